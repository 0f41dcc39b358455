//! Draws the line that is being typed, and its completions.

use super::kit::{cut, lines, pieces, popup, put};
use crate::dash::app::App;
use crate::dash::prompt::{Asks, Prompt};
use ratatui::buffer::Buffer;
use ratatui::layout::{Position, Rect};

/// Maximum number of visible completions.
const MAX_COMPLETIONS: usize = 7;

/// Draws the prompt in the status line and returns the position of the cursor. An edited value has
/// already been drawn in its own place.
pub(super) fn draw(app: &App, buf: &mut Buffer, area: Rect) -> Option<Position> {
    let prompt = app.prompt.as_ref()?;
    if matches!(prompt.asks, Asks::Option(_)) {
        return app.text_cursor.get();
    }
    let theme = app.theme;
    put(
        buf,
        area.x,
        area.y,
        area.width,
        &" ".repeat(usize::from(area.width)),
        theme.text(),
    );
    let label = format!(" {}: ", prompt.asks.label());
    let x = pieces(buf, area.x, area.y, area.width, &[(label, theme.accent())]);
    let room = area.right().saturating_sub(x + 1);
    let cursor = line(app, prompt, buf, x, area.y, room);
    match &prompt.refused {
        Some(reason) => refusal(app, reason, buf, area),
        None => list(app, prompt, buf, Rect { x, ..area }),
    }
    Some(cursor)
}

/// Draws the reason why the line was rejected, above the line.
fn refusal(app: &App, reason: &str, buf: &mut Buffer, at: Rect) {
    let room = usize::from(at.width.saturating_sub(2));
    let lines = lines(reason, room);
    let longest = lines.iter().map(|l| l.chars().count()).max().unwrap_or(0);
    let height = (lines.len() as u16 + 2).min(at.y);
    let area = Rect {
        x: at.x,
        y: at.y - height,
        width: (longest as u16 + 2).min(at.width),
        height,
    };
    let inner = popup(buf, area, "refused", app.theme);
    for (row, line) in (0..inner.height).zip(&lines) {
        put(
            buf,
            inner.x,
            inner.y + row,
            inner.width,
            line,
            app.theme.bad(),
        );
    }
}

/// Draws the line itself, scrolled so that the cursor is visible.
pub(super) fn line(
    app: &App,
    prompt: &Prompt,
    buf: &mut Buffer,
    x: u16,
    y: u16,
    width: u16,
) -> Position {
    let room = usize::from(width.max(1));
    let skip = (prompt.line.cursor() + 1).saturating_sub(room);
    let shown: String = prompt.line.text().chars().skip(skip).take(room).collect();
    put(buf, x, y, width, &shown, app.theme.strong());
    Position {
        x: x + (prompt.line.cursor() - skip) as u16,
        y,
    }
}

/// Draws the completions above or below the line, wherever there is room.
pub(super) fn list(app: &App, prompt: &Prompt, buf: &mut Buffer, at: Rect) {
    let all = &prompt.completions;
    if all.is_empty() {
        return;
    }
    let theme = app.theme;
    let shown = all.len().min(MAX_COMPLETIONS);
    let height = shown as u16 + 2;
    let longest = all.iter().map(|c| c.chars().count()).max().unwrap_or(0);
    let width = (longest as u16 + 4).clamp(14, at.width.max(14));
    let below = at.y + 1 + height < buf.area.bottom() - 1;
    let area = Rect {
        x: at
            .x
            .saturating_sub(2)
            .min(buf.area.right().saturating_sub(width)),
        y: if below {
            at.y + 1
        } else {
            at.y.saturating_sub(height)
        },
        width: width.min(buf.area.width),
        height,
    };
    let first = prompt.chosen.map_or(0, |c| (c + 1).saturating_sub(shown));
    let title = format!("{} of {}, Tab", shown, all.len());
    let inner = popup(
        buf,
        area,
        if all.len() > shown { &title } else { "Tab" },
        theme,
    );
    for (row, i) in (first..first + shown).enumerate() {
        let chosen = prompt.chosen == Some(i);
        let style = if chosen {
            theme.selected()
        } else {
            theme.text()
        };
        let mark = if chosen { "▸" } else { " " };
        let text = cut(&format!("{mark}{}", all[i]), usize::from(inner.width));
        put(
            buf,
            inner.x,
            inner.y + row as u16,
            inner.width,
            &text,
            style,
        );
    }
}
