//! Step times with confidence intervals, one row per run.

use super::Plot;
use super::draw::{self, FAINT, GRID, INK, series, short, text};
use plotters::prelude::*;

/// Maximum number of samples drawn as points.
const POINTS: usize = 200;
/// Maximum number of runs whose numbers the description lists. For more runs it gives the range.
const MAX_LISTED: usize = 6;
/// Height of a row.
const ROW: u32 = 64;

/// The step times of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct StepBar {
    /// Name.
    pub label: String,
    /// Median, milliseconds.
    pub median: f64,
    /// Confidence interval of the median, milliseconds; `None` for a prediction.
    pub interval: Option<(f64, f64)>,
    /// Samples, milliseconds.
    pub samples: Vec<f64>,
}

/// Draws medians as marks, intervals as bars, and samples as faint points.
#[must_use]
pub fn steps(title: &str, bars: &[StepBar]) -> Plot {
    let ends = bars.iter().filter_map(|b| b.interval);
    let all = bars
        .iter()
        .flat_map(|b| b.samples.iter().copied().chain([b.median]))
        .chain(ends.flat_map(|(a, b)| [a, b]));
    let x = draw::range(all);
    let description = describe(bars);
    let longest = bars.iter().map(|b| b.label.chars().count().min(40)).max();
    // Wide enough for the longest name.
    let gutter = 14 * longest.unwrap_or(0) as u32 + 24;
    let n = bars.len().max(1);
    let height = 110 + ROW * n as u32;
    draw::plot("steps", title, description, height, vec![], |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(16)
            .set_label_area_size(LabelAreaPosition::Bottom, 80)
            .set_label_area_size(LabelAreaPosition::Left, gutter)
            .build_cartesian_2d(x.clone(), 0.0..n as f64)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_desc("milliseconds per step")
            .x_labels(8)
            .x_label_formatter(&|v| short(*v))
            .label_style(text(24, &FAINT))
            .axis_desc_style(text(24, &FAINT))
            .axis_style(GRID)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (i, bar) in bars.iter().enumerate() {
            let y = n as f64 - 0.5 - i as f64;
            let colour = series(i);
            let (left, _) = (chart.plotting_area().get_pixel_range().0.start, 0);
            let (_, py) = chart.plotting_area().map_coordinate(&(x.start, y));
            let cut = draw::cut(&bar.label, 40);
            area.draw(&Text::new(
                cut,
                (left - gutter as i32 + 10, py - 12),
                text(24, &INK),
            ))?;
            let skip = bar.samples.len().div_ceil(POINTS).max(1);
            for s in bar.samples.iter().step_by(skip).filter(|s| s.is_finite()) {
                chart.draw_series([Circle::new((*s, y), 4, FAINT.stroke_width(1))])?;
            }
            if let Some((low, high)) = bar.interval {
                let line = |a: (f64, f64), b: (f64, f64)| {
                    PathElement::new(vec![a, b], colour.stroke_width(5))
                };
                chart.draw_series([
                    line((low, y), (high, y)),
                    line((low, y - 0.18), (low, y + 0.18)),
                    line((high, y - 0.18), (high, y + 0.18)),
                ])?;
            }
            chart.draw_series([Circle::new((bar.median, y), 10, colour.filled())])?;
            let (px, _) = chart.plotting_area().map_coordinate(&(bar.median, y));
            let label = format!("{} ms", short(bar.median));
            area.draw(&Text::new(label, (px - 40, py - 38), text(22, &INK)))?;
        }
        Ok(())
    })
}

/// Describes the drawing.
fn describe(bars: &[StepBar]) -> String {
    let number = |b: &StepBar| match b.interval {
        Some((low, high)) => format!(
            "{}: {} ms, interval {} to {} ms",
            b.label,
            short(b.median),
            short(low),
            short(high)
        ),
        None => format!("{}: {} ms", b.label, short(b.median)),
    };
    if bars.len() <= MAX_LISTED {
        return bars.iter().map(number).collect::<Vec<_>>().join("; ");
    }
    let by = |a: &&StepBar, b: &&StepBar| a.median.total_cmp(&b.median);
    let ends = [bars.iter().min_by(by), bars.iter().max_by(by)];
    let ends: Vec<String> = ends.into_iter().flatten().map(number).collect();
    format!("{} runs, from {}", bars.len(), ends.join(" to "))
}
