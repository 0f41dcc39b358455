//! Drawing: a pure function of the state.

mod charts;
mod confirm;
mod frame;
mod help;
mod kit;
mod options;
mod page;
mod prompt;
mod runs;
mod scenarios;
mod sweep;
mod timeline;
mod train;
mod whatif;

use super::app::{App, View};
use super::whatif::Ask;
use ratatui::Frame;
use ratatui::layout::Rect;

/// Minimum size in columns and rows. A smaller terminal shows only a message.
pub(crate) const SMALLEST: (u16, u16) = (80, 24);

/// Draws the dashboard.
pub fn draw(app: &App, frame: &mut Frame<'_>) {
    let area = frame.area();
    app.hits.borrow_mut().clear();
    let buf = frame.buffer_mut();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        frame::too_small(app, buf, area);
        return;
    }
    let body = Rect {
        y: area.y + 1,
        height: area.height - 3,
        ..area
    };
    frame::header(app, buf, Rect { height: 1, ..area });
    match app.view {
        View::Scenarios => scenarios::draw(app, buf, body),
        View::Timeline => timeline::draw(app, buf, body),
        View::Train => train::draw(app, buf, body),
        View::Sweep => sweep::draw(app, buf, body),
        View::Runs => runs::draw(app, buf, body),
        View::Compare => page::compare(app, buf, body),
        View::Gate => page::gate(app, buf, body),
        View::WhatIf => whatif::draw(app, Ask::Changes, buf, body),
        View::Fit => page::fit(app, buf, body),
        View::Tune => whatif::draw(app, Ask::Best, buf, body),
    }
    if let Some(whole) = &app.whole {
        match app.view {
            View::Train => train::whole(app, whole, buf, body),
            View::WhatIf => whatif::whole(app, Ask::Changes, whole, buf, body),
            View::Tune => whatif::whole(app, Ask::Best, whole, buf, body),
            _ => scenarios::whole(app, whole, buf, body),
        }
    }
    if let Some(help) = &app.help {
        help::draw(app, help, buf, body);
    }
    if let Some(question) = app.question {
        confirm::draw(app, question, buf, body);
    }
    let bottom = area.y + area.height;
    let line = |y| Rect {
        y,
        height: 1,
        ..area
    };
    frame::status(app, buf, line(bottom - 2));
    frame::footer(app, buf, line(bottom - 1));
    if let Some(position) = prompt::draw(app, buf, line(bottom - 2)) {
        frame.set_cursor_position(position);
    }
}
