//! Draws the frame around every view: tabs, status and footer.

use super::SMALLEST;
use super::kit::{cut, duration, pieces, put, put_right};
use crate::dash::app::{App, Hit, Tone, View};
use crate::dash::keys::{self, Place};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Modifier;

/// Minimum width for blanks around the names of views.
const WIDE: u16 = 116;

pub(super) fn too_small(app: &App, buf: &mut Buffer, area: Rect) {
    let text = format!(
        "{} x {} is too small: at least {} x {} is needed (q quits)",
        area.width, area.height, SMALLEST.0, SMALLEST.1
    );
    let lines = super::kit::wrap(&text, usize::from(area.width));
    let top = area.height.saturating_sub(lines.len() as u16) / 2;
    for (i, line) in lines.iter().enumerate().take(usize::from(area.height)) {
        put(
            buf,
            area.x,
            area.y + top + i as u16,
            area.width,
            line,
            app.theme.text(),
        );
    }
}

pub(super) fn header(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let mut x = area.x;
    let is_wide = area.width >= WIDE;
    if is_wide {
        x = put(buf, x, area.y, 12, " shardlab ", theme.strong());
        x = put(buf, x, area.y, 2, "│ ", theme.dim());
    }
    for (i, view) in View::ALL.into_iter().enumerate() {
        // All names fit 80 columns. The tenth view has key 0.
        let key = (i + 1) % 10;
        let label = match is_wide {
            true => format!(" {key} {} ", view.name()),
            false => format!("{key}{} ", view.name()),
        };
        let style = if view == app.view {
            theme.accent().add_modifier(Modifier::REVERSED)
        } else {
            theme.dim()
        };
        let end = put(
            buf,
            x,
            area.y,
            area.right().saturating_sub(x),
            &label,
            style,
        );
        let tab = Rect {
            x,
            width: end - x,
            ..area
        };
        app.hits.borrow_mut().push((tab, Hit::Tab(view)));
        x = end;
    }
    let room = area.right().saturating_sub(x);
    let help = if room < 7 { "?" } else { "? help" };
    put_right(buf, x, area.y, room, help, theme.dim());
}

/// Draws the running jobs or the last message. A prompt is drawn on top.
pub(super) fn status(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let jobs: Vec<String> = app
        .jobs
        .values()
        .map(|j| {
            let ending = if j.cancelled { ", ending" } else { "" };
            let since = duration(app.now.saturating_sub(j.since));
            format!(
                "{} {} {} ({since}{ending})",
                spinner(app),
                j.purpose.name(),
                j.of
            )
        })
        .collect();
    let right = jobs.join("  ");
    let width = (right.chars().count() as u16).min(area.width / 2);
    let right = cut(&right, usize::from(width));
    put_right(buf, area.x, area.y, area.width, &right, theme.accent());
    if let Some(notice) = &app.notice {
        let (mark, style) = match notice.tone {
            Tone::Plain => ("", theme.text()),
            Tone::Good => ("✓ ", theme.good()),
            Tone::Bad => ("✗ ", theme.bad()),
        };
        let room = area.width.saturating_sub(width + 2);
        let text = cut(&format!("{mark}{}", notice.text), usize::from(room));
        put(buf, area.x + 1, area.y, room, &text, style);
    }
}

fn spinner(app: &App) -> char {
    const FRAMES: [char; 8] = ['⠋', '⠙', '⠸', '⠴', '⠦', '⠧', '⠇', '⠏'];
    FRAMES[(app.now.as_millis() / 250) as usize % FRAMES.len()]
}

/// Draws the keys that have an effect here.
pub(super) fn footer(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let mut x = area.x + 1;
    for binding in keys::footer(app.place()) {
        let text = [
            (binding.chords[0].text(), theme.accent()),
            (format!(" {}  ", binding.short), theme.dim()),
        ];
        x = pieces(buf, x, area.y, area.right().saturating_sub(x), &text);
    }
    // Hide `q` if it types a letter or answers a question.
    if matches!(
        app.place(),
        Place::Typing | Place::Confirm | Place::Whole | Place::Help
    ) {
        return;
    }
    put_right(
        buf,
        x,
        area.y,
        area.right().saturating_sub(x),
        "q quit ",
        theme.dim(),
    );
}
