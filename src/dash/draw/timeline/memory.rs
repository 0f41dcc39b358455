//! Draws the memory curve as a stack of families, and the composition at its peak below it.

use super::GUTTER;
use crate::dash::app::{App, Hit};
use crate::dash::draw::charts::{Part, family_fill, family_style, stacked};
use crate::dash::draw::kit::{bytes, put, put_right};
use crate::dash::lanes::Lanes;
use crate::dash::lanes::memory::{Column, Family, Stack};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use shardlab_plan::record::RunKind;
use shardlab_plan::units::{ByteUnit, Bytes};

/// Blocks that fill eighths of a cell from its bottom.
const UP: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

pub(super) fn draw(app: &App, buf: &mut Buffer, area: Rect, plot: Rect) {
    let t = &app.timeline;
    let theme = app.theme;
    let binned = t.binned.borrow();
    let (Some(main), Some(binned)) = (&t.main, binned.as_ref()) else {
        return;
    };
    app.hits.borrow_mut().push((plot, Hit::Time));
    let samples = &main.memory.samples;
    if samples.is_empty() {
        put(
            buf,
            area.x + 1,
            area.y,
            area.width,
            "memory: no timeline was recorded",
            theme.dim(),
        );
        return;
    }
    // The last row shows the composition at the peak.
    let rows = area.height - 1;
    let most = |l: &Lanes| {
        l.memory
            .samples
            .iter()
            .map(|s| s.reserved.max(s.allocated))
            .max()
            .unwrap_or(0)
    };
    let top = most(main).max(t.other.as_deref().map_or(0, most)).max(1);
    put(buf, area.x + 1, area.y, GUTTER - 1, "memory", theme.text());
    if rows >= 2 {
        put(
            buf,
            area.x + 1,
            area.y + 1,
            GUTTER - 1,
            "╌ reserved",
            theme.dim(),
        );
    }
    put_right(buf, area.x, area.y, GUTTER - 1, &short(top), theme.dim());
    if rows >= 2 {
        put_right(buf, area.x, area.y + rows - 1, GUTTER - 1, "0", theme.dim());
    }
    let peak = main.memory.peak;
    for (i, column) in binned.memory[0].iter().enumerate() {
        let Some(column) = column else { continue };
        let x = plot.x + i as u16;
        let stack = main.memory.stacks.get(column.sample);
        draw_column(app, buf, x, area.y, rows, top, column, stack);
        if peak == Some(column.sample) {
            put(buf, x, area.y, 1, "▼", theme.bad());
        }
    }
    if t.other.is_some() {
        overlay(app, buf, plot, rows, top, &binned.memory[1]);
    }
    composition(
        app,
        main,
        buf,
        Rect {
            y: area.y + rows,
            height: 1,
            ..area
        },
    );
}

#[expect(
    clippy::too_many_arguments,
    reason = "a column is drawn in one place only"
)]
fn draw_column(
    app: &App,
    buf: &mut Buffer,
    x: u16,
    y: u16,
    rows: u16,
    top: u64,
    column: &Column,
    stack: Option<&Stack>,
) {
    let theme = app.theme;
    let cells = |n: u64| n as f64 / top as f64 * f64::from(rows);
    for row in 0..rows {
        // Height of each family within this cell, from the bottom of the cell.
        let (low, high) = (f64::from(rows - 1 - row), f64::from(rows - row));
        let filled = (cells(column.allocated) - low).clamp(0.0, 1.0);
        if filled <= 0.06 {
            let reserved = cells(column.reserved);
            if reserved > low && reserved <= high && column.reserved > column.allocated {
                put(buf, x, y + row, 1, "╌", theme.dim());
            }
            continue;
        }
        let family = stack.map(|s| family_at(s, top, rows, f64::midpoint(low, low + filled)));
        let (style, fill) = family.map_or((theme.series(2), '█'), |f| {
            (family_style(theme, f), family_fill(theme, f))
        });
        let eighths = ((filled * 8.0).round() as usize).clamp(1, 8);
        let glyph = if theme.textures() && eighths >= 4 {
            fill
        } else {
            UP[eighths]
        };
        put(buf, x, y + row, 1, &glyph.to_string(), style);
    }
}

/// Formats bytes in at most six characters: `287 G`, `38.5 G`.
fn short(n: u64) -> String {
    let unit = ByteUnit::of(Bytes(n));
    let count = unit.count(Bytes(n));
    let decimals = match count {
        c if c >= 99.95 => 0,
        c if c >= 9.995 => 1,
        _ => 2,
    };
    format!("{count:.decimals$} {}", &unit.name()[..1])
}

/// Returns the family at a height, in cells from the bottom.
fn family_at(stack: &Stack, top: u64, rows: u16, height: f64) -> Family {
    let mut sum = 0u64;
    for (family, n) in Family::ALL.into_iter().zip(stack) {
        sum += n;
        if sum as f64 / top as f64 * f64::from(rows) >= height {
            return family;
        }
    }
    Family::Other
}

/// Draws the curve of the other run as a line.
fn overlay(
    app: &App,
    buf: &mut Buffer,
    plot: Rect,
    rows: u16,
    top: u64,
    columns: &[Option<Column>],
) {
    let style: Style = app.theme.strong();
    for (i, column) in columns.iter().enumerate() {
        let Some(column) = column else { continue };
        let height = column.allocated as f64 / top as f64 * f64::from(rows);
        let row = (f64::from(rows) - height).clamp(0.0, f64::from(rows - 1)) as u16;
        let at = (plot.x + i as u16, plot.y + row);
        // Over a filled cell, the line has the cell's colour as background.
        let below = buf.cell(at).filter(|c| c.symbol() == "█").map(|c| c.fg);
        let style = below.map_or(style, |colour| style.bg(colour));
        put(buf, at.0, at.1, 1, "─", style);
    }
}

/// Draws the composition of the peak.
fn composition(app: &App, main: &Lanes, buf: &mut Buffer, area: Rect) {
    let theme = app.theme;
    let memory = &main.view.run.memory;
    let mut sums = Stack::default();
    for (role, n) in &memory.by_role {
        sums[Family::of(*role) as usize] += n.0;
    }
    let label = match main.view.run.kind {
        RunKind::Sim => "at the peak",
        RunKind::Exec | RunKind::Import => "at its peak",
    };
    put(buf, area.x + 1, area.y, GUTTER - 1, label, theme.dim());
    let parts: Vec<Part> = Family::ALL
        .into_iter()
        .zip(sums)
        .filter(|(_, n)| *n > 0)
        .map(|(f, n)| Part::of(theme, f, n))
        .collect();
    let text = parts
        .iter()
        .map(|p| format!("{} {}", p.name, bytes(p.size)))
        .collect::<Vec<_>>()
        .join(", ");
    let bar = (area.width - GUTTER) / 3;
    let place = Rect {
        x: area.x + GUTTER,
        width: bar,
        ..area
    };
    let whole = memory.peak_allocated.0;
    stacked(buf, place, &parts, whole, theme);
    let x = place.right() + 1;
    let room = area.right().saturating_sub(x + 1);
    let text = format!("{}: {text}", bytes(whole));
    let text = crate::dash::draw::kit::cut(&text, usize::from(room));
    put(buf, x, area.y, room, &text, theme.text());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_leave_room_for_the_name() {
        let mib = |n: f64| short((n * f64::from(1 << 20)) as u64);
        assert_eq!(mib(287.11 * 1024.0), "287 G");
        assert_eq!(mib(38.53 * 1024.0), "38.5 G");
        assert_eq!(mib(1.25 * 1024.0), "1.25 G");
        for n in (0..26).map(|i| 3u64.pow(i)) {
            assert!(short(n).chars().count() <= 6, "{}", short(n));
        }
    }
}
