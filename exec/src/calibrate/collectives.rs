//! Collectives between rank threads, by kind, element type, number of ranks and payload.

use super::quantile;
use crate::base::operand::RawRange;
use crate::comm::{Call, Group};
use crate::device::Abort;
use shardlab_plan::ir::{CollectiveKind, DType, ReduceOp};
use smallvec::smallvec;
use std::sync::Arc;
use std::time::Duration;

/// Sizes of the full side, in bytes.
const SIZES: [u64; 7] = [
    1 << 10,
    1 << 13,
    1 << 16,
    1 << 18,
    1 << 20,
    1 << 22,
    1 << 24,
];
/// Minimum and maximum number of repetitions.
const REPEATS: (u64, u64) = (8, 80);
/// Number of repetitions for warming up caches and queues.
const WARM: usize = 3;

/// Kinds and types with different costs. Reductions in bf16 convert.
const KINDS: [(CollectiveKind, DType); 6] = [
    (CollectiveKind::AllGather, DType::F32),
    (CollectiveKind::ReduceScatter, DType::F32),
    (CollectiveKind::ReduceScatter, DType::Bf16),
    (CollectiveKind::AllReduce, DType::F32),
    (CollectiveKind::AllReduce, DType::Bf16),
    (CollectiveKind::AllToAll, DType::F32),
];

/// Measurements of one kind and number of ranks.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) kind: CollectiveKind,
    /// Element type, if it matters.
    pub(super) dtype: Option<DType>,
    pub(super) ranks: u32,
    pub(super) rows: Vec<(u64, f64)>,
    /// The library's own estimates, if there are any.
    pub(super) estimates: Vec<(u64, f64)>,
}

/// Measures all tables for 2, 4, ... up to `most` ranks.
pub(super) fn measure(most: u32, budget: Duration) -> Vec<Table> {
    let worlds: Vec<u32> = std::iter::successors(Some(2u32), |w| Some(w * 2))
        .take_while(|&w| w <= most.max(2))
        .collect();
    let one = budget / (KINDS.len() * SIZES.len() * worlds.len()) as u32;
    let mut tables = Vec::new();
    for &ranks in &worlds {
        for (kind, dtype) in KINDS {
            let rows = SIZES
                .into_iter()
                .map(|bytes| (bytes, time(kind, dtype, ranks, bytes, one)))
                .collect();
            tables.push(Table {
                kind,
                dtype: kind.reduces().then_some(dtype),
                ranks,
                rows,
                estimates: Vec::new(),
            });
        }
    }
    tables
}

/// Returns the median time from the last rank's arrival until the call returns on rank 0, in
/// microseconds.
fn time(kind: CollectiveKind, dtype: DType, ranks: u32, bytes: u64, budget: Duration) -> f64 {
    let abort = Arc::new(Abort::new(Duration::from_secs(60)));
    let group = Arc::new(Group::new("calibration", (0..ranks).collect(), abort));
    let (input, output) = kind.operand_bytes(bytes, u64::from(ranks));
    // An estimate for choosing the number of repetitions, which must be equal on all ranks.
    let guess = 30.0 + bytes as f64 * f64::from(ranks) / 4e3;
    let repeats = ((budget.as_secs_f64() * 1e6 / guess) as u64).clamp(REPEATS.0, REPEATS.1);
    let reduce = if kind.reduces() {
        ReduceOp::Avg
    } else {
        ReduceOp::None
    };
    let run = |position: usize, group: &Group| -> Vec<f64> {
        let words = |bytes: u64| vec![0x3e80_3e80u32; (bytes / 4) as usize];
        let (mut from, mut to) = (words(input), words(output));
        let range = |data: &mut Vec<u32>, bytes: u64| RawRange {
            ptr: data.as_mut_ptr().cast(),
            bytes: bytes as usize,
            dtype,
        };
        let parts = (range(&mut from, input), range(&mut to, output));
        let mut times = Vec::new();
        for ticket in 0..repeats {
            let call = Call {
                kind,
                reduce,
                dtype,
                parts: smallvec![parts],
                rows: None,
                crash: false,
            };
            // SAFETY: the ranges are this thread's own vectors, which live until every member has
            // returned from the last call: no member leaves a collective before all have completed
            // it.
            let arrival = unsafe { group.run(position, ticket, call) };
            if let Ok(arrival) = arrival {
                times.push(arrival.start.elapsed().as_secs_f64() * 1e6);
            }
        }
        times
    };
    std::thread::scope(|scope| {
        let group = &group;
        let run = &run;
        let others: Vec<_> = (1..ranks as usize)
            .map(|p| scope.spawn(move || run(p, group)))
            .collect();
        let times = run(0, group);
        for other in others {
            // A rank thread cannot panic.
            let _ = other.join();
        }
        quantile(times.into_iter().skip(WARM).collect(), 0.5)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_completes_and_large_ones_take_longer() {
        for (kind, dtype) in KINDS {
            let us = |bytes| time(kind, dtype, 2, bytes, Duration::ZERO);
            let (small, large) = (us(1 << 10), us(1 << 22));
            assert!(small > 0.0 && large > small, "{kind:?}: {small} {large}");
        }
    }
}
