//! Yes-or-no questions that block everything else until they are answered.

use super::app::{App, Tone};
use super::event::{Effect, Task};
use super::keys::Command;

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Whether to make the result of the gate the baseline.
    Bless,
    /// Whether to remove the saved run in [`super::runs::RunsView::subject`].
    Remove,
    /// Whether [`App::export`] may replace a scenario file.
    Overwrite,
    /// Whether to quit while a training is running.
    Quit,
    /// Whether to train even though it needs more memory than available.
    TooLarge,
}

/// Handles a command that answers the question.
pub(super) fn answer(app: &mut App, question: Question, command: Command) -> Vec<Effect> {
    match (command, question) {
        (Command::Enter, Question::Bless) => {
            app.question = None;
            let judged = app.gate.judged.clone();
            judged.map_or_else(Vec::new, |j| app.start(Task::Bless(j)))
        }
        (Command::Enter, Question::Overwrite) => {
            app.question = None;
            let export = app.export.take();
            export.map_or_else(Vec::new, |e| app.start(Task::Export(e)))
        }
        (Command::Enter, Question::Remove) => {
            app.question = None;
            let id = app.runs.subject.take();
            id.map_or_else(Vec::new, |id| app.start(Task::Remove(id)))
        }
        (Command::Enter, Question::Quit) => vec![Effect::Save(app.save()), Effect::Quit],
        (Command::Enter, Question::TooLarge) => {
            app.question = None;
            super::train::anyway(app)
        }
        (Command::Back, _) => {
            app.question = None;
            if matches!(question, Question::Bless | Question::Overwrite) {
                app.say(Tone::Plain, "nothing is written");
            }
            Vec::new()
        }
        _ => Vec::new(),
    }
}
