//! Exposed time of an imported step: when the compute stream had nothing to run, and why.

use super::spans::Waits;
use shardlab_plan::ir::{COMPUTE, InstrId};
use shardlab_plan::record::{
    Blocker, Cause, ExposedGap, MIN_GAP, Reason, Reasons, Span, exposed_gaps,
};
use shardlab_plan::units::Picos;

/// Returns the gaps of the compute stream between `from` and `to`, both within the step. `waits`
/// says what each span waited for. The instruction of a span is its index.
pub(super) fn find(
    spans: &[Span],
    waits: &[Waits],
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
        match waits[span.instr.index()].start {
            Blocker::Event(i) => {
                let w = &spans[i as usize];
                match waits[i as usize].joined {
                    Some(joined) => joined_late(w, i, joined, free),
                    None => awaited(w, i, free, is_collective).into(),
                }
            }
            Blocker::Stream(_) => (Cause::Contention, None).into(),
            _ => (Cause::Host, None).into(),
        }
    })
}

/// Explains a gap that began at `free` and waited for span `i`.
fn awaited(w: &Span, i: u32, free: Picos, is_collective: &dyn Fn(InstrId) -> bool) -> Reason {
    let cause = if w.issued.0 > free.0 + MIN_GAP {
        // The host issued the awaited work only after the stream was free.
        Cause::Host
    } else if w.start.0 > free.0.max(w.issued.0) + MIN_GAP {
        match w.blocker {
            Blocker::Stream(_) => Cause::Queue,
            _ => Cause::Gate,
        }
    } else if is_collective(w.instr) {
        Cause::Wire
    } else {
        Cause::Contention
    };
    (cause, Some(i))
}

/// Explains a gap that began at `free` and waited for collective `i`, which another rank joined
/// late, at `joined`. Only the time from its start to then is a straggler's.
fn joined_late(w: &Span, i: u32, joined: Picos, free: Picos) -> Reasons {
    // The latency of a launch belongs to what the launch waited for.
    let prompt = w.start.0 <= free.max(w.ready).0 + MIN_GAP;
    let [issued, ready] = match (prompt, w.ready > w.issued) {
        (true, false) => [w.start, w.start],
        (true, true) => [w.issued, w.start],
        (false, _) => [w.issued, w.ready],
    };
    let until = |time: Picos, cause: Cause| (time, (cause, Some(i)));
    Reasons {
        until: vec![
            until(issued, Cause::Host),
            until(ready, Cause::Queue),
            until(w.start, Cause::Gate),
            until(joined, Cause::Straggler),
        ],
        rest: (Cause::Wire, Some(i)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::ir::StreamId;

    fn us(x: u64) -> Picos {
        Picos(x * 1_000_000)
    }

    /// Returns the gaps of spans: stream, and times in microseconds at which each is issued, starts
    /// and ends.
    fn gaps(all: &[(u8, [u64; 3], Waits)], to: u64, collective: u32) -> Vec<(u64, u64, Cause)> {
        let mut ends = [0; 2];
        let spans = all.iter().enumerate().map(|(i, (stream, times, waits))| {
            let [issued, start, end] = times.map(us);
            let before = std::mem::replace(&mut ends[usize::from(*stream)], times[2]);
            Span {
                instr: InstrId(i as u32),
                stream: StreamId(*stream),
                issued,
                ready: issued.max(us(before)).min(start),
                start,
                end,
                alone: end - waits.joined.unwrap_or(start),
                blocker: waits.joined.map_or(waits.start, |_| Blocker::Rank),
            }
        });
        let spans: Vec<Span> = spans.collect();
        let waits: Vec<Waits> = all.iter().map(|s| s.2).collect();
        find(&spans, &waits, Picos::ZERO, us(to), &|i| i.0 == collective)
            .iter()
            .map(|g| (g.start.0 / 1_000_000, g.end.0 / 1_000_000, g.cause))
            .collect()
    }

    fn after(start: Blocker) -> Waits {
        Waits {
            start,
            joined: None,
        }
    }

    fn joined(start: Blocker, at: u64) -> Waits {
        Waits {
            start,
            joined: Some(us(at)),
        }
    }

    #[test]
    fn gaps_are_explained_by_what_was_waited_for() {
        let host = after(Blocker::Host);
        let spans = [
            (0, [0, 0, 10], host),
            (1, [1, 5, 40], host),
            (0, [2, 40, 50], after(Blocker::Event(1))),
            (1, [65, 66, 80], host),
            (0, [67, 81, 90], after(Blocker::Event(3))),
            (0, [100, 101, 110], host),
        ];
        assert_eq!(
            gaps(&spans, 150, 1),
            [
                (10, 40, Cause::Wire),
                (50, 81, Cause::Host),
                (90, 101, Cause::Host),
                (110, 150, Cause::Tail)
            ]
        );
    }

    #[test]
    fn only_the_wait_for_the_last_rank_is_a_straggler_s() {
        let host = Blocker::Host;
        let spans = [
            (0, [0, 0, 10], after(host)),
            // Issued at 20, and started at once; the last rank joins at 50.
            (1, [20, 23, 70], joined(host, 50)),
            (0, [21, 72, 80], after(Blocker::Event(1))),
            // Behind the collective before it, whose stream is busy until 100.
            (1, [30, 72, 100], after(Blocker::Stream(1))),
            (1, [85, 101, 130], joined(Blocker::Stream(3), 120)),
            (0, [86, 131, 140], after(Blocker::Event(4))),
            // Issued and ready long before it started.
            (1, [132, 150, 180], joined(Blocker::Event(5), 160)),
            (0, [133, 180, 190], after(Blocker::Event(6))),
            // It ran while the stream was busy, and the last rank had joined it before the gap.
            (1, [181, 182, 220], joined(host, 188)),
            (0, [183, 221, 230], after(Blocker::Event(8))),
            // A collective on the compute stream itself: its gap ends with its start.
            (0, [250, 252, 280], joined(host, 270)),
        ];
        assert_eq!(
            gaps(&spans, 280, u32::MAX),
            [
                (10, 23, Cause::Host),
                (23, 50, Cause::Straggler),
                (50, 72, Cause::Wire),
                (80, 85, Cause::Host),
                (85, 101, Cause::Queue),
                (101, 120, Cause::Straggler),
                (120, 131, Cause::Wire),
                (140, 150, Cause::Gate),
                (150, 160, Cause::Straggler),
                (160, 180, Cause::Wire),
                (190, 221, Cause::Wire),
                (230, 252, Cause::Host),
            ]
        );
    }
}
