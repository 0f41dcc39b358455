//! Times between tasks: gaps, latencies, issue costs, the end of a step.

use super::{Observed, Totals, us};
use crate::calibrate::quantile;
use shardlab_plan::ir::COMPUTE;
use shardlab_plan::program::{Op, Program};
use shardlab_plan::record::{Blocker, Span};
use shardlab_plan::units::Picos;

/// A task that starts this long after its issue or the previous task, in microseconds, has waited
/// for something that is not in its record.
const LATE: f64 = 20.0;

/// Observations, from which medians are computed.
#[derive(Debug, Default)]
pub(in crate::calibrate) struct Between {
    gaps: Vec<f64>,
    latencies: Vec<f64>,
    events: Vec<f64>,
    launches: Vec<f64>,
    /// Time between two launches, and the number of instructions of one kind between them.
    records: Vec<(f64, usize)>,
    allocs: Vec<(f64, usize)>,
    tails: Vec<f64>,
}

impl Between {
    /// Adds the observations of a run with one rank.
    pub(in crate::calibrate) fn add(&mut self, observed: &Observed) {
        let spans = &observed.typical.spans;
        let program = &observed.program;
        let mut last: Option<&Span> = None;
        for span in spans.iter().filter(|s| s.stream == COMPUTE) {
            let since = |before: Picos| us(span.start.0.saturating_sub(before.0));
            let (found, took) = match (span.blocker, last) {
                (Blocker::Stream(_), Some(last)) => (&mut self.gaps, since(last.end)),
                (Blocker::Host, _) => (&mut self.latencies, since(span.issued)),
                _ => {
                    last = Some(span);
                    continue;
                }
            };
            if took <= LATE {
                found.push(took);
            }
            last = Some(span);
        }
        for pair in spans.windows(2) {
            self.issue(program, &pair[0], &pair[1]);
        }
        let end = spans.iter().map(|s| s.end.0).max().unwrap_or(0);
        self.tails
            .push(us(observed.typical.record.end.0.saturating_sub(end)));
    }

    /// Returns the issue time of the instructions between two tasks, if they are of one kind.
    fn issue(&mut self, program: &Program, a: &Span, b: &Span) {
        if b.instr <= a.instr {
            return;
        }
        let between = &program.instrs[a.instr.index() + 1..b.instr.index()];
        let took = us(b.issued.0.saturating_sub(a.issued.0));
        let count = |f: fn(&Op) -> bool| between.iter().filter(|i| f(&i.op)).count();
        let allocs = count(|o| matches!(o, Op::Alloc(_) | Op::Free(_)));
        let records = count(|o| matches!(o, Op::Record { .. } | Op::Wait { .. }));
        let others = between.len() - allocs - records - count(|o| matches!(o, Op::HostWork { .. }));
        match (others, allocs, records) {
            (0, 0, 0) => self.launches.push(took),
            (0, n, 0) => self.allocs.push((took, n)),
            (0, 0, n) => self.records.push((took, n)),
            _ => {}
        }
    }

    /// Adds the observations of a run with several ranks.
    pub(in crate::calibrate) fn add_events(&mut self, observed: &Observed) {
        let spans = &observed.typical.spans;
        for span in spans {
            if let Blocker::Event(by) = span.blocker
                && let Some(by) = spans.get(by as usize)
                && by.stream != span.stream
            {
                self.events.push(us(span.start.0.saturating_sub(by.end.0)));
            }
        }
    }

    pub(in crate::calibrate) fn settle(self, totals: &mut Totals) {
        totals.gap_us = quantile(self.gaps, 0.5);
        totals.latency_us = quantile(self.latencies, 0.5);
        totals.event_us = (quantile(self.events, 0.5) - totals.gap_us).max(0.0);
        let launch = quantile(self.launches, 0.5);
        // The instructions between two tasks are issued in addition to the second task.
        let in_addition = |x: Vec<(f64, usize)>| {
            let each = x.into_iter().map(|(took, n)| (took - launch) / n as f64);
            quantile(each.collect(), 0.5).max(0.02)
        };
        totals.issue_us = [launch, in_addition(self.records), in_addition(self.allocs)];
        totals.tail_us = quantile(self.tails, 0.5);
    }
}
