//! A small SVG writer for drawings whose geometry this crate computes.

use super::draw::{escape, titled};
use super::{Key, Plot};
use std::fmt::Write;

/// Size of most text.
pub(super) const TEXT: f64 = 24.0;
/// Estimated width of a character, as a share of the text size.
const CHARACTER: f64 = 0.56;

/// Estimates the width of a text.
pub(super) fn width_of(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * CHARACTER
}

/// Point of a text that is placed at its position.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        }
    }
}

/// A drawing under construction. Colors are names of variables, such as `ink`.
pub(super) struct Canvas {
    out: String,
}

impl Canvas {
    pub(super) fn new(width: f64, height: f64) -> Self {
        let out = format!(
            "<svg width=\"{width:.0}\" height=\"{height:.0}\"><g font-family=\"sans-serif\" font-size=\"{TEXT:.0}\">"
        );
        Self { out }
    }

    /// Writes a text of normal size.
    pub(super) fn text(&mut self, at: (f64, f64), anchor: Anchor, colour: &str, text: &str) {
        self.sized_text(at, anchor, colour, TEXT, text);
    }

    /// Writes a text of a given size.
    pub(super) fn sized_text(
        &mut self,
        (x, y): (f64, f64),
        anchor: Anchor,
        colour: &str,
        size: f64,
        text: &str,
    ) {
        let _ = write!(
            self.out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{}\" font-size=\"{size:.0}\" fill=\"var(--{colour})\">{}</text>",
            anchor.name(),
            escape(text)
        );
    }

    /// Writes a text with a halo, readable on lines and areas.
    pub(super) fn label(&mut self, (x, y): (f64, f64), anchor: Anchor, colour: &str, text: &str) {
        let _ = write!(
            self.out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{}\" fill=\"var(--{colour})\" stroke=\"var(--ground)\" stroke-width=\"6\" stroke-linejoin=\"round\" paint-order=\"stroke\">{}</text>",
            anchor.name(),
            escape(text)
        );
    }

    /// Fills a rectangle: x, y, width, height.
    pub(super) fn rect(&mut self, [x, y, w, h]: [f64; 4], colour: &str, opacity: f64) {
        let opacity = match opacity {
            o if o >= 1.0 => String::new(),
            o => format!(" fill-opacity=\"{o:.3}\""),
        };
        let _ = write!(
            self.out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" fill=\"var(--{colour})\"{opacity}/>"
        );
    }

    /// Draws the outline of a rectangle: x, y, width, height.
    pub(super) fn frame(&mut self, [x, y, w, h]: [f64; 4], colour: &str, width: f64) {
        let _ = write!(
            self.out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" fill=\"none\" stroke=\"var(--{colour})\" stroke-width=\"{width:.0}\"/>"
        );
    }

    /// Draws a line through points; `dashes` as in `stroke-dasharray`, or empty.
    pub(super) fn line(&mut self, points: &[(f64, f64)], colour: &str, width: f64, dashes: &str) {
        let mut path = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
        }
        let dashes = match dashes {
            "" => String::new(),
            some => format!(" stroke-dasharray=\"{some}\""),
        };
        let _ = write!(
            self.out,
            "<path d=\"{path}\" fill=\"none\" stroke=\"var(--{colour})\" stroke-width=\"{width:.0}\"{dashes}/>"
        );
    }

    /// Appends elements.
    pub(super) fn raw(&mut self, elements: &str) {
        self.out.push_str(elements);
    }

    /// Opens a group with a tooltip.
    pub(super) fn open_titled(&mut self, title: &str) {
        let _ = write!(self.out, "<g><title>{}</title>", escape(title));
    }

    pub(super) fn close(&mut self) {
        self.out.push_str("</g>");
    }

    /// Returns the finished drawing.
    pub(super) fn finish(
        mut self,
        name: &str,
        title: &str,
        description: String,
        legend: Vec<(Key, String)>,
    ) -> Plot {
        self.out.push_str("</g></svg>");
        Plot {
            name: name.to_owned(),
            title: title.to_owned(),
            svg: titled(&self.out, name, title, &description),
            description,
            legend,
        }
    }
}

/// Returns about `wanted` round numbers from 0 to `length`.
pub(super) fn ticks(length: f64, wanted: f64) -> Vec<f64> {
    let rough = (length / wanted).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|s| s * power)
        .find(|s| *s >= rough)
        .unwrap_or(rough);
    let last = (length / step + 1e-9).floor() as u32;
    (0..=last).map(|k| f64::from(k) * step).collect()
}

/// Returns round numbers within a range.
pub(super) fn ticks_within(range: &std::ops::Range<f64>, wanted: f64) -> Vec<f64> {
    let length = range.end - range.start;
    let step = match ticks(length, wanted).as_slice() {
        [_, step, ..] => *step,
        _ => length.max(f64::MIN_POSITIVE),
    };
    let first = (range.start / step - 1e-9).ceil() as i64;
    let last = (range.end / step + 1e-9).floor() as i64;
    (first..=last).map(|k| k as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(10.0, 8.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(
            ticks(1077.0, 8.0),
            [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]
        );
        for i in 0..400 {
            let length = 1e-6 * 1.07f64.powi(i);
            let n = ticks(length, 8.0).len();
            assert!((4..=10).contains(&n), "{length}: {n}");
        }
    }

    #[test]
    fn ticks_of_a_range_stay_within_it() {
        assert_eq!(ticks_within(&(37.0..52.5), 5.0), [40.0, 45.0, 50.0]);
        assert_eq!(ticks_within(&(-1.0..1.0), 4.0), [-1.0, -0.5, 0.0, 0.5, 1.0]);
    }
}
