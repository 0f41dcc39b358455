//! Throughput of kernels, against copying memory. Elements of the criterion reports are
//! floating-point operations for GEMMs and attention, bytes read and written for
//! everything else.

mod tape;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use shardlab_exec::kernels;
use shardlab_exec::{Hyper, LaunchContext, ONE_GROUP, RawRange};
use shardlab_plan::ir::{
    BodyOp, DType, Fused, Kernel, KernelClass, OpKind, Place, Real, ShardOp, Slot, op,
};
use shardlab_plan::units::{Bytes, Flops};
use std::hint::black_box;

const HYPER: Hyper = Hyper {
    lr: 1e-3,
    betas: [0.9, 0.95],
    eps: 1e-8,
    muon: shardlab_exec::NO_MUON,
    weight_decay: 0.1,
    clip_norm: 0.0,
    step: 3,
    groups: ONE_GROUP,
};

fn kernel(body: Vec<BodyOp>) -> Kernel {
    Kernel {
        name: "bench".to_owned(),
        class: KernelClass::Pointwise,
        flops: Flops(0),
        read: Bytes(0),
        written: Bytes(0),
        dtype: DType::F32,
        body,
        used_rows: None,
    }
}

/// A buffer of 1s with its type.
struct Buffer(Vec<u32>, DType);

impl Buffer {
    fn new(dtype: DType, numel: u64) -> Self {
        let one = match dtype {
            DType::Bf16 => 0x3f80_3f80,
            _ => 1.0f32.to_bits(),
        };
        Self(
            vec![one; (numel * dtype.size()).div_ceil(4) as usize],
            dtype,
        )
    }

    fn range(&mut self) -> RawRange {
        RawRange {
            ptr: self.0.as_mut_ptr().cast(),
            bytes: self.0.len() * 4,
            dtype: self.1,
        }
    }
}

fn slot(place: Place, shape: &[u64], dtype: DType) -> Slot {
    Slot {
        place,
        offset: 0,
        shape: shape.into(),
        strides: Default::default(),
        dtype,
    }
}

/// An op over contiguous operands of one type, and the buffers for it.
struct Case {
    kernel: Kernel,
    reads: Vec<Buffer>,
    writes: Vec<Buffer>,
}

impl Case {
    fn new(op: OpKind, inputs: &[(&[u64], DType)], outputs: &[(&[u64], DType)]) -> Self {
        let slots = |list: &[(&[u64], DType)], place: fn(u8) -> Place| {
            (0..)
                .zip(list)
                .map(|(i, (shape, dtype))| slot(place(i), shape, *dtype))
                .collect::<Vec<_>>()
        };
        let body = BodyOp {
            op,
            inputs: slots(inputs, Place::Read).into(),
            outputs: slots(outputs, Place::Write).into(),
        };
        let buffers = |list: &[(&[u64], DType)]| {
            list.iter()
                .map(|(s, d)| Buffer::new(*d, s.iter().product()))
                .collect()
        };
        Self {
            kernel: kernel(vec![body]),
            reads: buffers(inputs),
            writes: buffers(outputs),
        }
    }

    fn run(&mut self) {
        let reads: Vec<RawRange> = self.reads.iter_mut().map(Buffer::range).collect();
        let writes: Vec<RawRange> = self.writes.iter_mut().map(Buffer::range).collect();
        let ctx = LaunchContext {
            kernel: &self.kernel,
            data_rank: 0,
            hyper: HYPER,
            shapes: &[],
            groups: &[],
            scales: &[],
        };
        // SAFETY: the buffers outlive the call, on this thread alone.
        unsafe { kernels::launch(&ctx, &reads, &writes) }.expect("a well-formed launch");
    }

    /// Bytes of all operands.
    fn bytes(&self) -> u64 {
        self.reads
            .iter()
            .chain(&self.writes)
            .map(|b| b.0.len() as u64 * 4)
            .sum()
    }
}

fn copies(c: &mut Criterion) {
    let mut g = c.benchmark_group("copy");
    for numel in [1u64 << 14, 1 << 18, 1 << 22] {
        let (from, mut to) = (vec![1.0f32; numel as usize], vec![0.0f32; numel as usize]);
        g.throughput(Throughput::Bytes(numel * 8));
        g.bench_function(format!("memcpy {numel}"), |b| {
            b.iter(|| black_box(&mut to).copy_from_slice(black_box(&from)));
        });
    }
}

fn pointwise(c: &mut Criterion) {
    let mut g = c.benchmark_group("pointwise");
    let (a, d) = (1024u64, 256u64);
    let full: &[u64] = &[a, d];
    for t in [DType::F32, DType::Bf16] {
        let x = (full, t);
        let row = (&[d][..], t);
        let stat = (&[a, 1][..], DType::F32);
        let cases = [
            (OpKind::Add, vec![x, x], vec![x]),
            (OpKind::Silu, vec![x], vec![x]),
            (OpKind::SiluGrad, vec![x, x], vec![x]),
            (OpKind::Gelu, vec![x], vec![x]),
            (
                OpKind::RmsNorm(op::RmsNorm { eps: Real(1e-5) }),
                vec![x, row],
                vec![x, stat],
            ),
            (OpKind::RmsNormGrad, vec![x, x, row, stat], vec![x]),
            (OpKind::RmsNormWeightGrad, vec![x, x, stat], vec![row]),
            (OpKind::LogSoftmax, vec![x], vec![x]),
        ];
        for (op, ins, outs) in cases {
            let mut case = Case::new(op, &ins, &outs);
            g.throughput(Throughput::Bytes(case.bytes()));
            g.bench_function(format!("{} {t} {a}x{d}", op.name()), |b| {
                b.iter(|| case.run())
            });
        }
    }
    // The cost of a launch itself.
    let one = (&[1u64][..], DType::F32);
    let mut case = Case::new(OpKind::Add, &[one, one], &[one]);
    g.throughput(Throughput::Elements(1));
    g.bench_function("launch of one element", |b| b.iter(|| case.run()));
}

fn gemms(c: &mut Criterion) {
    let mut g = c.benchmark_group("gemm");
    for (m, n, k) in [
        (64, 64, 64),
        (256, 64, 64),
        (1024, 256, 256),
        (1024, 512, 512),
        (2048, 1408, 512),
    ] {
        for (t, ta, tb) in [
            (DType::F32, false, true),
            (DType::F32, false, false),
            (DType::F32, true, false),
            (DType::Bf16, false, true),
        ] {
            let (a, b, y) = ([m, k], [k, n], [m, n]);
            let (at, bt) = ([k, m], [n, k]);
            let op = OpKind::Gemm(op::Gemm {
                ta,
                tb,
                bias: false,
                accumulate: false,
            });
            let (a, b): (&[u64], &[u64]) = (if ta { &at } else { &a }, if tb { &bt } else { &b });
            let mut case = Case::new(op, &[(a, t), (b, t)], &[(&y, t)]);
            g.throughput(Throughput::Elements(2 * m * n * k));
            let name = format!(
                "{t} {m}x{n}x{k} {}{}",
                if ta { 't' } else { 'n' },
                if tb { 't' } else { 'n' }
            );
            g.bench_function(name, |b| b.iter(|| case.run()));
        }
    }
}

fn attention(c: &mut Criterion) {
    let mut g = c.benchmark_group("attention");
    for (batch, heads, kv, seq, d) in [
        (4u64, 4u64, 2u64, 128u64, 16u64),
        (4, 8, 2, 256, 64),
        (1, 8, 8, 1024, 64),
    ] {
        for t in [DType::F32, DType::Bf16] {
            let (q, k, l) = (
                [batch, heads, seq, d],
                [batch, kv, seq, d],
                [batch, heads, seq],
            );
            let (q, k, l) = ((&q[..], t), (&k[..], t), (&l[..], DType::F32));
            let name = format!("{t} {batch}x{heads}/{kv}x{seq}x{d}");
            let scale = Real(0.125);
            let flops = 2 * batch * heads * seq * seq * d;
            let mut case = Case::new(
                OpKind::Attention(op::Attention {
                    causal: true,
                    scale,
                }),
                &[q, k, k],
                &[q, l],
            );
            g.throughput(Throughput::Elements(flops));
            g.bench_function(format!("forward {name}"), |b| b.iter(|| case.run()));
            let op = OpKind::AttentionGrad(op::AttentionGrad {
                causal: true,
                scale,
            });
            let mut case = Case::new(op, &[q, q, k, k, q, l], &[q, k, k]);
            g.throughput(Throughput::Elements(flops / 2 * 5));
            g.bench_function(format!("backward {name}"), |b| b.iter(|| case.run()));
        }
    }
}

fn optimizer(c: &mut Criterion) {
    let mut g = c.benchmark_group("optimizer");
    let n = 1u64 << 20;
    let mut buffers: Vec<Buffer> = (0..4).map(|_| Buffer::new(DType::F32, n)).collect();
    let r: Vec<RawRange> = buffers.iter_mut().map(Buffer::range).collect();
    let body = BodyOp {
        op: OpKind::Shard(ShardOp::AdamW(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        })),
        inputs: Default::default(),
        outputs: Default::default(),
    };
    let kernel = kernel(vec![body]);
    let ctx = LaunchContext {
        kernel: &kernel,
        data_rank: 0,
        hyper: HYPER,
        shapes: &[],
        groups: &[],
        scales: &[],
    };
    g.throughput(Throughput::Bytes(n * 4 * 7));
    g.bench_function("adamw f32", |b| {
        b.iter(|| {
            // SAFETY: the buffers outlive the call, on this thread alone.
            unsafe { kernels::launch(&ctx, &r, &[r[0], r[2], r[3]]) }
                .expect("a well-formed launch");
        });
    });
}

criterion_group!(
    benches,
    copies,
    pointwise,
    gemms,
    attention,
    optimizer,
    tape::bench
);
criterion_main!(benches);
