//! The contention model compared with measured pairs on 4 H200 (torch 2.11, NCCL 2.28.9, NVLS off):
//! kernels back to back on one stream, and twenty collectives back to back on another. Both streams
//! have default priority.
//!
//! The host enqueues all collectives of a pair, then all kernels. Times are from the first launch
//! to the end of each stream's work, divided by the number of its launches. They therefore include
//! the work of a stream after the other one has finished.

mod common;

use shardlab_plan::ir::{COMPUTE, CollectiveKind, DType, KernelClass};
use shardlab_plan::program::{Op, StreamKind};
use shardlab_plan::record::Blocker;
use shardlab_sim::hardware::{
    self, CollectiveName, CollectiveTable, GemmRow, GemmTable, MemoryClass, MemoryTable,
};
use shardlab_sim::synthetic::Builder;
use shardlab_sim::{Options, Profile, simulate};

/// Number of collectives in a pair.
const COLLECTIVES: usize = 20;
/// Host time in microseconds of one `torch.distributed` call and of one `torch.mm(out=...)`.
const HOST_US: (f64, f64) = (18.0, 7.0);

/// One measured pair; `product` is all zero for `torch.mul` over 512 MiB.
struct Row {
    product: (u64, u64, u64),
    bytes: u64,
    alone: (f64, f64),
    kernels: usize,
    together: (f64, f64),
}

#[expect(clippy::too_many_arguments, reason = "a table row")]
const fn row(
    m: u64,
    n: u64,
    k: u64,
    mib: u64,
    g: f64,
    c: f64,
    kernels: usize,
    g2: f64,
    c2: f64,
) -> Row {
    Row {
        product: (m, n, k),
        bytes: mib << 20,
        alone: (g, c),
        kernels,
        together: (g2, c2),
    }
}

/// m, n, k, MiB, kernel alone, collective alone, number of kernels, kernel overlapped, collective
/// overlapped (times in microseconds). All-gathers and reduce-scatters alternate.
const ROWS: &[Row] = &[
    row(8192, 8192, 2048, 64, 364.0, 201.2, 11, 432.1, 311.2),
    row(8192, 8192, 2048, 64, 369.9, 189.1, 10, 443.8, 295.2),
    row(8192, 8192, 2048, 256, 369.4, 658.2, 35, 452.4, 856.4),
    row(8192, 8192, 2048, 256, 370.4, 673.7, 36, 452.4, 860.3),
    row(8192, 4096, 4096, 64, 355.2, 193.3, 10, 428.9, 307.8),
    row(8192, 4096, 4096, 64, 355.0, 191.0, 10, 433.4, 305.4),
    row(8192, 4096, 4096, 256, 355.6, 669.6, 37, 446.6, 881.7),
    row(8192, 4096, 4096, 256, 355.0, 674.3, 37, 446.6, 858.8),
    row(16384, 14336, 4096, 64, 2614.1, 220.5, 4, 2974.1, 807.7),
    row(16384, 14336, 4096, 64, 2781.4, 210.7, 4, 3017.1, 740.1),
    row(16384, 14336, 4096, 256, 2773.7, 728.0, 5, 2990.1, 1319.0),
    row(16384, 14336, 4096, 256, 2681.7, 708.9, 5, 3037.4, 1278.2),
    row(4096, 128256, 2048, 64, 2847.6, 220.7, 4, 3234.3, 807.0),
    row(4096, 128256, 2048, 64, 3071.3, 213.0, 4, 3420.1, 833.4),
    row(4096, 128256, 2048, 256, 3258.6, 751.8, 4, 3713.3, 1330.2),
    row(4096, 128256, 2048, 256, 3114.6, 726.0, 4, 3315.3, 1366.4),
    row(0, 0, 0, 256, 253.1, 678.3, 53, 306.4, 1054.9),
    row(0, 0, 0, 256, 252.7, 672.1, 53, 296.9, 1096.3),
];

/// Simulates a pair with a profile whose tables hold only the times of this pair.
fn pair(row: &Row, mut profile: Profile) -> (f64, f64) {
    let (m, n, k) = row.product;
    profile.gemm = vec![GemmTable {
        source: "pair".into(),
        dtype: DType::Bf16,
        scaling: None,
        fast_accum: None,
        rows: vec![GemmRow(m, n, k, row.alone.0)],
    }];
    let moved = 1 << 30;
    profile.memory = vec![MemoryTable {
        source: "pair".into(),
        class: MemoryClass::Pointwise,
        op: None,
        dtype: None,
        columns: None,
        in_step: false,
        bytes: None,
        rows: vec![(moved, row.alone.0)],
    }];
    profile.collective = vec![CollectiveTable {
        source: "pair".into(),
        kind: CollectiveName::AllGather,
        ranks: 4,
        nodes: 1,
        dtype: None,
        rows: vec![(row.bytes, row.alone.1)],
        nccl_rows: Vec::new(),
    }];
    (profile.host.collective_us, profile.host.launch_us) = HOST_US;
    let mut b = Builder::new("pair", 4);
    let side = b.add_stream(StreamKind::AllGather, 0);
    let comm = b.communicator("shard", 4, 1);
    let gather = b.collective(CollectiveKind::AllGather, comm, row.bytes);
    let kernel = match row.product {
        (0, ..) => b.kernel("mul", KernelClass::Pointwise, 0, moved / 2, moved / 2),
        (m, n, k) => b.gemm(m, n, k),
    };
    for _ in 0..COLLECTIVES {
        b.op(Op::Collective {
            id: gather,
            stream: side,
        });
    }
    for _ in 0..row.kernels {
        b.launch(kernel, COMPUTE);
    }
    for stream in [side, COMPUTE] {
        let event = b.add_event();
        b.op(Op::Record { event, stream }).op(Op::HostWait(event));
    }
    let run = simulate(
        &b.finish(),
        &profile,
        &Options {
            steps: 2,
            ..Options::default()
        },
    )
    .unwrap();
    let end = |stream| {
        run.spans
            .iter()
            .filter(|s| s.stream == stream)
            .map(|s| s.end.us())
            .fold(0.0, f64::max)
    };
    let start = run.steps.last().unwrap().start.us();
    (
        (end(COMPUTE) - start) / row.kernels as f64,
        (end(side) - start) / COLLECTIVES as f64,
    )
}

/// Returns the mean absolute relative error of kernels and of collectives, and the largest error.
fn errors(profile: &Profile, print: bool) -> (f64, f64, f64) {
    let (mut kernels, mut collectives, mut worst) = (0.0, 0.0, 0.0f64);
    for row in ROWS {
        let (g, c) = pair(row, profile.clone());
        let (eg, ec) = (g / row.together.0 - 1.0, c / row.together.1 - 1.0);
        if print {
            println!(
                "{:?} {:>3} MiB: kernel {g:7.1} us, measured {:7.1} ({:+5.1} %); collective {c:7.1} us, measured {:7.1} ({:+5.1} %)",
                row.product,
                row.bytes >> 20,
                row.together.0,
                100.0 * eg,
                row.together.1,
                100.0 * ec
            );
        }
        kernels += eg.abs();
        collectives += ec.abs();
        worst = worst.max(eg.abs()).max(ec.abs());
    }
    (
        kernels / ROWS.len() as f64,
        collectives / ROWS.len() as f64,
        worst,
    )
}

#[test]
fn measured_pairs_are_reproduced() {
    let (kernels, collectives, worst) = errors(&hardware::load("h200-nvlink").unwrap(), true);
    println!(
        "mean {:.1} % and {:.1} %, worst {:.1} %",
        100.0 * kernels,
        100.0 * collectives,
        100.0 * worst
    );
    assert!(
        kernels < 0.05 && collectives < 0.08 && worst < 0.20,
        "{kernels} {collectives} {worst}"
    );
}

/// Simulates a GEMM of 400 us and a memory-bound kernel on another stream, the second one issued
/// while the first one runs. Returns start and end of the kernels in microseconds, and whether the
/// second one waited for SMs.
fn turns(gemm_first: bool, memory_us: f64) -> ([(f64, f64); 2], bool) {
    let mut profile = hardware::load("h200-nvlink").unwrap();
    profile.gemm[0].rows = vec![GemmRow(8192, 8192, 2048, 400.0)];
    profile.gemm.truncate(1);
    let moved = 1 << 30;
    profile.memory = vec![MemoryTable {
        source: "test".into(),
        class: MemoryClass::Pointwise,
        op: None,
        dtype: None,
        columns: None,
        in_step: false,
        bytes: None,
        rows: vec![(moved, memory_us)],
    }];
    profile.host.launch_us = 5.0;
    let mut b = Builder::new("turns", 1);
    let side = b.add_stream(StreamKind::AllGather, 0);
    let gemm = (b.gemm(8192, 8192, 2048), COMPUTE);
    let memory = b.kernel("mul", KernelClass::Pointwise, 0, moved / 2, moved / 2);
    let mut order = [gemm, (memory, side)];
    if !gemm_first {
        order.reverse();
    }
    for (kernel, stream) in order {
        b.launch(kernel, stream);
    }
    let options = Options {
        steps: 1,
        ..Options::default()
    };
    let run = simulate(&b.finish(), &profile, &options).unwrap();
    let [first, second] = [0, 1].map(|i| &run.spans[i]);
    let times = [first, second].map(|s| (s.start.us(), s.end.us()));
    (times, second.blocker == Blocker::Sms)
}

/// A kernel that fills the device starts when the one that is running ends, if either is bound by
/// arithmetic. In a step on two H200, updates of experts on the stream of reductions wait for
/// matmuls, and matmuls wait for updates.
#[test]
fn a_gemm_and_an_update_take_turns() {
    for gemm_first in [true, false] {
        let ([first, second], waited) = turns(gemm_first, 300.0);
        assert!(waited && second.0 >= first.1, "{first:?} {second:?}");
        let total = second.1 - first.0;
        assert!((total - 700.0).abs() < 15.0, "{total}");
    }
}

/// A short kernel finds room next to the blocks of a GEMM.
#[test]
fn a_short_kernel_runs_next_to_a_gemm() {
    let ([gemm, short], waited) = turns(true, 10.0);
    assert!(!waited && short.1 < gemm.1, "{gemm:?} {short:?}");
}
