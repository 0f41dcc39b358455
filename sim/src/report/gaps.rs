//! Exposed time: when the compute stream had nothing to run, and why.
//!
//! A gap before a kernel is split at the start of the span that the kernel waited for. Before that
//! start, the cause is whatever delayed the awaited span (host, gate, another rank, missing SMs),
//! followed backwards. While the awaited span ran, the time by which another rank joined late is a
//! straggler's, the time lost to contention is contention's, the time by which it could have
//! started earlier is its gate's or the host's, and the rest is the wire's. Nothing could have
//! started before its own input was ready, so waiting for an input is not a gate.

use shardlab_plan::ir::COMPUTE;
use shardlab_plan::program::{Op, Phase, Program};
use shardlab_plan::record::{Blocker, Cause, ExposedGap, Inputs, Queues, Span};
use shardlab_plan::units::Picos;

/// Finds the gaps of the compute stream between `from` and `to` that are longer than `least`.
pub(super) fn find(
    program: &Program,
    spans: &[Span],
    from: Picos,
    to: Picos,
    least: u64,
) -> Vec<ExposedGap> {
    let mut finder = Finder {
        program,
        spans,
        from,
        inputs: Inputs::new(program, spans, from),
        queues: Queues::new(program, spans),
        gaps: Vec::new(),
        queued: Picos::ZERO,
    };
    let mut free = from;
    for (i, span) in spans
        .iter()
        .enumerate()
        .filter(|(_, s)| s.stream == COMPUTE)
    {
        if span.start.0 > free.0 + least {
            finder.gap(free, span.start, i);
        }
        free = free.max(span.end);
    }
    if to.0 > free.0 + least {
        finder.push(free, to, Cause::Tail, None);
    }
    finder.gaps
}

struct Finder<'a> {
    program: &'a Program,
    spans: &'a [Span],
    from: Picos,
    inputs: Inputs<'a>,
    queues: Queues<'a>,
    gaps: Vec<ExposedGap>,
    /// Time in queues up to now.
    queued: Picos,
}

impl Finder<'_> {
    fn push(&mut self, start: Picos, end: Picos, cause: Cause, waited_for: Option<u32>) {
        if end <= start {
            return;
        }
        if cause == Cause::Queue {
            self.queued += end - start;
        }
        match self.gaps.last_mut() {
            Some(last)
                if last.end == start && last.cause == cause && last.waited_for == waited_for =>
            {
                last.end = end
            }
            _ => self.gaps.push(ExposedGap {
                start,
                end,
                cause,
                waited_for,
            }),
        }
    }

    /// Adds the gap from `a` to `b` in which the compute stream ran nothing and which ended when
    /// span `i` started.
    fn gap(&mut self, a: Picos, b: Picos, i: usize) {
        let span = &self.spans[i];
        match span.blocker {
            Blocker::Event(x) => {
                let closing = matches!(
                    self.program.instrs[span.instr.index()].phase,
                    Phase::Final | Phase::Clip | Phase::Optimizer | Phase::Refresh
                );
                if closing && self.ends_collective(x) {
                    // If every rank had been on time, it would have ended this much earlier.
                    let late = a + self.joined_late(x).min(b - a);
                    self.push(a, late, Cause::Straggler, Some(x));
                    self.push(late, b, Cause::Tail, Some(x));
                } else {
                    self.waited(a, b, x, x);
                }
            }
            Blocker::Communicator(x) => self.waited(a, b, x, x),
            Blocker::Rank => self.push(a, b, Cause::Straggler, None),
            Blocker::Sms => self.push(a, b, Cause::Contention, None),
            // The gap waited for work of the previous step.
            Blocker::None => self.push(a, b, Cause::Gate, None),
            Blocker::Host | Blocker::Stream(_) => self.push(a, b, Cause::Host, None),
        }
    }

    /// Returns how long a collective that another rank joined late waited only for that rank.
    fn joined_after(&self, x: u32) -> Picos {
        let span = &self.spans[x as usize];
        let turn = self.queues.of(x).map_or(Picos::ZERO, |q| q.until);
        span.start
            .saturating_sub(span.ready.max(span.issued).max(turn))
    }

    fn is_collective(&self, i: u32) -> bool {
        matches!(
            self.program.instrs[self.spans[i as usize].instr.index()].op,
            Op::Collective { .. }
        )
    }

    /// Returns whether a span is a collective or, outside the compute stream, work on a
    /// collective's result.
    fn ends_collective(&self, i: u32) -> bool {
        let span = &self.spans[i as usize];
        match span.blocker {
            _ if self.is_collective(i) => true,
            Blocker::Stream(y) | Blocker::Event(y) => {
                y < i && span.stream != COMPUTE && self.is_collective(y)
            }
            _ => false,
        }
    }

    /// Returns how much earlier a collective would have ended if every rank had joined it, and the
    /// collectives directly before it, on time.
    fn joined_late(&self, mut x: u32) -> Picos {
        let mut late = Picos::ZERO;
        loop {
            let span = &self.spans[x as usize];
            let behind = match span.blocker {
                Blocker::Rank => {
                    late += self.joined_after(x);
                    let mut before = self.spans[..x as usize].iter();
                    let before = before.rposition(|s| s.stream == span.stream);
                    before.filter(|&y| self.spans[y].end == span.ready)
                }
                Blocker::Stream(y) | Blocker::Event(y) | Blocker::Communicator(y) => {
                    Some(y as usize).filter(|&y| self.spans[y].stream != COMPUTE)
                }
                _ => None,
            };
            match behind {
                Some(y) if y < x as usize => x = y as u32,
                _ => return late,
            }
        }
    }

    /// Attributes `a..b` to span `x`, whose end the gap waited for; the gap reports `shown`. In
    /// issue order, blockers precede what they block, so the recursion ends.
    fn waited(&mut self, a: Picos, b: Picos, x: u32, shown: u32) {
        if b <= a {
            return;
        }
        let span = self.spans[x as usize];
        let begun = span.start.clamp(a, b);
        // First, the time before it started. The last thing that it waited for comes after its
        // turn.
        let queued = self.queues.of(x);
        let mut counted = self.queued;
        let turn = queued.map_or(a, |q| {
            let [since, until] = [q.since, q.until].map(|t| t.clamp(a, begun));
            self.held(a, since, x, shown);
            counted = self.queued;
            self.push(since, until, Cause::Queue, Some(shown));
            until
        });
        match span.blocker {
            Blocker::Host => self.push(turn, begun, Cause::Host, Some(shown)),
            Blocker::Rank => self.push(turn, begun, Cause::Straggler, Some(shown)),
            Blocker::Sms => self.push(turn, begun, Cause::Contention, Some(shown)),
            Blocker::None => self.push(turn, begun, Cause::Gate, Some(shown)),
            Blocker::Stream(_) | Blocker::Communicator(_) if queued.is_some() => {
                self.push(turn, begun, Cause::Queue, Some(shown));
            }
            Blocker::Stream(y) | Blocker::Event(y) | Blocker::Communicator(y) => {
                if y < x && self.spans[y as usize].stream != COMPUTE {
                    self.waited(turn, begun, y, shown);
                } else {
                    self.push(turn, begun, Cause::Gate, Some(shown));
                }
            }
        }
        // Then the time while it ran, in order: the part that an earlier start would have hidden,
        // the wire, and what contention added.
        let ran = b - begun;
        let lost = (span.end - span.start).saturating_sub(span.alone);
        // Its turn and a late rank take precedence over contention: if it had started when it was
        // ready, or if that rank had been on time, this time would be hidden at any speed.
        let behind = self.queues.late(x).map_or(Picos::ZERO, |(_, late)| late);
        let behind = ran.min(behind.saturating_sub(self.queued - counted));
        self.push(begun, begun + behind, Cause::Queue, Some(shown));
        let (begun, ran) = (begun + behind, ran - behind);
        let joined_late = match span.blocker {
            Blocker::Rank => ran.min(self.joined_after(x)),
            _ => Picos::ZERO,
        };
        let contention = (ran - joined_late).min(lost);
        let ran = ran - contention;
        let free = queued.map_or(span.ready, |q| q.until.max(span.ready));
        let (late, cause) = match span.blocker {
            // An infinitely fast host would have issued it when its stream was ready.
            Blocker::Host => (
                ran.min(span.start.saturating_sub(span.ready.max(self.from))),
                Cause::Host,
            ),
            Blocker::Rank => (joined_late, Cause::Straggler),
            Blocker::Sms => (ran.min(span.start.saturating_sub(free)), Cause::Contention),
            _ if self.is_kernel(x) => (ran, Cause::Gate),
            Blocker::Event(y) | Blocker::Stream(y) if self.spans[y as usize].stream == COMPUTE => {
                let input = self.inputs.ready(x);
                let late = span.start.saturating_sub(span.issued.max(input));
                (ran.min(late), Cause::Gate)
            }
            _ => (Picos::ZERO, Cause::Wire),
        };
        self.push(begun, begun + late, cause, Some(shown));
        self.push(begun + late, begun + ran, Cause::Wire, Some(shown));
        self.push(begun + ran, b, Cause::Contention, Some(shown));
    }

    /// Attributes `a..b`, during which span `x` could not yet wait for its turn, because it was not
    /// issued or its stream was not ready.
    fn held(&mut self, a: Picos, b: Picos, x: u32, shown: u32) {
        let span = &self.spans[x as usize];
        let mut before = self.spans[..x as usize].iter();
        match before.rposition(|s| s.stream == span.stream) {
            _ if span.issued > span.ready => self.push(a, b, Cause::Host, Some(shown)),
            Some(y) if self.spans[y].end == span.ready => self.waited(a, b, y as u32, shown),
            _ => self.push(a, b, Cause::Gate, Some(shown)),
        }
    }

    fn is_kernel(&self, i: u32) -> bool {
        matches!(
            self.program.instrs[self.spans[i as usize].instr.index()].op,
            Op::Launch { .. }
        )
    }
}
