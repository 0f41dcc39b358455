//! The streams of a step as lanes over time: a standalone drawing, and data for zooming.

use super::Plot;
use super::draw::{WIDTH, escape, short, titled};
use crate::view::{RunView, Work};
use serde::Serialize;
use shardlab_plan::record::{Blocker, Cause};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Width of the names of lanes.
const GUTTER: f64 = 190.0;
/// Height of a lane, including the gap below it.
const LANE: f64 = 44.0;
const GAP: f64 = 12.0;
/// Margin above the lanes and, for the axis, below them.
const TOP: f64 = 10.0;
const AXIS: f64 = 44.0;
/// Distance from the ends within which the label of a tick is not centred.
const EDGE: f64 = 60.0;
/// Spans closer than this are drawn as one, and no span is drawn narrower.
const FINEST: f64 = 0.7;
/// Maximum number of spans in the data of one timeline: the longest.
const MAX_SPANS: usize = 20_000;
/// Maximum number of spans in the data of all timelines of a page: about 4 MB.
const MAX_SPANS_PER_PAGE: usize = 80_000;

/// Returns the maximum number of spans for each of `timelines` timelines of a page.
#[must_use]
pub const fn share(timelines: usize) -> usize {
    if timelines * MAX_SPANS <= MAX_SPANS_PER_PAGE {
        MAX_SPANS
    } else {
        MAX_SPANS_PER_PAGE / timelines
    }
}

/// A timeline: a drawing of the whole step, and its spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// The drawing.
    pub plot: Plot,
    /// Spans as JSON, for a script.
    pub data: String,
    /// Number of spans left out of the data; all are shorter than any span in it.
    pub left_out: usize,
}

/// Returns the colour of a kind of work.
#[must_use]
pub const fn colour(work: Work) -> usize {
    match work {
        Work::Gemm => 0,
        Work::AllGather => 1,
        Work::ReduceScatter => 2,
        Work::Memory => 3,
        Work::Optimizer => 4,
        Work::Attention => 5,
        Work::Copy => 6,
        Work::AllReduce | Work::OtherCollective => 7,
    }
}

/// Data for the script. Times are nanoseconds since the start of the step.
#[derive(Serialize)]
struct Data<'a> {
    /// Length of the step.
    length: u64,
    /// Geometry of the drawing.
    gutter: f64,
    width: f64,
    top: f64,
    lane: f64,
    gap: f64,
    lanes: Vec<Lane>,
    names: Vec<&'a str>,
    units: Vec<&'a str>,
    phases: Vec<&'static str>,
    /// What spans may wait for.
    waits: [&'static str; 7],
    /// Causes of gaps.
    causes: [&'static str; 7],
}

#[derive(Serialize)]
struct Lane {
    name: String,
    /// Seven numbers per span: start relative to the previous span, length, colour, name, unit,
    /// phase, and what it waited for.
    spans: Vec<u64>,
}

/// A bar of the drawing.
struct Bar {
    start: u64,
    length: u64,
    colour: usize,
    text: [u64; 4],
}

/// Draws the timeline of a run's recorded step, with at most `most` spans for zooming.
#[must_use]
pub fn timeline(name: &str, title: &str, view: &RunView, most: usize) -> Timeline {
    let run = &view.run;
    let from = run.recorded_from.0;
    let length = (run.recorded_to.0.saturating_sub(from) / 1000).max(1);
    let mut phases: Vec<&'static str> = Vec::new();
    let mut lanes: BTreeMap<usize, Vec<Bar>> = BTreeMap::new();
    let mut works: BTreeMap<usize, &'static str> = BTreeMap::new();
    for span in &run.spans {
        let Some(instr) = view.instr(span.instr) else {
            continue;
        };
        let work = instr.work.unwrap_or(Work::Memory);
        works.insert(colour(work), work.name());
        let phase = instr.phase.name();
        let at = phases.iter().position(|p| *p == phase).unwrap_or_else(|| {
            phases.push(phase);
            phases.len() - 1
        });
        lanes.entry(span.stream.index()).or_default().push(Bar {
            start: span.start.0.saturating_sub(from) / 1000,
            length: span.end.0.saturating_sub(span.start.0) / 1000,
            colour: colour(work),
            text: [
                u64::from(instr.name),
                instr.unit.index() as u64,
                at as u64,
                waited(span.blocker),
            ],
        });
    }
    let mut idle: Vec<Bar> = Vec::new();
    for gap in &run.gaps {
        idle.push(Bar {
            start: gap.start.0.saturating_sub(from) / 1000,
            length: gap.end.0.saturating_sub(gap.start.0) / 1000,
            colour: 8,
            text: [view.names.len() as u64, 0, 0, gap.cause as u64],
        });
    }
    let mut named: Vec<(String, Vec<Bar>)> = lanes
        .into_iter()
        .map(|(i, bars)| {
            (
                view.program.streams.get(i).cloned().unwrap_or_default(),
                bars,
            )
        })
        .collect();
    if !idle.is_empty() {
        named.push(("exposed".to_owned(), idle));
    }
    for (_, bars) in &mut named {
        bars.sort_by_key(|b| b.start);
    }
    let svg = drawing(&named, length);
    let total: usize = named.iter().map(|(_, b)| b.len()).sum();
    let left_out = total.saturating_sub(most);
    if left_out > 0 {
        let mut lengths: Vec<u64> = named
            .iter()
            .flat_map(|(_, b)| b.iter().map(|b| b.length))
            .collect();
        lengths.sort_unstable();
        let least = lengths[left_out];
        for (_, bars) in &mut named {
            bars.retain(|b| b.length >= least);
        }
    }
    let busy = |bars: &[Bar]| bars.iter().map(|b| b.length).sum::<u64>() as f64 / length as f64;
    let description = named
        .iter()
        .map(|(n, bars)| {
            format!(
                "{n}: {} spans, {:.0} % of the step",
                bars.len(),
                100.0 * busy(bars)
            )
        })
        .collect::<Vec<_>>()
        .join("; ");
    let description = format!("{} ms per step. {description}", short(length as f64 / 1e6));
    let mut legend: Vec<(usize, String)> =
        works.into_iter().map(|(c, n)| (c, n.to_owned())).collect();
    if named.last().is_some_and(|(n, _)| n == "exposed") {
        legend.push((8, "exposed: nothing to compute".to_owned()));
    }
    let mut names: Vec<&str> = view.names.iter().map(String::as_str).collect();
    names.push("exposed");
    let data = Data {
        length,
        gutter: GUTTER,
        width: f64::from(WIDTH),
        top: TOP,
        lane: LANE,
        gap: GAP,
        lanes: named
            .into_iter()
            .map(|(name, bars)| {
                let mut before = 0;
                let spans = bars.iter().flat_map(|b| {
                    let since = b.start - before;
                    before = b.start;
                    let [n, u, p, w] = b.text;
                    [since, b.length, b.colour as u64, n, u, p, w]
                });
                Lane {
                    spans: spans.collect(),
                    name,
                }
            })
            .collect(),
        names,
        units: view.program.units.iter().map(String::as_str).collect(),
        phases,
        waits: WAITS,
        causes: Cause::ALL.map(Cause::name),
    };
    Timeline {
        plot: Plot {
            name: name.to_owned(),
            title: title.to_owned(),
            svg: titled(&svg, name, title, &description),
            description,
            legend,
        },
        // Plain data always serialises. `<` is escaped, so that no text can end the page's script
        // element.
        data: serde_json::to_string(&data)
            .unwrap_or_default()
            .replace('<', "\\u003c"),
        left_out,
    }
}

/// What the start of a span waited for, by number.
const WAITS: [&str; 7] = [
    "the host",
    "its stream",
    "another stream",
    "its communicator",
    "a rank that came later",
    "SMs",
    "nothing",
];

const fn waited(b: Blocker) -> u64 {
    match b {
        Blocker::Host => 0,
        Blocker::Stream(_) => 1,
        Blocker::Event(_) => 2,
        Blocker::Communicator(_) => 3,
        Blocker::Rank => 4,
        Blocker::Sms => 5,
        Blocker::None => 6,
    }
}

/// Returns four to ten round numbers from 0 to a length.
fn ticks(length: f64) -> Vec<f64> {
    let rough = (length / 8.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|s| s * power)
        .find(|s| *s >= rough)
        .unwrap_or(rough);
    let last = (length / step + 1e-9).floor() as u32;
    (0..=last).map(|k| f64::from(k) * step).collect()
}

/// Draws the whole step as an SVG.
fn drawing(lanes: &[(String, Vec<Bar>)], length: u64) -> String {
    let scale = (f64::from(WIDTH) - GUTTER) / length as f64;
    let bottom = TOP + lanes.len() as f64 * (LANE + GAP);
    let height = bottom + AXIS;
    let mut out = format!(
        "<svg width=\"{WIDTH}\" height=\"{height:.0}\"><g font-family=\"sans-serif\" font-size=\"24\">"
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
            let fill = if colour == 8 {
                "var(--bad)".to_owned()
            } else {
                format!("var(--c{colour})")
            };
            let _ = write!(out, "<path fill=\"{fill}\" d=\"{path}\"/>");
        }
    }
    out.push_str("</g><g class=\"axis\">");
    for ms in ticks(length as f64 / 1e6) {
        let x = GUTTER + ms * 1e6 * scale;
        let anchor = match x {
            x if x < GUTTER + EDGE => "start",
            x if x > f64::from(WIDTH) - EDGE => "end",
            _ => "middle",
        };
        let _ = write!(
            out,
            "<path d=\"M{x:.0} {bottom:.0}v8\" stroke=\"var(--faint)\"/><text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"{anchor}\" fill=\"var(--faint)\">{} ms</text>",
            bottom + 34.0,
            short(ms)
        );
    }
    out.push_str("</g></g></svg>");
    out
}

/// Returns one path per colour. Spans that the drawing cannot separate become one bar.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_long_step_stays_small_and_keeps_its_longest_spans() {
        let view = testing::view(60_000);
        let t = timeline("t", "Timeline", &view, MAX_SPANS);
        assert!(t.plot.svg.len() < 400_000, "{}", t.plot.svg.len());
        assert!(t.left_out > 0);
        let v: serde_json::Value = serde_json::from_str(&t.data).unwrap();
        let spans: usize = v["lanes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|l| l["spans"].as_array().unwrap().len() / 7)
            .sum();
        assert!(spans >= MAX_SPANS && spans <= MAX_SPANS + testing::view(60_000).run.spans.len());
    }

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(1077.0), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        for i in 0..400 {
            let length = 1e-6 * 1.07f64.powi(i);
            let n = ticks(length).len();
            assert!((4..=10).contains(&n), "{length}: {n}");
        }
    }

    #[test]
    fn causes_are_numbered_as_they_are_listed() {
        for (i, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, i);
        }
    }

    #[test]
    fn spans_come_back_from_the_data() {
        let view = testing::view(300);
        let t = timeline("t", "<T>", &view, MAX_SPANS);
        assert!(t.plot.svg.contains("&lt;T&gt;"));
        assert!(!t.data.contains('<'));
        let v: serde_json::Value = serde_json::from_str(&t.data).unwrap();
        let compute = &v["lanes"][0];
        assert_eq!(compute["name"], view.program.streams[0]);
        let mut own: Vec<_> = view
            .run
            .spans
            .iter()
            .filter(|s| s.stream.index() == 0)
            .collect();
        own.sort_by_key(|s| s.start);
        let numbers: Vec<u64> = compute["spans"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_u64().unwrap())
            .collect();
        let mut at = 0;
        for (span, n) in own.iter().zip(numbers.chunks(7)) {
            at += n[0];
            assert_eq!(at, (span.start.0 - view.run.recorded_from.0) / 1000);
            assert_eq!(n[1], (span.end.0 - span.start.0) / 1000);
            let name = v["names"][n[3] as usize].as_str().unwrap();
            assert!(view.span_label(span).starts_with(name));
        }
        assert_eq!(numbers.len() / 7, own.len());
    }
}
