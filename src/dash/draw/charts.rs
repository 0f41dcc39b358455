//! Draws bars and curves.

use super::kit::put;
use crate::dash::lanes::memory::Family;
use crate::dash::theme::Theme;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::Span;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Widget};
use shardlab_plan::units::thousands;

/// A part of a stacked bar.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) name: &'static str,
    pub(super) size: u64,
    pub(super) style: Style,
    pub(super) fill: char,
}

impl Part {
    /// Creates the part of a family of roles.
    pub(super) fn of(theme: Theme, family: Family, size: u64) -> Self {
        Self {
            name: family.name(),
            size,
            style: family_style(theme, family),
            fill: family_fill(theme, family),
        }
    }
}

/// Returns the colour of a family.
pub(super) fn family_style(theme: Theme, family: Family) -> Style {
    theme.series(match family {
        Family::Weights => 0,
        Family::Optimizer => 4,
        Family::Gradients => 6,
        Family::Gathered => 5,
        Family::Reduction => 7,
        Family::Activations => 1,
        Family::Other => 2,
        Family::Logits => 3,
    })
}

/// Returns the texture of a family, or a full block if colours are enough.
pub(super) fn family_fill(theme: Theme, family: Family) -> char {
    if !theme.textures() {
        return '█';
    }
    match family {
        Family::Weights => '█',
        Family::Optimizer => '▓',
        Family::Gradients => '▚',
        Family::Gathered => '=',
        Family::Reduction => '#',
        Family::Activations => '▒',
        Family::Other => '░',
        Family::Logits => '%',
    }
}

/// Draws a bar of one row: the parts of a whole, each with its name if there is room, and dots for
/// the rest.
pub(super) fn stacked(buf: &mut Buffer, area: Rect, parts: &[Part], whole: u64, theme: Theme) {
    let column = |n: u64| (n as f64 / whole.max(1) as f64 * f64::from(area.width)).round() as u16;
    let mut sum = 0;
    for part in parts {
        let from = column(sum);
        sum += part.size;
        let to = column(sum).min(area.width);
        let width = to.saturating_sub(from);
        let fill: String = std::iter::repeat_n(part.fill, usize::from(width)).collect();
        put(buf, area.x + from, area.y, width, &fill, part.style);
        let named = part.name.chars().count() as u16 + 2;
        if width >= named {
            let style = part.style.add_modifier(Modifier::REVERSED);
            put(
                buf,
                area.x + from,
                area.y,
                named,
                &format!(" {} ", part.name),
                style,
            );
        }
    }
    let rest = column(sum).min(area.width);
    let dots = "·".repeat(usize::from(area.width - rest));
    put(
        buf,
        area.x + rest,
        area.y,
        area.width - rest,
        &dots,
        theme.dim(),
    );
}

/// A curve of a chart.
pub(super) struct Curve<'a> {
    pub(super) name: &'a str,
    pub(super) points: &'a [(f64, f64)],
    pub(super) style: Style,
    pub(super) scatter: bool,
}

/// Draws curves over steps, with their range on the left.
pub(super) fn curves(buf: &mut Buffer, area: Rect, all: &[Curve<'_>], theme: Theme) {
    let points = || {
        all.iter()
            .flat_map(|c| c.points)
            .filter(|p| p.1.is_finite())
    };
    let fold = |f: fn(f64, f64) -> f64, pick: fn(&(f64, f64)) -> f64, from: f64| {
        points().map(pick).fold(from, f)
    };
    let (x0, x1) = (
        fold(f64::min, |p| p.0, f64::INFINITY),
        fold(f64::max, |p| p.0, f64::NEG_INFINITY),
    );
    let (y0, y1) = (
        fold(f64::min, |p| p.1, f64::INFINITY),
        fold(f64::max, |p| p.1, f64::NEG_INFINITY),
    );
    if !(x0.is_finite() && y0.is_finite()) || area.height < 3 {
        return;
    }
    let x1 = if x1 > x0 { x1 } else { x0 + 1.0 };
    let margin = if y1 > y0 {
        (y1 - y0) * 0.03
    } else {
        y0.abs().max(1.0) * 0.01
    };
    let (low, high) = (y0 - margin, y1 + margin);
    let datasets = all
        .iter()
        .map(|c| {
            Dataset::default()
                .name(c.name.to_owned())
                .marker(if c.scatter {
                    Marker::Dot
                } else {
                    Marker::Braille
                })
                .graph_type(if c.scatter {
                    GraphType::Scatter
                } else {
                    GraphType::Line
                })
                .style(c.style)
                .data(c.points)
        })
        .collect();
    let label = |v: f64| Span::styled(number(v), theme.dim());
    Chart::new(datasets)
        .x_axis(
            Axis::default()
                .style(theme.dim())
                .bounds([x0, x1])
                .labels([label(x0), label(x1)]),
        )
        .y_axis(
            Axis::default()
                .style(theme.dim())
                .bounds([low, high])
                .labels([label(y0), label(f64::midpoint(y0, y1)), label(y1)]),
        )
        .legend_position(Some(ratatui::widgets::LegendPosition::TopRight))
        .render(area, buf);
}

/// Formats a number in about five characters.
pub(super) fn number(v: f64) -> String {
    match v.abs() {
        a if a >= 1e5 => format!("{v:.1e}"),
        a if a >= 100.0 || v.fract() == 0.0 => thousands(v, 0),
        a if a >= 1.0 => format!("{v:.3}"),
        _ => format!("{v:.4}"),
    }
}
