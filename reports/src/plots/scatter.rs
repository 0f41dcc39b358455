//! A scatter plot of predicted against measured times, one point per instruction.

use super::draw::{self, FAINT, GRID, series, short, text};
use super::{Key, Plot};
use plotters::prelude::*;

/// Maximum number of points per color. The longest instructions are drawn.
const POINTS: usize = 400;

/// Draws points by kind: predicted and measured microseconds. On the diagonal, both are equal.
#[must_use]
pub fn scatter(name: &str, title: &str, kinds: &[(String, Vec<(f64, f64)>)]) -> Plot {
    let good = |p: &&(f64, f64)| p.0 > 0.0 && p.1 > 0.0 && p.0.is_finite() && p.1.is_finite();
    let all = kinds.iter().flat_map(|(_, p)| p.iter().filter(good));
    let (mut low, mut high) = (f64::INFINITY, 0.0f64);
    let (mut count, mut within) = (0u32, 0u32);
    for (p, m) in all {
        low = low.min(p.min(*m));
        high = high.max(p.max(*m));
        count += 1;
        within += u32::from((m / p - 1.0).abs() <= 0.1);
    }
    if count == 0 {
        (low, high) = (1.0, 10.0);
    }
    let (low, high) = (low / 1.5, high * 1.5);
    let description = format!(
        "{count} instructions, {within} of them predicted within 10 % of the measured time; from {} to {} microseconds",
        short(low * 1.5),
        short(high / 1.5)
    );
    let legend = kinds
        .iter()
        .enumerate()
        .map(|(i, (k, _))| (Key::Series(i), k.clone()))
        .collect();
    draw::plot(name, title, description, 760, legend, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .set_label_area_size(LabelAreaPosition::Bottom, 80)
            .set_label_area_size(LabelAreaPosition::Left, 130)
            .build_cartesian_2d((low..high).log_scale(), (low..high).log_scale())?;
        chart
            .configure_mesh()
            .x_desc("predicted, microseconds")
            .y_desc("measured, microseconds")
            .x_label_formatter(&|v| short(*v))
            .y_label_formatter(&|v| short(*v))
            .label_style(text(24, &FAINT))
            .axis_desc_style(text(24, &FAINT))
            .axis_style(GRID)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;
        let diagonal = [(low, low), (high, high)];
        chart.draw_series(LineSeries::new(diagonal, FAINT.stroke_width(2)))?;
        for (i, (_, points)) in kinds.iter().enumerate() {
            let mut points: Vec<&(f64, f64)> = points.iter().filter(good).collect();
            points.sort_by(|a, b| b.1.total_cmp(&a.1));
            let style = series(i).stroke_width(3);
            for p in points.into_iter().take(POINTS) {
                // Shapes distinguish kinds without colors.
                if i % 2 == 0 {
                    chart.draw_series([Circle::new(*p, 6, style)])?;
                } else {
                    chart.draw_series([TriangleMarker::new(*p, 9, style)])?;
                }
            }
        }
        Ok(())
    })
}
