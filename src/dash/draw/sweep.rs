//! Draws the sweep.

use super::kit::{badge, cut, lines, ms, pane, pieces, put, put_right, step_ms};
use crate::dash::app::{App, Hit, Purpose};
use crate::dash::glance::Brief;
use crate::dash::sweep::{Point, Row};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use shardlab_plan::record::basis::number;

/// Width of each of [`COLUMNS`](crate::dash::sweep::COLUMNS).
const WIDTHS: [u16; 8] = [9, 10, 6, 8, 9, 8, 8, 6];

pub(super) fn draw(app: &App, buf: &mut Buffer, body: Rect) {
    let s = &app.sweep;
    let top = Rect { height: 4, ..body };
    axes(app, buf, top);
    let mut table_area = Rect {
        y: body.y + 4,
        height: body.height - 4,
        ..body
    };
    if body.width >= 130 && !s.points.is_empty() {
        let side = body.width / 3;
        table_area.width -= side;
        scatter(
            app,
            buf,
            Rect {
                x: table_area.right(),
                width: side,
                ..table_area
            },
        );
    }
    table(app, buf, table_area);
}

fn axes(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let s = &app.sweep;
    let name = s.setup.as_ref().map_or_else(
        || {
            app.scenarios
                .current()
                .map_or(String::new(), |c| c.name.clone())
        },
        |x| x.path.display().to_string(),
    );
    let running = app.running(Purpose::Sweep).is_some();
    // All points have the same basis, unless axes change the mesh.
    let mut briefs = s.points.iter().filter_map(|p| p.result.as_ref().ok());
    let basis = briefs.find_map(|b| b.basis.as_ref());
    let basis = basis.map_or_else(String::new, |b| format!(" ({})", badge(b)));
    let inner = pane(buf, area, &format!("Sweep {name}{basis}"), running, theme);
    let width = inner.width.saturating_sub(2);
    let added = if s.axes.is_empty() {
        ("its own axes; a adds one".to_owned(), theme.dim())
    } else {
        (s.axes.join("   "), theme.text())
    };
    pieces(
        buf,
        inner.x + 1,
        inner.y,
        width,
        &[
            ("axes  ".into(), theme.dim()),
            (cut(&added.0, usize::from(width) - 6), added.1),
        ],
    );
    let mut state = vec![(
        format!("{} of {} points", s.points.len(), s.total),
        theme.text(),
    )];
    if running {
        state.push(("  predicting; Esc cancels".into(), theme.accent()));
    }
    if !s.filter.is_empty() {
        state.push((format!("  filter {}", s.filter), theme.warn()));
    }
    if s.front_only {
        state.push(("  front only".into(), theme.warn()));
    }
    state.push((
        format!(
            "  ◆ on the Pareto front of time per {} and memory",
            s.counted_in().one()
        ),
        theme.dim(),
    ));
    pieces(buf, inner.x + 1, inner.y + 1, width, &state);
}

/// A column on the screen.
struct Column {
    /// Index among the axes, then among [`COLUMNS`](crate::dash::sweep::COLUMNS).
    of: usize,
    width: u16,
}

/// Columns by importance. The last of these are dropped first if there is no room.
const IMPORTANCE: [usize; 8] = [0, 7, 6, 1, 3, 5, 4, 2];

/// Returns the columns that fit, axes first.
fn layout(app: &App, width: u16) -> Vec<Column> {
    const MARKS: u16 = 3;
    let s = &app.sweep;
    let axes = s.keys.len();
    let mut columns: Vec<Column> = (0..axes)
        .map(|of| {
            let name = s.keys[of]
                .rsplit('.')
                .next()
                .unwrap_or_default()
                .chars()
                .count();
            let longest = s
                .points
                .iter()
                .filter_map(|p| p.settings.get(of))
                .map(|v| v.chars().count())
                .max()
                .unwrap_or(0);
            let width = longest.max(name.min(10)).clamp(4, 18) as u16;
            Column { of, width }
        })
        .collect();
    let mut used = MARKS + columns.iter().map(|c| c.width + 1).sum::<u16>();
    let mut shown = Vec::new();
    for i in IMPORTANCE {
        if used + WIDTHS[i] < width {
            used += WIDTHS[i] + 1;
            shown.push(i);
        }
    }
    shown.sort_unstable();
    columns.extend(shown.into_iter().map(|i| Column {
        of: axes + i,
        width: WIDTHS[i],
    }));
    // The names of axes get the remaining room.
    for column in columns.iter_mut().take(axes) {
        let name = s.keys[column.of]
            .rsplit('.')
            .next()
            .unwrap_or_default()
            .chars()
            .count() as u16
            + 1;
        let more = name
            .saturating_sub(column.width)
            .min(width.saturating_sub(used));
        column.width += more;
        used += more;
    }
    columns
}

fn table(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let s = &app.sweep;
    let rows = s.rows();
    let title = if rows.len() < s.points.len() {
        format!("Points: {} of {} pass", rows.len(), s.points.len())
    } else {
        "Points".to_owned()
    };
    let inner = pane(buf, area, &title, true, theme);
    if let Some(error) = &s.error {
        let width = inner.width.saturating_sub(2);
        let lines = lines(error, usize::from(width))
            .into_iter()
            .chain(["d removes the last axis; w sweeps again".to_owned()]);
        for (i, line) in lines.take(usize::from(inner.height)).enumerate() {
            let y = inner.y + i as u16;
            put(buf, inner.x + 1, y, width, &line, theme.bad());
        }
        return;
    }
    if s.points.is_empty() {
        let text = if app.running(Purpose::Sweep).is_some() {
            "predicting …"
        } else {
            "w sweeps the selected scenario over its axes.\n\n\
             For example: a, then fsdp.prefetch_forward=[0, 1, 2] and Enter; a, then train.micro_batch=[1, 2] \
             and Enter; w predicts all six points, ◆ marks the best trade-offs between time and memory, \
             and Enter applies the selected point."
        };
        let width = usize::from(inner.width - 2).min(78);
        for (y, line) in (inner.y..inner.bottom()).zip(lines(text, width)) {
            put(buf, inner.x + 1, y, inner.width - 1, &line, theme.dim());
        }
        return;
    }
    let layout = layout(app, inner.width);
    *s.drawn.borrow_mut() = layout.iter().map(|c| c.of + 1).collect();
    let axes = s.keys.len();
    let mut x = inner.x + 3;
    for column in &layout {
        let name = if column.of < axes {
            s.keys[column.of].rsplit('.').next().unwrap_or_default()
        } else {
            s.title(column.of - axes)
        };
        let sorted = s.sort == column.of + 1;
        let arrow = match (sorted, s.reversed) {
            (true, false) => "↑",
            (true, true) => "↓",
            _ => "",
        };
        let style = if sorted { theme.accent() } else { theme.dim() };
        let text = cut(&format!("{arrow}{name}"), usize::from(column.width));
        if column.of < axes {
            put(buf, x, inner.y, column.width, &text, style);
        } else {
            put_right(buf, x, inner.y, column.width, &text, style);
        }
        x += column.width + 1;
    }
    let body = Rect {
        y: inner.y + 1,
        height: inner.height - 1,
        ..inner
    };
    for (line, i) in s
        .cursor
        .window(rows.len(), usize::from(body.height))
        .enumerate()
    {
        let place = Rect {
            y: body.y + line as u16,
            height: 1,
            ..body
        };
        let selected = i == s.cursor.at;
        line_of(app, buf, place, rows[i], selected, &layout);
        app.hits.borrow_mut().push((place, Hit::Point(i)));
    }
    if rows.is_empty() {
        put(
            buf,
            body.x + 1,
            body.y,
            body.width - 1,
            &format!("none of {} passes; Esc shows all", s.points.len()),
            theme.dim(),
        );
    }
}

fn line_of(app: &App, buf: &mut Buffer, place: Rect, row: Row, selected: bool, layout: &[Column]) {
    let theme = app.theme;
    let point = &app.sweep.points[row.point];
    let style = if selected {
        theme.selected()
    } else {
        theme.text()
    };
    put(
        buf,
        place.x,
        place.y,
        place.width,
        &" ".repeat(usize::from(place.width)),
        style,
    );
    put(
        buf,
        place.x,
        place.y,
        1,
        if selected { "▸" } else { " " },
        style,
    );
    let front = if row.front { "◆" } else { " " };
    put(
        buf,
        place.x + 1,
        place.y,
        1,
        front,
        style.patch(theme.good()),
    );
    let mut x = place.x + 3;
    let axes = app.sweep.keys.len();
    for column in layout {
        match (column.of.checked_sub(axes), &point.result) {
            (None, _) => {
                let value = point.settings.get(column.of).map_or("", String::as_str);
                put(buf, x, place.y, column.width, value, style);
            }
            (Some(_), Err(reason)) => {
                let room = place.right().saturating_sub(x);
                put(
                    buf,
                    x,
                    place.y,
                    room,
                    &format!("✗ {reason}"),
                    style.patch(theme.bad()),
                );
                return;
            }
            (Some(c), Ok(brief)) => {
                let tone = match (c, brief.fits) {
                    (7, "no") => theme.bad(),
                    (7, "tight") => theme.warn(),
                    (0, _) if row.front => theme.good(),
                    _ => Style::new(),
                };
                put_right(
                    buf,
                    x,
                    place.y,
                    column.width,
                    &cells(brief)[c],
                    style.patch(tone),
                );
            }
        }
        x += column.width + 1;
    }
}

fn cells(b: &Brief) -> [String; 8] {
    [
        step_ms(b),
        number(b.tokens_per_s, 0, b.basis.as_deref()),
        format!("{:.1}", 100.0 * b.mfu),
        ms(b.exposed_ms),
        format!("{:.2}", b.allocated.gib()),
        format!("{:.2}", b.reserved.gib()),
        format!("{:.2}", b.device.gib()),
        b.fits.to_owned(),
    ]
}

/// Draws step time against reserved memory with the Pareto front marked.
fn scatter(app: &App, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let s = &app.sweep;
    let title = format!("us per {} (down) and GiB (right)", s.counted_in().one());
    let inner = pane(buf, area, &title, false, theme);
    let inner = Rect {
        height: inner.height.saturating_sub(1),
        ..inner
    };
    let of = |p: &Point| {
        let b = p.result.as_ref().ok()?;
        Some((b.reserved.gib(), 1e6 / b.tokens_per_s))
    };
    let all: Vec<(f64, f64)> = s.points.iter().filter_map(of).collect();
    let range = |pick: fn(&(f64, f64)) -> f64| {
        let low = all.iter().map(pick).fold(f64::INFINITY, f64::min);
        let high = all.iter().map(pick).fold(f64::NEG_INFINITY, f64::max);
        let margin = ((high - low) * 0.05).max(high.abs() * 1e-3).max(1e-9);
        (low - margin, high + margin)
    };
    if all.is_empty() || inner.height < 3 {
        return;
    }
    let (x, y) = (range(|p| p.0), range(|p| p.1));
    let rows = s.rows();
    let selected = rows.get(s.cursor.at).map(|r| r.point);
    // The front is drawn last, so that its marks are not covered.
    let mut order = rows;
    order.sort_by_key(|r| (r.front, Some(r.point) == selected));
    for row in &order {
        let Some(p) = of(&s.points[row.point]) else {
            continue;
        };
        let column = ((p.0 - x.0) / (x.1 - x.0) * f64::from(inner.width - 1)) as u16;
        let line = ((p.1 - y.0) / (y.1 - y.0) * f64::from(inner.height - 1)) as u16;
        let (glyph, style) = match (Some(row.point) == selected, row.front) {
            (true, _) => ("█", theme.accent()),
            (_, true) => ("◆", theme.good()),
            _ => ("·", theme.text()),
        };
        put(buf, inner.x + column, inner.y + line, 1, glyph, style);
    }
    let text = format!("{:.1} to {:.1} GiB, {:.2} to {:.2} us", x.0, x.1, y.0, y.1);
    put(
        buf,
        inner.x,
        inner.bottom(),
        inner.width,
        &text,
        theme.dim(),
    );
}
