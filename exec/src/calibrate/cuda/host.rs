//! Host costs of issuing work, and rates of copies.

use super::bench::Bench;
use super::middle;
use super::rank::Rank;
use super::recipe::{COMPUTE_STREAM, OTHER, SIDE};
use crate::base::operand::RawRange;
use crate::device::Device;
use shardlab_plan::ir::{CollectiveKind, DType, KernelClass, OpKind};

/// Number of commands in a measurement. It is smaller than the capacity of a stream's queue.
const MANY: u32 = 400;
/// Number of launches in a captured graph.
const GRAPH: u32 = 500;
/// Number of elements for a kernel that takes longer than its launch on the host.
const LONGER: u64 = 8 << 20;
/// Bytes of large and of small copies.
const LARGE: usize = 128 << 20;
const SMALL: usize = 4096;
/// Number of large copies per direction.
const COPIES: u32 = 12;

/// Host costs in microseconds, and copy rates in GB/s.
#[derive(Clone, Debug, Default)]
pub(super) struct Host {
    pub(super) launch_us: f64,
    pub(super) event_us: f64,
    pub(super) copy_us: f64,
    pub(super) host_wait_us: f64,
    pub(super) alloc_us: f64,
    pub(super) graph_launch_us: f64,
    pub(super) graph_gap_us: f64,
    /// Zero if it was not measured.
    pub(super) gap_us: f64,
    pub(super) copy_latency_us: f64,
}

/// Measures all costs on one rank.
pub(super) fn measure(bench: &Bench<'_>, host: &mut Host) -> Result<(), String> {
    let small = (vec![1024u64], DType::F32);
    let measured = bench.run(
        |recipe| {
            let two = [small.clone(), small.clone()];
            recipe.kernel(
                OpKind::Add,
                KernelClass::Pointwise,
                DType::F32,
                &two,
                &two[..1],
            )
        },
        |rank, single| {
            rank.say("the host's part");
            let mut h = Host::default();
            let command = rank.command(single);
            let us = |ns: u64, n: u32| ns as f64 / 1e3 / f64::from(n);
            // Issue time: the shortest of several, because interference can only make it longer.
            let mut launch = f64::INFINITY;
            let mut events = f64::INFINITY;
            for _ in 0..5 {
                rank.begin(false)?;
                let start = rank.now();
                for _ in 0..MANY {
                    rank.issue(COMPUTE_STREAM, command.clone(), 0)?;
                }
                launch = launch.min(us(rank.now() - start, MANY));
                rank.end()?;
                rank.begin(false)?;
                let start = rank.now();
                for e in 0..MANY / 2 {
                    rank.event(COMPUTE_STREAM, e, false)?;
                    rank.event(SIDE, e, true)?;
                }
                events = events.min(us(rank.now() - start, MANY));
                rank.end()?;
            }
            (h.launch_us, h.event_us) = (launch, events);
            // End of a wait: time from the end of the kernel until the host continues, without the
            // issue time.
            rank.begin(true)?;
            let mut waits = Vec::new();
            for n in 0..8 {
                rank.issue(COMPUTE_STREAM, command.clone(), n)?;
                rank.event(COMPUTE_STREAM, n, false)?;
                rank.host_wait(n)?;
                waits.push(rank.now());
            }
            let times = rank.end()?;
            let mut late: Vec<f64> = times
                .iter()
                .zip(&waits)
                .map(|(t, &w)| w.saturating_sub(t.end) as f64 / 1e3)
                .collect();
            h.host_wait_us = middle(&mut late);
            // Time of a graph's launches in addition to that of their kernels.
            rank.begin(true)?;
            for n in 0..MANY {
                rank.issue(COMPUTE_STREAM, command.clone(), n)?;
            }
            let mut kernels = rank.end_us(0)?;
            let kernel = middle(&mut kernels);
            let commands = (0..GRAPH)
                .map(|_| (COMPUTE_STREAM, command.clone()))
                .collect();
            rank.begin(false)?;
            let graph = rank.device().capture(commands)?;
            rank.end()?;
            let (mut issue, mut whole) = (f64::INFINITY, f64::INFINITY);
            for _ in 0..5 {
                rank.begin(false)?;
                let start = rank.now();
                rank.device().replay(graph, 0)?;
                issue = issue.min(us(rank.now() - start, 1));
                rank.device().idle()?;
                whole = whole.min(us(rank.now() - start, 1));
                rank.end()?;
            }
            h.graph_launch_us = issue;
            h.graph_gap_us = ((whole - issue) / f64::from(GRAPH) - kernel).max(0.1);
            // Small copies between pinned memory and the device.
            if let Some(pinned) = rank.device().pinned(SMALL) {
                let device = rank.scratch(SMALL);
                rank.begin(true)?;
                for n in 0..3 {
                    rank.copy(SIDE, pinned.range(), device, 2 * n)?;
                    rank.copy(SIDE, device, pinned.range(), 2 * n + 1)?;
                }
                let mut small = rank.end_us(0)?;
                h.copy_latency_us = middle(&mut small);
                rank.begin(false)?;
                let start = rank.now();
                for _ in 0..MANY / 4 {
                    rank.copy(SIDE, pinned.range(), device, 0)?;
                }
                h.copy_us = us(rank.now() - start, MANY / 4);
                rank.end()?;
            }
            Ok(h)
        },
    )?;
    *host = Host {
        alloc_us: allocation(),
        ..measured
    };
    Ok(())
}

/// Large copies to the device and to the host while all ranks copy, because ranks share the host's
/// memory and may share links.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copies {
    /// Rate of each direction alone, in GB/s.
    pub(super) gbps: [f64; 2],
    /// Share of its rate that each direction loses because of the other.
    pub(super) loss: [f64; 2],
}

impl Copies {
    /// Computes rates from the median microseconds of copies of `bytes` bytes in each direction,
    /// alone and overlapping with the other direction.
    fn of(bytes: usize, alone: [f64; 2], overlapped: [f64; 2]) -> Self {
        Self {
            gbps: alone.map(|us| bytes as f64 / us / 1e3),
            loss: [0, 1].map(|i| (1.0 - alone[i] / overlapped[i]).clamp(0.0, 0.9)),
        }
    }
}

/// Copies on all ranks of a bench at the same time. Returns `None` if memory cannot be pinned.
pub(super) fn copies(bench: &Bench<'_>) -> Result<Option<Copies>, String> {
    bench.run(
        |_| (),
        |rank, ()| {
            rank.say("copies to and from the host");
            let pinned = rank.device().pinned(2 * LARGE);
            // The first rank records times. If another rank has no pinned memory, it copies
            // nothing.
            if rank.agree(f64::from(u8::from(pinned.is_some())))? == 0.0 {
                return Ok(None);
            }
            let half = |range: RawRange, second: bool| RawRange {
                ptr: range.ptr.wrapping_add(if second { LARGE } else { 0 }),
                bytes: LARGE,
                ..range
            };
            let host = pinned.as_ref().map(|p| p.range());
            let device = rank.scratch(2 * LARGE);
            // Each direction has its own stream and its own halves of memory.
            let copy = |rank: &mut Rank, back: bool, task| {
                let Some(host) = host else { return Ok(()) };
                let (host, device) = (half(host, back), half(device, back));
                if back {
                    rank.copy(OTHER, device, host, task)
                } else {
                    rank.copy(SIDE, host, device, task)
                }
            };
            let mut alone = [0.0; 2];
            for (back, us) in [false, true].into_iter().zip(&mut alone) {
                rank.begin(true)?;
                for n in 0..COPIES {
                    copy(rank, back, n)?;
                }
                *us = middle(&mut rank.end_us(0)?);
            }
            rank.begin(true)?;
            for n in 0..COPIES {
                copy(rank, false, 2 * n)?;
                copy(rank, true, 2 * n + 1)?;
            }
            let times: Vec<(u64, u64)> = rank.end()?.iter().map(|t| (t.start, t.end)).collect();
            let known = alone.iter().all(|us| *us > 0.0);
            let overlapped = overlapped(&times).filter(|_| known);
            Ok(overlapped.map(|overlapped| Copies::of(LARGE, alone, overlapped)))
        },
    )
}

/// Returns the median microseconds of the even and of the odd tasks (start and end in nanoseconds),
/// among those that overlap completely with the other kind.
fn overlapped(times: &[(u64, u64)]) -> Option<[f64; 2]> {
    let kind = |i: usize| times.iter().skip(i).step_by(2).copied();
    let middles = [0, 1].map(|i| {
        let first = kind(1 - i).map(|t| t.0).min().unwrap_or(u64::MAX);
        let last = kind(1 - i).map(|t| t.1).max().unwrap_or(0);
        let inside = kind(i).filter(|t| t.0 >= first && t.1 <= last);
        let mut us: Vec<f64> = inside.map(|t| (t.1 - t.0) as f64 / 1e3).collect();
        middle(&mut us)
    });
    middles.iter().all(|m| *m > 0.0).then_some(middles)
}

/// Returns the microseconds per kernel in a sequence of many: the kernel's own time if it is
/// recorded, otherwise including the gap to the next one. The end of a kernel becomes visible later
/// if GPUs access each other's memory, so several ranks measure the total, and a single rank
/// measures the kernel's own time.
pub(super) fn spacing(bench: &Bench<'_>, record: bool) -> Result<f64, String> {
    bench.run(
        |recipe| {
            let two = [(vec![LONGER], DType::Bf16), (vec![LONGER], DType::Bf16)];
            let class = KernelClass::Pointwise;
            let kernel = recipe.kernel(OpKind::Mul, class, DType::Bf16, &two, &two[..1]);
            // A collective, after which the GPUs of the ranks access each other's memory.
            let kind = CollectiveKind::AllGather;
            (kernel, recipe.collective(kind, DType::Bf16, 1 << 20))
        },
        |rank, (single, gather)| {
            rank.say("gaps between kernels");
            let command = rank.command(single);
            let gather = rank.gather(*gather);
            if rank.ranks() > 1 {
                rank.prime(&[(SIDE, gather)])?;
            }
            let mut best = f64::INFINITY;
            for _ in 0..5 {
                rank.begin(record)?;
                let start = rank.now();
                for n in 0..MANY {
                    rank.issue(COMPUTE_STREAM, command.clone(), n)?;
                }
                rank.device().idle()?;
                let whole = (rank.now() - start) as f64 / 1e3 / f64::from(MANY);
                let mut kernels = rank.end_us(0)?;
                best = best.min(if record { middle(&mut kernels) } else { whole });
            }
            Ok(best)
        },
    )
}

/// Returns the microseconds of an allocation or a free, which do not involve a device.
fn allocation() -> f64 {
    let text = "[model]\nfamily = \"llama\"\nlayers = 4\nhidden = 64\nheads = 4\nffn = 128\nvocab = 128\n\
                [train]\nseq_len = 16\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 2\n";
    let Ok(scenario) = shardlab_plan::scenario::parse("bench", text, &[]) else {
        return 0.1;
    };
    let Ok(program) = shardlab_plan::plan(&scenario) else {
        return 0.1;
    };
    let start = std::time::Instant::now();
    let mut count = 0u32;
    for _ in 0..20 {
        let mut memory = shardlab_plan::memory::Memory::new(&program, None);
        for instr in &program.instrs {
            use shardlab_plan::program::Op;
            match instr.op {
                Op::Alloc(b) => count += u32::from(memory.alloc(&program, b).is_ok()),
                Op::Free(b) => count += u32::from(memory.free(&program, b)),
                _ => {}
            }
        }
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(count.max(1))
}

#[cfg(test)]
mod tests {
    use super::{Copies, overlapped};

    #[test]
    fn copies_lose_what_they_take_longer_when_overlapping() {
        // 50 MB in 1 and 2 ms alone, in 1.25 and 2 ms when overlapping.
        let copies = Copies::of(50_000_000, [1000.0, 2000.0], [1250.0, 2000.0]);
        assert_eq!(copies.gbps, [50.0, 25.0]);
        assert!((copies.loss[0] - 0.2).abs() < 1e-12 && copies.loss[1] == 0.0);
    }

    #[test]
    fn copies_without_overlap_do_not_count() {
        // To the device from 0 to 12 in steps of three, to the host from 1 to 13 in steps of four.
        // The first copy to the device starts alone, and the last one to the host ends alone.
        let times = [
            (0, 3),
            (1, 5),
            (3, 6),
            (5, 9),
            (6, 9),
            (9, 13),
            (9, 12),
            (13, 13),
        ];
        let us = |ns: f64| ns / 1e3;
        assert_eq!(overlapped(&times), Some([us(3.0), us(4.0)]));
        assert_eq!(overlapped(&[]), None);
        assert_eq!(overlapped(&[(0, 3), (4, 8)]), None);
    }
}
