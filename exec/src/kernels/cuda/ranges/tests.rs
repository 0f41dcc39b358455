//! Lists of ranges, performed on the host, give the results of the CPU's kernels.

use super::{Parameters, Piece, Work, operands, work};
use crate::device::NO_HYPER;
use crate::kernels;
use crate::kernels::cuda::codegen::shard::Ranges;
use crate::operand::{LaunchContext, RawRange};
use proptest::prelude::*;
use shardlab_plan::ir::{
    BodyOp, DType, Fused, Kernel, KernelClass, OpKind, Pieces, RECIPROCAL_STRIDE, Real, ScaleBlock,
    Shape, ShardOp,
};
use shardlab_plan::program::{GroupRun, ScaleRun};
use shardlab_plan::units::{Bytes, Flops};

fn kernel(op: ShardOp) -> Kernel {
    Kernel {
        name: op.name().to_owned(),
        class: KernelClass::MultiCopy,
        flops: Flops(0),
        read: Bytes(0),
        written: Bytes(0),
        dtype: DType::F32,
        body: vec![BodyOp {
            op: OpKind::Shard(op),
            inputs: [].into_iter().collect(),
            outputs: [].into_iter().collect(),
        }],
        used_rows: None,
    }
}

/// Runs an operation with the CPU's kernels. The ranges must be in the test's memory.
fn launch(
    op: ShardOp,
    known: Parameters<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), kernels::KernelError> {
    let kernel = kernel(op);
    let context = LaunchContext {
        kernel: &kernel,
        data_rank: 0,
        hyper: NO_HYPER,
        shapes: known.shapes,
        groups: known.groups,
        scales: known.scales,
    };
    // SAFETY: the caller's ranges are in the test's memory, which nothing else uses.
    unsafe { kernels::launch(&context, reads, writes) }
}

/// Memory with ranges one after another.
struct Memory {
    words: Vec<u64>,
    ranges: Vec<(usize, usize, DType)>,
}

impl Memory {
    fn new(parts: &[(usize, DType)], seed: u64) -> Self {
        let mut ranges = Vec::new();
        let mut at = 0usize;
        for &(n, ty) in parts {
            let size = ty.size() as usize;
            at = at.next_multiple_of(size);
            ranges.push((at, n * size, ty));
            at += n * size;
        }
        let mut words = vec![0u64; at.div_ceil(8) + 1];
        let mut x = seed | 1;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for &(at, len, ty) in &ranges {
            for chunk in bytes[at..at + len].chunks_exact_mut(ty.size() as usize) {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1);
                let v = ((x >> 40) as i64 - (1 << 23)) as f32 / 65536.0;
                match ty {
                    DType::Bf16 => chunk.copy_from_slice(&half::bf16::from_f32(v).to_le_bytes()),
                    DType::F8E4m3 => chunk.fill(v as u8),
                    _ => chunk.copy_from_slice(&v.to_le_bytes()),
                }
            }
        }
        Self { words, ranges }
    }

    fn range(&mut self, i: usize) -> RawRange {
        let (at, bytes, dtype) = self.ranges[i];
        let base = self.words.as_mut_ptr().cast::<u8>();
        RawRange {
            ptr: base.wrapping_add(at),
            bytes,
            dtype,
        }
    }
}

fn flat(at: u64, n: u64, dtype: DType) -> RawRange {
    RawRange {
        ptr: at as *mut u8,
        bytes: (n * dtype.size()) as usize,
        dtype,
    }
}

/// Runs a piece with the CPU's kernels, as the GPU's list kernel would.
fn perform(kind: Ranges, p: &Piece, w: &Work) {
    let scaled = |op, run: Option<ScaleRun>, reads: &[RawRange], writes: &[RawRange]| {
        let known = Parameters {
            scales: run.as_slice(),
            ..Parameters::default()
        };
        launch(op, known, reads, writes).unwrap();
    };
    let run = |op, reads: &[RawRange], writes: &[RawRange]| scaled(op, None, reads, writes);
    match kind {
        Ranges::Raw if p.at[1] == 0 => {
            run(ShardOp::Zero, &[], &[flat(p.at[0], p.n, DType::U8)]);
        }
        Ranges::Raw => run(
            ShardOp::Copy,
            &[flat(p.at[1], p.n, DType::U8)],
            &[flat(p.at[0], p.n, DType::U8)],
        ),
        Ranges::Cast { from, to } => run(
            ShardOp::Copy,
            &[flat(p.at[1], p.n, from)],
            &[flat(p.at[0], p.n, to)],
        ),
        Ranges::Accumulate { from, to } => run(
            ShardOp::Accumulate,
            &[flat(p.at[1], p.n, from)],
            &[flat(p.at[0], p.n, to)],
        ),
        Ranges::Sum {
            from,
            to,
            pieces,
            accumulate,
        } => {
            let bytes = (p.n * from.size()) as usize;
            let mut packed = vec![0u64; (bytes * pieces as usize).div_ceil(8)];
            let base = packed.as_mut_ptr() as u64;
            for r in 0..u64::from(pieces) {
                run(
                    ShardOp::Copy,
                    &[flat(p.at[1] + r * p.at[2], bytes as u64, DType::U8)],
                    &[flat(base + r * bytes as u64, bytes as u64, DType::U8)],
                );
            }
            let sum = flat(p.at[0], p.n, to);
            run(
                ShardOp::SumPieces {
                    ranks: pieces,
                    factor: Real(f64::from(w.factor)),
                    accumulate,
                },
                &[flat(base, u64::from(pieces) * p.n, from), sum],
                &[sum],
            );
        }
        Ranges::Scale { of } => run(
            ShardOp::Scale {
                factor: Real(f64::from(w.factor)),
            },
            &[],
            &[flat(p.at[0], p.n, of)],
        ),
        Ranges::Amax { of, through } => {
            let mut found = 0.0f32;
            let of_it = flat(&raw mut found as u64, 1, DType::F32);
            let all = ScaleRun {
                scale: Some(0),
                numel: p.n,
            };
            scaled(
                ShardOp::ShardAmax { through },
                Some(all),
                &[flat(p.at[1], p.n, of)],
                &[of_it],
            );
            // SAFETY: the maximum is in the test's memory.
            unsafe {
                let most = p.at[0] as *mut f32;
                *most = found.max(*most);
            }
        }
        Ranges::Scales { to } => {
            let [scales, inverses, amax] = [(0, 1), (1, RECIPROCAL_STRIDE), (2, 1)]
                .map(|(i, stride)| flat(p.at[i], p.n * stride, DType::F32));
            run(ShardOp::ShardScales { to }, &[amax], &[scales, inverses]);
        }
        Ranges::Codes { from, through, to } => {
            let all = ScaleRun {
                scale: (p.at[2] != 0).then_some(0),
                numel: p.n,
            };
            let by = flat(p.at[2], u64::from(p.at[2] != 0), DType::F32);
            let reads = [flat(p.at[1], p.n, from), by];
            scaled(
                ShardOp::ShardCast { through },
                Some(all),
                &reads,
                &[flat(p.at[0], p.n, to)],
            );
        }
        Ranges::BlockCodes { from, through, to } => {
            let shapes = [Shape::from_slice(&[p.n / p.at[3], p.at[3]])];
            let block = ScaleBlock::SQUARE;
            let known = Parameters {
                shapes: &shapes,
                ..Parameters::default()
            };
            let writes = [
                flat(p.at[0], p.n, to),
                flat(p.at[2], p.n / block.numel(), DType::F32),
            ];
            let op = ShardOp::ShardCastBlocks { through, block };
            launch(op, known, &[flat(p.at[1], p.n, from)], &writes).unwrap();
        }
        Ranges::RouterBias => {
            let [bias, counts] = [0, 1].map(|i| flat(p.at[i], p.n, DType::F32));
            let speed = Real(f64::from(w.factor));
            run(ShardOp::RouterBias { speed }, &[bias, counts], &[bias]);
        }
        other => panic!("{other:?} is not compared here"),
    }
}

/// Runs both ways on the same memory; returns the number of pieces.
fn agree(
    op: ShardOp,
    shapes: &[Shape],
    parts: &[(usize, DType)],
    reads: &[usize],
    writes: &[usize],
) -> usize {
    let known = Parameters {
        shapes,
        ..Parameters::default()
    };
    agree_knowing(op, known, parts, reads, writes)
}

/// Does the same with all that a launch knows of its operands.
fn agree_knowing(
    op: ShardOp,
    known: Parameters<'_>,
    parts: &[(usize, DType)],
    reads: &[usize],
    writes: &[usize],
) -> usize {
    let mut cpu = Memory::new(parts, 7);
    let mut gpu = Memory::new(parts, 7);
    let of = |m: &mut Memory, which: &[usize]| -> Vec<RawRange> {
        which.iter().map(|&i| m.range(i)).collect()
    };
    let (r, w) = (of(&mut cpu, reads), of(&mut cpu, writes));
    launch(op, known, &r, &w).unwrap();
    let (r, w) = (of(&mut gpu, reads), of(&mut gpu, writes));
    let work = work(op, known, &r, &w).unwrap();
    let mut pieces = 0;
    for batch in &work.batches {
        for p in &batch.pieces {
            perform(batch.kind, p, &work);
            pieces += 1;
        }
    }
    assert_eq!(cpu.words, gpu.words);
    pieces
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::F32, DType::Bf16])
}

proptest! {
    #[test]
    fn copies_between_sequences(
        cuts in prop::collection::vec(0usize..40, 1..5),
        others in prop::collection::vec(0usize..40, 1..5),
        types in prop::collection::vec(dtypes(), 10),
    ) {
        let total: usize = cuts.iter().sum();
        // The other side is cut elsewhere, to the same length.
        let mut rest = total;
        let mut sizes = Vec::new();
        for o in others {
            let n = o.min(rest);
            sizes.push(n);
            rest -= n;
        }
        sizes.push(rest);
        let parts: Vec<(usize, DType)> = cuts.iter().chain(&sizes).copied().zip(types.iter().copied().cycle()).collect();
        let reads: Vec<usize> = (0..cuts.len()).collect();
        let writes: Vec<usize> = (cuts.len()..parts.len()).collect();
        agree(ShardOp::MultiCopy, &[], &parts, &reads, &writes);
    }

    #[test]
    fn packing_and_unpacking(
        shapes in prop::collection::vec((1u64..7, 1u64..5), 1..4),
        ranks in 1u32..5,
        packed in dtypes(),
        param in dtypes(),
        padded in any::<bool>(),
    ) {
        let shapes: Vec<Shape> = shapes.iter().map(|&(r, c)| Shape::from_slice(&[r, c])).collect();
        let shard = |s: &Shape| (s[0].div_ceil(u64::from(ranks)) * s[1]) as usize;
        let whole: usize = shapes.iter().map(|s| shard(s) * ranks as usize).sum();
        let mut parts = vec![(whole, packed)];
        let numel = |s: &Shape| if padded { shard(s) * ranks as usize } else { (s[0] * s[1]) as usize };
        parts.extend(shapes.iter().map(|s| (numel(s), param)));
        let params: Vec<usize> = (1..parts.len()).collect();
        agree(ShardOp::CopyOut { ranks }, &shapes, &parts, &[0], &params);
        agree(ShardOp::ChunkCat { ranks }, &shapes, &parts, &params, &[0]);
    }

    #[test]
    fn sums_and_factors(n in 1usize..50, m in 0usize..20, from in dtypes(), to in dtypes()) {
        agree(ShardOp::Accumulate, &[], &[(n + m, from), (n, to), (m, to)], &[0], &[1, 2]);
        agree(ShardOp::Scale { factor: Real(0.37) }, &[], &[(n, from), (m, to)], &[], &[0, 1]);
        agree(ShardOp::Zero, &[], &[(n, from), (m, to)], &[], &[0, 1]);
    }

    #[test]
    fn sums_of_pieces(ranks in 1u32..5, n in 1usize..50, m in 0usize..20, from in dtypes(), to in dtypes(), accumulate in any::<bool>()) {
        let op = ShardOp::SumPieces { ranks, factor: Real(0.37), accumulate };
        let parts = [((n + m) * ranks as usize, from), (n, to), (m, to)];
        let pieces = agree(op, &[], &parts, &[0, 1, 2], &[1, 2]);
        assert!(pieces <= 2, "{pieces}");
    }
}

/// Runs of tensors that have a scale each, in any order, with padding between them.
fn scale_runs() -> impl Strategy<Value = Vec<ScaleRun>> {
    let run = (prop::option::weighted(0.8, 0u32..5), 0u64..40);
    let run = run.prop_map(|(scale, numel)| ScaleRun { scale, numel });
    prop::collection::vec(run, 1..8)
}

proptest! {
    #[test]
    fn shards_in_8_bits(runs in scale_runs(), main in dtypes(), rounded in any::<bool>()) {
        let through = if rounded { DType::Bf16 } else { DType::F32 };
        let n = runs.iter().map(|run| run.numel as usize).sum();
        let known = Parameters { scales: &runs, ..Parameters::default() };
        let parts = [(n, main), (5, DType::F32), (n, DType::F8E4m3)];
        agree_knowing(ShardOp::ShardAmax { through }, known, &parts, &[0], &[1]);
        agree_knowing(ShardOp::ShardCast { through }, known, &parts, &[0, 1], &[2]);
    }
}

/// An update that finds maxima is cut where its tensors end, and where its parameter groups do.
#[test]
fn updates_are_cut_where_scales_are() {
    let f = DType::F32;
    let mut m = Memory::new(&[(10, f), (10, f), (2, f)], 3);
    let [weight, grad, maxima] = [0, 1, 2].map(|i| m.range(i));
    let op = ShardOp::Sgd(Fused {
        cast: false,
        pieces: None,
        maxima: true,
    });
    let scales = [(Some(1), 4), (None, 1), (Some(0), 5)];
    let scales = scales.map(|(scale, numel)| ScaleRun { scale, numel });
    let groups = [(0, 6), (1, 4)].map(|(group, numel)| GroupRun { group, numel });
    let known = Parameters {
        groups: &groups,
        scales: &scales,
        ..Parameters::default()
    };
    let w = work(op, known, &[weight, grad], &[weight, maxima]).unwrap();
    let [zeros, update] = &w.batches[..] else {
        panic!("{:?}", w.batches)
    };
    assert_eq!(zeros.kind, Ranges::Raw);
    assert_eq!(zeros.pieces[0].at[..2], [maxima.ptr as u64, 0]);
    assert_eq!(zeros.pieces[0].n, 8);
    let slot = maxima.ptr as u64;
    let found: Vec<_> = update
        .pieces
        .iter()
        .map(|p| (p.n, p.at[2], p.at[3]))
        .collect();
    assert_eq!(
        found,
        [(4, slot + 4, 0), (1, 0, 0), (1, slot, 0), (4, slot, 1)]
    );
    assert_eq!(update.pieces[3].at[1], grad.ptr as u64 + 24);
    let short = Parameters {
        scales: &scales[..2],
        ..known
    };
    assert!(work(op, short, &[weight, grad], &[weight, maxima]).is_err());
}

/// A shard with the last rows of a matrix, padding, and the first rows of another matrix: each
/// block has a scale, in the order of the codes.
#[test]
fn blocks_of_shards_in_8_bits() {
    let shapes = [&[128, 256][..], &[16384], &[256, 128]].map(Shape::from_slice);
    let op = ShardOp::ShardCastBlocks {
        through: DType::Bf16,
        block: ScaleBlock::SQUARE,
    };
    let n = 128 * 256 + 16384 + 256 * 128;
    let parts = |main| [(n, main), (n, DType::F8E4m3), (n / 16384, DType::F32)];
    for main in [DType::F32, DType::Bf16] {
        assert_eq!(agree(op, &shapes, &parts(main), &[0], &[1, 2]), 4);
    }
    let mut m = Memory::new(&parts(DType::F32), 3);
    let [main, codes, scales] = [0, 1, 2].map(|i| m.range(i));
    for shapes in [
        &[&[64, 256][..], &[n as u64 - 64 * 256]],
        &[&[128, 192][..], &[n as u64 - 128 * 192]],
        &[&[128, 256][..], &[n as u64 - 128 * 256 - 1]],
    ] {
        let shapes = shapes.map(Shape::from_slice);
        let known = Parameters {
            shapes: &shapes,
            ..Parameters::default()
        };
        assert!(work(op, known, &[main], &[codes, scales]).is_err());
        let run = launch(op, known, &[main], &[codes, scales]);
        assert!(run.is_err(), "{shapes:?}");
    }
}

#[test]
fn scales_and_their_reciprocals() {
    let apart = RECIPROCAL_STRIDE as usize;
    let parts = [70, 70, 70 * apart].map(|n| (n, DType::F32));
    let op = ShardOp::ShardScales { to: DType::F8E4m3 };
    assert_eq!(agree(op, &[], &parts, &[0], &[1, 2]), 1);
}

#[test]
fn shards_that_do_not_fit_their_scales_are_refused() {
    let mut m = Memory::new(&[(8, DType::F32), (2, DType::F32), (8, DType::F8E4m3)], 3);
    let [main, by, codes] = [0, 1, 2].map(|i| m.range(i));
    for (scale, numel) in [(1, 7), (2, 8)] {
        let runs = [ScaleRun {
            scale: Some(scale),
            numel,
        }];
        let known = Parameters {
            scales: &runs,
            ..Parameters::default()
        };
        let through = DType::Bf16;
        let (amax, cast) = (
            ShardOp::ShardAmax { through },
            ShardOp::ShardCast { through },
        );
        assert!(work(amax, known, &[main], &[by]).is_err());
        assert!(work(cast, known, &[main, by], &[codes]).is_err());
    }
    let runs = [ScaleRun {
        scale: Some(1),
        numel: 8,
    }];
    let known = Parameters {
        scales: &runs,
        ..Parameters::default()
    };
    let cast = ShardOp::ShardCast {
        through: DType::Bf16,
    };
    let w = work(cast, known, &[main, by], &[codes]).unwrap();
    assert_eq!(w.batches[0].pieces[0].at[2], by.ptr as u64 + 4);
    let in_bytes = work(cast, known, &[main, codes], &[codes]);
    assert!(in_bytes.is_err());
}

#[test]
fn neighbours_become_one_piece() {
    let f = DType::F32;
    assert_eq!(
        agree(
            ShardOp::MultiCopy,
            &[],
            &[(8, f), (4, f), (12, f)],
            &[0, 1],
            &[2]
        ),
        1
    );
    assert_eq!(
        agree(ShardOp::Zero, &[], &[(8, f), (4, f)], &[], &[0, 1]),
        1
    );
}

/// Neighbouring routers do not share a mean, and a block has all experts of one.
#[test]
fn routers_stay_apart() {
    let f = DType::F32;
    let op = ShardOp::RouterBias { speed: Real(0.25) };
    let parts = [(6, f), (6, f), (6, f), (6, f)];
    assert_eq!(agree(op, &[], &parts, &[0, 2, 1, 3], &[0, 1]), 2);
    let most = Ranges::RouterBias.chunk();
    for (experts, fits) in [(most, true), (most + 1, false)] {
        let [bias, counts] = [1 << 20, 1 << 24].map(|at| flat(at, experts, f));
        let made = work(op, Parameters::default(), &[bias, counts], &[bias]);
        assert_eq!(made.is_ok(), fits, "{experts}");
    }
}

#[test]
fn moments_go_on_where_they_are_not_named() {
    let f = DType::F32;
    let mut m = Memory::new(&[(4, f), (4, f), (6, f), (6, f), (2, f), (2, f), (1, f)], 3);
    let r: Vec<RawRange> = (0..7).map(|i| m.range(i)).collect();
    let reads = [r[0], r[1], r[2], r[3], r[4], r[5], r[6]];
    let w = work(
        ShardOp::AdamW(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        }),
        Parameters::default(),
        &reads,
        &[r[0], r[2], r[3], r[4]],
    )
    .unwrap();
    assert_eq!(w.square, r[6].ptr as u64);
    let pieces = &w.batches[0].pieces;
    assert_eq!(pieces.len(), 2);
    assert_eq!(pieces[1].at[2], r[2].ptr as u64 + 16);
    assert_eq!((pieces[0].n, pieces[1].n), (4, 2));
    let short = work(
        ShardOp::AdamW(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        }),
        Parameters::default(),
        &reads[..6],
        &[r[0], r[4]],
    );
    assert!(short.is_err());
}

#[test]
fn updates_are_cut_where_copies_of_the_weight_end() {
    let (f, h) = (DType::F32, DType::Bf16);
    let parts = [(6, f), (6, f), (6, f), (6, f), (2, h), (4, h), (1, f)];
    let mut m = Memory::new(&parts, 3);
    let r: Vec<RawRange> = (0..7).map(|i| m.range(i)).collect();
    let at = |i: usize| r[i].ptr as u64;
    let reads = [r[0], r[1], r[2], r[3], r[6]];
    let op = ShardOp::AdamW(Fused {
        cast: true,
        pieces: None,
        maxima: false,
    });
    // In the order of the launch, which is not that of memory.
    let w = work(
        op,
        Parameters::default(),
        &reads,
        &[r[0], r[2], r[3], r[5], r[4]],
    )
    .unwrap();
    assert_eq!(w.square, at(6));
    let [batch] = &w.batches[..] else {
        panic!("one kind")
    };
    assert_eq!(batch.kind.width(), 5);
    let want = [
        (operands([at(0), at(1), at(2), at(3), at(5)]), 4),
        (
            operands([at(0) + 16, at(1) + 16, at(2) + 16, at(3) + 16, at(4)]),
            2,
        ),
    ];
    let got: Vec<_> = batch.pieces.iter().map(|p| (p.at, p.n)).collect();
    assert_eq!(got, want);
    assert!(work(op, Parameters::default(), &reads, &[r[0], r[2], r[3], r[5]]).is_err());
    assert!(
        work(
            op,
            Parameters::default(),
            &reads,
            &[r[0], r[2], r[3], r[5], r[1]]
        )
        .is_err()
    );
    let sgd = ShardOp::Sgd(Fused {
        cast: true,
        pieces: None,
        maxima: false,
    });
    let w = work(sgd, Parameters::default(), &reads[..2], &[r[0], r[5], r[4]]).unwrap();
    assert_eq!(w.batches[0].kind.width(), 3);
    let got: Vec<_> = w.batches[0].pieces.iter().map(|p| (p.at, p.n)).collect();
    let want = [
        (operands([at(0), at(1), at(5)]), 4),
        (operands([at(0) + 16, at(1) + 16, at(4)]), 2),
    ];
    assert_eq!(got, want);
    // Copies that follow one another in memory are one.
    let w = work(sgd, Parameters::default(), &reads[..2], &[r[0], r[4], r[5]]).unwrap();
    let got: Vec<_> = w.batches[0].pieces.iter().map(|p| (p.at, p.n)).collect();
    assert_eq!(got, [(operands([at(0), at(1), at(4)]), 6)]);
}

#[test]
fn updates_know_how_far_pieces_of_their_gradient_are_apart() {
    let (f, h) = (DType::F32, DType::Bf16);
    // Three pieces of six elements make up the gradient; the weight has copies of two and of four.
    let parts = [(6, f), (18, h), (6, f), (6, f), (4, h), (2, h)];
    let mut m = Memory::new(&parts, 3);
    let r: Vec<RawRange> = (0..6).map(|i| m.range(i)).collect();
    let at = |i: usize| r[i].ptr as u64;
    let pieces = |ranks| {
        Some(Pieces {
            ranks,
            factor: Real(0.25),
        })
    };
    let adamw = |cast, ranks| {
        ShardOp::AdamW(Fused {
            cast,
            pieces: pieces(ranks),
            maxima: false,
        })
    };
    let writes = [r[0], r[2], r[3], r[5], r[4]];
    let w = work(adamw(true, 3), Parameters::default(), &r[..4], &writes).unwrap();
    assert_eq!(w.factor, 0.25);
    assert_eq!(w.batches[0].kind.width(), 6);
    let got: Vec<_> = w.batches[0].pieces.iter().map(|p| (p.at, p.n)).collect();
    // The pieces are 12 bytes apart, wherever a range starts within them.
    let want = [
        (operands([at(0), at(1), at(2), at(3), at(5), 12]), 2),
        (
            operands([at(0) + 8, at(1) + 4, at(2) + 8, at(3) + 8, at(4), 12]),
            4,
        ),
    ];
    assert_eq!(got, want);
    // Without copies the distance comes after the moments; SGD has none.
    let w = work(
        adamw(false, 3),
        Parameters::default(),
        &r[..4],
        &writes[..3],
    )
    .unwrap();
    assert_eq!(
        w.batches[0].pieces[0].at,
        operands([at(0), at(1), at(2), at(3), 12])
    );
    let sgd = ShardOp::Sgd(Fused {
        cast: false,
        pieces: pieces(3),
        maxima: false,
    });
    let w = work(sgd, Parameters::default(), &r[..2], &writes[..1]).unwrap();
    assert_eq!(w.batches[0].pieces[0].at, operands([at(0), at(1), 12]));
    // A number of pieces that differs from the gradient's.
    for ranks in [1, 2, 4] {
        assert!(
            work(
                adamw(false, ranks),
                Parameters::default(),
                &r[..4],
                &writes[..3]
            )
            .is_err()
        );
    }
}
