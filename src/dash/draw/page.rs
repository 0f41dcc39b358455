//! Draws pages of tables: comparisons and gates.

use super::charts::{Curve, curves};
use super::kit::{abridge, lines as kept, pane, put, put_right, wrap};
use crate::dash::app::{App, Purpose, Tone};
use crate::dash::cursor::Cursor;
use crate::dash::tables::{Page, Table};
use crate::dash::theme::Theme;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use std::cell::Cell;

/// Maximum width of explanations.
const READABLE: usize = 78;

pub(super) fn compare(app: &App, buf: &mut Buffer, body: Rect) {
    let text = if app.running(Purpose::Compare).is_some() {
        "comparing …"
    } else {
        "No comparison yet: c compares the last two runs, or those marked in view 5.\n\n\
         For example: 1, then r simulates a scenario; → changes an option, r simulates it again; 6, then c \
         says which one is faster and why."
    };
    let c = &app.compare;
    draw(
        app,
        buf,
        body,
        "Compare",
        c.page.as_deref(),
        &c.cursor,
        &c.lines,
        text,
    );
}

pub(super) fn gate(app: &App, buf: &mut Buffer, body: Rect) {
    let g = &app.gate;
    let text = if app.running(Purpose::Gate).is_some() {
        "gating …".to_owned()
    } else {
        format!(
            "b checks the selected scenario against its baseline in {} (f: another folder).\n\n\
             A baseline records step time, memory and the program of a scenario. Without one, b offers to \
             write it (B); later, b reports every difference.",
            g.folder.display()
        )
    };
    draw(
        app,
        buf,
        body,
        "Gate",
        g.page.as_deref(),
        &g.cursor,
        &g.lines,
        &text,
    );
}

pub(super) fn fit(app: &App, buf: &mut Buffer, body: Rect) {
    let f = &app.fit;
    let text = match (&f.error, app.running(Purpose::Fit)) {
        (Some(error), _) => format!("✗ {error}"),
        (None, Some(_)) => "predicting …".to_owned(),
        (None, None) => {
            "Select a scenario in view 1: whether it fits, what takes up the memory of a GPU, \
                         and how the keys of its configuration were read are shown here."
                .to_owned()
        }
    };
    let page = f.page.as_deref().filter(|_| f.error.is_none());
    draw(app, buf, body, "Fit", page, &f.cursor, &f.lines, &text);
}

/// A line of tables and texts.
pub(super) enum Line {
    Text(String, Style),
    /// Cells and whether each is aligned to the right, the widths of the columns, and the style.
    Cells(Vec<(String, bool)>, Vec<usize>, Style),
}

impl Line {
    /// Draws the line into a row of an area.
    pub(super) fn draw(&self, buf: &mut Buffer, inner: Rect, y: u16) {
        match self {
            Self::Text(text, style) => {
                put(buf, inner.x + 1, y, inner.width - 1, text, *style);
            }
            Self::Cells(cells, widths, style) => {
                let mut x = inner.x + 1;
                for ((text, right), w) in cells.iter().zip(widths) {
                    let w = (*w as u16).min(inner.right().saturating_sub(x));
                    let text = abridge(text, usize::from(w));
                    if *right {
                        put_right(buf, x, y, w, &text, *style);
                    } else {
                        put(buf, x, y, w, &text, *style);
                    }
                    x += w + 2;
                    if x >= inner.right() {
                        break;
                    }
                }
            }
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "three views share it")]
fn draw(
    app: &App,
    buf: &mut Buffer,
    body: Rect,
    name: &str,
    page: Option<&Page>,
    cursor: &Cursor,
    count: &Cell<usize>,
    otherwise: &str,
) {
    let theme = app.theme;
    let Some(page) = page else {
        let inner = pane(buf, body, name, true, theme);
        let width = (usize::from(inner.width) - 2).min(READABLE);
        let lines = kept(otherwise, width);
        for (y, line) in (inner.y..inner.bottom()).zip(&lines) {
            put(buf, inner.x + 1, y, inner.width - 1, line, theme.dim());
        }
        count.set(0);
        return;
    };
    let curve_rows = if page.losses.is_empty() {
        0
    } else {
        (body.height / 3).clamp(7, 14)
    };
    let area = Rect {
        height: body.height - curve_rows,
        ..body
    };
    let inner = pane(buf, area, &format!("{name} {}", page.title), true, theme);
    let mut y = inner.y;
    if let Some((tone, verdict)) = &page.verdict {
        for line in wrap(verdict, usize::from(inner.width) - 2).iter().take(3) {
            put(
                buf,
                inner.x + 1,
                y,
                inner.width - 1,
                line,
                tone_style(theme, *tone),
            );
            y += 1;
        }
        y += 1;
    }
    let lines = lines(&page.tables, theme, usize::from(inner.width) - 2);
    count.set(lines.len());
    let height = usize::from(inner.bottom().saturating_sub(y));
    // The cursor is the first visible line, because tables have no selection.
    let top = cursor.at.min(lines.len().saturating_sub(height));
    let _ = cursor.window(lines.len(), height);
    for line in lines.iter().skip(top).take(height) {
        line.draw(buf, inner, y);
        y += 1;
    }
    if top + height < lines.len() {
        let more = format!(" {} more lines ", lines.len() - top - height);
        put_right(
            buf,
            area.x,
            area.bottom() - 1,
            area.width - 2,
            &more,
            theme.dim(),
        );
    }
    if curve_rows > 0 {
        let place = Rect {
            y: area.bottom(),
            height: curve_rows,
            ..body
        };
        losses(app, buf, place, page);
    }
}

pub(super) fn tone_style(theme: Theme, tone: Tone) -> Style {
    match tone {
        Tone::Plain => theme.text(),
        Tone::Good => theme.good(),
        Tone::Bad => theme.bad(),
    }
}

/// Returns the lines of tables, one table after another, at most `width` columns wide.
pub(super) fn lines(tables: &[Table], theme: Theme, width: usize) -> Vec<Line> {
    let mut all = Vec::new();
    for table in tables {
        if !all.is_empty() {
            all.push(Line::Text(String::new(), Style::new()));
        }
        all.push(Line::Text(table.title.clone(), theme.accent()));
        if !table.rows.is_empty() {
            all.extend(table_lines(table, theme, width));
        }
        for note in &table.notes {
            all.extend(
                wrap(note, width)
                    .into_iter()
                    .map(|l| Line::Text(l, theme.dim())),
            );
        }
    }
    all
}

fn table_lines(table: &Table, theme: Theme, width: usize) -> Vec<Line> {
    let right: Vec<bool> = table.header.iter().map(|h| h.starts_with('>')).collect();
    let header: Vec<String> = table
        .header
        .iter()
        .map(|h| h.trim_start_matches('>').to_owned())
        .collect();
    let columns = header.len();
    let mut widths: Vec<usize> = header.iter().map(|h| h.chars().count()).collect();
    for row in &table.rows {
        for (w, cell) in widths.iter_mut().zip(&row.cells) {
            *w = (*w).max(cell.chars().count());
        }
    }
    // The widest columns are shrunk until everything fits.
    while widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1) > width {
        match widths.iter_mut().max() {
            Some(w) if *w > 8 => *w -= 1,
            _ => break,
        }
    }
    let aligned = |cells: &[String]| -> Vec<(String, bool)> {
        cells.iter().cloned().zip(right.iter().copied()).collect()
    };
    let mut lines = vec![Line::Cells(aligned(&header), widths.clone(), theme.dim())];
    for row in &table.rows {
        lines.push(Line::Cells(
            aligned(&row.cells),
            widths.clone(),
            tone_style(theme, row.tone),
        ));
    }
    lines
}

fn losses(app: &App, buf: &mut Buffer, area: Rect, page: &Page) {
    let theme = app.theme;
    let inner = pane(buf, area, "Loss", false, theme);
    let points: Vec<Vec<(f64, f64)>> = page
        .losses
        .iter()
        .map(|s| {
            s.values
                .iter()
                .enumerate()
                .map(|(i, v)| (i as f64 + 1.0, *v))
                .collect()
        })
        .collect();
    let all: Vec<Curve<'_>> = page
        .losses
        .iter()
        .zip(&points)
        .enumerate()
        .map(|(i, (s, points))| Curve {
            name: &s.name,
            points,
            style: theme.series(i),
            scatter: false,
        })
        .collect();
    curves(buf, inner, &all, theme);
}
