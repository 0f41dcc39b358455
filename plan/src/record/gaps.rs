//! Exposed time of a recorded step: when the compute stream had nothing to run.

use super::{Cause, ExposedGap, Span};
use crate::units::Picos;

/// Gaps shorter than this, in picoseconds, are the cost of the queue itself.
pub const MIN_GAP: u64 = 5_000_000;

/// Why the compute stream had nothing to run: the cause, and the span that it waited for.
pub type Reason = (Cause, Option<u32>);

/// Explains a gap of the compute stream from its start to its end. Each reason holds from the end
/// of the one before it, so there can be no time without a reason, and none with two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reasons {
    /// Reasons with the times at which they end, in order. Times outside of the gap are moved to
    /// its ends.
    pub until: Vec<(Picos, Reason)>,
    /// The reason of the rest.
    pub rest: Reason,
}

impl From<Reason> for Reasons {
    fn from(rest: Reason) -> Self {
        Self {
            until: Vec::new(),
            rest,
        }
    }
}

/// Returns the gaps of the compute stream between `from` and `to`. The spans of the stream are
/// given in order. `explain` returns why a span did not start when the stream was free, and which
/// span it waited for. If there is more than one reason, each becomes a gap of its own.
#[must_use]
pub fn exposed_gaps<'s, R: Into<Reasons>>(
    compute: impl IntoIterator<Item = &'s Span>,
    from: Picos,
    to: Picos,
    explain: impl Fn(&Span, Picos) -> R,
) -> Vec<ExposedGap> {
    let mut gaps = Vec::new();
    let mut free = from;
    for span in compute {
        if span.start.0 > free.0 + MIN_GAP {
            split(&mut gaps, free, span.start, &explain(span, free).into());
        }
        free = free.max(span.end);
    }
    if to.0 > free.0 + MIN_GAP {
        let tail = (Cause::Tail, None);
        split(&mut gaps, free, to, &tail.into());
    }
    gaps
}

/// Adds the parts of the gap from `start` to `end`.
fn split(gaps: &mut Vec<ExposedGap>, mut start: Picos, end: Picos, why: &Reasons) {
    let rest = (end, why.rest);
    for (until, (cause, waited_for)) in why.until.iter().copied().chain([rest]) {
        let until = until.clamp(start, end);
        if until > start {
            gaps.push(ExposedGap {
                start,
                end: until,
                cause,
                waited_for,
            });
        }
        start = until;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{COMPUTE, InstrId};
    use crate::record::Blocker;

    #[test]
    fn reasons_fill_a_gap_in_order() {
        let us = |t: u64| Picos(t * 1_000_000);
        let span = |start: u64, end: u64| Span {
            instr: InstrId(0),
            stream: COMPUTE,
            issued: us(start),
            ready: us(start),
            start: us(start),
            end: us(end),
            alone: us(end - start),
            blocker: Blocker::Host,
        };
        let spans = [span(0, 10), span(40, 50)];
        // The first ends before the gap, the third before the second, and the last after it.
        let why = |_: &Span, _: Picos| Reasons {
            until: vec![
                (us(5), (Cause::Host, None)),
                (us(20), (Cause::Queue, Some(1))),
                (us(15), (Cause::Gate, Some(1))),
                (us(99), (Cause::Wire, Some(1))),
            ],
            rest: (Cause::Contention, None),
        };
        let found: Vec<_> = exposed_gaps(&spans, Picos::ZERO, us(60), why)
            .into_iter()
            .map(|g| (g.start, g.end, g.cause, g.waited_for))
            .collect();
        assert_eq!(
            found,
            [
                (us(10), us(20), Cause::Queue, Some(1)),
                (us(20), us(40), Cause::Wire, Some(1)),
                (us(50), us(60), Cause::Tail, None),
            ]
        );
    }
}
