//! Gates a scenario against its baseline.

use super::app::{App, Purpose, Tone, View};
use super::confirm::Question;
use super::cursor::Cursor;
use super::event::{Effect, Judged, Task};
use super::keys::Command;
use super::prompt::{Asks, Prompt};
use super::tables::Page;
use std::path::PathBuf;
use std::sync::Arc;

/// State of the gate view.
#[derive(Debug, Default)]
pub struct GateView {
    /// Folder of baselines.
    pub folder: PathBuf,
    /// The last verdict.
    pub page: Option<Arc<Page>>,
    /// The facts that it judged.
    pub judged: Option<Arc<Judged>>,
    /// Scroll position.
    pub cursor: Cursor,
    /// Number of lines in the last drawing.
    pub lines: std::cell::Cell<usize>,
}

/// Handles a command in the gate view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Gate => gate(app),
        Command::Back => app.cancel(Purpose::Gate),
        Command::Bless => {
            app.question = app.gate.judged.as_ref().map(|_| Question::Bless);
            if app.question.is_none() {
                app.say(
                    Tone::Plain,
                    "run the gate first (b): its result becomes the baseline",
                );
            }
            Vec::new()
        }
        Command::Folder => {
            let text = app.gate.folder.display().to_string();
            app.prompt = Some(Prompt::new(Asks::Baselines, text));
            Vec::new()
        }
        other => {
            let lines = app.gate.lines.get();
            app.gate.cursor.go(other, lines);
            Vec::new()
        }
    }
}

/// Changes the folder of baselines.
pub(super) fn accept(app: &mut App, text: &str) -> Vec<Effect> {
    let text = text.trim();
    if text.is_empty() || app.gate.folder.as_os_str() == text {
        return Vec::new();
    }
    app.gate.folder = PathBuf::from(text);
    gate(app)
}

/// Gates the selected scenario.
pub(super) fn gate(app: &mut App) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    app.view = View::Gate;
    app.gate.page = None;
    app.gate.judged = None;
    let folder = app.gate.folder.clone();
    app.start(Task::Gate(setup, folder))
}
