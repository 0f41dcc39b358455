//! Collectives by kind and size, alone and beside kernels.

use super::bench::{Bench, COMPUTE_STREAM, SIDE, Single};
use super::middle;
use crate::calibrate::collectives::Table;
use shardlab_plan::model::OpKind;
use shardlab_plan::program::{CollectiveId, CollectiveKind, KernelClass};
use shardlab_plan::units::DType;

/// Bytes of the full side.
const SIZES: [u64; 8] = [
    1 << 17,
    1 << 20,
    1 << 22,
    1 << 24,
    1 << 26,
    1 << 28,
    1 << 29,
    1 << 30,
];
/// Kinds and types; reductions in float32 as well.
const KINDS: [(CollectiveKind, DType); 7] = [
    (CollectiveKind::AllGather, DType::Bf16),
    (CollectiveKind::ReduceScatter, DType::Bf16),
    (CollectiveKind::ReduceScatter, DType::F32),
    (CollectiveKind::AllReduce, DType::Bf16),
    (CollectiveKind::AllReduce, DType::F32),
    (CollectiveKind::AllToAll, DType::Bf16),
    (CollectiveKind::Broadcast, DType::Bf16),
];
const REPEATS: u32 = 10;
const WARM: usize = 3;
/// Payload beside kernels.
const BESIDE: u64 = 256 << 20;

/// How kernels and collectives slow one another, as factors of their times alone; 1 where nothing was measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Together {
    /// A large product beside an all-gather, and the all-gather.
    pub(super) product: (f64, f64),
    /// A kernel bound by memory, likewise.
    pub(super) memory: (f64, f64),
    /// Attention, likewise.
    pub(super) attention: (f64, f64),
    /// The host's issue of a collective, microseconds.
    pub(super) issue_us: f64,
}

impl Default for Together {
    fn default() -> Self {
        Self {
            product: (1.0, 1.0),
            memory: (1.0, 1.0),
            attention: (1.0, 1.0),
            issue_us: 0.0,
        }
    }
}

/// Tables of all kinds between the bench's ranks.
pub(super) fn alone(bench: &Bench<'_>) -> Result<Vec<Table>, String> {
    let measured = bench.run(
        |recipe| {
            let mut ids: Vec<(usize, u64, CollectiveId)> = Vec::new();
            for (k, (kind, dtype)) in KINDS.into_iter().enumerate() {
                for bytes in SIZES {
                    ids.push((k, bytes, recipe.collective(kind, dtype, bytes)));
                }
            }
            ids
        },
        |rank, ids| {
            let mut rows = Vec::new();
            for &(kind, bytes, id) in ids {
                let command = rank.gather(id);
                rank.begin(true)?;
                for n in 0..REPEATS {
                    rank.issue(SIDE, command.clone(), n)?;
                }
                let mut all: Vec<f64> = rank
                    .end()?
                    .iter()
                    .skip(WARM)
                    .map(|t| (t.end - t.start) as f64 / 1e3)
                    .collect();
                rows.push((kind, bytes, middle(&mut all)));
            }
            Ok(rows)
        },
    )?;
    let table = |(k, (kind, dtype)): (usize, (CollectiveKind, DType))| Table {
        kind,
        dtype: matches!(
            kind,
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce
        )
        .then_some(dtype),
        ranks: bench.ranks(),
        rows: measured
            .iter()
            .filter(|r| r.0 == k && r.2.is_finite())
            .map(|r| (r.1, r.2))
            .collect(),
    };
    Ok(KINDS.into_iter().enumerate().map(table).collect())
}

/// Times of kernels and collectives that run at the same time.
pub(super) fn together(bench: &Bench<'_>) -> Result<Together, String> {
    bench.run(
        |recipe| {
            let bf16 = DType::Bf16;
            let [m, n, k] = [8192, 8192, 2048];
            let op = OpKind::Gemm {
                ta: false,
                tb: true,
                bias: false,
                accumulate: false,
            };
            let class = KernelClass::Gemm { m, n, k, batch: 1 };
            let ins = [(vec![m, k], bf16), (vec![n, k], bf16)];
            let product = recipe.kernel(op, class, bf16, &ins, &[(vec![m, n], bf16)]);
            let large = (vec![256 << 20], bf16);
            let two = [large.clone(), large];
            let memory = recipe.kernel(OpKind::Mul, KernelClass::Pointwise, bf16, &two, &two[..1]);
            let attention = super::grid::attend(recipe, [1, 32, 8, 8192, 128], false);
            let gather = recipe.collective(CollectiveKind::AllGather, bf16, BESIDE);
            ([product, memory, attention], gather)
        },
        |rank, (kernels, gather)| {
            let command = rank.gather(*gather);
            // Alone: the collective, and its issue.
            rank.begin(true)?;
            for n in 0..REPEATS {
                rank.issue(SIDE, command.clone(), n)?;
            }
            let mut times: Vec<f64> = rank
                .end()?
                .iter()
                .skip(WARM)
                .map(|t| (t.end - t.start) as f64)
                .collect();
            let collective = middle(&mut times);
            rank.begin(false)?;
            let start = rank.now();
            for _ in 0..REPEATS {
                rank.issue(SIDE, command.clone(), 0)?;
            }
            let issue_us = (rank.now() - start) as f64 / 1e3 / f64::from(REPEATS);
            rank.end()?;
            let mut pair = |single: &Single| {
                let kernel = rank.command(single);
                rank.begin(true)?;
                for n in 0..REPEATS {
                    rank.issue(COMPUTE_STREAM, kernel.clone(), n)?;
                }
                let mut times: Vec<f64> = rank
                    .end()?
                    .iter()
                    .skip(WARM)
                    .map(|t| (t.end - t.start) as f64)
                    .collect();
                let alone = middle(&mut times);
                let ratio = if alone > 0.0 { collective / alone } else { 1.0 };
                // Both streams are kept busy for about the same time.
                let launches = ((f64::from(REPEATS) * ratio) as u32).clamp(6, 300);
                rank.begin(true)?;
                for n in 0..REPEATS {
                    rank.issue(SIDE, command.clone(), n)?;
                }
                for n in 0..launches {
                    rank.issue(COMPUTE_STREAM, kernel.clone(), REPEATS + n)?;
                }
                let all = rank.end()?;
                let middle_of = |mut list: Vec<f64>| {
                    // The first and the last ones run alone in part.
                    let skip = (list.len() / 4).max(1);
                    if list.len() > 2 * skip {
                        list = list[skip..list.len() - skip].to_vec();
                    }
                    middle(&mut list)
                };
                let of = |kernels: bool| {
                    let list = all.iter().filter(|t| (t.task >= REPEATS) == kernels);
                    middle_of(list.map(|t| (t.end - t.start) as f64).collect())
                };
                let factor = |x: f64, alone: f64| {
                    if x.is_finite() && alone > 0.0 {
                        (x / alone).max(1.0)
                    } else {
                        1.0
                    }
                };
                Ok((factor(of(true), alone), factor(of(false), collective)))
            };
            Ok(Together {
                product: pair(&kernels[0])?,
                memory: pair(&kernels[1])?,
                attention: pair(&kernels[2])?,
                issue_us,
            })
        },
    )
}
