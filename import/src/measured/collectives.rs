//! Collectives: bytes, totals, and their times without waits for other ranks.

use super::pairs::{CollectiveSpan, pairs};
use crate::attribute::{Attributed, Work};
use crate::kineto::{Collective, Trace};
use shardlab_plan::ir::{COMPUTE, CollectiveKind, InstrId};
use shardlab_plan::record::intervals::{overlap, union};
use shardlab_plan::record::{CollectiveStats, Span, add_times};
use shardlab_plan::units::Bytes;
use std::collections::BTreeMap;

/// Returns the size in bytes of an element type, by its name in PyTorch's profiler.
pub(crate) fn element_bytes(dtype: &str) -> u64 {
    match dtype {
        "Double" | "Long" | "ComplexFloat" => 8,
        "Float" | "Int" => 4,
        "BFloat16" | "Half" | "Short" => 2,
        _ => 1,
    }
}

/// Returns the payload of a collective in bytes: the size of the full tensor.
#[must_use]
pub fn bytes_of(collective: &Collective) -> u64 {
    let elements = collective.elements_in.max(collective.elements_out);
    elements * element_bytes(&collective.dtype)
}

/// Returns the collectives of a rank in the order of their starts.
#[must_use]
pub fn of_rank(trace: &Trace, a: &Attributed) -> Vec<CollectiveSpan> {
    a.work
        .iter()
        .filter(|w| w.work.is_collective())
        .map(|w| {
            let event = &trace.device[w.device as usize];
            let described = w.collective.map(|c| &trace.collectives[c as usize]);
            let group = described.map_or_else(String::new, |c| format!("{} {}", c.group, c.ranks));
            CollectiveSpan {
                device: w.device,
                step: w.place.step,
                key: (w.work, group, described.map_or(0, bytes_of)),
                span: (event.start + trace.head.base, event.end + trace.head.base),
            }
        })
        .collect()
}

/// Time of a collective without waits for other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pure {
    /// Earliest end over all ranks minus latest start, nanoseconds.
    pub alone: i64,
    /// Time that this rank waited for the last one, nanoseconds.
    pub waited: i64,
}

/// Times of the first rank's collectives, from the traces of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Joint {
    /// Times without waits for other ranks, by device event.
    pub(crate) pure: BTreeMap<u32, Pure>,
    /// Number of collectives of which no trace of another rank has the group.
    pub(crate) alone: usize,
    /// For each rank, the number of collectives that only its trace lacks. They count nowhere.
    pub(crate) lost: Vec<usize>,
    /// For each rank, the time that the others waited for it, nanoseconds.
    pub(crate) late: Vec<i64>,
}

/// Compares the collectives of the first rank with those of the others. All times are on one clock.
#[must_use]
pub(crate) fn pure_times(ranks: &[&[CollectiveSpan]]) -> Joint {
    let mut joint = Joint {
        lost: vec![0; ranks.len()],
        late: vec![0; ranks.len()],
        ..Joint::default()
    };
    let Some((first, others)) = ranks.split_first() else {
        return joint;
    };
    if others.is_empty() {
        return joint;
    }
    // The spans of each collective, by rank, and those that a trace lacks.
    let mut spans: Vec<Vec<(usize, (i64, i64))>> =
        first.iter().map(|c| vec![(0, c.span)]).collect();
    let mut is_lost = vec![false; first.len()];
    for (i, other) in others.iter().enumerate() {
        let found = pairs(first, other);
        for (own, theirs) in found.both {
            spans[own].push((i + 1, other[theirs].span));
        }
        joint.lost[0] = joint.lost[0].max(found.lost_by_first);
        joint.lost[i + 1] = found.lost.len();
        found.lost.into_iter().for_each(|c| is_lost[c] = true);
    }
    for ((c, spans), is_lost) in first.iter().zip(&spans).zip(is_lost) {
        // The missing rank may be the one that the others waited for.
        if is_lost {
            continue;
        }
        // Ranks outside of the collective's group do not take part.
        if spans.len() == 1 {
            joint.alone += 1;
            continue;
        }
        let all = || spans.iter().map(|s| s.1);
        let start = all().map(|s| s.0).max().unwrap_or(c.span.0);
        let end = all().map(|s| s.1).min().unwrap_or(c.span.1);
        let second = all()
            .map(|s| s.0)
            .filter(|s| *s < start)
            .max()
            .unwrap_or(start);
        if let Some((last, _)) = spans.iter().find(|(_, s)| s.0 == start) {
            joint.late[*last] += start - second;
        }
        joint.pure.insert(
            c.device,
            Pure {
                // Clocks agree only to within microseconds, but a duration must not be negative.
                alone: (end - start).clamp(0, c.span.1 - c.span.0),
                waited: (start - c.span.0).max(0),
            },
        );
    }
    joint
}

/// Returns totals by kind over the spans of a step.
pub(super) fn stats(
    spans: &[Span],
    work: &dyn Fn(InstrId) -> Option<Work>,
    bytes: &dyn Fn(InstrId) -> u64,
) -> BTreeMap<CollectiveKind, CollectiveStats> {
    let on_compute = |want: fn(Work) -> bool| {
        let of = spans
            .iter()
            .filter(|s| s.stream == COMPUTE && work(s.instr).is_some_and(want));
        union(&mut of.map(|s| (s.start.0, s.end.0)).collect::<Vec<_>>())
    };
    let compute = on_compute(|_| true);
    let products = on_compute(|w| matches!(w, Work::Gemm | Work::Attention));
    let mut stats: BTreeMap<CollectiveKind, CollectiveStats> = BTreeMap::new();
    let mut running: BTreeMap<CollectiveKind, Vec<(u64, u64)>> = BTreeMap::new();
    for span in spans {
        let kind = match work(span.instr) {
            Some(Work::AllGather) => CollectiveKind::AllGather,
            Some(Work::ReduceScatter) => CollectiveKind::ReduceScatter,
            Some(Work::AllReduce) => CollectiveKind::AllReduce,
            Some(Work::OtherCollective) => CollectiveKind::AllToAll,
            _ => continue,
        };
        let entry = stats.entry(kind).or_default();
        entry.count += 1;
        entry.bytes += Bytes(bytes(span.instr));
        let over = overlap(&products, &[(span.start.0, span.end.0)]);
        entry.overlapped_with_gemm += u32::from(over > 0);
        running
            .entry(kind)
            .or_default()
            .push((span.start.0, span.end.0));
    }
    add_times(&mut stats, running, &compute);
    stats
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(device: u32, bytes: u64, span: (i64, i64)) -> CollectiveSpan {
        CollectiveSpan {
            device,
            step: 0,
            key: (Work::AllGather, "0".into(), bytes),
            span,
        }
    }

    #[test]
    fn pure_time_starts_with_the_last_rank() {
        let a = [
            span(1, 8, (0, 100)),
            span(2, 8, (110, 150)),
            span(3, 4, (200, 210)),
        ];
        let b = [span(9, 8, (60, 101)), span(8, 8, (100, 149))];
        let Joint {
            pure,
            alone,
            lost,
            late,
        } = pure_times(&[&a, &b]);
        assert_eq!(
            pure[&1],
            Pure {
                alone: 40,
                waited: 60
            }
        );
        assert_eq!(
            pure[&2],
            Pure {
                alone: 39,
                waited: 0
            }
        );
        // Both ranks are in the group of the third collective, so that its other event is lost.
        assert_eq!((pure.len(), alone, lost), (2, 0, vec![0, 1]));
        assert_eq!(late, [10, 60]);
        assert!(pure_times(&[&a]).pure.is_empty());
        let elsewhere = b.map(|mut c| {
            c.key.1 = "1".into();
            c
        });
        let joint = pure_times(&[&a, &elsewhere]);
        assert_eq!((joint.alone, joint.lost), (3, vec![0, 0]));
    }
}
