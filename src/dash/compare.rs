//! Compares runs.

use super::app::App;
use super::cursor::Cursor;
use super::event::{Effect, Runs, Task};
use super::keys::Command;
use super::tables::Page;
use std::sync::Arc;

/// State of the compare view.
#[derive(Debug, Default)]
pub struct CompareView {
    /// The last comparison.
    pub page: Option<Arc<Page>>,
    /// Scroll position.
    pub cursor: Cursor,
    /// Number of lines in the last drawing.
    pub lines: std::cell::Cell<usize>,
}

/// Handles a command in the compare view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Compare => compare(app),
        Command::Pair => {
            app.runs.pair_marked(&mut app.timeline);
            app.view = super::app::View::Timeline;
            Vec::new()
        }
        other => {
            let lines = app.compare.lines.get();
            app.compare.cursor.go(other, lines);
            Vec::new()
        }
    }
}

/// Compares the marked runs, or the last two.
pub(super) fn compare(app: &mut App) -> Vec<Effect> {
    let runs = app.runs.to_compare();
    if runs.len() < 2 {
        app.say(
            super::app::Tone::Plain,
            "two runs are needed: simulate (r) or train (x) a scenario twice, or mark runs (space) in view 5",
        );
        return Vec::new();
    }
    app.view = super::app::View::Compare;
    app.start(Task::Compare(Runs(runs)))
}
