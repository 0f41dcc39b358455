//! The gate of a scenario against its baseline.

use super::app::{App, Purpose, Tone, View};
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
    /// What it was made of.
    pub judged: Option<Arc<Judged>>,
    /// Whether a new baseline is to be confirmed.
    pub confirm: bool,
    /// First line shown.
    pub cursor: Cursor,
    /// Lines that there are, by the last drawing.
    pub lines: std::cell::Cell<usize>,
}

/// A key in the gate view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    if app.gate.confirm {
        return confirmed(app, command);
    }
    match command {
        Command::Gate => gate(app),
        Command::Back => app.cancel(Purpose::Gate),
        Command::Bless => {
            app.gate.confirm = app.gate.judged.is_some();
            if !app.gate.confirm {
                app.say(
                    Tone::Plain,
                    "gate it first (b): a baseline is what a gate has found",
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

/// A key while a new baseline is to be confirmed.
fn confirmed(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Enter => {
            app.gate.confirm = false;
            let judged = app.gate.judged.clone();
            judged.map_or_else(Vec::new, |j| app.start(Task::Bless(j)))
        }
        Command::Back => {
            app.gate.confirm = false;
            app.say(Tone::Plain, "nothing is written");
            Vec::new()
        }
        _ => Vec::new(),
    }
}

/// Takes another folder of baselines.
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
    let Some(setup) = app.setup() else {
        return Vec::new();
    };
    app.view = View::Gate;
    app.gate.page = None;
    app.gate.judged = None;
    app.gate.confirm = false;
    let folder = app.gate.folder.clone();
    app.start(Task::Gate(setup, folder))
}
