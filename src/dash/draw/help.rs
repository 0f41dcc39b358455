//! Draws the help.

use super::kit::{popup, put, wrap};
use crate::dash::app::App;
use crate::dash::help::{Help, HelpLine};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

pub(super) fn draw(app: &App, help: &Help, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let width = body.width.min(100);
    let area = Rect {
        x: body.x + (body.width - width) / 2,
        width,
        ..body
    };
    let title = if help.search.is_empty() {
        "Keys (/ searches, Esc closes)".to_owned()
    } else {
        format!("Keys with `{}`", help.search)
    };
    let inner = popup(buf, area, &title, theme);
    const KEYS: u16 = 24;
    let lines = help.lines();
    let mut y = inner.y;
    for line in lines.iter().skip(help.top) {
        if y >= inner.bottom() {
            break;
        }
        match line {
            HelpLine::Title(title) => {
                put(buf, inner.x + 1, y, inner.width - 1, title, theme.accent());
            }
            HelpLine::Keys(keys, text) => {
                put(buf, inner.x + 3, y, KEYS, keys, theme.strong());
                let room = inner.width.saturating_sub(KEYS + 4);
                for (i, part) in wrap(text, usize::from(room)).iter().enumerate() {
                    if i > 0 {
                        y += 1;
                    }
                    if y < inner.bottom() {
                        put(buf, inner.x + 3 + KEYS, y, room, part, theme.text());
                    }
                }
            }
            HelpLine::Blank => {}
        }
        y += 1;
    }
    if lines.is_empty() {
        put(
            buf,
            inner.x + 1,
            inner.y,
            inner.width - 1,
            "no match",
            theme.dim(),
        );
    }
}
