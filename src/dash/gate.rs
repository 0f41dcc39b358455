//! The gate of a scenario against its baseline.

use super::app::{App, Purpose, View};
use super::cursor::Cursor;
use super::event::{Effect, Task};
use super::keys::Command;
use super::tables::Page;
use std::sync::Arc;

/// State of the gate view.
#[derive(Debug, Default)]
pub struct GateView {
    /// The last verdict.
    pub page: Option<Arc<Page>>,
    /// First line shown.
    pub cursor: Cursor,
    /// Lines that there are, by the last drawing.
    pub lines: std::cell::Cell<usize>,
}

/// A key in the gate view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Gate => gate(app),
        Command::Back => app.cancel(Purpose::Gate),
        other => {
            let lines = app.gate.lines.get();
            app.gate.cursor.go(other, lines);
            Vec::new()
        }
    }
}

/// Gates the selected scenario.
pub(super) fn gate(app: &mut App) -> Vec<Effect> {
    let Some(setup) = app.setup() else {
        return Vec::new();
    };
    app.view = View::Gate;
    app.gate.page = None;
    app.start(Task::Gate(setup))
}
