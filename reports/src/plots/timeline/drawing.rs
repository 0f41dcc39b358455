//! Draws a whole step as an SVG: lanes, memory, time axis.

use super::EXPOSED;
use super::geometry::{GAP, GUTTER, LANE, TOP, bottom, scale};
use super::memory::Panel;
use crate::plots::draw::{WIDTH, escape, short};
use crate::plots::svg::ticks;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Margin below the time axis, for its labels.
const AXIS: f64 = 44.0;
/// Distance from the ends within which the label of a tick is not centred.
const EDGE: f64 = 60.0;
/// Spans closer than this are drawn as one, and no span is drawn narrower.
const FINEST: f64 = 0.7;

/// A bar of the drawing. Times are in nanoseconds since the start of the step.
pub(super) struct Bar {
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) colour: usize,
    pub(super) text: [u64; 4],
}

/// A drawing and the vertical position of its time axis.
pub(super) struct Drawing {
    pub(super) svg: String,
    pub(super) axis: f64,
}

/// Draws a step of `own` nanoseconds over an axis of `length` nanoseconds.
pub(super) fn draw(
    lanes: &[(String, Vec<Bar>)],
    panel: Option<&Panel>,
    own: u64,
    length: u64,
) -> Drawing {
    let scale = scale(length);
    let axis = panel.map_or_else(|| bottom(lanes.len()), Panel::bottom);
    let mut out = format!(
        "<svg width=\"{WIDTH}\" height=\"{:.0}\"><g font-family=\"sans-serif\" font-size=\"24\">",
        axis + AXIS
    );
    for (i, (name, _)) in lanes.iter().enumerate() {
        let y = TOP + i as f64 * (LANE + GAP);
        let _ = write!(
            out,
            "<text x=\"0\" y=\"{:.0}\" fill=\"var(--ink)\">{}</text><path d=\"M{GUTTER} {:.0}H{WIDTH}\" stroke=\"var(--grid)\"/>",
            y + LANE * 0.68,
            escape(name),
            y + LANE + GAP / 2.0
        );
    }
    out.push_str("<g class=\"bars\">");
    for (i, (_, bars)) in lanes.iter().enumerate() {
        let y = TOP + i as f64 * (LANE + GAP);
        for (colour, path) in paths(bars, scale, y) {
            let fill = match colour {
                EXPOSED => "var(--bad)".to_owned(),
                colour => format!("var(--c{colour})"),
            };
            let _ = write!(out, "<path fill=\"{fill}\" d=\"{path}\"/>");
        }
    }
    out.push_str("</g>");
    if let Some(panel) = panel {
        out.push_str(&panel.svg);
    }
    out.push_str("<g class=\"axis\">");
    for ms in ticks(length as f64 / 1e6, 8.0) {
        let x = GUTTER + ms * 1e6 * scale;
        let anchor = match x {
            x if x < GUTTER + EDGE => "start",
            x if x > f64::from(WIDTH) - EDGE => "end",
            _ => "middle",
        };
        let _ = write!(
            out,
            "<path d=\"M{x:.0} {axis:.0}v8\" stroke=\"var(--faint)\"/><text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"{anchor}\" fill=\"var(--faint)\">{} ms</text>",
            axis + 34.0,
            short(ms)
        );
    }
    if own < length {
        // The end of this step, because the axis extends to the end of a longer one.
        let x = GUTTER + own as f64 * scale;
        let _ = write!(
            out,
            "<path d=\"M{x:.1} {TOP}V{axis:.0}\" stroke=\"var(--faint)\" stroke-width=\"2\" stroke-dasharray=\"8 8\"/>"
        );
    }
    out.push_str("</g><g class=\"cursor\"></g></g></svg>");
    Drawing { svg: out, axis }
}

/// Returns one path per color. Spans that are too close to draw separately become one bar.
fn paths(bars: &[Bar], scale: f64, y: f64) -> BTreeMap<usize, String> {
    let mut open: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
    let mut out: BTreeMap<usize, String> = BTreeMap::new();
    let put = |out: &mut BTreeMap<usize, String>, colour, (a, b): (f64, f64)| {
        let w = (b - a).max(FINEST);
        let _ = write!(
            out.entry(colour).or_default(),
            "M{:.1} {y:.0}h{w:.1}v{LANE:.0}h-{w:.1}z",
            GUTTER + a
        );
    };
    for bar in bars {
        let (a, b) = (
            bar.start as f64 * scale,
            (bar.start + bar.length) as f64 * scale,
        );
        match open.get_mut(&bar.colour) {
            Some((_, end)) if a - *end < FINEST => *end = end.max(b),
            _ => {
                if let Some(done) = open.insert(bar.colour, (a, b)) {
                    put(&mut out, bar.colour, done);
                }
            }
        }
    }
    for (colour, done) in open {
        put(&mut out, colour, done);
    }
    out
}
