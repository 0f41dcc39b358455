//! A metric over two options.

use super::Plot;
use super::draw::{self, FAINT, GROUND, INK, series, short, text};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Text about the middle of a cell.
const MIDDLE: Pos = Pos {
    h_pos: HPos::Center,
    v_pos: VPos::Top,
};

/// Cells `values[row][column]`, smaller being better; `None` where there is no run. The number stands in every cell.
#[must_use]
pub fn heat(
    title: &str,
    unit: &str,
    x: (&str, &[String]),
    y: (&str, &[String]),
    values: &[Vec<Option<f64>>],
) -> Plot {
    let all = || values.iter().flatten().flatten().copied();
    let (low, high) = all().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| {
        (a.min(v), b.max(v))
    });
    let mut best = String::new();
    for (row, name) in values.iter().zip(y.1) {
        for (cell, column) in row.iter().zip(x.1) {
            if *cell == Some(low) {
                best = format!("; the best is {} {unit} at {}={column}", short(low), x.0);
                if !y.0.is_empty() {
                    best.push_str(&format!(", {}={name}", y.0));
                }
            }
        }
    }
    let description = format!("from {} to {} {unit}{best}", short(low), short(high));
    let (columns, rows) = (x.1.len().max(1), y.1.len().max(1));
    let height = 130 + 84 * rows as u32;
    draw::plot("heat", title, description, height, vec![], |area| {
        let (left, top) = (360i32, 16i32);
        let (w, h) = ((draw::WIDTH as i32 - left - 20) / columns as i32, 84i32);
        for (r, row) in values.iter().enumerate() {
            let py = top + r as i32 * h;
            let label = y.1.get(r).map_or("", |s| s);
            let label = if y.0.is_empty() {
                label.to_owned()
            } else {
                format!("{} = {label}", y.0)
            };
            let cut = draw::cut(&label, 27);
            area.draw(&Text::new(cut, (4, py + 30), text(22, &INK)))?;
            for (c, cell) in row.iter().enumerate() {
                let px = left + c as i32 * w;
                let corners = [(px + 2, py + 2), (px + w - 2, py + h - 2)];
                let Some(v) = cell else {
                    area.draw(&Rectangle::new(corners, FAINT.stroke_width(1)))?;
                    continue;
                };
                // The worst is full; text on it has the ground's colour.
                let share = if high > low {
                    (v - low) / (high - low)
                } else {
                    0.0
                };
                let step = (share * 4.0).round() / 4.0;
                let full = step >= 0.75;
                let fill = series(0).mix(if full { 1.0 } else { 0.06 + 0.2 * step });
                area.draw(&Rectangle::new(corners, fill.filled()))?;
                // A path: rectangles are drawn with the thinnest line whatever they ask for.
                let inset = if *v == low { 3 } else { 0 };
                let [(a, b), (c, d)] = corners;
                let (a, b, c, d) = (a + inset, b + inset, c - inset, d - inset);
                let frame = vec![(a, b), (c, b), (c, d), (a, d), (a, b)];
                let width = if *v == low { 7 } else { 1 };
                let ink = if *v == low { INK } else { series(0) };
                area.draw(&PathElement::new(frame, ink.stroke_width(width)))?;
                let style = text(24, if full { &GROUND } else { &INK }).pos(MIDDLE);
                area.draw(&Text::new(short(*v), (px + w / 2, py + 30), style))?;
            }
        }
        for (c, name) in x.1.iter().enumerate() {
            let at = (left + c as i32 * w + w / 2, top + rows as i32 * h + 8);
            let cut = draw::cut(name, (w / 13).max(4) as usize);
            area.draw(&Text::new(cut, at, text(22, &FAINT).pos(MIDDLE)))?;
        }
        let at = (left, top + rows as i32 * h + 50);
        let words = format!("{}; cells: {unit}, thick frame: best", x.0);
        area.draw(&Text::new(words, at, text(22, &FAINT)))?;
        Ok(())
    })
}
