//! Exposed time of a measured step: when the compute stream had nothing to run, and why.

use shardlab_plan::ir::COMPUTE;
use shardlab_plan::record::{Blocker, Cause, ExposedGap, MIN_GAP, Span, exposed_gaps};
use shardlab_plan::units::Picos;

/// Returns the gaps of the compute stream between `from` and `to`. `input` returns when the input
/// of a span, by index, was ready.
pub(super) fn find(
    spans: &[Span],
    from: Picos,
    to: Picos,
    input: &dyn Fn(u32) -> Picos,
) -> Vec<ExposedGap> {
    if spans.is_empty() {
        return Vec::new();
    }
    let compute = spans.iter().filter(|s| s.stream == COMPUTE);
    exposed_gaps(compute, from, to, |span, free| {
        explain(spans, span, free, input)
    })
}

/// Explains why `span` did not start at `free`.
fn explain(
    spans: &[Span],
    span: &Span,
    free: Picos,
    input: &dyn Fn(u32) -> Picos,
) -> (Cause, Option<u32>) {
    match span.blocker {
        Blocker::Event(i) => match spans.get(i as usize) {
            Some(w) if w.blocker == Blocker::Rank => (Cause::Straggler, Some(i)),
            // It started late only if neither its input nor the queue explains the time.
            Some(w) if w.start.0 > free.max(input(i)).0 + MIN_GAP => (Cause::Gate, Some(i)),
            _ => (Cause::Wire, Some(i)),
        },
        Blocker::Rank => (Cause::Straggler, None),
        // It had been issued, and nothing preceded it on its stream: work on other streams occupied
        // the device.
        Blocker::Stream(_) if spans.iter().any(|s| overlaps(s, free, span.start)) => {
            (Cause::Contention, None)
        }
        _ => (Cause::Host, None),
    }
}

/// Returns whether a task of another stream ran between two times for longer than the queue's own
/// cost.
fn overlaps(span: &Span, from: Picos, to: Picos) -> bool {
    let (start, end) = (span.start.max(from), span.end.min(to));
    span.stream != COMPUTE && end.0 > start.0 + MIN_GAP
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::ir::{InstrId, StreamId};

    fn span(stream: u8, start: u64, end: u64, blocker: Blocker) -> Span {
        let us = |x: u64| Picos(x * 1_000_000);
        Span {
            instr: InstrId(0),
            stream: StreamId(stream),
            issued: Picos::ZERO,
            ready: us(start),
            start: us(start),
            end: us(end),
            alone: us(end - start),
            blocker,
        }
    }

    #[test]
    fn gaps_are_explained_by_what_the_kernel_waited_for() {
        let spans = [
            span(0, 0, 10, Blocker::None),
            span(1, 5, 40, Blocker::Host),
            span(0, 40, 50, Blocker::Event(1)),
            span(1, 60, 80, Blocker::Stream(1)),
            span(0, 80, 90, Blocker::Event(3)),
            span(0, 100, 110, Blocker::Host),
            // After the previous kernel, as soon as the queue allows; then one whose input came
            // from another stream.
            span(1, 113, 120, Blocker::Event(5)),
            span(0, 120, 125, Blocker::Event(6)),
            span(1, 140, 150, Blocker::Host),
            span(0, 150, 155, Blocker::Event(8)),
            // Issued long before, after a task that has just ended: once while a kernel of another
            // stream occupies the device, and once while none does.
            span(1, 152, 164, Blocker::Host),
            span(0, 165, 170, Blocker::Stream(9)),
            span(0, 178, 180, Blocker::Stream(11)),
        ];
        let us = |x: u64| Picos(x * 1_000_000);
        let input = |i: u32| us(if i == 8 { 138 } else { 0 });
        let found: Vec<_> = find(&spans, Picos::ZERO, us(190), &input)
            .into_iter()
            .map(|g| (g.start, g.end, g.cause, g.waited_for))
            .collect();
        assert_eq!(
            found,
            [
                (us(10), us(40), Cause::Wire, Some(1)),
                (us(50), us(80), Cause::Gate, Some(3)),
                (us(90), us(100), Cause::Host, None),
                (us(110), us(120), Cause::Wire, Some(6)),
                (us(125), us(150), Cause::Wire, Some(8)),
                (us(155), us(165), Cause::Contention, None),
                (us(170), us(178), Cause::Host, None),
                (us(180), us(190), Cause::Tail, None),
            ]
        );
    }
}
