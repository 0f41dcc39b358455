//! Cost of a step's collectives, computed from its spans in the same way for predicted and measured
//! steps.

use super::intervals::{length, overlap, touches, union};
use super::{CollectiveStats, Span};
use crate::ir::{COMPUTE, CollectiveKind, InstrId};
use crate::program::{Op, Program};
use crate::units::{Bytes, Picos};
use std::collections::BTreeMap;

/// Returns totals by kind. If several collectives of a kind run at the same time, their time counts
/// once. Time during which the compute stream runs nothing is exposed. A collective overlaps a GEMM
/// if any GEMM, attention or convolution shares time with it.
#[must_use]
pub fn collective_stats(
    program: &Program,
    spans: &[Span],
) -> BTreeMap<CollectiveKind, CollectiveStats> {
    let gemm = |i: InstrId| match program.instrs[i.index()].op {
        Op::Launch { kernel, .. } => program.kernels[kernel.index()].class.is_arithmetic(),
        _ => false,
    };
    let interval = |s: &Span| (s.start.0, s.end.0);
    let on_compute = || spans.iter().filter(|s| s.stream == COMPUTE);
    let compute = union(&mut on_compute().map(interval).collect::<Vec<_>>());
    let gemms = union(
        &mut on_compute()
            .filter(|s| gemm(s.instr))
            .map(interval)
            .collect::<Vec<_>>(),
    );
    let mut stats: BTreeMap<CollectiveKind, CollectiveStats> = BTreeMap::new();
    let mut running: BTreeMap<CollectiveKind, Vec<(u64, u64)>> = BTreeMap::new();
    for span in spans {
        let Op::Collective { id, .. } = program.instrs[span.instr.index()].op else {
            continue;
        };
        let collective = &program.collectives[id.index()];
        let entry = stats.entry(collective.kind).or_default();
        entry.count += 1;
        entry.bytes += Bytes(collective.expected_bytes());
        entry.overlapped_with_gemm += u32::from(touches(&gemms, interval(span)));
        running
            .entry(collective.kind)
            .or_default()
            .push(interval(span));
    }
    add_times(&mut stats, running, &compute);
    stats
}

/// Sets the busy and the exposed time of each kind from the intervals in which its collectives run,
/// given the intervals in which the compute stream is busy, both in picoseconds.
pub fn add_times(
    stats: &mut BTreeMap<CollectiveKind, CollectiveStats>,
    running: BTreeMap<CollectiveKind, Vec<(u64, u64)>>,
    compute: &[(u64, u64)],
) {
    for (kind, mut list) in running {
        let merged = union(&mut list);
        let busy = length(&merged);
        let entry = stats.entry(kind).or_default();
        entry.busy = Picos(busy);
        entry.exposed = Picos(busy - overlap(&merged, compute));
    }
}
