//! A heat map: a metric over two options.

use super::Plot;
use super::draw::{self, short};
use super::svg::{Anchor, Canvas, TEXT, width_of};

/// Height of a cell.
const CELL: f64 = 68.0;
/// Maximum width of a cell, so that a map with few columns is narrow enough for a phone.
const MAX_WIDTH: f64 = 190.0;
/// Width of the color scale, of its gradations, and its height.
const SCALE: f64 = 320.0;
const GRADATIONS: u32 = 40;
const SCALE_HEIGHT: f64 = 22.0;
/// Opacity of the worst cell's color; the best cell has the full color.
const FAINTEST: f64 = 0.08;
/// Maximum number of characters of a row's name.
const NAME: usize = 24;
/// Maximum number of characters of an axis title.
const TITLE: usize = 100;

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
    /// Whether it is the best of all cells, without a tie.
    pub best: bool,
}

/// A row of a map; `None` where no run exists.
pub type Row = Vec<Option<Cell>>;

/// Returns the opacity of a cell's color: proportional to its distance from the worst value.
fn shade(value: f64, worst: f64, best: f64) -> f64 {
    let share = if best == worst {
        1.0
    } else {
        (value - worst) / (best - worst)
    };
    FAINTEST + (1.0 - FAINTEST) * share.clamp(0.0, 1.0)
}

/// Draws the cells `rows[row][column]` of one measure, with a number in every cell, titles of both
/// axes and the scale of colors.
#[must_use]
pub fn heat(
    title: &str,
    measure: Measure,
    x: (&str, &[String]),
    y: (&str, &[String]),
    cells: &[Row],
) -> Plot {
    let fitting = || cells.iter().flatten().flatten().filter(|c| c.fits);
    let low = fitting().map(|c| c.value).fold(f64::INFINITY, f64::min);
    let high = fitting().map(|c| c.value).fold(f64::NEG_INFINITY, f64::max);
    let (worst, best) = if measure.more_is_better {
        (low, high)
    } else {
        (high, low)
    };
    let (columns, rows) = (x.1.len().max(1) as f64, y.1.len().max(1) as f64);
    let names = y.1.iter().map(|n| width_of(&draw::cut(n, NAME), TEXT));
    let left = names.fold(0.0, f64::max) + 24.0;
    let most = (f64::from(draw::WIDTH) - left - 20.0) / columns;
    let names = x.1.iter().map(|n| width_of(n, TEXT) + 16.0);
    let w = names.fold(130.0, f64::max).min(MAX_WIDTH).min(most);
    // The title of the rows' axis is above the rows, and the title of the columns' axis is below
    // the columns.
    let top = if y.0.is_empty() { 8.0 } else { 44.0 };
    let bottom = top + rows * CELL;
    let titles = [x.0, y.0].map(|t| draw::cut(t, TITLE));
    let words = [
        width_of(&titles[0], TEXT),
        width_of(&titles[1], TEXT),
        left + SCALE + 20.0,
    ];
    let width = words.into_iter().fold(left + columns * w + 20.0, f64::max);
    let mut canvas = Canvas::new(width, bottom + 180.0);
    canvas.text((0.0, 26.0), Anchor::Start, "faint", &titles[1]);
    for (r, row) in cells.iter().enumerate() {
        let py = top + r as f64 * CELL;
        let name = y.1.get(r).map_or("", |s| s);
        let at = (left - 14.0, py + CELL / 2.0 + 8.0);
        canvas.text(at, Anchor::End, "ink", &draw::cut(name, NAME));
        for (c, cell) in row.iter().enumerate() {
            let place = [left + c as f64 * w + 2.0, py + 2.0, w - 4.0, CELL - 4.0];
            match cell {
                None => canvas.frame(place, "grid", 1.0),
                Some(cell) => draw_cell(&mut canvas, place, cell, worst, best),
            }
        }
    }
    for (c, name) in x.1.iter().enumerate() {
        let at = (left + (c as f64 + 0.5) * w, bottom + 28.0);
        let cut = draw::cut(name, ((w / (TEXT * 0.56)) as usize).max(3));
        canvas.text(at, Anchor::Middle, "ink", &cut);
    }
    let middle = (left + columns * w / 2.0).max(width_of(&titles[0], TEXT) / 2.0);
    canvas.text((middle, bottom + 64.0), Anchor::Middle, "faint", &titles[0]);
    if worst.is_finite() {
        scale(&mut canvas, (left, bottom + 92.0), measure, worst, best);
    }
    let description = describe(measure, x, y, cells);
    canvas.finish("heat", title, description, vec![])
}

fn draw_cell(canvas: &mut Canvas, place: [f64; 4], cell: &Cell, worst: f64, best: f64) {
    let [x, y, w, h] = place;
    let number = short(cell.value);
    let size = (TEXT * (w - 8.0) / width_of(&number, TEXT)).clamp(11.0, TEXT);
    let middle = x + w / 2.0;
    if !cell.fits {
        canvas.frame(place, "faint", 1.0);
        let words = if w >= 76.0 { "no fit" } else { "✗" };
        canvas.sized_text(
            (middle, y + h * 0.44),
            Anchor::Middle,
            "faint",
            size,
            &number,
        );
        canvas.sized_text((middle, y + h * 0.84), Anchor::Middle, "faint", 20.0, words);
        return;
    }
    canvas.rect(place, "heat", shade(cell.value, worst, best));
    if cell.best {
        canvas.frame([x + 2.0, y + 2.0, w - 4.0, h - 4.0], "ink", 5.0);
    }
    canvas.sized_text(
        (middle, y + h / 2.0 + 8.0),
        Anchor::Middle,
        "ink",
        size,
        &number,
    );
}

/// Draws the scale from the worst value on the left to the best on the right.
fn scale(canvas: &mut Canvas, (x, y): (f64, f64), measure: Measure, worst: f64, best: f64) {
    let part = SCALE / f64::from(GRADATIONS);
    for i in 0..GRADATIONS {
        let share = f64::from(i) / f64::from(GRADATIONS - 1);
        let colour = shade(worst + share * (best - worst), worst, best);
        // Gradations overlap slightly, so that no gaps show between them.
        let place = [x + f64::from(i) * part, y, part + 0.4, SCALE_HEIGHT];
        canvas.rect(place, "heat", if best == worst { 1.0 } else { colour });
    }
    canvas.frame([x, y, SCALE, SCALE_HEIGHT], "faint", 1.0);
    let below = y + SCALE_HEIGHT + 26.0;
    canvas.text((x, below), Anchor::Start, "ink", &short(worst));
    canvas.text((x + SCALE, below), Anchor::End, "ink", &short(best));
    let words = format!("{}, right is better", measure.unit);
    canvas.text((x, below + 30.0), Anchor::Start, "faint", &words);
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
                // The first of equal cells is the best, as in tables.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plot(values: &[f64], more_is_better: bool) -> Plot {
        let measure = Measure {
            unit: "u",
            more_is_better,
        };
        let row = values
            .iter()
            .map(|&value| {
                Some(Cell {
                    value,
                    fits: true,
                    best: false,
                })
            })
            .collect();
        let names: Vec<String> = (0..values.len()).map(|i| i.to_string()).collect();
        heat(
            "T",
            measure,
            ("x.key", &names),
            ("", &[String::new()]),
            &[row],
        )
    }

    /// Returns the opacities of the cells, in order.
    fn shades(plot: &Plot, cells: usize) -> Vec<f64> {
        let opacity = |t: &str| match t.split("fill-opacity=\"").nth(1) {
            Some(t) => t.split('"').next().unwrap().parse().unwrap(),
            None => 1.0,
        };
        let rects = plot.svg.split("<rect ").skip(1);
        rects
            .take(cells)
            .map(|t| opacity(t.split('>').next().unwrap()))
            .collect()
    }

    /// Differences in color are proportional to differences in value.
    #[test]
    fn colours_are_continuous() {
        let plot = plot(&[7785.0, 8092.0, 8194.0, 8274.0, 8327.0], true);
        let shown = shades(&plot, 5);
        let expected = |v: f64| FAINTEST + (1.0 - FAINTEST) * (v - 7785.0) / (8327.0 - 7785.0);
        for (shown, value) in shown.iter().zip([7785.0, 8092.0, 8194.0, 8274.0, 8327.0]) {
            assert!((shown - expected(value)).abs() < 1e-3, "{value}: {shown}");
        }
        assert!(shown.windows(2).all(|w| w[1] > w[0] + 0.05), "{shown:?}");
    }

    #[test]
    fn less_time_is_darker_and_equal_values_are_alike() {
        let shown = shades(&plot(&[10.0, 20.0, 15.0], false), 3);
        assert_eq!(shown, [1.0, FAINTEST, 0.54]);
        assert_eq!(shades(&plot(&[3.0, 3.0], true), 2), [1.0, 1.0]);
    }

    proptest! {
        #[test]
        fn a_map_stays_within_its_page(columns in 1usize..25, length in 1usize..60) {
            let names: Vec<String> = (0..columns).map(|i| format!("{i:0>length$}")).collect();
            let cell = Cell { value: 123_456.0, fits: true, best: false };
            let measure = Measure { unit: "ms per step", more_is_better: false };
            let rows = [vec![Some(cell); columns]];
            let plot = heat("T", measure, ("x", &names), ("y", &names[..1]), &rows);
            let size = plot.svg.split("viewBox=\"0 0 ").nth(1).unwrap();
            let width: f64 = size.split(' ').next().unwrap().parse().unwrap();
            prop_assert!(width <= f64::from(draw::WIDTH) + 1.0, "{width}");
        }
    }
}
