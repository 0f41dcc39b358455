//! The fit view: whether the selected scenario fits, what takes up the memory of a GPU, and how the
//! keys of its configuration were read. It shows the same as `shardlab fit`.

use super::app::{App, Purpose, View};
use super::cursor::Cursor;
use super::event::{Effect, Setup, Task};
use super::keys::Command;
use super::tables::Page;
use super::whatif::{self, Ask};
use std::cell::Cell;
use std::sync::Arc;

/// State of the fit view.
#[derive(Debug, Default)]
pub struct FitView {
    /// The scenario of the last request.
    asked: Option<Setup>,
    /// The scenario that the page is about.
    of: Option<Setup>,
    /// The last result.
    pub page: Option<Arc<Page>>,
    /// The reason why there is no result.
    pub error: Option<String>,
    /// Scroll position.
    pub cursor: Cursor,
    /// Number of lines in the last drawing.
    pub lines: Cell<usize>,
}

impl FitView {
    /// Stores a result.
    pub(super) fn arrived(&mut self, of: Setup, page: Arc<Page>) {
        self.of = Some(of);
        self.page = Some(page);
        self.error = None;
        self.cursor.at = 0;
    }
}

/// Shows the view, and predicts the selected scenario if another one is shown.
pub(super) fn open(app: &mut App) -> Vec<Effect> {
    app.view = View::Fit;
    let setup = app.setup();
    let is_pending = app.running(Purpose::Fit).is_some() && app.fit.asked == setup;
    if setup.is_none() || is_pending || app.fit.of == setup {
        return Vec::new();
    }
    fit(app)
}

/// Handles a command in the view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Fit => fit(app),
        Command::Tune => whatif::ask(app, Ask::Best),
        Command::WhatIf => whatif::open(app),
        Command::Back => app.cancel(Purpose::Fit),
        Command::Copy => {
            let setup = app.setup();
            super::export::copy(app, setup)
        }
        other => {
            let lines = app.fit.lines.get();
            app.fit.cursor.go(other, lines);
            Vec::new()
        }
    }
}

/// Predicts whether the selected scenario fits.
fn fit(app: &mut App) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    app.fit.error = None;
    app.fit.page = None;
    app.fit.asked = Some(setup.clone());
    let job = app.scenarios.current().and_then(|s| s.job.as_ref());
    let keys = job.map(|job| Arc::clone(&job.keys));
    app.start(Task::Fit { setup, keys })
}
