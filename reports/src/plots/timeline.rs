//! A step over time: its streams as lanes, and its memory below them, on one time axis. Consists of
//! a standalone drawing and data for zooming.

mod drawing;
mod geometry;
mod memory;

use super::draw::{WIDTH, short, titled};
use super::{Key, Plot};
use crate::view::{RunView, Work};
use drawing::Bar;
use geometry::{GAP, GUTTER, LANE, TOP};
use memory::Panel;
use serde::Serialize;
use shardlab_plan::record::{Blocker, Cause};
use std::collections::BTreeMap;

/// Maximum number of spans in the data of one timeline. The longest spans are kept.
const MAX_SPANS: usize = 20_000;
/// Maximum number of spans in the data of all timelines of a page: about 4 MB.
const MAX_SPANS_PER_PAGE: usize = 72_000;
/// Index of the color of exposed time.
const EXPOSED: usize = 8;

/// Returns the maximum number of spans per timeline for a page with `timelines` timelines.
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
    /// Spans and memory as JSON, for a script.
    pub data: String,
    /// Number of spans left out of the data; all are shorter than any span in it.
    pub left_out: usize,
}

/// Returns the color of a kind of work.
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

/// Data for the script. Times are in nanoseconds since the start of the step.
#[derive(Serialize)]
struct Data<'a> {
    /// Length of the time axis, which is that of the longest step on the page.
    length: u64,
    /// Length of this step.
    own: u64,
    /// Geometry of the drawing.
    gutter: f64,
    width: f64,
    top: f64,
    lane: f64,
    gap: f64,
    /// Vertical position of the time axis.
    axis: f64,
    lanes: Vec<Lane>,
    names: Vec<&'a str>,
    units: Vec<&'a str>,
    phases: Vec<&'static str>,
    /// What spans may wait for.
    waits: [&'static str; 7],
    /// Causes of gaps.
    causes: [&'static str; 7],
    /// Memory, if it was recorded.
    memory: Option<memory::Data>,
}

#[derive(Serialize)]
struct Lane {
    name: String,
    /// Seven numbers per span: start relative to the previous span, length, color, name, unit,
    /// phase, and what the span waited for.
    spans: Vec<u64>,
}

/// Returns the length of a run's recorded step, nanoseconds.
#[must_use]
pub fn length(view: &RunView) -> u64 {
    (view.recorded().0 / 1000).max(1)
}

/// Draws the timeline of a run's recorded step over a time axis of `length` nanoseconds, with at
/// most `most` spans for zooming.
#[must_use]
pub fn timeline(name: &str, title: &str, view: &RunView, length: u64, most: usize) -> Timeline {
    let own = self::length(view);
    let length = length.max(own);
    let mut phases: Vec<&'static str> = Vec::new();
    let mut works: BTreeMap<usize, &'static str> = BTreeMap::new();
    let mut named = streams(view, &mut phases, &mut works);
    let mut awaited: Vec<String> = Vec::new();
    let idle = gaps(view, &mut awaited);
    let is_exposed = !idle.is_empty();
    if is_exposed {
        named.push(("exposed".to_owned(), idle));
    }
    for (_, bars) in &mut named {
        bars.sort_by_key(|b| b.start);
    }
    let panel = Panel::new(view, length, geometry::bottom(named.len()));
    let drawing = drawing::draw(&named, panel.as_ref(), own, length);
    let mut description = describe(&named, own);
    if let Some(panel) = &panel {
        description.push_str(&format!(". Memory: {}", panel.description));
    }
    let left_out = limit(&mut named, most);
    let mut legend: Vec<(Key, String)> = works
        .into_iter()
        .map(|(c, n)| (Key::Series(c), n.to_owned()))
        .collect();
    if is_exposed {
        legend.push((Key::Exposed, "exposed: nothing to compute".to_owned()));
    }
    legend.extend(panel.iter().flat_map(Panel::legend));
    let names = view.names.iter().chain(&awaited).map(String::as_str);
    let data = Data {
        length,
        own,
        gutter: GUTTER,
        width: f64::from(WIDTH),
        top: TOP,
        lane: LANE,
        gap: GAP,
        axis: drawing.axis,
        lanes: named.into_iter().map(lane).collect(),
        names: names.collect(),
        units: view.program.units.iter().map(String::as_str).collect(),
        phases,
        waits: WAITS,
        causes: Cause::ALL.map(Cause::name),
        memory: panel.map(|p| p.data),
    };
    Timeline {
        plot: Plot {
            name: name.to_owned(),
            title: title.to_owned(),
            svg: titled(&drawing.svg, name, title, &description),
            description,
            legend,
        },
        // Plain data can always be serialized. `<` is escaped, so that no text can end the page's
        // script element.
        data: serde_json::to_string(&data)
            .unwrap_or_default()
            .replace('<', "\\u003c"),
        left_out,
    }
}

/// Returns the spans by stream, and collects the phases and kinds of work that occur.
fn streams(
    view: &RunView,
    phases: &mut Vec<&'static str>,
    works: &mut BTreeMap<usize, &'static str>,
) -> Vec<(String, Vec<Bar>)> {
    let from = view.run.recorded_from.0;
    let mut lanes: BTreeMap<usize, Vec<Bar>> = BTreeMap::new();
    for span in &view.run.spans {
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
    let name = |i: usize| view.program.streams.get(i).cloned().unwrap_or_default();
    lanes.into_iter().map(|(i, bars)| (name(i), bars)).collect()
}

/// Returns the gaps of the compute stream. Their names, appended to those of the view, describe
/// what they waited for.
fn gaps(view: &RunView, awaited: &mut Vec<String>) -> Vec<Bar> {
    let from = view.run.recorded_from.0;
    let mut known: BTreeMap<String, u64> = BTreeMap::new();
    view.run
        .gaps
        .iter()
        .map(|gap| {
            let label = view.awaited_label(&view.awaited(gap));
            let next = (view.names.len() + awaited.len()) as u64;
            let name = *known.entry(label.clone()).or_insert_with(|| {
                awaited.push(label);
                next
            });
            Bar {
                start: gap.start.0.saturating_sub(from) / 1000,
                length: gap.end.0.saturating_sub(gap.start.0) / 1000,
                colour: EXPOSED,
                text: [name, 0, 0, gap.cause as u64],
            }
        })
        .collect()
}

/// Keeps the `most` longest spans, and returns the number of dropped ones.
fn limit(named: &mut [(String, Vec<Bar>)], most: usize) -> usize {
    let total: usize = named.iter().map(|(_, b)| b.len()).sum();
    let left_out = total.saturating_sub(most);
    if left_out > 0 {
        let all = named.iter().flat_map(|(_, b)| b.iter().map(|b| b.length));
        let mut lengths: Vec<u64> = all.collect();
        lengths.sort_unstable();
        let least = lengths[left_out];
        for (_, bars) in named {
            bars.retain(|b| b.length >= least);
        }
    }
    left_out
}

fn lane((name, bars): (String, Vec<Bar>)) -> Lane {
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
}

fn describe(named: &[(String, Vec<Bar>)], length: u64) -> String {
    let busy = |bars: &[Bar]| bars.iter().map(|b| b.length).sum::<u64>() as f64 / length as f64;
    let lanes: Vec<String> = named
        .iter()
        .map(|(n, bars)| {
            let noun = if n == "exposed" { "gaps" } else { "kernels" };
            let share = 100.0 * busy(bars);
            format!("{n}: {} {noun}, {share:.0} % of the step", bars.len())
        })
        .collect();
    format!(
        "{} ms per step. {}",
        short(length as f64 / 1e6),
        lanes.join("; ")
    )
}

/// What the start of a span waited for, by index.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_long_step_stays_small_and_keeps_its_longest_spans() {
        let view = testing::view(60_000);
        let t = timeline("t", "Timeline", &view, 0, MAX_SPANS);
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
    fn causes_are_numbered_as_they_are_listed() {
        for (i, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, i);
        }
    }

    #[test]
    fn spans_come_back_from_the_data() {
        let view = testing::view(300);
        let t = timeline("t", "<T>", &view, 0, MAX_SPANS);
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

    /// A gap names the collective that it waited for.
    #[test]
    fn gaps_name_what_they_waited_for() {
        let view = testing::view(300);
        let t = timeline("t", "T", &view, 0, MAX_SPANS);
        let v: serde_json::Value = serde_json::from_str(&t.data).unwrap();
        let lanes = v["lanes"].as_array().unwrap();
        let idle = lanes.last().unwrap();
        assert_eq!(idle["name"], "exposed");
        let numbers = idle["spans"].as_array().unwrap();
        for (gap, n) in view.run.gaps.iter().zip(numbers.chunks(7)) {
            let expected = view.awaited_label(&view.awaited(gap));
            assert_eq!(v["names"][n[3].as_u64().unwrap() as usize], expected);
        }
    }

    /// With two runs on one scale, the shorter one ends before the axis.
    #[test]
    fn steps_share_a_scale() {
        let view = testing::view(300);
        let own = length(&view);
        let wide = timeline("t", "T", &view, 2 * own, MAX_SPANS);
        let v: serde_json::Value = serde_json::from_str(&wide.data).unwrap();
        assert_eq!((&v["length"], &v["own"]), (&(2 * own).into(), &own.into()));
        let bars = wide.plot.svg.split("class=\"bars\"").nth(1).unwrap();
        let bars = bars.split("</g>").next().unwrap();
        let last = bars
            .split('M')
            .skip(1)
            .map(|p| p.split(' ').next().unwrap().parse::<f64>().unwrap())
            .fold(0.0, f64::max);
        let half = f64::midpoint(GUTTER, f64::from(WIDTH));
        assert!(last > half - 20.0 && last < half + 1.0, "{last}");
        // A step is never truncated.
        let v = timeline("t", "T", &view, 1, MAX_SPANS).data;
        assert!(v.contains(&format!("\"length\":{own},")));
    }
}
