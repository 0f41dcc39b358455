//! Kernels of the sharding engine: layouts, sums, optimizers, and the operands of complete
//! programs.

use super::memory::{Buffer, HYPER, Rng, kernel, launch, launch_in};
use shardlab_exec::kernels::{self, KernelError, OperandError};
use shardlab_exec::{Hyper, LaunchContext, ONE_GROUP, RawRange};
use shardlab_plan::config::GroupSettings;
use shardlab_plan::ir::{
    BodyOp, DType, Fused, Holds, Kernel, OpKind, Pieces, Real, Shape, ShardOp,
};
use shardlab_plan::program::{GroupRun, Op, Program, ScaleRun};
use shardlab_plan::scenario;

const F32: DType = DType::F32;
const BF16: DType = DType::Bf16;

/// Returns a kernel with a single sharding operation.
fn shard_kernel(op: ShardOp) -> Kernel {
    kernel(vec![BodyOp {
        op: OpKind::Shard(op),
        inputs: Default::default(),
        outputs: Default::default(),
    }])
}

fn run(
    op: ShardOp,
    hyper: Hyper,
    shapes: &[Shape],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), KernelError> {
    launch(&shard_kernel(op), hyper, shapes, reads, writes)
}

fn random(rng: &mut Rng, dtype: DType, n: usize) -> Buffer {
    let values: Vec<f64> = (0..n).map(|_| rng.next()).collect();
    Buffer::of(dtype, &values)
}

/// Rounds a float to the dtype of a buffer.
fn rounded(dtype: DType, v: f64) -> f64 {
    Buffer::of(dtype, &[v]).get(0)
}

#[test]
fn copies_cut_ranges_differently() {
    let mut rng = Rng(3);
    for op in [ShardOp::Copy, ShardOp::MultiCopy] {
        for (from, to) in [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)] {
            // 7000 elements: 5000 + 0 + 2000 become 1 + 2999 + 4000.
            let mut a = random(&mut rng, from, 7000);
            let mut b = Buffer::new(to, 7000);
            let reads = [a.part(2000, 5000), a.part(0, 0), a.part(0, 2000)];
            let writes = [b.part(6999, 1), b.part(0, 2999), b.part(2999, 4000)];
            run(op, HYPER, &[], &reads, &writes).unwrap();
            let sequence: Vec<f64> = (2000..7000)
                .chain(0..2000)
                .map(|i| rounded(to, a.get(i)))
                .collect();
            let order = std::iter::once(6999).chain(0..6999);
            assert_eq!(sequence, order.map(|i| b.get(i)).collect::<Vec<_>>());
            let short = run(op, HYPER, &[], &reads[..1], &writes).unwrap_err();
            assert!(
                matches!(
                    short.fault,
                    OperandError::Size {
                        needed: 7000,
                        found: 5000,
                        ..
                    }
                ),
                "{short}"
            );
        }
    }
}

/// Returns parameters whose rows do not divide evenly, and one with fewer rows than ranks.
fn shapes() -> Vec<Shape> {
    [&[5u64, 3][..], &[7], &[2, 2, 2], &[8, 1]]
        .iter()
        .map(|s| Shape::from_slice(s))
        .collect()
}

#[test]
fn packed_shards_hold_whole_rows() {
    let mut rng = Rng(4);
    let (ranks, shapes) = (3usize, shapes());
    // Rows per shard: ceil(5/3), ceil(7/3), ceil(2/3), ceil(8/3).
    let shard = [2 * 3, 3, 4, 3];
    let stride: usize = shard.iter().sum();
    for (from, to) in [(F32, F32), (F32, BF16), (BF16, F32)] {
        let numel: Vec<usize> = shapes
            .iter()
            .map(|s| s.iter().product::<u64>() as usize)
            .collect();
        let mut grads: Vec<Buffer> = numel.iter().map(|&n| random(&mut rng, from, n)).collect();
        let mut packed = Buffer::new(to, stride * ranks);
        let reads: Vec<RawRange> = grads.iter_mut().map(Buffer::range).collect();
        let op = ShardOp::ChunkCat { ranks: 3 };
        run(op, HYPER, &shapes, &reads, &[packed.range()]).unwrap();
        for rank in 0..ranks {
            let mut offset = rank * stride;
            for (p, g) in grads.iter().enumerate() {
                for i in 0..shard[p] {
                    let at = rank * shard[p] + i;
                    let want = if at < numel[p] {
                        rounded(to, g.get(at))
                    } else {
                        0.0
                    };
                    assert_eq!(
                        packed.get(offset + i),
                        want,
                        "rank {rank} parameter {p} element {i}"
                    );
                }
                offset += shard[p];
            }
        }
        // The inverse operation.
        let mut full: Vec<Buffer> = numel.iter().map(|&n| Buffer::new(to, n)).collect();
        let writes: Vec<RawRange> = full.iter_mut().map(Buffer::range).collect();
        let op = ShardOp::CopyOut { ranks: 3 };
        run(op, HYPER, &shapes, &[packed.range()], &writes).unwrap();
        for (f, g) in full.iter().zip(&grads) {
            let want: Vec<f64> = g.values().into_iter().map(|v| rounded(to, v)).collect();
            assert_eq!(f.values(), want);
        }
        // A full parameter, including its padding.
        let mut padded = Buffer::new(to, shard[0] * ranks);
        let with = [&[padded.range()], &writes[1..]].concat();
        run(op, HYPER, &shapes, &[packed.range()], &with).unwrap();
        assert_eq!(&padded.values()[..15], full[0].values());
        assert_eq!(&padded.values()[15..], [0.0; 3]);
        let e = run(op, HYPER, &shapes[..2], &[packed.range()], &writes).unwrap_err();
        assert!(
            matches!(e.fault, OperandError::Count { what: "shapes", .. }),
            "{e}"
        );
    }
}

#[test]
fn sums_scale_and_zero() {
    let mut rng = Rng(5);
    for t in [F32, BF16] {
        let mut add = random(&mut rng, F32, 5000);
        let mut sums = [random(&mut rng, t, 3000), random(&mut rng, t, 2000)];
        let before: Vec<f64> = sums.iter().flat_map(Buffer::values).collect();
        let [a, b] = &mut sums;
        let reads = [add.range(), a.range(), b.range()];
        run(ShardOp::Accumulate, HYPER, &[], &reads, &reads[1..]).unwrap();
        let after: Vec<f64> = sums.iter().flat_map(Buffer::values).collect();
        for i in 0..5000 {
            let sum = f64::from(before[i] as f32 + add.get(i) as f32);
            assert_eq!(after[i], rounded(t, sum));
        }
        let [a, b] = &mut sums;
        let both = [a.range(), b.range()];
        let third = Real(1.0 / 3.0);
        run(ShardOp::Scale { factor: third }, HYPER, &[], &both, &both).unwrap();
        let scaled: Vec<f64> = sums.iter().flat_map(Buffer::values).collect();
        for i in 0..5000 {
            let product = f64::from(after[i] as f32 * third.0 as f32);
            assert_eq!(scaled[i], rounded(t, product));
        }
        let [a, _] = &mut sums;
        let part = a.part(10, 20);
        run(ShardOp::Zero, HYPER, &[], &[], &[part]).unwrap();
        for (i, before) in scaled.iter().enumerate().take(40) {
            let want = if (10..30).contains(&i) { 0.0 } else { *before };
            assert_eq!(sums[0].get(i), want);
        }
    }
}

/// Unreduced shards are each multiplied by the factor, summed in rank order, and rounded once.
#[test]
fn pieces_are_summed() {
    let mut rng = Rng(7);
    for t in [F32, BF16] {
        let mut sums = [random(&mut rng, t, 3000), random(&mut rng, t, 2000)];
        let third = Real(1.0 / 3.0);
        let [a, b] = &mut sums;
        let mut three = random(&mut rng, t, 15000);
        for accumulate in [false, true] {
            let op = ShardOp::SumPieces {
                ranks: 3,
                factor: third,
                accumulate,
            };
            let before: Vec<f64> = [&*a, &*b].into_iter().flat_map(Buffer::values).collect();
            let reads = [three.range(), a.range(), b.range()];
            run(op, HYPER, &[], &reads, &reads[1..]).unwrap();
            let after: Vec<f64> = [&*a, &*b].into_iter().flat_map(Buffer::values).collect();
            for i in 0..5000 {
                let piece = |r: usize| three.get(5000 * r + i) as f32 * third.0 as f32;
                let sum = piece(0) + piece(1) + piece(2);
                let all = if accumulate {
                    before[i] as f32 + sum
                } else {
                    sum
                };
                assert_eq!(after[i], rounded(t, f64::from(all)));
            }
        }
        let e = run(
            ShardOp::SumPieces {
                ranks: 2,
                factor: third,
                accumulate: false,
            },
            HYPER,
            &[],
            &[three.range()],
            &[a.range()],
        )
        .unwrap_err();
        assert!(matches!(e.fault, OperandError::Size { .. }), "{e}");
    }
}

/// An update from unreduced shards is bitwise equal to the update from their sum.
#[test]
fn updates_add_up_pieces() {
    const N: usize = 5001;
    let mut rng = Rng(11);
    for t in [F32, BF16] {
        let factor = Real(1.0 / 3.0);
        let mut pieces = random(&mut rng, t, 3 * N);
        let mut sum = Buffer::new(F32, N);
        let add = ShardOp::SumPieces {
            ranks: 3,
            factor,
            accumulate: false,
        };
        run(add, HYPER, &[], &[pieces.range()], &[sum.range()]).unwrap();
        let start = [(); 3].map(|()| random(&mut rng, F32, N).values());
        let update = |op: ShardOp, grad: RawRange| {
            // Second moments are not negative.
            let [w, m, v] = &start;
            let v: Vec<f64> = v.iter().map(|x| x.abs()).collect();
            let mut all = [w, m, &v].map(|x| Buffer::of(F32, x));
            let mut copy = Buffer::new(BF16, N);
            let [w, m, v] = all.each_mut().map(Buffer::range);
            let (reads, writes) = match op {
                ShardOp::Sgd { .. } => (vec![w, grad], vec![w, copy.range()]),
                _ => (vec![w, grad, m, v], vec![w, m, v, copy.range()]),
            };
            run(op, HYPER, &[], &reads, &writes)?;
            Ok::<_, KernelError>((all.map(|b| b.values()), copy.values()))
        };
        let both = |pieces| {
            let cast = true;
            [
                ShardOp::AdamW(Fused {
                    cast,
                    pieces,
                    maxima: false,
                }),
                ShardOp::Sgd(Fused {
                    cast,
                    pieces,
                    maxima: false,
                }),
            ]
        };
        let three = Some(Pieces { ranks: 3, factor });
        for (apart, within) in both(None).into_iter().zip(both(three)) {
            let want = update(apart, sum.range()).unwrap();
            assert_eq!(update(within, pieces.range()).unwrap(), want);
            assert_ne!(want.0[0], start[0]);
        }
        // The number of unreduced shards differs from the number of ranks.
        for op in both(Some(Pieces { ranks: 2, factor })) {
            let e = update(op, pieces.range()).unwrap_err();
            assert!(matches!(e.fault, OperandError::Size { .. }), "{e}");
        }
    }
}

#[test]
fn norms_and_clipping() {
    let mut rng = Rng(6);
    let mut grads = [random(&mut rng, F32, 4100), random(&mut rng, BF16, 37)];
    let before: Vec<f64> = grads.iter().flat_map(Buffer::values).collect();
    let mut scalar = Buffer::new(F32, 1);
    let [a, b] = &mut grads;
    let (a, b, s) = (a.range(), b.range(), scalar.range());
    run(ShardOp::SumSquares, HYPER, &[], &[a], &[s]).unwrap();
    // The second launch adds to the result of the first.
    run(ShardOp::SumSquares, HYPER, &[], &[b, s], &[s]).unwrap();
    let square: f64 = before.iter().map(|v| v * v).sum();
    assert!((scalar.get(0) / square - 1.0).abs() < 1e-6);
    // A limit above the norm has no effect. A limit below it scales the gradients.
    let loose = Hyper {
        clip_norm: 1e3,
        ..HYPER
    };
    run(ShardOp::ClipScale, loose, &[], &[a, b, s], &[a, b]).unwrap();
    assert_eq!(
        grads.iter().flat_map(Buffer::values).collect::<Vec<_>>(),
        before
    );
    let tight = Hyper {
        clip_norm: 0.5,
        ..HYPER
    };
    run(ShardOp::ClipScale, tight, &[], &[a, b, s], &[a, b]).unwrap();
    let norm: f64 = grads
        .iter()
        .flat_map(Buffer::values)
        .map(|v| v * v)
        .sum::<f64>()
        .sqrt();
    assert!((norm - 0.5).abs() < 1e-4, "{norm}");
}

#[test]
fn nan_is_found() {
    for t in [F32, BF16] {
        let mut x = Buffer::of(t, &vec![1.0; 5000]);
        let mut flag = Buffer::new(F32, 1);
        for (value, found) in [(1.0, 0.0), (f64::INFINITY, 0.0), (f64::NAN, 1.0)] {
            x.write(4321, &[value]);
            run(ShardOp::NanCheck, HYPER, &[], &[x.range()], &[flag.range()]).unwrap();
            assert_eq!(flag.get(0), found, "{value} as {t}");
        }
    }
}

/// Computes the rule of `torch.optim.AdamW` in float64.
fn adamw(h: &Hyper, clip: f64, w: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64]) {
    let [b1, b2] = h.betas;
    let (c1, c2) = (1.0 - b1.powi(h.step as i32), 1.0 - b2.powi(h.step as i32));
    for i in 0..w.len() {
        let g = g[i] * clip;
        w[i] -= h.lr * h.weight_decay * w[i];
        m[i] = b1 * m[i] + (1.0 - b1) * g;
        v[i] = b2 * v[i] + (1.0 - b2) * g * g;
        w[i] -= h.lr / c1 * m[i] / (v[i].sqrt() / c2.sqrt() + h.eps);
    }
}

fn near(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!(
            (x - y).abs() <= tolerance * y.abs().max(1e-2),
            "element {i}: {x} {y}"
        );
    }
}

#[test]
fn adamw_follows_torch() {
    // Weight 1, gradient 1, one step of torch.optim.AdamW(lr=0.1, betas=(0.9, 0.999), eps=1e-8,
    // weight_decay=0.01): 0.899.
    let h = Hyper {
        lr: 0.1,
        betas: [0.9, 0.999],
        eps: 1e-8,
        muon: shardlab_exec::NO_MUON,
        weight_decay: 0.01,
        clip_norm: 0.0,
        step: 1,
        groups: ONE_GROUP,
    };
    let [mut w, mut g, mut m, mut v] = [1.0, 1.0, 0.0, 0.0].map(|x| Buffer::of(F32, &[x]));
    let r = [w.range(), g.range(), m.range(), v.range()];
    run(
        ShardOp::AdamW(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        }),
        h,
        &[],
        &r,
        &[r[0], r[2], r[3]],
    )
    .unwrap();
    assert!((w.get(0) - 0.899).abs() < 1e-6, "{}", w.get(0));
    assert!((m.get(0) - 0.1).abs() < 1e-7 && (v.get(0) - 0.001).abs() < 1e-9);
}

#[test]
fn adamw_over_several_tensors_and_steps() {
    let mut rng = Rng(8);
    for (weights, moments, tolerance) in [(F32, F32, 1e-5), (BF16, F32, 1e-2), (BF16, BF16, 3e-2)] {
        for clip in [0.0, 0.3] {
            let sizes = [3000usize, 0, 17];
            let mut w: Vec<Buffer> = sizes
                .iter()
                .map(|&n| random(&mut rng, weights, n))
                .collect();
            let mut g: Vec<Buffer> = sizes.iter().map(|&n| random(&mut rng, F32, n)).collect();
            let zeros = |n| Buffer::of(moments, &vec![0.0; n]);
            let mut m: Vec<Buffer> = sizes.iter().map(|&n| zeros(n)).collect();
            let mut v: Vec<Buffer> = sizes.iter().map(|&n| zeros(n)).collect();
            let mut square = Buffer::of(F32, &[2.25]);
            let mut want: Vec<[Vec<f64>; 3]> = (0..3)
                .map(|i| [w[i].values(), m[i].values(), v[i].values()])
                .collect();
            for step in 1..=3 {
                let h = Hyper {
                    step,
                    clip_norm: clip,
                    ..HYPER
                };
                let (mut reads, mut writes) = (vec![], vec![]);
                for i in 0..3 {
                    let [a, b] = [w[i].range(), g[i].range()];
                    reads.extend([a, b]);
                    writes.push(a);
                    // An empty shard has no moments.
                    if sizes[i] > 0 {
                        let both = [m[i].range(), v[i].range()];
                        reads.extend(both);
                        writes.extend(both);
                    }
                }
                if clip > 0.0 {
                    reads.push(square.range());
                }
                run(
                    ShardOp::AdamW(Fused {
                        cast: false,
                        pieces: None,
                        maxima: false,
                    }),
                    h,
                    &[],
                    &reads,
                    &writes,
                )
                .unwrap();
                let factor = if clip > 0.0 { clip / (1.5 + 1e-6) } else { 1.0 };
                for (i, [w, m, v]) in want.iter_mut().enumerate() {
                    adamw(&h, factor, w, &g[i].values(), m, v);
                }
            }
            for i in 0..3 {
                near(&w[i].values(), &want[i][0], tolerance);
                near(&m[i].values(), &want[i][1], tolerance);
            }
        }
    }
}

/// Computes the rule of Lion (Chen et al. 2023, algorithm 2) in float64.
fn lion(h: &Hyper, w: &mut [f64], g: &[f64], m: &mut [f64]) {
    let [b1, b2] = h.betas;
    for i in 0..w.len() {
        let blend = b1 * m[i] + (1.0 - b1) * g[i];
        let sign = if blend == 0.0 { 0.0 } else { blend.signum() };
        w[i] -= h.lr * (sign + h.weight_decay * w[i]);
        m[i] = b2 * m[i] + (1.0 - b2) * g[i];
    }
}

/// Computes the rule of `torch.optim.SGD` in float64.
fn sgd(h: &Hyper, w: &mut [f64], g: &[f64]) {
    for (w, g) in w.iter_mut().zip(g) {
        *w -= h.lr * (g + h.weight_decay * *w);
    }
}

#[test]
fn lion_steps_by_the_sign_of_its_blend() {
    let mut rng = Rng(21);
    for moments in [F32, BF16] {
        let n = 3000;
        let mut w = random(&mut rng, F32, n);
        // The blend of a zero gradient without momentum has no sign, so the weight only decays.
        let mut g = Buffer::of(
            F32,
            &[&[0.0][..], &random(&mut rng, F32, n - 1).values()].concat(),
        );
        let mut m = Buffer::of(moments, &vec![0.0; n]);
        let (mut want_w, mut want_m) = (w.values(), m.values());
        let before = w.get(0);
        for step in 1..=3 {
            let h = Hyper { step, ..HYPER };
            let r = [w.range(), g.range(), m.range()];
            let op = ShardOp::Lion(Fused {
                cast: false,
                pieces: None,
                maxima: false,
            });
            run(op, h, &[], &r, &[r[0], r[2]]).unwrap();
            lion(&h, &mut want_w, &g.values(), &mut want_m);
            if moments == BF16 {
                want_m = m.values();
            }
        }
        near(&w.values(), &want_w, 1e-5);
        near(&m.values(), &want_m, 1e-5);
        assert!((w.get(0) - before * 0.999f64.powi(3)).abs() < 1e-6);
        // The momentum has another length than the weights.
        let op = ShardOp::Lion(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        });
        let short = [w.range(), g.range(), m.part(0, n - 1)];
        assert!(run(op, HYPER, &[], &short, &[short[0], short[2]]).is_err());
    }
}

/// Biases of experts with fewer choices than the mean increase, and those with more decrease. All
/// are then shifted so that their sum stays the same, which is the only change for an expert with
/// the mean number of choices. Two routers of a launch have separate means.
#[test]
fn biases_of_routers_move_by_the_sign_of_what_is_missing() {
    let counts = [[4.0, 0.0, 2.0, 2.0], [9.0, 1.0, 1.0, 1.0]];
    let before = [[0.5, -0.25, 0.0, 0.125], [1.0, 1.0, 1.0, 1.0]];
    let mut bias = Buffer::of(F32, &before.concat());
    let mut counted = Buffer::of(F32, &counts.concat());
    let reads = [
        bias.part(0, 4),
        counted.part(0, 4),
        bias.part(4, 4),
        counted.part(4, 4),
    ];
    let op = ShardOp::RouterBias { speed: Real(0.25) };
    // The learning rate and the clipping norm have no effect.
    let hyper = Hyper {
        lr: 100.0,
        clip_norm: 1e-3,
        ..HYPER
    };
    run(op, hyper, &[], &reads, &[reads[0], reads[2]]).unwrap();
    // The second router's steps are -0.25 and three times 0.25, with mean 0.125.
    let wanted = [0.25, 0.0, 0.0, 0.125, 0.625, 1.125, 1.125, 1.125];
    assert_eq!(bias.values(), wanted);
    // Counts that do not divide evenly: 7 choices of 3 experts, none of which has the mean.
    let mut bias = Buffer::of(F32, &[0.0; 3]);
    let mut counted = Buffer::of(F32, &[2.0, 2.0, 3.0]);
    let reads = [bias.range(), counted.range()];
    run(op, HYPER, &[], &reads, &reads[..1]).unwrap();
    let third = 0.25 / 3.0;
    near(
        &bias.values(),
        &[0.25 - third, 0.25 - third, -0.25 - third],
        1e-6,
    );
    // Operands with other dtypes and lengths are rejected.
    let mut short = Buffer::of(BF16, &[0.0; 3]);
    assert!(run(op, HYPER, &[], &[bias.range(), short.range()], &reads[..1]).is_err());
    assert!(
        run(
            op,
            HYPER,
            &[],
            &[bias.range(), counted.part(0, 2)],
            &reads[..1]
        )
        .is_err()
    );
    assert!(run(op, HYPER, &[], &reads, &[counted.range()]).is_err());
}

/// A weight just above the midpoint of two codes is rounded to the upper one, unless it is first
/// rounded to bfloat16, which makes it a tie. The amax of several shards is also tested with and
/// without rounding.
#[test]
fn casts_of_shards_round_once_or_twice() {
    let above = 1.0625 + f64::powi(2.0, -12);
    let scales = [(Some(0), 2), (Some(1), 3)].map(|(scale, numel)| ScaleRun { scale, numel });
    let run = |op, scales: &[ScaleRun], reads: &[RawRange], writes: &[RawRange]| {
        let ctx = LaunchContext {
            kernel: &shard_kernel(op),
            data_rank: 0,
            hyper: HYPER,
            shapes: &[],
            groups: &[],
            scales,
        };
        launch_in(&ctx, reads, writes).unwrap();
    };
    for (through, code, most) in [(F32, 1.125, above), (BF16, 1.0, 1.0625)] {
        let mut a = Buffer::of(F32, &[above, -0.5]);
        let mut b = Buffer::of(F32, &[-2.0 * above, 0.0, 1.0]);
        let mut maxima = Buffer::of(F32, &[9.0, 9.0]);
        let amax = ShardOp::ShardAmax { through };
        run(amax, &scales, &[a.range(), b.range()], &[maxima.range()]);
        assert_eq!(maxima.values(), [most, 2.0 * most], "{through}");
        let mut by = Buffer::of(F32, &[2.0]);
        let mut codes = Buffer::of(DType::F8E4m3, &[0.0; 3]);
        let mut between = Buffer::of(F32, &[0.0; 3]);
        let one = [ScaleRun {
            scale: Some(0),
            numel: 3,
        }];
        let writes = [codes.range(), between.range()];
        let cast = ShardOp::ShardCast { through };
        run(cast, &one, &[b.range(), by.range()], &writes);
        assert_eq!(codes.values(), [-4.0 * code, 0.0, 2.0], "{through}");
    }
}

/// A gather of weights with several dtypes has a buffer of bytes: shards are copied in one after
/// another, and copied out by parameter.
#[test]
fn weights_of_several_types_are_packed_as_bytes() {
    let shapes = [[4, 2].as_slice(), &[2]].map(Shape::from_slice);
    let (wide, narrow) = ([1.0, -2.0, 3.0, 0.5], [7.0]);
    let mut packed = Buffer::of(DType::U8, &[0.0; 12]);
    for rank in 0..2usize {
        let sign = 1.0 - 2.0 * rank as f64;
        let mut codes = Buffer::of(DType::F8E4m3, &wide.map(|x| sign * x));
        let mut norm = Buffer::of(BF16, &narrow.map(|x| sign * x));
        let to = packed.part(6 * rank, 6);
        let reads = [codes.range(), norm.range()];
        run(ShardOp::MultiCopy, HYPER, &[], &reads, &[to]).unwrap();
    }
    let mut codes = Buffer::of(DType::F8E4m3, &[0.0; 8]);
    let mut norm = Buffer::of(BF16, &[0.0; 2]);
    let writes = [codes.range(), norm.range()];
    let op = ShardOp::CopyOut { ranks: 2 };
    run(op, HYPER, &shapes, &[packed.range()], &writes).unwrap();
    assert_eq!(codes.values(), [1.0, -2.0, 3.0, 0.5, -1.0, 2.0, -3.0, -0.5]);
    assert_eq!(norm.values(), [7.0, -7.0]);
}

/// An update also computes the amax of its new weights in bfloat16, per tensor.
#[test]
fn updates_find_maxima_of_new_weights() {
    // Tensors end within both ranges of weights. The second tensor has no elements here, and there
    // is padding before the third.
    let scales = [(Some(0), 2500), (None, 3), (Some(2), 997)]
        .map(|(scale, numel)| ScaleRun { scale, numel });
    let mut rng = Rng(41);
    let mut w = [3000, 500].map(|n| random(&mut rng, F32, n));
    let mut g = [3000, 500].map(|n| random(&mut rng, F32, n));
    let mut plain = [0, 1].map(|n| Buffer::of(F32, &w[n].values()));
    let mut maxima = Buffer::of(F32, &[7.0; 3]);
    let op = |maxima| {
        ShardOp::Sgd(Fused {
            cast: false,
            pieces: None,
            maxima,
        })
    };
    let mut update = |maxima: Option<RawRange>, w: &mut [Buffer; 2]| {
        let [a, b] = w.each_mut().map(Buffer::range);
        let [c, d] = g.each_mut().map(Buffer::range);
        let writes = [&[a, b], maxima.as_slice()].concat();
        let ctx = LaunchContext {
            kernel: &shard_kernel(op(maxima.is_some())),
            data_rank: 0,
            hyper: HYPER,
            shapes: &[],
            groups: &[],
            scales: &scales,
        };
        launch_in(&ctx, &[a, c, b, d], &writes).unwrap();
    };
    update(Some(maxima.range()), &mut w);
    update(None, &mut plain);
    let [new, same] = [&w, &plain].map(|w| w.iter().flat_map(Buffer::values).collect::<Vec<_>>());
    assert_eq!(new, same);
    let most = |of: &[f64]| {
        of.iter()
            .fold(0.0, |most: f64, x| most.max(rounded(BF16, x.abs())))
    };
    assert_eq!(
        maxima.values(),
        [most(&new[..2500]), 0.0, most(&new[2503..])]
    );
}

/// One launch for the weights of several groups equals one launch per group with the settings of
/// that group.
#[test]
fn parameter_groups_have_their_own_settings() {
    let settings = [
        GroupSettings {
            weight_decay: 0.0,
            lr_scale: 1.0,
        },
        GroupSettings {
            weight_decay: 0.5,
            lr_scale: 0.1,
        },
    ];
    let mut groups = ONE_GROUP;
    groups[..2].copy_from_slice(&settings.map(Some));
    let h = Hyper { groups, ..HYPER };
    let of_group = |group: u8| match group {
        0 => HYPER,
        g => Hyper {
            lr: HYPER.lr * settings[usize::from(g) - 1].lr_scale,
            weight_decay: settings[usize::from(g) - 1].weight_decay,
            ..HYPER
        },
    };
    // Groups change within both tensors, and one run of a group covers the end of the first.
    let runs = [(1, 7), (0, 2500), (2, 900), (1, 1), (0, 92)]
        .map(|(group, numel)| GroupRun { group, numel });
    let sizes = [3000usize, 500];
    for name in ["adamw", "lion", "sgd"] {
        let (cast, pieces) = (false, None);
        let op = match name {
            "adamw" => ShardOp::AdamW(Fused {
                cast,
                pieces,
                maxima: false,
            }),
            "lion" => ShardOp::Lion(Fused {
                cast,
                pieces,
                maxima: false,
            }),
            _ => ShardOp::Sgd(Fused {
                cast,
                pieces,
                maxima: false,
            }),
        };
        let mut rng = Rng(31);
        let mut w = sizes.map(|n| random(&mut rng, F32, n));
        let mut g = sizes.map(|n| random(&mut rng, F32, n));
        let mut m = sizes.map(|n| Buffer::of(F32, &vec![0.0; n]));
        let mut v = sizes.map(|n| Buffer::of(F32, &vec![0.0; n]));
        let all = |b: &[Buffer; 2]| b.iter().flat_map(Buffer::values).collect::<Vec<f64>>();
        let [mut want, gradient] = [&w, &g].map(all);
        let mut first = 0;
        for run in runs {
            let h = of_group(run.group);
            let range = first..first + run.numel as usize;
            let (w, g) = (&mut want[range.clone()], &gradient[range]);
            let zeros = || vec![0.0; g.len()];
            match name {
                "adamw" => adamw(&h, 1.0, w, g, &mut zeros(), &mut zeros()),
                "lion" => lion(&h, w, g, &mut zeros()),
                _ => sgd(&h, w, g),
            }
            first += run.numel as usize;
        }
        let (mut reads, mut writes) = (vec![], vec![]);
        for i in 0..2 {
            let states = [m[i].range(), v[i].range()];
            let states = &states[..op.update().unwrap().rule.states()];
            reads.extend([w[i].range(), g[i].range()]);
            reads.extend(states);
            writes.push(w[i].range());
            writes.extend(states);
        }
        let ctx = LaunchContext {
            kernel: &shard_kernel(op),
            data_rank: 0,
            hyper: h,
            shapes: &[],
            groups: &runs,
            scales: &[],
        };
        launch_in(&ctx, &reads, &writes).unwrap();
        near(&all(&w), &want, 1e-5);
    }
}

/// Rounds to the nearest of the 256 values of bitsandbytes' dynamic map, in float64.
fn coded(signed: bool, x: f64) -> f64 {
    let mut map = vec![0.0, 1.0];
    for decade in 0..7 {
        let parts = if signed { 1 << decade } else { 2 << decade };
        for part in 0..parts {
            let middle = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
            map.push(middle * 10f64.powi(decade - 6));
            map.push(-map[map.len() - 1]);
        }
    }
    let usable = map.into_iter().filter(|f| signed || *f >= 0.0);
    usable
        .min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs()))
        .unwrap()
}

/// Rounds values to codes in blocks of 256.
fn blockwise(signed: bool, values: &mut [f64]) {
    for block in values.chunks_mut(256) {
        let scale = block.iter().fold(1e-12f64, |a, x| a.max(x.abs()));
        block
            .iter_mut()
            .for_each(|x| *x = coded(signed, *x / scale) * scale);
    }
}

/// The states of an 8-bit optimizer are rounded to the nearest code after each step. The last block
/// has fewer elements.
#[test]
fn states_in_8_bits_follow_bitsandbytes() {
    const N: usize = 5000;
    const U8: DType = DType::U8;
    for (name, states) in [("adamw", 2), ("lion", 1)] {
        let mut rng = Rng(41);
        let mut w = random(&mut rng, F32, N);
        let mut g = random(&mut rng, F32, N);
        let mut codes = [(); 2].map(|()| Buffer::new(U8, N));
        let mut scales = [(); 2].map(|()| Buffer::of(F32, &[0.0; N.div_ceil(256)]));
        let (mut want, gradient) = (w.values(), g.values());
        let mut moments = [vec![0.0; N], vec![0.0; N]];
        let (cast, pieces) = (false, None);
        for step in 1..=3 {
            let h = Hyper { step, ..HYPER };
            let [m, v] = &mut moments;
            let op = match name {
                "adamw" => {
                    adamw(&h, 1.0, &mut want, &gradient, m, v);
                    ShardOp::AdamW(Fused {
                        cast,
                        pieces,
                        maxima: false,
                    })
                }
                _ => {
                    lion(&h, &mut want, &gradient, m);
                    ShardOp::Lion(Fused {
                        cast,
                        pieces,
                        maxima: false,
                    })
                }
            };
            blockwise(true, m);
            blockwise(false, v);
            let [c, s] = [&mut codes, &mut scales].map(|b| {
                let ranges = b.iter_mut().map(Buffer::range);
                ranges.take(states).collect::<Vec<_>>()
            });
            let (w, g) = (w.range(), g.range());
            let reads = [&[w, g][..], &c, &s].concat();
            let writes = [&[w][..], &c, &s].concat();
            run(op, h, &[], &reads, &writes).unwrap();
            // There is one scale too few.
            let short = RawRange {
                bytes: s[0].bytes - 4,
                ..s[0]
            };
            let bad = [&[w, g][..], &c, &vec![short; states]].concat();
            let bad_writes = [&[w][..], &c, &vec![short; states]].concat();
            assert!(run(op, h, &[], &bad, &bad_writes).is_err());
        }
        // A number halfway between two codes may be rounded differently in float32.
        let updated = w.values();
        let pairs = updated.iter().zip(&want);
        let differ = pairs.filter(|(a, b)| (*a - *b).abs() > 1e-5);
        assert!(differ.count() < N / 200, "{name}");
        near(&w.values(), &want, 1e-2);
        let largest = moments[0][..256].iter().fold(0.0f64, |a, x| a.max(x.abs()));
        assert!((scales[0].get(0) / largest - 1.0).abs() < 0.01);
    }
}

#[test]
fn flat_moments_continue_from_tensor_to_tensor() {
    let mut rng = Rng(9);
    let sizes = [40usize, 60];
    let mut w: Vec<Buffer> = sizes.iter().map(|&n| random(&mut rng, F32, n)).collect();
    let mut g: Vec<Buffer> = sizes.iter().map(|&n| random(&mut rng, F32, n)).collect();
    let (mut m, mut v) = (Buffer::of(F32, &[0.0; 100]), Buffer::of(F32, &[0.0; 100]));
    let mut want: Vec<Vec<f64>> = w.iter().map(Buffer::values).collect();
    for (want, g) in want.iter_mut().zip(&g) {
        let n = want.len();
        adamw(
            &HYPER,
            1.0,
            want,
            &g.values(),
            &mut vec![0.0; n],
            &mut vec![0.0; n],
        );
    }
    let [w0, w1] = [0, 1].map(|i| w[i].range());
    let [g0, g1] = [0, 1].map(|i| g[i].range());
    let (mr, vr) = (m.range(), v.range());
    run(
        ShardOp::AdamW(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        }),
        HYPER,
        &[],
        &[w0, g0, mr, vr, w1, g1],
        &[w0, mr, vr, w1],
    )
    .unwrap();
    for i in 0..2 {
        near(&w[i].values(), &want[i], 1e-5);
    }
    let second: Vec<f64> = g[1].values().iter().map(|g| 0.1 * g).collect();
    near(&m.values()[40..], &second, 1e-5);
    // There are more weights than moments.
    let e = run(
        ShardOp::AdamW(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        }),
        HYPER,
        &[],
        &[w1, g1, mr, vr, w0, g0, w1, g1],
        &[w1, mr, vr, w0, w1],
    );
    assert!(matches!(
        e.unwrap_err().fault,
        OperandError::Count { what: "states", .. }
    ));
}

#[test]
fn threads_change_no_bit_of_adamw() {
    let n = 100_001;
    let run_with = |threads| {
        let mut rng = Rng(12);
        let mut all = [0; 4].map(|_| random(&mut rng, F32, n));
        let squares: Vec<f64> = all[3].values().iter().map(|v| v * v).collect();
        all[3].write(0, &squares);
        let r: Vec<RawRange> = all.iter_mut().map(Buffer::range).collect();
        kernels::use_threads(threads);
        let done = run(
            ShardOp::AdamW(Fused {
                cast: false,
                pieces: None,
                maxima: false,
            }),
            HYPER,
            &[],
            &r,
            &[r[0], r[2], r[3]],
        );
        kernels::use_threads(1);
        done.unwrap();
        all.map(|b| b.bits())
    };
    let want = run_with(1);
    for threads in [2, 5] {
        assert!(run_with(threads) == want, "{threads} threads");
    }
}

#[test]
fn sgd_follows_torch() {
    let mut rng = Rng(10);
    let (mut w, mut g) = (random(&mut rng, F32, 3000), random(&mut rng, BF16, 3000));
    let want: Vec<f64> = w
        .values()
        .iter()
        .zip(g.values())
        .map(|(w, g)| w - HYPER.lr * (g + HYPER.weight_decay * w))
        .collect();
    let (wr, gr) = (w.range(), g.range());
    run(
        ShardOp::Sgd(Fused {
            cast: false,
            pieces: None,
            maxima: false,
        }),
        HYPER,
        &[],
        &[wr, gr],
        &[wr],
    )
    .unwrap();
    near(&w.values(), &want, 1e-5);
}

/// Copies of the new weight are cast from the stored value, so they are rounded twice if the weight
/// itself is narrow.
#[test]
fn updates_leave_a_second_copy_of_the_weight() {
    let sizes = [5000usize, 70];
    for (weights, copies) in [(F32, BF16), (F32, F32), (BF16, F32), (DType::F16, BF16)] {
        for adamw in [true, false] {
            let run_with = |cast: bool| {
                let mut rng = Rng(21);
                let mut of = |t| sizes.map(|n| random(&mut rng, t, n));
                let (mut w, mut g) = (of(weights), of(F32));
                let n = sizes[0] + sizes[1];
                let zeros = vec![0.0; n];
                let (mut m, mut v) = (Buffer::of(F32, &zeros), Buffer::of(F32, &zeros));
                let mut c = Buffer::new(copies, n);
                let [w0, w1] = [0, 1].map(|i| w[i].range());
                let [g0, g1] = [0, 1].map(|i| g[i].range());
                let (mr, vr) = (m.range(), v.range());
                // The first weight has copies in three places.
                let first = [
                    c.part(70, 2049),
                    c.part(70 + 2049, 1),
                    c.part(70 + 2050, 2950),
                ];
                let second = [c.part(0, 70)];
                let pick = |copies: &[RawRange]| if cast { copies.to_vec() } else { vec![] };
                let (op, reads, writes) = if adamw {
                    let reads = vec![w0, g0, mr, vr, w1, g1];
                    let writes = [vec![w0, mr, vr], pick(&first), vec![w1], pick(&second)];
                    (
                        ShardOp::AdamW(Fused {
                            cast,
                            pieces: None,
                            maxima: false,
                        }),
                        reads,
                        writes.concat(),
                    )
                } else {
                    let writes = [vec![w0], pick(&first), vec![w1], pick(&second)];
                    (
                        ShardOp::Sgd(Fused {
                            cast,
                            pieces: None,
                            maxima: false,
                        }),
                        vec![w0, g0, w1, g1],
                        writes.concat(),
                    )
                };
                run(op, HYPER, &[], &reads, &writes).unwrap();
                let state = [w[0].bits(), w[1].bits(), m.bits(), v.bits()];
                let done = (state, [0, 1].map(|i| w[i].values()), c.values());
                if cast {
                    let fewer = run(op, HYPER, &[], &reads, &writes[..writes.len() - 1]);
                    assert!(fewer.is_err());
                }
                done
            };
            let (plain, cast) = (run_with(false), run_with(true));
            assert!(plain.0 == cast.0, "{weights} {copies} {adamw}");
            for (i, start) in [(0, 70), (1, 0)] {
                let want = plain.1[i].iter().map(|&x| rounded(copies, x));
                let got = &cast.2[start..start + sizes[i]];
                assert!(want.eq(got.iter().copied()), "{weights} {copies} {adamw}");
            }
        }
    }
}

const F32_COMPUTE: &str = "compute = \"f32\"\n";
const BF16_COMPUTE: &str = "compute = \"bf16\"\n";
const BF16_ONLY: &str = "compute = \"bf16\"\nmain_params = \"none\"\n";

/// Launches every kernel of a program on the ranges of rank 0, filled with zeros.
fn rehearse(p: &Program) -> usize {
    let mut buffers: Vec<Buffer> = p
        .buffers
        .iter()
        .map(|b| {
            let n = b.bytes.0.div_ceil(b.dtype.size()) as usize;
            Buffer::of(b.dtype, &vec![0.0; n])
        })
        .collect();
    let mut count = 0;
    for (id, i) in (0..).zip(&p.instrs) {
        let Op::Launch { kernel, .. } = i.op else {
            continue;
        };
        let k = &p.kernels[kernel.index()];
        let mut ranges = |list: &[shardlab_plan::ir::Access]| -> Vec<RawRange> {
            list.iter()
                .map(|a| {
                    let b = &mut buffers[a.buffer.index()];
                    let size = b.dtype.size();
                    b.part((a.offset / size) as usize, (a.bytes / size) as usize)
                })
                .collect()
        };
        let (reads, writes) = (ranges(p.reads(&i.op)), ranges(p.writes(&i.op)));
        let behind = match k.body.first().map(|b| b.op) {
            Some(OpKind::Shard(ShardOp::CopyOut { .. })) => p.writes(&i.op),
            Some(OpKind::Shard(ShardOp::ChunkCat { .. })) => p.reads(&i.op),
            _ => &[],
        };
        let shapes: Vec<Shape> = behind
            .iter()
            .map(|a| match p.buffers[a.buffer.index()].holds {
                Holds::Param(id) => p.params[id.index()].shape.clone(),
                other => panic!("{other:?} is no parameter"),
            })
            .collect();
        launch(k, HYPER, &shapes, &reads, &writes)
            .unwrap_or_else(|e| panic!("{}: {e}", p.op_text(shardlab_plan::ir::InstrId(id))));
        count += 1;
    }
    count
}

/// Precision, mesh, and other options of `[fsdp]`.
type Variant = (&'static str, &'static str, &'static str);
const THREE: &str = "dp_shard = 3\n";
const GRID: &str = "dp_shard = 2\ndp_outer = 2\n";

/// Rehearses all supported combinations of policies, strategies and other options. Returns their
/// number.
fn rehearse_all(mode: &str, train: &str, variants: &[Variant]) -> usize {
    let model = "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = 12\nheads = 6\nkv_heads = 2\nhead_dim = 4\nffn = 20\nvocab = 13\n";
    let mut programs = 0;
    for policy in ["native", "fsdp2", "megatron", "megatron_v2"] {
        for strategy in ["no_shard", "optim", "optim_grads", "optim_grads_params"] {
            for (precision, mesh, more) in variants {
                let text = format!(
                    "{model}[train]\nseq_len = 7\nmicro_batch = 2\ngrad_accum = 2\nclip_norm = 1.0\n{train}\
                     [mesh]\nhardware = \"h200-nvlink\"\n{mesh}\
                     [fsdp]\npolicy = \"{policy}\"\nstrategy = \"{strategy}\"\n{more}\
                     [compile]\nmode = \"{mode}\"\n[precision]\n{precision}"
                );
                // Some combinations are not supported.
                let Ok(s) = scenario::parse("test", &text, &[]) else {
                    continue;
                };
                let Ok(p) = shardlab_plan::plan(&s) else {
                    continue;
                };
                assert!(rehearse(&p) > 50, "{text}");
                programs += 1;
            }
        }
    }
    programs
}

#[test]
fn operands_of_whole_programs_fit() {
    let variants = [
        (F32_COMPUTE, "dp_shard = 1\n", ""),
        (F32_COMPUTE, THREE, ""),
        (BF16_COMPUTE, THREE, "nan_check = true\n"),
        (BF16_ONLY, THREE, ""),
        (BF16_COMPUTE, GRID, ""),
        (BF16_COMPUTE, GRID, "outer_strategy = \"optim\"\n"),
        (
            BF16_COMPUTE,
            "dp_shard = 4\n",
            "reshard_after_forward = 2\n",
        ),
    ];
    assert!(rehearse_all("off", "validate_every = 2\n", &variants) > 30);
    let one = [(BF16_COMPUTE, THREE, "")];
    for mode in ["blocks", "regions"] {
        assert!(
            rehearse_all(mode, "validate_every = 2\n", &one) > 4,
            "{mode}"
        );
    }
    assert!(rehearse_all("full", "", &one) > 1);
}

#[test]
fn operands_of_fully_compiled_validation_fit() {
    assert!(rehearse_all("full", "validate_every = 2\n", &[(F32_COMPUTE, THREE, "")]) > 1);
}
