//! Curves over steps: losses and gradient norms.

use super::draw::{self, FAINT, GRID, series, short, text};
use super::{Key, Plot, SERIES};
use plotters::prelude::*;

/// Maximum number of points per curve.
const POINTS: usize = 1000;

/// One curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Name.
    pub label: String,
    /// Values, one per step; a NaN leaves a gap.
    pub values: Vec<f64>,
}

/// Dash patterns of the second and later curves. They make overlapping curves visible, and
/// distinguish curves without colors.
const DASHES: [&str; 4] = ["16 10", "5 8", "24 8 5 8", "2 6"];

/// Draws curves on common axes. The first is solid; those after the eighth are thin.
#[must_use]
pub fn curves(name: &str, title: &str, unit: &str, all: &[Curve]) -> Plot {
    let steps = all.iter().map(|c| c.values.len()).max().unwrap_or(0);
    let y = draw::range(all.iter().flat_map(|c| c.values.iter().copied()));
    let words = |c: &Curve| match (c.values.first(), c.values.last()) {
        (Some(a), Some(b)) => format!("{}: from {} to {}", c.label, short(*a), short(*b)),
        _ => format!("{}: none", c.label),
    };
    let description = format!(
        "{steps} steps. {}",
        all.iter().map(words).collect::<Vec<_>>().join("; ")
    );
    let legend = all
        .iter()
        .enumerate()
        .map(|(i, c)| (Key::Series(i), c.label.clone()))
        .collect();
    let mut plot = draw::plot(name, title, description, 560, legend, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .set_label_area_size(LabelAreaPosition::Bottom, 80)
            .set_label_area_size(LabelAreaPosition::Left, 120)
            .build_cartesian_2d(0.0..steps.max(2) as f64 - 1.0, y)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(unit)
            .x_label_formatter(&|v| short(*v))
            .y_label_formatter(&|v| short(*v))
            .label_style(text(24, &FAINT))
            .axis_desc_style(text(24, &FAINT))
            .axis_style(GRID)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (i, curve) in all.iter().enumerate() {
            let skip = curve.values.len().div_ceil(POINTS).max(1);
            let points: Vec<(f64, f64)> = curve
                .values
                .iter()
                .enumerate()
                .filter(|(s, _)| s % skip == 0 || s + 1 == curve.values.len())
                .map(|(s, v)| (s as f64, *v))
                .collect();
            let style = series(i).stroke_width(if i < SERIES { 4 } else { 2 });
            for part in points.split(|(_, v)| !v.is_finite()) {
                match part {
                    [] => {}
                    [(x, v)] => {
                        chart.draw_series([Circle::new((*x, *v), 5, series(i).filled())])?;
                    }
                    part => {
                        chart.draw_series(LineSeries::new(part.iter().copied(), style))?;
                    }
                }
            }
        }
        Ok(())
    });
    for i in 1..SERIES {
        let stroke = format!("stroke=\"var(--c{i})\"");
        let dashes = DASHES[(i - 1) % DASHES.len()];
        let dashed = format!("{stroke} stroke-dasharray=\"{dashes}\"");
        plot.svg = plot.svg.replace(&stroke, &dashed);
    }
    plot
}
