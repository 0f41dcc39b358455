//! Draws the option editor.

use super::kit::{MORE, cut, excerpt, pane, put, shorten, wrap};
use super::prompt;

use crate::dash::app::{App, Hit};
use crate::dash::options;
use crate::dash::prompt::Asks;
use crate::dash::scenarios::Pane;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

/// Returns the columns for keys: in a wide pane, those of the longest ones.
const fn key_width(pane: Rect) -> u16 {
    match pane.width {
        80.. => 26,
        _ => 22,
    }
}

enum Line {
    Section(&'static str),
    /// Row among the shown options, and index into all options.
    Option(usize, usize),
    /// Reason why the value in the previous row is invalid.
    Refused(String),
}

/// Maximum number of lines of a reason.
const REASON: usize = 4;

pub(super) fn draw(app: &App, buf: &mut Buffer, area: Rect) {
    app.text_cursor.set(None);
    let theme = app.theme;
    let s = &app.scenarios;
    let focused = s.pane == Pane::Options;
    let rows = s.option_rows();
    let title = match s.option_filter.as_str() {
        "" => "Options".to_owned(),
        filter => format!("Options {}: {filter}", rows.len()),
    };
    let inner = pane(buf, area, &title, focused, theme);
    let lines = lines(app, &rows, usize::from(inner.width).saturating_sub(6));
    let width = usize::from(inner.width.saturating_sub(2));
    // The text on the selected option gets the room that it needs, up to half of the pane.
    let needed = s.option().map_or(1, |o| lines_about(o, width).len());
    let least = if inner.height >= 12 { 3 } else { 2 };
    let about = (needed as u16).clamp(least, (inner.height / 2).max(least));
    let body = Rect {
        height: inner.height.saturating_sub(about),
        ..inner
    };
    let at = lines
        .iter()
        .position(|l| matches!(l, Line::Option(row, _) if *row == s.option.at))
        .unwrap_or(0);
    let is_reason = |l: &&Line| matches!(l, Line::Refused(_));
    let reason = lines.iter().skip(at + 1).take_while(is_reason).count();
    // The reason is shown together with its option. If there is no room for both, the option takes
    // precedence.
    let height = usize::from(body.height);
    let _ = s.option.window_at(at + reason, lines.len(), height);
    let shown = s.option.window_at(at, lines.len(), height);
    let mut edited = None;
    for (i, line) in lines[shown].iter().enumerate() {
        let place = Rect {
            y: body.y + i as u16,
            height: 1,
            ..body
        };
        match line {
            Line::Section(name) => {
                put(
                    buf,
                    place.x + 1,
                    place.y,
                    place.width - 1,
                    name,
                    theme.accent(),
                );
            }
            Line::Option(row, option) => {
                let selected = *row == s.option.at;
                if row_of(app, buf, place, *option, selected, focused) {
                    edited = Some(place);
                }
                app.hits.borrow_mut().push((place, Hit::Option(*row)));
            }
            Line::Refused(text) => {
                put(
                    buf,
                    place.x + 5,
                    place.y,
                    place.width.saturating_sub(5),
                    text,
                    theme.bad(),
                );
            }
        }
    }
    describe(
        app,
        buf,
        Rect {
            y: body.bottom(),
            height: about,
            ..inner
        },
    );
    if let (Some(place), Some(p)) = (edited, &app.prompt) {
        prompt::list(
            app,
            p,
            buf,
            Rect {
                x: place.x + key_width(place) + 4,
                // Below the reason.
                y: place.y + reason as u16,
                width: place.width.saturating_sub(key_width(place) + 4),
                ..place
            },
        );
    }
}

fn lines(app: &App, rows: &[usize], width: usize) -> Vec<Line> {
    let s = &app.scenarios;
    let mut lines = Vec::with_capacity(rows.len() + 7);
    let mut section = "";
    for (row, &option) in rows.iter().enumerate() {
        let info = options::all()[option];
        if info.section != section {
            section = info.section;
            lines.push(Line::Section(section));
        }
        lines.push(Line::Option(row, option));
        if let Some(refused) = s.refused.as_ref()
            && s.refused_value(option).is_some()
        {
            let text = format!("✗ {}", refused.reason);
            lines.extend(
                excerpt(&text, width, REASON, MORE)
                    .into_iter()
                    .map(Line::Refused),
            );
        }
    }
    lines
}

/// Draws an option. Returns whether it is being edited.
fn row_of(
    app: &App,
    buf: &mut Buffer,
    place: Rect,
    option: usize,
    selected: bool,
    focused: bool,
) -> bool {
    let theme = app.theme;
    let s = &app.scenarios;
    let key = key_width(place);
    let info = options::all()[option];
    let path = options::path(info);
    let style = match (selected, focused) {
        (true, true) => theme.selected(),
        (true, false) => theme.selected_elsewhere(),
        _ => theme.text(),
    };
    let changed = s.changes().is_some_and(|c| c.contains_key(&path));
    let blank = " ".repeat(usize::from(place.width));
    put(buf, place.x, place.y, place.width, &blank, style);
    let mark = if selected { "▸" } else { " " };
    put(buf, place.x, place.y, 1, mark, style);
    if changed {
        put(buf, place.x + 1, place.y, 1, "●", style.patch(theme.warn()));
    }
    put(
        buf,
        place.x + 2,
        place.y,
        key,
        &shorten(info.key, usize::from(key)),
        style,
    );
    let x = place.x + key + 3;
    let room = place.right().saturating_sub(x);
    let editing = app
        .prompt
        .as_ref()
        .filter(|p| p.asks == Asks::Option(option));
    if let Some(p) = editing {
        let cursor = prompt::line(app, p, buf, x, place.y, room.min(40));
        app.text_cursor.set(Some(cursor));
        return true;
    }
    let value = s.value(option);
    if let Some(refused) = s.refused_value(option) {
        let kept = value.unwrap_or(info.default);
        let text = format!("{kept}  (not {refused}; Esc)");
        let text = cut(&text, usize::from(room));
        put(buf, x, place.y, room, &text, style.patch(theme.bad()));
        return false;
    }
    let shown = match (value, changed) {
        (Some(v), true) => match s.base_value(option) {
            Some(old) if old != v => format!("{v}  (was {old})"),
            _ => v.to_owned(),
        },
        (Some(v), false) => v.to_owned(),
        (None, _) => info.default.to_owned(),
    };
    let tone = match (value, changed) {
        (_, true) => theme.warn(),
        (Some(_), _) => theme.text(),
        (None, _) => theme.dim(),
    };
    const VALUE: u16 = 24;
    let narrow = room < VALUE + 24 || changed;
    let width = if narrow { room } else { VALUE };
    let end = put(
        buf,
        x,
        place.y,
        width,
        &cut(&shown, usize::from(width)),
        style.patch(tone),
    );
    if !narrow {
        let doc = place.right().saturating_sub(x + VALUE + 1);
        put(
            buf,
            (x + VALUE).max(end) + 1,
            place.y,
            doc,
            &cut(info.doc, usize::from(doc)),
            style.patch(theme.dim()),
        );
    }
    false
}

/// Describes the selected option and its valid values.
fn describe(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let Some(option) = app.scenarios.option() else {
        put(
            buf,
            area.x + 1,
            area.y,
            area.width - 1,
            "no match",
            theme.dim(),
        );
        return;
    };
    let width = usize::from(area.width.saturating_sub(2));
    let room = usize::from(area.height);
    let mut lines = lines_about(option, width);
    if lines.len() > room {
        // The rest is shown by a key.
        lines.truncate(room);
        if let Some(last) = lines.last_mut() {
            *last = cut(last, width.saturating_sub(MORE.chars().count())) + MORE;
        }
    }
    let first = wrap(options::all()[option].doc, width).len();
    for (i, line) in lines.iter().enumerate() {
        let style = if i < first { theme.text() } else { theme.dim() };
        put(
            buf,
            area.x + 1,
            area.y + i as u16,
            area.width - 1,
            line,
            style,
        );
    }
}

/// Returns the sentences on an option: its effect, and its valid values.
pub(super) fn about(option: usize) -> Vec<String> {
    let info = options::all()[option];
    let default = info.default.trim_matches(['(', ')']);
    let takes = format!("takes {}; default {default}", info.expected());
    let takes = [vec![takes], info.applies()].concat().join(". ");
    vec![info.doc.to_owned(), takes]
}

fn lines_about(option: usize, width: usize) -> Vec<String> {
    let all = about(option);
    all.iter().flat_map(|text| wrap(text, width)).collect()
}

/// Returns the path of an option and its value.
pub(super) fn heading(app: &App, option: usize) -> String {
    let info = options::all()[option];
    let value = app.scenarios.value(option).unwrap_or(info.default);
    format!("{} = {value}", options::path(info))
}
