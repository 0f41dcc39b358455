//! Exposed time of an imported step: when the compute stream had nothing to run, and why.

use shardlab_plan::ir::{COMPUTE, InstrId};
use shardlab_plan::record::{Blocker, Cause, ExposedGap, MIN_GAP, Span, exposed_gaps};
use shardlab_plan::units::Picos;

/// Returns the gaps of the compute stream between `from` and `to`, both within the step.
pub(super) fn find(
    spans: &[Span],
    from: Picos,
    to: Picos,
    is_collective: &dyn Fn(InstrId) -> bool,
) -> Vec<ExposedGap> {
    if spans.is_empty() {
        return Vec::new();
    }
    let mut compute: Vec<&Span> = spans.iter().filter(|s| s.stream == COMPUTE).collect();
    compute.sort_by_key(|s| s.start);
    exposed_gaps(compute, from, to, |span, free| {
        cause(spans, span, free, is_collective)
    })
}

fn cause(
    spans: &[Span],
    span: &Span,
    free: Picos,
    is_collective: &dyn Fn(InstrId) -> bool,
) -> (Cause, Option<u32>) {
    match span.blocker {
        Blocker::Rank => (Cause::Straggler, None),
        Blocker::Event(i) => match spans.get(i as usize) {
            Some(w) if w.blocker == Blocker::Rank => (Cause::Straggler, Some(i)),
            // The host issued the awaited work only after the stream was free.
            Some(w) if w.issued.0 > free.0 + MIN_GAP => (Cause::Host, Some(i)),
            Some(w) if w.start.0 > free.0.max(w.issued.0) + MIN_GAP => match w.blocker {
                Blocker::Stream(_) => (Cause::Queue, Some(i)),
                _ => (Cause::Gate, Some(i)),
            },
            Some(w) if is_collective(w.instr) => (Cause::Wire, Some(i)),
            _ => (Cause::Contention, Some(i)),
        },
        Blocker::Stream(_) => (Cause::Contention, None),
        _ => (Cause::Host, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::ir::StreamId;

    #[test]
    fn gaps_are_explained_by_what_was_waited_for() {
        let us = |x: u64| Picos(x * 1_000_000);
        let span = |stream: u8, issued: u64, start: u64, end: u64, blocker| Span {
            instr: InstrId(u32::from(stream)),
            stream: StreamId(stream),
            issued: us(issued),
            ready: us(start),
            start: us(start),
            end: us(end),
            alone: us(end - start),
            blocker,
        };
        let spans = [
            span(0, 0, 0, 10, Blocker::Host),
            span(1, 1, 5, 40, Blocker::Host),
            span(0, 2, 40, 50, Blocker::Event(1)),
            span(1, 65, 66, 80, Blocker::Host),
            span(0, 67, 81, 90, Blocker::Event(3)),
            span(0, 100, 101, 110, Blocker::Host),
            span(1, 90, 108, 130, Blocker::Rank),
            span(0, 92, 131, 140, Blocker::Event(6)),
        ];
        let found = find(&spans, Picos::ZERO, us(150), &|i| i.0 == 1);
        let causes: Vec<_> = found
            .iter()
            .map(|g| (g.start.0 / 1_000_000, g.cause))
            .collect();
        assert_eq!(
            causes,
            [
                (10, Cause::Wire),
                (50, Cause::Host),
                (90, Cause::Host),
                (110, Cause::Straggler),
                (140, Cause::Tail)
            ]
        );
    }
}
