//! Draws the runs of this session and of the store.

use super::kit::{bytes, cut, ms, pane, put, put_right};
use crate::dash::app::{App, Hit};
use crate::dash::names::letter;
use crate::dash::query::Fields as _;
use crate::dash::runs::{COLUMNS, Listed, Row};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

/// Columns before the texts, for the selection and the marks.
const MARKS: u16 = 3;
/// Number of rows below the list for the details of the selected run, including the line above
/// them.
const DETAILS: u16 = 4;
/// Minimum number of rows for showing the details.
const TALL: u16 = 14;
/// Minimum width of a column of options.
const OPTIONS: u16 = 16;

/// A column on the screen.
struct Column {
    title: &'static str,
    /// Index into [`COLUMNS`]; `None` for the options.
    of: Option<usize>,
    width: u16,
    right: bool,
}

pub(super) fn draw(app: &App, buf: &mut Buffer, body: Rect) {
    let theme = app.theme;
    let r = &app.runs;
    let rows = r.rows();
    let all = r.all().len();
    let mut title = format!(
        "Runs {} open, {} in the store",
        r.kept.len(),
        r.stored.len()
    );
    if !r.filter.is_empty() {
        title = format!("{title}: {} of {all} pass {}", rows.len(), r.filter);
    }
    let inner = pane(buf, body, &title, true, theme);
    let columns = layout(app, &rows, inner.width);
    header(app, buf, inner, &columns);
    let details = if inner.height >= TALL && !rows.is_empty() {
        DETAILS
    } else {
        0
    };
    let area = Rect {
        y: inner.y + 1,
        height: inner.height.saturating_sub(2 + details),
        ..inner
    };
    for (line, i) in r
        .cursor
        .window(rows.len(), usize::from(area.height))
        .enumerate()
    {
        let place = Rect {
            y: area.y + line as u16,
            height: 1,
            ..area
        };
        row(app, buf, place, rows[i], i == r.cursor.at, &columns);
        app.hits.borrow_mut().push((place, Hit::Run(i)));
    }
    if rows.is_empty() {
        let text = if all == 0 {
            "no runs yet: r simulates and x trains the scenario selected in view 1".to_owned()
        } else {
            format!("none of {all} passes; Esc shows all")
        };
        put(buf, area.x + 1, area.y, area.width - 1, &text, theme.dim());
    }
    if let Some(selected) = rows.get(r.cursor.at).filter(|_| details > 0) {
        let place = Rect {
            y: area.bottom(),
            height: details,
            ..inner
        };
        all_of(app, buf, place, r.of(*selected));
    }
    if let Some(error) = &r.store_error {
        let text = cut(
            &format!("the store cannot be read: {error}"),
            usize::from(inner.width) - 2,
        );
        put(
            buf,
            inner.x + 1,
            inner.bottom() - 1,
            inner.width - 1,
            &text,
            theme.warn(),
        );
    }
}

/// Returns the content of a cell.
fn cell(app: &App, run: Listed<'_>, column: &Column) -> String {
    let Some(of) = column.of else {
        return run.changes();
    };
    match COLUMNS[of].1 {
        "" => run.called(),
        "created" => made(app, run).map_or_else(String::new, date),
        "step" => ms(run.step_ms()),
        "alloc" => bytes(run.allocated().0),
        "loss" => run
            .loss()
            .map_or_else(|| "-".to_owned(), |l| format!("{l:.4}")),
        field => run.field(field).unwrap_or_default(),
    }
}

/// Returns when a run was saved.
fn made<'a>(app: &'a App, run: Listed<'a>) -> Option<&'a str> {
    match run {
        Listed::Kept(_) => app.runs.stored(run).map(|s| s.made.as_str()),
        Listed::Stored(s) => Some(&s.made),
    }
}

/// Formats `YYYY-MM-DDTHH:MM:SSZ` as `MM-DD HH:MM`.
fn date(created: &str) -> String {
    created.get(5..16).unwrap_or_default().replace('T', " ")
}

/// Returns the columns with the widths of their contents. The options get the rest; if there is too
/// little room, losses and dates are left out.
fn layout(app: &App, rows: &[Row], width: u16) -> Vec<Column> {
    let column = |of: usize| {
        let mut column = Column {
            title: COLUMNS[of].0,
            of: Some(of),
            width: 0,
            right: of >= 4,
        };
        let cells = rows
            .iter()
            .map(|r| cell(app, app.runs.of(*r), &column).chars().count());
        let longest = cells.max().unwrap_or(0) as u16;
        // One more column for the arrow of the sorted column.
        let title = column.title.len() as u16 + u16::from(app.runs.sort == of);
        column.width = longest.min(24).max(title);
        column
    };
    let mut columns: Vec<Column> = (0..COLUMNS.len()).map(column).collect();
    let listed = || rows.iter().map(|r| app.runs.of(*r));
    let (dates, losses) = (
        listed().any(|r| r.id().is_some()),
        listed().any(|r| r.loss().is_some()),
    );
    columns.retain(|c| match c.title {
        "saved" => dates,
        "loss" => losses,
        _ => true,
    });
    let used = |all: &[Column]| MARKS + all.iter().map(|c| c.width + 1).sum::<u16>();
    let most = listed()
        .map(|r| r.changes().chars().count())
        .max()
        .unwrap_or(0);
    let wanted = OPTIONS.min(most as u16);
    for least in ["loss", "saved"] {
        if used(&columns) + wanted + 1 > width {
            columns.retain(|c| c.title != least || c.of == Some(app.runs.sort));
        }
    }
    let rest = width.saturating_sub(used(&columns) + 2);
    if most > 0 && rest > 6 {
        let numbers = columns
            .iter()
            .position(|c| c.right)
            .unwrap_or(columns.len());
        columns.insert(
            numbers,
            Column {
                title: "options",
                of: None,
                width: rest,
                right: false,
            },
        );
    } else if let Some(scenario) = columns.iter_mut().find(|c| c.title == "scenario") {
        scenario.width += rest;
    }
    columns
}

fn header(app: &App, buf: &mut Buffer, inner: Rect, columns: &[Column]) {
    let mut x = inner.x + MARKS;
    for column in columns {
        let sorted = column.of == Some(app.runs.sort) && app.runs.sort > 0;
        let arrow = match (sorted, app.runs.reversed) {
            (true, false) => "↑",
            (true, true) => "↓",
            _ => "",
        };
        let style = if sorted {
            app.theme.accent()
        } else {
            app.theme.dim()
        };
        let text = format!("{arrow}{}", column.title);
        write(buf, x, inner.y, column, &text, style);
        x += column.width + 1;
    }
}

fn write(buf: &mut Buffer, x: u16, y: u16, column: &Column, text: &str, style: Style) {
    if column.right {
        put_right(buf, x, y, column.width, text, style);
    } else {
        put(buf, x, y, column.width, text, style);
    }
}

fn row(app: &App, buf: &mut Buffer, place: Rect, row: Row, selected: bool, columns: &[Column]) {
    let theme = app.theme;
    let r = &app.runs;
    let style = if selected {
        theme.selected()
    } else {
        theme.text()
    };
    let blank = " ".repeat(usize::from(place.width));
    put(buf, place.x, place.y, place.width, &blank, style);
    let mark = if selected { "▸" } else { " " };
    put(buf, place.x, place.y, 1, mark, style);
    let tone = match row {
        Row::Kept(i) => {
            let number = r.kept[i].number;
            if let Some(order) = r.marked.iter().position(|n| *n == number) {
                let warn = style.patch(theme.warn());
                put(buf, place.x + 1, place.y, 1, &letter(order), warn);
            }
            Style::new()
        }
        Row::Stored(_) => theme.dim(),
    };
    let run = r.of(row);
    let mut x = place.x + MARKS;
    for column in columns {
        write(
            buf,
            x,
            place.y,
            column,
            &cell(app, run, column),
            style.patch(tone),
        );
        x += column.width + 1;
    }
}

/// Draws the details of the selected run: what it is, where it is saved, and its options in full.
fn all_of(app: &App, buf: &mut Buffer, area: Rect, run: Listed<'_>) {
    let theme = app.theme;
    let width = area.width.saturating_sub(2);
    let rule = "─".repeat(usize::from(area.width));
    put(buf, area.x, area.y, area.width, &rule, theme.dim());
    let field = |name| run.field(name).unwrap_or_default();
    let what = format!(
        "{} {} {}, {} on {} x {}",
        run.called(),
        field("kind"),
        field("scenario"),
        field("policy"),
        field("world_size"),
        field("hardware")
    );
    let place = match (app.runs.stored(run), run.id()) {
        (Some(s), _) => {
            let name = s
                .name
                .as_ref()
                .map_or_else(String::new, |n| format!("{n} = "));
            format!("in the store: {name}{}, {}", s.id, s.made)
        }
        (None, Some(id)) => format!("in the store: {id}"),
        (None, None) => "only in this session; K saves it in the store".to_owned(),
    };
    let options = match run.changes() {
        none if none.is_empty() => "options as in the scenario file".to_owned(),
        some => some,
    };
    let texts = [
        (what, theme.strong()),
        (place, theme.dim()),
        (options, theme.text()),
    ];
    for (y, (text, style)) in (area.y + 1..area.bottom()).zip(texts) {
        put(buf, area.x + 1, y, width, &text, style);
    }
}
