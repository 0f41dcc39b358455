//! Collectives by kind and size, alone and overlapping with kernels.

use super::bench::Bench;
use super::middle;
use super::rank::Rank;
use super::recipe::{COMPUTE_STREAM, OTHER, SIDE, Single};
use crate::calibrate::collectives::Table;
use crate::device::{Command, Stop, TaskTimes};
use shardlab_plan::ir::{CollectiveId, CollectiveKind, DType, KernelClass, OpKind, op};

/// Sizes of the full side, in bytes.
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
/// Kinds and types, including reductions in float32.
const KINDS: [(CollectiveKind, DType); 6] = [
    (CollectiveKind::AllGather, DType::Bf16),
    (CollectiveKind::ReduceScatter, DType::Bf16),
    (CollectiveKind::ReduceScatter, DType::F32),
    (CollectiveKind::AllReduce, DType::Bf16),
    (CollectiveKind::AllReduce, DType::F32),
    (CollectiveKind::AllToAll, DType::Bf16),
];
/// Size in bytes from which times are compared with the fastest link. Smaller payloads may stay in
/// caches.
const LARGE: u64 = 1 << 24;
/// A rate in GB/s that no link between GPUs reaches in one direction: NVLink 6 carries 1,800.
const FASTEST_GBPS: f64 = 5e3;
const REPEATS: u32 = 10;
const WARM: usize = 3;
/// Payload of collectives that overlap with kernels or with each other.
const OVERLAP: u64 = 1 << 30;
/// Share of the measuring time after which no further part of this measurement starts.
const SHARE: f64 = 0.45;
/// Number of collectives that overlap with each kernel, and number of warm-up collectives.
const ROUNDS: u32 = 5;

/// How much kernels and collectives slow each other down, as factors relative to running alone; 1
/// if not measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Together {
    /// A large GEMM during an all-gather, and the all-gather.
    pub(super) product: (f64, f64),
    /// A memory-bound kernel during an all-gather, and the all-gather.
    pub(super) memory: (f64, f64),
    /// Attention during an all-gather, and the all-gather.
    pub(super) attention: (f64, f64),
    /// Host time to issue a collective, in microseconds.
    pub(super) issue_us: f64,
    /// Bus bandwidth of a concurrent all-gather and reduce-scatter, in GB/s; 0 if not measured.
    pub(super) reach_gbps: f64,
}

impl Default for Together {
    fn default() -> Self {
        Self {
            product: (1.0, 1.0),
            memory: (1.0, 1.0),
            attention: (1.0, 1.0),
            issue_us: 0.0,
            reach_gbps: 0.0,
        }
    }
}

/// Measures the tables of all kinds between the bench's ranks.
pub(super) fn alone(bench: &Bench<'_>) -> Result<Vec<Table>, String> {
    let (measured, estimates) = bench.run(
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
                if bytes == SIZES[0] {
                    let (what, dtype) = KINDS[kind];
                    let name = format!("{} of {dtype}", what.name());
                    if rank.late(SHARE, &format!("{name} and what follows"))? {
                        break;
                    }
                    rank.say(&name);
                }
                let command = rank.gather(id);
                rank.prime(&[(SIDE, command.clone())])?;
                rank.begin(true)?;
                for n in 0..REPEATS {
                    rank.issue(SIDE, command.clone(), n)?;
                }
                let mut all = rank.end_us(WARM)?;
                rows.push((kind, bytes, middle(&mut all)));
            }
            // After everything that is timed, because NCCL may keep state from an estimate.
            let mut estimates = Vec::new();
            if !rank.late(SHARE, "NCCL's own estimates")? {
                rank.say("NCCL's own estimates");
                for &(kind, bytes, id) in &ids[..rows.len()] {
                    let command = rank.gather(id);
                    if let Some(us) = rank.estimate(&command)? {
                        estimates.push((kind, bytes, us));
                    }
                }
            }
            Ok((rows, estimates))
        },
    )?;
    let of = |all: &[(usize, u64, f64)], k| {
        let of_kind = all.iter().filter(|r| r.0 == k && r.2.is_finite());
        of_kind.map(|r| (r.1, r.2)).collect::<Vec<_>>()
    };
    let table = |(k, (kind, dtype)): (usize, (CollectiveKind, DType))| Table {
        kind,
        dtype: kind.reduces().then_some(dtype),
        ranks: bench.ranks(),
        rows: of(&measured, k),
        estimates: of(&estimates, k),
    };
    let mut tables: Vec<Table> = KINDS.into_iter().enumerate().map(table).collect();
    tables.retain(|t| !t.rows.is_empty());
    tables.iter().try_for_each(possible)?;
    Ok(tables)
}

/// Rejects times that no link allows, because the collectives did not run.
fn possible(table: &Table) -> Result<(), String> {
    let share = f64::from(table.ranks - 1) / f64::from(table.ranks);
    for &(bytes, us) in &table.rows {
        let gbps = share * bytes as f64 / us / 1e3;
        if bytes >= LARGE && gbps > FASTEST_GBPS {
            return Err(format!(
                "{} of {bytes} bytes between {} ranks took {us:.1} us, or {gbps:.0} GB/s, which no link reaches: it did not run",
                table.kind.name(),
                table.ranks
            ));
        }
    }
    Ok(())
}

/// Measures kernels and collectives that run at the same time.
pub(super) fn together(bench: &Bench<'_>) -> Result<Together, String> {
    bench.run(
        |recipe| {
            let bf16 = DType::Bf16;
            let [m, n, k] = [8192, 8192, 2048];
            let op = OpKind::Gemm(op::Gemm {
                ta: false,
                tb: true,
                bias: false,
                accumulate: false,
            });
            let class = KernelClass::Gemm { m, n, k, batch: 1 };
            let ins = [(vec![m, k], bf16), (vec![n, k], bf16)];
            let product = recipe.kernel(op, class, bf16, &ins, &[(vec![m, n], bf16)]);
            let mut mul = |elements: u64| {
                let one = (vec![elements], bf16);
                let two = [one.clone(), one];
                recipe.kernel(OpKind::Mul, KernelClass::Pointwise, bf16, &two, &two[..1])
            };
            let (memory, short) = (mul(256 << 20), mul(8 << 20));
            let attention = {
                let shape = super::grid::causal([1, 32, 8, 8192, 128]);
                super::grid::attend(recipe, shape, false)
            };
            let gather = recipe.collective(CollectiveKind::AllGather, bf16, OVERLAP);
            let scatter = recipe.other_collective(CollectiveKind::ReduceScatter, bf16, OVERLAP);
            ([product, memory, attention, short], gather, scatter)
        },
        |rank, (kernels, gather, scatter)| {
            let [product, memory, attention, short] = kernels;
            let command = rank.gather(*gather);
            let scatter = rank.gather(*scatter);
            // Both communicators connect and all kernels load, one after another.
            rank.say("first uses");
            rank.prime(&[(SIDE, command.clone()), (OTHER, scatter.clone())])?;
            for kernel in kernels {
                let kernel = rank.command(kernel);
                rank.prime(&[(COMPUTE_STREAM, kernel)])?;
            }
            // This kernel is also used on this stream.
            let ahead = rank.command(short);
            rank.prime(&[(OTHER, ahead.clone())])?;
            rank.say("issue of all-gathers");
            let alone = row(rank, SIDE, &command)?;
            rank.begin(false)?;
            let start = rank.now();
            for _ in 0..REPEATS {
                rank.issue(SIDE, command.clone(), 0)?;
            }
            let issue_us = (rank.now() - start) as f64 / 1e3 / f64::from(REPEATS);
            rank.end()?;
            let mut found = Together {
                issue_us,
                ..Together::default()
            };
            let parts = [
                ("a GEMM", product),
                ("a kernel bound by memory", memory),
                ("attention", attention),
            ];
            let mut factors = [(1.0, 1.0); 3];
            for ((name, single), factors) in parts.into_iter().zip(&mut factors) {
                let part = format!("{name} next to an all-gather");
                if rank.late(SHARE, &part)? {
                    break;
                }
                rank.say(&part);
                *factors = pair(rank, single, short, (&command, alone))?;
            }
            [found.product, found.memory, found.attention] = factors;
            let part = "an all-gather and a reduce-scatter at the same time";
            if !rank.late(SHARE, part)? {
                rank.say(part);
                found.reach_gbps = reach(rank, &command, &scatter, &ahead)?;
            }
            Ok(found)
        },
    )
}

fn length(t: &TaskTimes) -> f64 {
    (t.end - t.start) as f64
}

/// Returns the nanoseconds per command in a sequence. All ranks return the same number.
fn row(
    rank: &mut Rank,
    stream: shardlab_plan::ir::StreamId,
    command: &Command,
) -> Result<f64, Stop> {
    rank.begin(true)?;
    for n in 0..REPEATS {
        rank.issue(stream, command.clone(), n)?;
    }
    let mut times: Vec<f64> = rank.end()?.iter().skip(WARM).map(length).collect();
    rank.agree(middle(&mut times))
}

/// Measures the bus bandwidth of two collectives at the same time, in GB/s. The all-gather starts
/// immediately, and the reduce-scatter after a short kernel, so the all-gather gets its
/// multiprocessors first on every GPU. Even if there is no room for both, no GPU runs a collective
/// that another GPU cannot start.
fn reach(
    rank: &mut Rank,
    gather: &Command,
    scatter: &Command,
    ahead: &Command,
) -> Result<f64, Stop> {
    rank.begin(true)?;
    for n in 0..REPEATS {
        rank.issue(SIDE, gather.clone(), 3 * n)?;
        rank.issue(OTHER, ahead.clone(), 3 * n + 1)?;
        rank.issue(OTHER, scatter.clone(), 3 * n + 2)?;
        let (one, other) = (2 * n, 2 * n + 1);
        rank.event(SIDE, one, false)?;
        rank.event(OTHER, other, false)?;
        rank.event(OTHER, one, true)?;
        rank.event(SIDE, other, true)?;
    }
    let times = rank.end()?;
    let ranks = f64::from(rank.ranks());
    let bytes = 2.0 * OVERLAP as f64 * (ranks - 1.0) / ranks;
    let mut rates = rates(&times, bytes);
    let rate = middle(&mut rates);
    Ok(if rate.is_finite() { rate } else { 0.0 })
}

/// Returns the bytes per nanosecond of each round of [`reach`], without the warm-up rounds.
fn rates(times: &[TaskTimes], bytes: f64) -> Vec<f64> {
    let find = |task: u32| times.iter().find(|t| t.task == task);
    (WARM as u32..REPEATS)
        .filter_map(|n| {
            let (gather, scatter) = (find(3 * n)?, find(3 * n + 2)?);
            let from = gather.start.min(scatter.start);
            let to = gather.end.max(scatter.end);
            (to > from).then(|| bytes / (to - from) as f64)
        })
        .collect()
}

/// Measures how much a kernel and a collective slow each other down. Each collective starts as in
/// training steps: after a kernel that has just ended, while a short kernel runs. It therefore gets
/// its multiprocessors immediately instead of at the end of the next kernel.
fn pair(
    rank: &mut Rank,
    single: &Single,
    short: &Single,
    (gather, gather_alone): (&Command, f64),
) -> Result<(f64, f64), Stop> {
    let (kernel, short) = (rank.command(single), rank.command(short));
    let alone = row(rank, COMPUTE_STREAM, &kernel)?;
    if !(alone > 0.0 && gather_alone > 0.0) {
        return Ok((1.0, 1.0));
    }
    // The kernels outlast the collective even if it takes twice as long.
    let launches = ((2.0 * gather_alone / alone) as u32).clamp(3, 60);
    rank.begin(true)?;
    let mut task = 0;
    let mut gathers = Vec::new();
    for round in 0..ROUNDS {
        let (go, done) = (2 * round, 2 * round + 1);
        rank.issue(COMPUTE_STREAM, short.clone(), task)?;
        rank.event(COMPUTE_STREAM, go, false)?;
        rank.event(SIDE, go, true)?;
        rank.issue(SIDE, gather.clone(), task + 1)?;
        rank.issue(COMPUTE_STREAM, short.clone(), task + 2)?;
        for n in 0..launches {
            rank.issue(COMPUTE_STREAM, kernel.clone(), task + 3 + n)?;
        }
        rank.event(SIDE, done, false)?;
        rank.event(COMPUTE_STREAM, done, true)?;
        gathers.push(task + 1);
        task += 3 + launches;
    }
    let times = rank.end()?;
    let (mut kernels, mut collectives) = slowed(&times, &gathers, launches);
    let factor = |slow: &mut [f64], alone: f64| {
        let slow = middle(slow);
        if slow.is_finite() {
            (slow / alone).max(1.0)
        } else {
            1.0
        }
    };
    let kernel = factor(&mut kernels, alone);
    Ok((kernel, factor(&mut collectives, gather_alone)))
}

/// Returns the times of kernels that overlap completely with a collective, and the times of the
/// collectives, without the first round. `gathers` are the tasks of the collectives. `launches`
/// kernels follow one task after each collective.
fn slowed(times: &[TaskTimes], gathers: &[u32], launches: u32) -> (Vec<f64>, Vec<f64>) {
    let find = |task: u32| times.iter().find(|t| t.task == task);
    let (mut kernels, mut collectives) = (Vec::new(), Vec::new());
    for &gather in gathers.iter().skip(1) {
        let Some(gather) = find(gather) else { continue };
        collectives.push(length(gather));
        let first = gather.task + 2;
        let inside = (first..first + launches)
            .filter_map(find)
            .filter(|k| k.start >= gather.start && k.end <= gather.end);
        kernels.extend(inside.map(length));
    }
    (kernels, collectives)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(task: u32, start: u64, end: u64) -> TaskTimes {
        TaskTimes {
            task,
            issued: 0,
            ready: start,
            free: start,
            start,
            end,
            waited: None,
        }
    }

    #[test]
    fn only_kernels_that_overlap_completely_count_without_the_first_round() {
        // A short kernel, the collective, a short kernel, and two kernels; all of it twice.
        let times = [
            task(0, 0, 1),
            task(1, 1, 900),
            task(2, 1, 2),
            task(3, 2, 100),
            task(4, 100, 200),
            task(5, 1000, 1001),
            task(6, 1001, 1251),
            task(7, 1002, 1003),
            task(8, 1010, 1140),
            task(9, 1140, 1260),
        ];
        assert_eq!(slowed(&times, &[1, 6], 2), (vec![130.0], vec![250.0]));
    }

    #[test]
    fn a_collective_that_did_not_run_is_refused() {
        let of = |us: f64| Table {
            kind: CollectiveKind::AllGather,
            dtype: None,
            ranks: 2,
            rows: vec![(1 << 17, 2.9), (1 << 30, us)],
            estimates: Vec::new(),
        };
        // 1 GiB over NVLink 4 (450 GB/s), and the time between two events with nothing between
        // them.
        assert_eq!(possible(&of(1400.0)), Ok(()));
        assert!(possible(&of(2.9)).unwrap_err().ends_with("it did not run"));
    }

    #[test]
    fn two_collectives_at_a_time_are_timed_by_round_and_not_between_rounds() {
        let round = |n: u32| {
            let at = 1000 * u64::from(n);
            [
                task(3 * n, at, at + 400),
                task(3 * n + 1, at, at + 10),
                task(3 * n + 2, at + 10, at + 500),
            ]
        };
        let times: Vec<TaskTimes> = (0..REPEATS).flat_map(round).collect();
        let count = REPEATS as usize - WARM;
        assert_eq!(rates(&times, 1000.0), vec![2.0; count]);
        assert!(rates(&[], 1000.0).is_empty());
    }
}
