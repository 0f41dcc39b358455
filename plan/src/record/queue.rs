//! Collectives that were issued and ready, but waited for their turn after collectives of another
//! kind.
//!
//! Collectives of one communicator run in the order in which they are issued, and so do those of
//! one stream. Consecutive collectives of the same kind form a line. Gathers are issued in the
//! order in which their results are needed, so the time of such a line is the wire's. A collective
//! after another kind (a gather after a reduction) waits for data that computation does not need
//! first.

use super::{Blocker, ExposedGap, Span};
use crate::ir::{COMPUTE, Collective, StreamId};
use crate::program::{Op, Program};
use crate::units::Picos;
use std::cell::OnceCell;
use std::collections::BTreeMap;

/// Resource that two collectives use in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// The communicator.
    Communicator,
    /// The stream.
    Stream,
}

impl Shared {
    /// Returns the name in sentences.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Communicator => "communicator",
            Self::Stream => "stream",
        }
    }
}

/// A wait for another collective's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// The span of the collective that waited.
    pub waited: u32,
    /// The span of the collective that it waited for.
    pub behind: u32,
    /// Resource that both need.
    pub shared: Shared,
    /// Time at which the waiting collective was issued and ready.
    pub since: Picos,
    /// Time at which the other collective ended.
    pub until: Picos,
}

impl Queued {
    /// Returns how long it waited.
    #[must_use]
    pub fn time(&self) -> Picos {
        self.until.saturating_sub(self.since)
    }
}

/// The waits of a step's collectives for each other.
pub struct Queues<'a> {
    program: &'a Program,
    spans: &'a [Span],
    /// The previous collective on the communicator, by span. Computed on first use.
    before: OnceCell<BTreeMap<u32, u32>>,
}

impl<'a> Queues<'a> {
    /// Creates the waits for these spans, in issue order, of one step.
    #[must_use]
    pub const fn new(program: &'a Program, spans: &'a [Span]) -> Self {
        Self {
            program,
            spans,
            before: OnceCell::new(),
        }
    }

    /// Returns the wait of span `x` itself after a collective of another kind; `None` if `x` is not
    /// a collective or did not wait.
    #[must_use]
    pub fn of(&self, x: u32) -> Option<Queued> {
        let kind = self.collective(x)?.kind;
        let span = self.spans.get(x as usize)?;
        let (behind, shared, ready) = match span.blocker {
            // Its stream became free only when the previous collective ended, which hides when it
            // would have been ready otherwise.
            Blocker::Stream(y) if y < x && self.collective(y).is_some() => {
                let ready = self.spans[y as usize].start.max(self.let_go(y, x));
                (y, Shared::Stream, ready)
            }
            _ => (*self.before().get(&x)?, Shared::Communicator, span.ready),
        };
        let since = ready.max(span.issued);
        let until = self.spans[behind as usize].end.min(span.start);
        let other = self.collective(behind)?.kind != kind;
        (other && until > since).then_some(Queued {
            waited: x,
            behind,
            shared,
            since,
            until,
        })
    }

    /// Returns the wait that delayed span `x`, and the delay: its own wait, or that of the first
    /// collective in the line of its kind directly before it.
    #[must_use]
    pub fn late(&self, x: u32) -> Option<(Queued, Picos)> {
        let mut line = x;
        let mut most = None;
        loop {
            let span = self.spans.get(line as usize)?;
            if let Some(queued) = self.of(line) {
                let late = queued.time();
                return Some((queued, most.map_or(late, |most| late.min(most))));
            }
            // A span cannot start before its issue.
            let could = span.start.saturating_sub(span.issued);
            most = Some(most.map_or(could, |most: Picos| most.min(could)));
            let (Blocker::Stream(y) | Blocker::Communicator(y)) = span.blocker else {
                return None;
            };
            let kinds = [line, y].map(|i| self.collective(i).map(|c| c.kind));
            if y >= line || kinds[0].is_none() || kinds[0] != kinds[1] {
                return None;
            }
            line = y;
        }
    }

    /// Returns the wait that caused a gap with cause [`super::Cause::Queue`]: that of the span that
    /// the gap waited for, or of the line directly before that span.
    #[must_use]
    pub fn of_gap(&self, gap: &ExposedGap) -> Option<Queued> {
        let mut x = gap.waited_for?;
        loop {
            if let Some((queued, _)) = self.late(x) {
                return Some(queued);
            }
            x = match self.spans.get(x as usize)?.blocker {
                Blocker::Stream(y) | Blocker::Event(y) | Blocker::Communicator(y)
                    if y < x && self.spans[y as usize].stream != COMPUTE =>
                {
                    y
                }
                _ => return None,
            };
        }
    }

    fn collective(&self, x: u32) -> Option<&'a Collective> {
        let span = self.spans.get(x as usize)?;
        match self.program.instrs.get(span.instr.index())?.op {
            Op::Collective { id, .. } => self.program.collectives.get(id.index()),
            _ => None,
        }
    }

    fn before(&self) -> &BTreeMap<u32, u32> {
        self.before.get_or_init(|| {
            let mut last = BTreeMap::new();
            let all = (0..self.spans.len() as u32).filter_map(|x| Some((x, self.collective(x)?)));
            all.filter_map(|(x, c)| Some((x, last.insert(c.comm, x)?)))
                .collect()
        })
    }

    /// Returns the time of the last event that the stream waits for between spans `y` and `x`.
    fn let_go(&self, y: u32, x: u32) -> Picos {
        let [from, to] = [y, x].map(|i| self.spans[i as usize].instr.index());
        let on = self.spans[x as usize].stream;
        let instrs = &self.program.instrs;
        let waits = (from..to).filter_map(|i| match instrs[i].op {
            Op::Wait { event, stream } if stream == on => Some((i, event)),
            _ => None,
        });
        let recorded = waits.filter_map(|(i, waited)| {
            instrs[..i]
                .iter()
                .enumerate()
                .rev()
                .find_map(|(at, r)| match r.op {
                    Op::Record { event, stream } if event == waited => Some((at, stream)),
                    _ => None,
                })
        });
        let ends = recorded.filter_map(|(at, stream)| self.last_on(stream, at));
        ends.max().unwrap_or(Picos::ZERO)
    }

    /// Returns the end of the last span of a stream before an instruction.
    fn last_on(&self, stream: StreamId, before: usize) -> Option<Picos> {
        let to = self.spans.partition_point(|s| s.instr.index() < before);
        let found = self.spans[..to].iter().rev().find(|s| s.stream == stream);
        found.map(|s| s.end)
    }
}
