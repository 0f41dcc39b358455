//! The recorded step of a run as lanes, computed once when the run is opened.

pub mod bins;
pub mod memory;
mod walk;

use shardlab_plan::ir::{StreamId, UnitId};
use shardlab_plan::program::Phase;
use shardlab_plan::record::{Blocker, Cause};
use shardlab_reports::RunView;
use shardlab_reports::view::{InstrView, MemoryCurve, Work};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(1);

/// A span on its lane. Times are picoseconds since the start of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Start.
    pub start: u64,
    /// End.
    pub end: u64,
    /// Index into the run's spans.
    pub span: u32,
    /// Kind of work.
    pub work: Work,
}

/// A stream over time, as a sequence of spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Stream.
    pub stream: StreamId,
    /// Name.
    pub name: String,
    /// Spans, sorted by start.
    pub items: Vec<Item>,
}

impl Lane {
    /// Returns the items that are at least partly within an interval.
    #[must_use]
    pub fn within(&self, from: u64, to: u64) -> &[Item] {
        let first = self.items.partition_point(|i| i.end <= from);
        let last = self.items.partition_point(|i| i.start < to);
        self.items.get(first..last).unwrap_or_default()
    }

    /// Returns the index of the item closest to a time.
    #[must_use]
    pub fn nearest(&self, time: u64) -> Option<usize> {
        let after = self.items.partition_point(|i| i.start <= time);
        let before = after.checked_sub(1);
        let distance = |i: usize| {
            let item = &self.items[i];
            item.start
                .saturating_sub(time)
                .max(time.saturating_sub(item.end))
        };
        [before, Some(after).filter(|a| *a < self.items.len())]
            .into_iter()
            .flatten()
            .min_by_key(|&i| distance(i))
    }
}

/// An interval in which the compute stream had nothing to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Start.
    pub start: u64,
    /// End.
    pub end: u64,
    /// Cause.
    pub cause: Cause,
    /// The spans that the gap waited for, in order.
    pub awaited: Vec<u32>,
}

/// Consecutive work of one unit in one phase on the compute stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Start.
    pub start: u64,
    /// End.
    pub end: u64,
    /// Unit.
    pub unit: UnitId,
    /// Phase.
    pub phase: Phase,
    /// Micro-batch.
    pub micro_batch: u16,
}

/// The recorded step of a run.
#[derive(Debug)]
pub struct Lanes {
    /// Unique id, so that cached data of one run is never used for another.
    pub id: u64,
    /// The run.
    pub view: Arc<RunView>,
    /// Length of the step, picoseconds; at least 1.
    pub length: u64,
    /// Streams that ran something.
    pub lanes: Vec<Lane>,
    /// Whether each span is on the critical path.
    pub critical: Vec<bool>,
    /// Gaps, sorted by start.
    pub gaps: Vec<Gap>,
    /// The longest gaps, longest first.
    pub longest: Vec<Gap>,
    /// Segments, sorted by start.
    pub segments: Vec<Segment>,
    /// Memory curve.
    pub memory: MemoryCurve,
    /// Lane and index in the lane of each span.
    places: Vec<(u32, u32)>,
}

impl Lanes {
    /// Computes the lanes of a run.
    #[must_use]
    pub fn new(view: Arc<RunView>) -> Self {
        let run = &view.run;
        let from = run.recorded_from.0;
        let streams = view.program.streams.len();
        let mut lanes: Vec<Lane> = (0..streams)
            .map(|i| Lane {
                stream: StreamId(i as u8),
                name: view.program.streams[i].clone(),
                items: Vec::new(),
            })
            .collect();
        let mut length = run.recorded_to.0.saturating_sub(from).max(1);
        let instrs: Vec<Option<&InstrView>> =
            run.spans.iter().map(|s| view.instr(s.instr)).collect();
        for (i, (span, instr)) in run.spans.iter().zip(&instrs).enumerate() {
            let work = instr.and_then(|i| i.work);
            let item = Item {
                start: span.start.0.saturating_sub(from),
                end: span.end.0.saturating_sub(from),
                span: i as u32,
                work: work.unwrap_or(Work::Memory),
            };
            length = length.max(item.end);
            if let Some(lane) = lanes.get_mut(span.stream.index()) {
                lane.items.push(item);
            }
        }
        lanes.retain(|l| !l.items.is_empty());
        let mut places = vec![(0, 0); run.spans.len()];
        for (l, lane) in lanes.iter_mut().enumerate() {
            lane.items.sort_by_key(|i| (i.start, i.end, i.span));
            for (p, item) in lane.items.iter().enumerate() {
                places[item.span as usize] = (l as u32, p as u32);
            }
        }
        let mut gaps: Vec<Gap> = run
            .gaps
            .iter()
            .map(|g| Gap {
                start: g.start.0.saturating_sub(from),
                end: g.end.0.saturating_sub(from),
                cause: g.cause,
                awaited: view.awaited(g),
            })
            .collect();
        const MAX_SPANS: usize = 50;
        let mut longest = gaps.clone();
        longest.sort_by_key(|g| (std::cmp::Reverse(g.end - g.start), g.start));
        longest.truncate(MAX_SPANS);
        gaps.sort_by_key(|g| (g.start, g.end));
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            length,
            critical: critical(&view),
            gaps,
            longest,
            segments: segments(&instrs, &lanes),
            memory: MemoryCurve::new(&view),
            places,
            lanes,
            view,
        }
    }

    /// Returns the lane of a span, and its index there.
    #[must_use]
    pub fn place(&self, span: u32) -> Option<(usize, usize)> {
        let &(lane, place) = self.places.get(span as usize)?;
        Some((lane as usize, place as usize))
    }

    /// Returns the item of a span.
    #[must_use]
    pub fn item(&self, span: u32) -> Option<&Item> {
        let (lane, place) = self.place(span)?;
        self.lanes.get(lane)?.items.get(place)
    }

    /// Returns the instruction of a span.
    #[must_use]
    pub fn instr(&self, span: u32) -> Option<&InstrView> {
        self.view
            .instr(self.view.run.spans.get(span as usize)?.instr)
    }

    /// Returns the name and unit of a span.
    #[must_use]
    pub fn label(&self, span: u32) -> String {
        self.view
            .run
            .spans
            .get(span as usize)
            .map_or_else(String::new, |s| self.view.span_label(s))
    }

    /// Returns the name of a span.
    #[must_use]
    pub fn name(&self, span: u32) -> &str {
        self.instr(span).map_or("", |i| self.view.name_of(i))
    }

    /// Returns the last thing that the start of a span waited for, in words, and the span if it was
    /// one.
    #[must_use]
    pub fn why(&self, span: u32) -> (String, Option<u32>) {
        let Some(s) = self.view.run.spans.get(span as usize) else {
            return (String::new(), None);
        };
        let stream_of = |i: u32| {
            let other = self.view.run.spans.get(i as usize);
            other.map_or("", |o| self.view.stream(o))
        };
        match s.blocker {
            Blocker::Host => {
                let when = s.issued.saturating_sub(self.view.run.recorded_from);
                (format!("the host, which launched it at {when}"), None)
            }
            Blocker::Stream(i) => (
                format!("{}, before it on the stream", self.label(i)),
                Some(i),
            ),
            Blocker::Event(i) => (
                format!("{} ({} stream)", self.label(i), stream_of(i)),
                Some(i),
            ),
            Blocker::Communicator(i) => (
                format!("{}, on the same communicator", self.label(i)),
                Some(i),
            ),
            Blocker::Rank => ("another rank, which joined late".into(), None),
            Blocker::Sms => (
                "a kernel that held all SMs".into(),
                self.ended_at(s.start.0),
            ),
            Blocker::None => ("first work of the step".into(), None),
        }
    }

    /// Returns a span that ended at this time on the run's clock.
    fn ended_at(&self, time: u64) -> Option<u32> {
        let spans = &self.view.run.spans;
        spans.iter().position(|s| s.end.0 == time).map(|i| i as u32)
    }

    /// Returns the longest gap that a span caused on the compute stream.
    #[must_use]
    pub(crate) fn exposes(&self, span: u32) -> Option<&Gap> {
        self.gaps
            .iter()
            .filter(|g| g.awaited.contains(&span))
            .max_by_key(|g| g.end - g.start)
    }
}

/// Returns whether each span is on the critical path.
fn critical(view: &RunView) -> Vec<bool> {
    let mut on = vec![false; view.run.spans.len()];
    for i in view.run.critical_path() {
        on[i] = true;
    }
    on
}

/// Returns the segments of the first lane. `instrs` are the instructions by span.
fn segments(instrs: &[Option<&InstrView>], lanes: &[Lane]) -> Vec<Segment> {
    let mut all: Vec<Segment> = Vec::new();
    let items = lanes
        .first()
        .map(|l| l.items.as_slice())
        .unwrap_or_default();
    for item in items {
        let Some(instr) = instrs[item.span as usize] else {
            continue;
        };
        match all.last_mut() {
            Some(s)
                if (s.unit, s.phase, s.micro_batch)
                    == (instr.unit, instr.phase, instr.micro_batch) =>
            {
                s.end = item.end;
            }
            _ => all.push(Segment {
                start: item.start,
                end: item.end,
                unit: instr.unit,
                phase: instr.phase,
                micro_batch: instr.micro_batch,
            }),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::testing::view;

    #[test]
    fn every_span_is_on_its_lane_in_order() {
        let lanes = Lanes::new(view("llama-tiny", &[]));
        let mut seen = 0;
        for lane in &lanes.lanes {
            assert!(
                lane.items.windows(2).all(|w| w[0].end <= w[1].start),
                "{}",
                lane.name
            );
            seen += lane.items.len();
        }
        assert_eq!(seen, lanes.view.run.spans.len());
        for span in 0..seen as u32 {
            assert_eq!(lanes.item(span).map(|i| i.span), Some(span));
        }
        assert_eq!(lanes.lanes[0].name, "compute");
    }

    #[test]
    fn nearest_and_within_agree_with_a_search_over_all() {
        let lanes = Lanes::new(view("llama-tiny", &[]));
        for lane in &lanes.lanes {
            for k in 0..50 {
                let time = lanes.length * k / 49;
                let distance =
                    |i: &Item| i.start.saturating_sub(time).max(time.saturating_sub(i.end));
                let best = lane.items.iter().map(distance).min();
                assert_eq!(lane.nearest(time).map(|i| distance(&lane.items[i])), best);
                let to = time + lanes.length / 20;
                let count = lane
                    .items
                    .iter()
                    .filter(|i| i.end > time && i.start < to)
                    .count();
                assert_eq!(lane.within(time, to).len(), count);
            }
        }
    }
}
