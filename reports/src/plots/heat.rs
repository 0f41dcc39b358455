//! A heat map: a metric over two options.

use super::Plot;
use super::draw::{self, FAINT, GROUND, INK, series, short, text};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Position of text: centred in a cell.
const MIDDLE: Pos = Pos {
    h_pos: HPos::Center,
    v_pos: VPos::Top,
};
/// Minimum width of a cell that contains words.
const ROOMY: i32 = 90;

/// What the cells of a map show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// Unit of the values.
    pub unit: &'static str,
    /// Whether more is better.
    pub more_is_better: bool,
}

/// A cell of a map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Value.
    pub value: f64,
    /// Whether it fits the device. A cell that does not fit is shown, but is never the best.
    pub fits: bool,
    /// Whether it is the best of all, without a tie.
    pub best: bool,
}

/// A row of a map; `None` where no run exists.
pub type Row = Vec<Option<Cell>>;

/// Draws the cells `rows[row][column]` of one measure, with a number in every cell.
#[must_use]
pub fn heat(
    title: &str,
    measure: Measure,
    x: (&str, &[String]),
    y: (&str, &[String]),
    cells: &[Row],
) -> Plot {
    let unit = measure.unit;
    let all = || cells.iter().flatten().flatten();
    let (low, high) = all()
        .filter(|c| c.fits)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), c| {
            (a.min(c.value), b.max(c.value))
        });
    let best = if measure.more_is_better { high } else { low };
    let description = describe(measure, x, y, cells);
    let (columns, rows) = (x.1.len().max(1), y.1.len().max(1));
    let height = 130 + 84 * rows as u32;
    draw::plot("heat", title, description, height, vec![], |area| {
        let (left, top) = (360i32, 16i32);
        let (w, h) = ((draw::WIDTH as i32 - left - 20) / columns as i32, 84i32);
        for (r, row) in cells.iter().enumerate() {
            let py = top + r as i32 * h;
            let label = y.1.get(r).map_or("", |s| s);
            let cut = draw::cut(label, 27);
            area.draw(&Text::new(cut, (4, py + 30), text(22, &INK)))?;
            for (c, cell) in row.iter().enumerate() {
                let px = left + c as i32 * w;
                let corners = [(px + 2, py + 2), (px + w - 2, py + h - 2)];
                let middle = (px + w / 2, py + 30);
                let Some(cell) = cell else {
                    area.draw(&Rectangle::new(corners, FAINT.stroke_width(1)))?;
                    continue;
                };
                let number = short(cell.value);
                if !cell.fits {
                    area.draw(&Rectangle::new(corners, FAINT.stroke_width(1)))?;
                    let words = if w >= ROOMY { "no fit" } else { "✗" };
                    let above = (middle.0, py + 16);
                    let below = (middle.0, py + 46);
                    area.draw(&Text::new(number, above, text(24, &FAINT).pos(MIDDLE)))?;
                    area.draw(&Text::new(words, below, text(20, &FAINT).pos(MIDDLE)))?;
                    continue;
                }
                // The best cell is filled completely; its text has the background colour.
                let share = if high > low {
                    1.0 - (cell.value - best).abs() / (high - low)
                } else {
                    0.0
                };
                let step = (share * 4.0).round() / 4.0;
                let full = step >= 0.75;
                let fill = series(0).mix(if full { 1.0 } else { 0.06 + 0.2 * step });
                area.draw(&Rectangle::new(corners, fill.filled()))?;
                // Draw a path, since plotters gives rectangles the thinnest line in any case.
                let is_best = cell.best;
                let inset = if is_best { 3 } else { 0 };
                let [(a, b), (c, d)] = corners;
                let (a, b, c, d) = (a + inset, b + inset, c - inset, d - inset);
                let frame = vec![(a, b), (c, b), (c, d), (a, d), (a, b)];
                let width = if is_best { 7 } else { 1 };
                let ink = if is_best { INK } else { series(0) };
                area.draw(&PathElement::new(frame, ink.stroke_width(width)))?;
                let style = text(24, if full { &GROUND } else { &INK }).pos(MIDDLE);
                area.draw(&Text::new(number, middle, style))?;
            }
        }
        for (c, name) in x.1.iter().enumerate() {
            let at = (left + c as i32 * w + w / 2, top + rows as i32 * h + 8);
            let cut = draw::cut(name, (w / 13).max(4) as usize);
            area.draw(&Text::new(cut, at, text(22, &FAINT).pos(MIDDLE)))?;
        }
        let at = (left, top + rows as i32 * h + 50);
        let axes = match y.0 {
            "" => x.0.to_owned(),
            y => format!("across: {}, down: {y}", x.0),
        };
        let words = format!("{axes}; cells: {unit}; darker is better, outlined: best");
        area.draw(&Text::new(words, at, text(22, &FAINT)))?;
        Ok(())
    })
}

/// Describes the map: its range, its best cell, and what does not fit.
fn describe(measure: Measure, x: (&str, &[String]), y: (&str, &[String]), cells: &[Row]) -> String {
    let unit = measure.unit;
    let all = || cells.iter().flatten().flatten();
    let (low, high) = all().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), c| {
        (a.min(c.value), b.max(c.value))
    });
    let mut words = format!("from {} to {} {unit}", short(low), short(high));
    let unfit = all().filter(|c| !c.fits).count();
    let mut best = None;
    for (row, name) in cells.iter().zip(y.1) {
        for (cell, column) in row.iter().zip(x.1) {
            if let Some(cell) = cell.filter(|c| c.best) {
                // The first of equal cells, as in tables.
                best.get_or_insert((cell.value, column, name));
            }
        }
    }
    if let Some((value, column, name)) = best {
        let of = if unfit > 0 { "best that fits" } else { "best" };
        words.push_str(&format!(
            "; the {of} is {} {unit} at {}={column}",
            short(value),
            x.0
        ));
        if !y.0.is_empty() {
            words.push_str(&format!(", {}={name}", y.0));
        }
    }
    match (unfit, all().count()) {
        (0, _) => {}
        (n, all) if n == all => words.push_str("; none fits the device"),
        (1, _) => words.push_str("; 1 does not fit the device"),
        (n, _) => words.push_str(&format!("; {n} do not fit the device")),
    }
    words
}
