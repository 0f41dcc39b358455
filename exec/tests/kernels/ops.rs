//! Single operations compared with float64: all operands, dtypes and layouts, edge values, and
//! errors.

#![expect(
    clippy::cloned_ref_to_slice_refs,
    reason = "operand lists read better when all are built alike"
)]

use super::case::{Arg, Case, Lay, arg, each, shape};
use super::memory::{Buffer, Rng, positions};
use super::semantics;
use shardlab_exec::kernels::OperandError;
use shardlab_plan::ir::{DType, OpKind, Place, Real, ScaleBlock, ScoreMod, Slot, op};

#[test]
fn elementwise() {
    each(|t, a, b, rng| {
        let s = shape(rng);
        let x = |rng: &mut Rng| {
            if rng.below(5) == 0 {
                arg(&s, t).lay(Lay::Repeated)
            } else {
                arg(&s, t).lay(a)
            }
        };
        let y = arg(&s, t).lay(b);
        for op in [
            OpKind::Neg,
            OpKind::Silu,
            OpKind::Gelu,
            OpKind::Relu,
            OpKind::Copy,
        ] {
            Case::new(op, &[x(rng)], &[y.clone()], rng).check();
        }
        let binary = [
            OpKind::Add,
            OpKind::Sub,
            OpKind::Mul,
            OpKind::LogProbs,
            OpKind::SiluGrad,
            OpKind::GeluGrad,
            OpKind::ReluGrad,
        ];
        for op in binary
            .into_iter()
            .chain([OpKind::SquaredError(op::SquaredError { scale: Real(0.3) })])
        {
            Case::new(op, &[x(rng), x(rng)], &[y.clone()], rng).check();
            // The result replaces the first or the second operand.
            if a == b {
                Case::new(
                    op,
                    &[arg(&s, t).lay(a), x(rng)],
                    &[y.clone().same_as(0)],
                    rng,
                )
                .check();
                Case::new(
                    op,
                    &[x(rng), arg(&s, t).lay(a)],
                    &[y.clone().same_as(1)],
                    rng,
                )
                .check();
            }
        }
        Case::new(
            OpKind::Fill(op::Fill { value: Real(0.25) }),
            &[],
            &[y.clone()],
            rng,
        )
        .check();
        let grad = OpKind::SquaredErrorGrad(op::SquaredErrorGrad { scale: Real(0.3) });
        let ins = [
            arg(&s, t).lay(Lay::Repeated),
            x(rng),
            x(rng),
            arg(&s, t).lay(a),
        ];
        Case::new(grad, &ins, &[y.same_as(3)], rng).check();
    });
}

#[test]
fn broadcasts_and_casts() {
    each(|t, a, b, rng| {
        let s: Vec<u64> = (0..3).map(|_| 2 + rng.below(20)).collect();
        let other = if t == DType::F32 {
            DType::Bf16
        } else {
            DType::F32
        };
        for small in [
            vec![s[2]],
            vec![s[1], s[2]],
            vec![1, s[1], 1],
            vec![s[0], s[1], 1],
            vec![1],
            vec![],
        ] {
            let (x, y) = (arg(&s, t).lay(a), arg(&small, other).lay(Lay::Dense));
            Case::new(
                OpKind::Add,
                &[x.clone(), y.clone()],
                &[arg(&s, t).lay(b)],
                rng,
            )
            .check();
            Case::new(OpKind::Mul, &[y, x], &[arg(&s, other).lay(b)], rng).check();
        }
        // A copy to another shape and dtype.
        let flat = [s[0] * s[2], s[1]];
        Case::new(
            OpKind::Copy,
            &[arg(&s, t).lay(a)],
            &[arg(&flat, other).lay(b)],
            rng,
        )
        .check();
        let ids = arg(&s, DType::I64).lay(a).ids(1 << 52);
        let mut case = Case::new(OpKind::Copy, &[ids], &[arg(&flat, DType::I64).lay(b)], rng);
        case.run().unwrap();
        let from: Vec<f64> = positions(&case.op.inputs[0])
            .into_iter()
            .map(|i| case.ins[0].get(i))
            .collect();
        let to: Vec<f64> = positions(&case.op.outputs[0])
            .into_iter()
            .map(|i| case.buffers()[0].get(i))
            .collect();
        assert_eq!(from, to, "integers are copied exactly");
    });
}

#[test]
fn concatenations() {
    each(|t, a, b, rng| {
        let s: Vec<u64> = (0..4).map(|_| 1 + rng.below(7)).collect();
        for axis in 0..4usize {
            let mut total = s.clone();
            total[axis] = 0;
            let parts: Vec<Arg> = (0..1 + rng.below(4))
                .map(|_| {
                    let mut part = s.clone();
                    part[axis] = 1 + rng.below(6);
                    total[axis] += part[axis];
                    arg(&part, t).lay(a)
                })
                .collect();
            Case::new(
                OpKind::Cat(op::Cat { axis: axis as u8 }),
                &parts,
                &[arg(&total, t).lay(b)],
                rng,
            )
            .check();
        }
    });
}

#[test]
fn norms() {
    each(|t, a, b, rng| {
        let (r, d) = (1 + rng.below(40), 1 + rng.below(70));
        let eps = Real(1e-5);
        let (x, y, w) = (
            arg(&[r, d], t).lay(a),
            arg(&[r, d], t).lay(b),
            arg(&[d], t).lay(a),
        );
        let stat = arg(&[r, 1], DType::F32);
        let rms = OpKind::RmsNorm(op::RmsNorm { eps });
        Case::new(
            rms,
            &[x.clone(), w.clone()],
            &[y.clone(), stat.clone()],
            rng,
        )
        .check();
        let layer = OpKind::LayerNorm(op::LayerNorm { eps });
        let stats = [y.clone(), stat.clone(), stat.clone()];
        if d > 4 {
            Case::new(layer, &[x.clone(), w.clone(), w.clone()], &stats, rng).check();
            Case::new(layer, &[x.clone(), w.clone()], &stats, rng).check();
        }
        let two = [x.clone(), x.clone()];
        let ins = |more: &[&Arg]| {
            two.iter()
                .chain(more.iter().copied())
                .cloned()
                .collect::<Vec<_>>()
        };
        Case::new(OpKind::RmsNormGrad, &ins(&[&w, &stat]), &[y.clone()], rng).check();
        Case::new(OpKind::RmsNormWeightGrad, &ins(&[&stat]), &[w.clone()], rng).check();
        Case::new(
            OpKind::LayerNormGrad,
            &ins(&[&w, &stat, &stat]),
            &[y.clone()],
            rng,
        )
        .check();
        let params = OpKind::LayerNormParamGrad;
        Case::new(params, &ins(&[&stat, &stat]), &[w.clone(), w.clone()], rng).check();
        Case::new(params, &ins(&[&stat, &stat]), &[w.clone()], rng).check();
        if a == b {
            // The result replaces the gradient.
            Case::new(
                OpKind::RmsNormGrad,
                &ins(&[&w, &stat]),
                &[y.same_as(0)],
                rng,
            )
            .check();
        }
    });
}

#[test]
fn sums() {
    each(|t, a, b, rng| {
        let s: Vec<u64> = (0..4).map(|_| 1 + rng.below(11)).collect();
        let x = arg(&s, t).lay(a);
        for tail in 1..4 {
            let out = arg(&s[tail..], t).lay(b);
            Case::new(OpKind::SumLeading, &[x.clone()], &[out], rng).check();
        }
        Case::new(
            OpKind::SumLeading,
            &[arg(&s, t).lay(Lay::Repeated)],
            &[arg(&s[3..], t)],
            rng,
        )
        .check();
        Case::new(
            OpKind::SumChannels,
            &[x.clone()],
            &[arg(&s[1..2], t).lay(b)],
            rng,
        )
        .check();
        Case::new(OpKind::SumAll, &[x], &[arg(&[], DType::F32)], rng).check();
    });
}

#[test]
fn softmaxes_and_losses() {
    each(|t, a, b, rng| {
        let (r, d) = (1 + rng.below(50), 2 + rng.below(90));
        let (x, y) = (arg(&[r, d], t).lay(a), arg(&[r, d], t).lay(b));
        Case::new(OpKind::LogSoftmax, &[x.clone()], &[y.clone()], rng).check();
        Case::new(
            OpKind::LogSoftmaxGrad,
            &[x.clone(), x.clone()],
            &[y.clone()],
            rng,
        )
        .check();
        Case::new(
            OpKind::LogSumExp,
            &[x.clone()],
            &[arg(&[r, 1], DType::F32)],
            rng,
        )
        .check();
        let labels = arg(&[r], DType::I64).lay(a).ids(d);
        let one = arg(&[], DType::F32);
        Case::new(
            OpKind::NllLoss,
            &[x.clone(), labels.clone()],
            &[one.clone(), one.clone()],
            rng,
        )
        .check();
        let rows = one.clone().values(&[r as f64]);
        let ins = [one.clone(), labels.clone(), rows, x.clone()];
        Case::new(OpKind::NllLossGrad, &ins, &[y.clone()], rng).check();
        Case::new(OpKind::NllLossGrad, &ins, &[x.clone().same_as(3)], rng).check();
        let chunk = OpKind::CrossEntropy(op::CrossEntropy {
            scale: Real(1.0 / 77.0),
            gradient: Real(0.25 / 77.0),
        });
        let outs = [x.clone().same_as(0), one.clone().same_as(2)];
        Case::new(chunk, &[x, labels, one], &outs, rng).check();
    });
}

#[test]
fn gathers_and_scatters() {
    each(|t, a, b, rng| {
        let (n, v, d) = (1 + rng.below(60), 1 + rng.below(20), 1 + rng.below(40));
        let (ids, table) = (arg(&[n], DType::I64).lay(a).ids(v), arg(&[v, d], t).lay(a));
        Case::new(
            OpKind::Embedding,
            &[ids.clone(), table.clone()],
            &[arg(&[n, d], t).lay(b)],
            rng,
        )
        .check();
        let grads = arg(&[n, d], t).lay(b);
        let ins = [grads, ids, table.clone()];
        Case::new(
            OpKind::EmbeddingGrad,
            &ins,
            &[table.clone().same_as(2)],
            rng,
        )
        .check();
        let table = table.lay(b);
        Case::new(
            OpKind::EmbeddingGrad,
            &ins,
            std::slice::from_ref(&table),
            rng,
        )
        .check();
        Case::new(OpKind::EmbeddingGrad, &ins[..2], &[table], rng).check();
    });
}

#[test]
fn products() {
    each(|t, a, b, rng| {
        let [m, n, k] = [0; 3].map(|_| 1 + rng.below(70));
        let batch = 1 + rng.below(3);
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let x = if ta {
                vec![batch, k, m]
            } else {
                vec![batch, m, k]
            };
            // Leading dimensions are rows.
            let (m, k) = if ta { (m, k * batch) } else { (m * batch, k) };
            let y = if tb { [n, k] } else { [k, n] };
            let (x, y) = (arg(&x, t).lay(a), arg(&y, t).lay(b));
            let c = arg(&[m, n], t).lay(b);
            let gemm = |bias, accumulate| {
                OpKind::Gemm(op::Gemm {
                    ta,
                    tb,
                    bias,
                    accumulate,
                })
            };
            let bias = arg(&[n], t).lay(a);
            Case::new(
                gemm(false, false),
                &[x.clone(), y.clone()],
                &[c.clone()],
                rng,
            )
            .check();
            Case::new(
                gemm(true, false),
                &[x.clone(), y.clone(), bias.clone()],
                &[c.clone()],
                rng,
            )
            .check();
            let wide = arg(&[m, n], DType::F32);
            Case::new(
                gemm(false, true),
                &[x.clone(), y.clone(), c.clone()],
                &[c.clone().same_as(2)],
                rng,
            )
            .check();
            Case::new(
                gemm(false, true),
                &[x.clone(), y.clone(), c.clone()],
                &[wide.clone()],
                rng,
            )
            .check();
            Case::new(
                gemm(true, true),
                &[x, y, bias, wide.clone()],
                &[wide.same_as(3)],
                rng,
            )
            .check();
        }
    });
}

#[test]
fn attentions() {
    each(|t, a, b, rng| {
        let (batch, kv, group) = (1 + rng.below(2), 1 + rng.below(3), 1 + rng.below(3));
        let (seq, d) = (1 + rng.below(150), 1 + rng.below(20));
        let pad = seq.next_multiple_of(32);
        let heads = kv * group;
        for causal in [true, false] {
            let scale = Real(1.0 / (d as f64).sqrt());
            let (q, k) = (
                arg(&[batch, heads, seq, d], t).lay(a),
                arg(&[batch, kv, seq, d], t).lay(a),
            );
            let out = arg(&[batch, heads, seq, d], t).lay(b);
            let lse = arg(
                &[batch, heads, if rng.below(2) == 0 { pad } else { seq }],
                DType::F32,
            );
            let state = arg(&[], DType::I64);
            let op = OpKind::Attention(op::Attention { causal, scale });
            let outs = [out.clone(), lse.clone(), state.clone(), state.clone()];
            let mut forward = Case::new(op, &[q.clone(), k.clone(), k.clone()], &outs, rng);
            forward.run().unwrap();
            let values: Vec<Vec<f64>> = forward.buffers().iter().map(|b| b.values()).collect();
            let inputs: Vec<Vec<f64>> = forward.ins.iter().map(Buffer::values).collect();
            let slots = forward.op.clone();
            forward.check();
            // The backward of exactly these values: the reference uses the saved statistics.
            let mut ins = vec![arg(&[batch, heads, seq, d], t).lay(b)];
            ins.extend([&q, &k, &k].map(Clone::clone));
            ins.extend([out, lse, state.clone(), state.clone()]);
            let outs = [q.clone().lay(b), k.clone().lay(b), k.clone().lay(b)];
            let mut case = Case::new(
                OpKind::AttentionGrad(op::AttentionGrad { causal, scale }),
                &ins,
                &outs,
                rng,
            );
            for (i, x) in inputs.iter().enumerate() {
                let place = Place::Read(1 + i as u8);
                case.op.inputs[1 + i] = Slot {
                    place,
                    ..slots.inputs[i].clone()
                };
                case.ins[1 + i] = Buffer::of(t, x);
            }
            for (i, x) in values.iter().take(2).enumerate() {
                let place = Place::Read(4 + i as u8);
                case.op.inputs[4 + i] = Slot {
                    place,
                    ..slots.outputs[i].clone()
                };
                case.ins[4 + i] = Buffer::of([t, DType::F32][i], x);
            }
            case.check();
        }
    });
}

/// Attention sinks, from values that take nearly all weight to values with almost no effect, and
/// their gradients.
#[test]
fn sinks_of_attention() {
    each(|t, a, b, rng| {
        let (batch, kv, group) = (1 + rng.below(2), 1 + rng.below(3), 1 + rng.below(3));
        let (seq, d, heads) = (1 + rng.below(150), 1 + rng.below(20), kv * group);
        let window = rng.below(2) * (1 + rng.below(seq));
        let (causal, scale) = (true, Real(1.0 / (d as f64).sqrt()));
        let score_mod = ScoreMod {
            window,
            ..ScoreMod::NONE
        };
        let (q, k) = (
            arg(&[batch, heads, seq, d], t).lay(a),
            arg(&[batch, kv, seq, d], t).lay(a),
        );
        let sinks: Vec<f64> = (0..heads)
            .map(|h| [-40.0, 0.5, 8.0][h as usize % 3])
            .collect();
        let sinks = arg(&[heads], t).values(&sinks);
        let (out, lse) = (q.clone().lay(b), arg(&[batch, heads, seq], DType::F32));
        let op = OpKind::SinkAttention(op::SinkAttention {
            causal,
            scale,
            score_mod,
        });
        let ins = [q.clone(), k.clone(), k.clone(), sinks.clone()];
        let mut forward = Case::new(op, &ins, &[out.clone(), lse.clone()], rng);
        forward.run().unwrap();
        let made: Vec<Vec<f64>> = forward.buffers().iter().map(|b| b.values()).collect();
        let (given, slots) = (forward.ins.clone(), forward.op.clone());
        forward.check();
        let grads = [q.clone().lay(b), k.clone().lay(b), k.clone().lay(b)];
        let grads = [&grads[..], &[arg(&[heads], DType::F32)]].concat();
        let ins = [&[q.clone().lay(b)], &ins[..], &[out, lse]].concat();
        let op = OpKind::SinkAttentionGrad(op::SinkAttentionGrad {
            causal,
            scale,
            score_mod,
        });
        let mut case = Case::new(op, &ins, &grads, rng);
        // The backward of exactly these values: the reference uses the saved statistics.
        let results = made.iter().zip([t, DType::F32]);
        let results = results.map(|(values, dtype)| Buffer::of(dtype, values));
        let all = given.into_iter().chain(results);
        for (i, (slot, buffer)) in slots
            .inputs
            .iter()
            .chain(&slots.outputs)
            .zip(all)
            .enumerate()
        {
            let place = Place::Read(1 + i as u8);
            case.op.inputs[1 + i] = Slot {
                place,
                ..slot.clone()
            };
            case.ins[1 + i] = buffer;
        }
        case.check();
    });
}

#[test]
fn convolutions() {
    each(|t, a, b, rng| {
        let [n, ci, co] = [0; 3].map(|_| 1 + rng.below(4));
        let [h, w] = [0; 2].map(|_| 1 + rng.below(7));
        for kernel in [1, 3, 5] {
            let x = arg(&[n, ci, h, w], t).lay(a);
            let wt = arg(&[co, ci, kernel, kernel], t).lay(a);
            let y = arg(&[n, co, h, w], t).lay(b);
            Case::new(
                OpKind::Conv(op::Conv { kernel }),
                &[x.clone(), wt.clone()],
                &[y.clone()],
                rng,
            )
            .check();
            Case::new(
                OpKind::ConvGradInput(op::ConvGradInput { kernel }),
                &[y.clone(), wt.clone()],
                &[x.clone()],
                rng,
            )
            .check();
            Case::new(
                OpKind::ConvGradWeight(op::ConvGradWeight { kernel }),
                &[y, x],
                &[wt],
                rng,
            )
            .check();
        }
    });
}

#[test]
fn a_buffer_of_another_type_wins() {
    // A bfloat16 GEMM whose result and bias are in float32 buffers: nothing is rounded.
    let mut rng = Rng(5);
    let op = OpKind::Gemm(op::Gemm {
        ta: true,
        tb: false,
        bias: false,
        accumulate: false,
    });
    let x = arg(&[33, 17], DType::Bf16);
    let mut case = Case::new(
        op,
        &[x.clone(), x.clone()],
        &[arg(&[17, 17], DType::F32)],
        &mut rng,
    );
    case.op.outputs[0].dtype = DType::Bf16;
    let exact = semantics::apply(&case.op, &[case.ins[0].values(), case.ins[1].values()]);
    case.run().unwrap();
    for (g, w) in case.buffers()[0].values().iter().zip(&exact[0]) {
        assert!((g - w).abs() < 1e-5, "{g} {w}");
    }
    // The same for an elementwise operation.
    let mut case = Case::new(
        OpKind::Mul,
        &[x.clone(), x.clone()],
        &[arg(&[33, 17], DType::F32)],
        &mut rng,
    );
    case.op.outputs[0].dtype = DType::Bf16;
    case.run().unwrap();
    let product = case.ins[0].get(7) * case.ins[1].get(7);
    assert_eq!(case.buffers()[0].get(7), f64::from(product as f32));
}

#[test]
fn extreme_values() {
    let run = |op, x: &[f64]| {
        let n = x.len() as u64;
        let a = arg(&[1, n], DType::F32).values(x);
        let mut case = Case::new(op, &[a], &[arg(&[1, n], DType::F32)], &mut Rng(1));
        case.run().unwrap();
        case.buffers()[0].values()
    };
    let far = [-1e30, -200.0, -1e-30, 0.0, 1e-30, 200.0, 1e30];
    for (op, right) in [
        (OpKind::Silu, 1e30),
        (OpKind::Gelu, 1e30),
        (OpKind::Relu, 1e30),
    ] {
        let y = run(op, &far);
        assert!(y.iter().all(|v| v.is_finite()), "{op:?} {y:?}");
        assert!(
            y[0].abs() < 1e-6 && y[1].abs() < 1e-6 && (y[6] / right - 1.0).abs() < 1e-6,
            "{op:?} {y:?}"
        );
    }
    // A dominant logit gets all probability. Equal logits share it, regardless of their size.
    let y = run(OpKind::LogSoftmax, &[1e4, 0.0, -1e4]);
    assert_eq!(y, [0.0, -1e4, -2e4]);
    let y = run(OpKind::LogSoftmax, &[-1e3; 4]);
    assert!(y.iter().all(|v| (v + 4f64.ln()).abs() < 1e-4), "{y:?}");
    // NaN is preserved.
    let (min, max) = (Some(Real(-1.0)), Real(1.0));
    for op in [
        OpKind::Clamp(op::Clamp { min, max }),
        OpKind::Silu,
        OpKind::Gelu,
        OpKind::Relu,
        OpKind::LogSoftmax,
        OpKind::LogSumExp,
    ] {
        let mut x = vec![0.5; 40];
        x[21] = f64::NAN;
        let n = if op == OpKind::LogSumExp { 1 } else { 40 };
        let a = arg(&[1, 40], DType::F32).values(&x);
        let mut case = Case::new(op, &[a], &[arg(&[1, n], DType::F32)], &mut Rng(1));
        case.run().unwrap();
        assert!(
            case.buffers()[0].values().iter().any(|v| v.is_nan()),
            "{op:?}"
        );
    }
}

/// Returns the error of a launch that must fail.
fn fault(op: OpKind, ins: &[Arg], outs: &[Arg]) -> OperandError {
    let error = Case::new(op, ins, outs, &mut Rng(2)).run().unwrap_err();
    assert_eq!((error.kernel.as_str(), error.op), ("test", op.name()));
    error.fault
}

#[test]
fn errors_say_what_is_wrong() {
    let f = DType::F32;
    let ids = |v: &[f64]| arg(&[v.len() as u64], DType::I64).values(v);
    let table = arg(&[5, 3], f);
    let label = |row, value, limit| OperandError::Label { row, value, limit };
    let out = [arg(&[3, 3], f)];
    assert_eq!(
        fault(
            OpKind::Embedding,
            &[ids(&[0.0, 4.0, 5.0]), table.clone()],
            &out
        ),
        label(2, 5, 5)
    );
    assert_eq!(
        fault(
            OpKind::Embedding,
            &[ids(&[0.0, -1.0, 5.0]), table.clone()],
            &out
        ),
        label(1, -1, 5)
    );
    let one = arg(&[], f);
    let outs = [one.clone(), one.clone()];
    assert_eq!(
        fault(
            OpKind::NllLoss,
            &[arg(&[3, 4], f), ids(&[0.0, 1.0, 4.0])],
            &outs
        ),
        label(2, 4, 4)
    );
    let chunk = OpKind::CrossEntropy(op::CrossEntropy {
        scale: Real(1.0),
        gradient: Real(1.0),
    });
    let ins = [arg(&[2, 4], f), ids(&[3.0, 7.0]), one.clone()];
    assert_eq!(
        fault(chunk, &ins, &[arg(&[2, 4], f).same_as(0), one.same_as(2)]),
        label(1, 7, 4)
    );
    let size = |needed, found| move |f: &OperandError| matches!(f, OperandError::Size { needed: n, found: g, .. } if (*n, *g) == (needed, found));
    let gemm = OpKind::Gemm(op::Gemm {
        ta: false,
        tb: false,
        bias: false,
        accumulate: false,
    });
    let got = fault(
        gemm,
        &[arg(&[2, 3], f), arg(&[4, 2], f)],
        &[arg(&[2, 2], f)],
    );
    assert!(size(3, 4)(&got), "{got}");
    let got = fault(OpKind::Copy, &[arg(&[5], f)], &[arg(&[6], f)]);
    assert!(size(6, 5)(&got), "{got}");
    assert!(matches!(
        fault(OpKind::Add, &[arg(&[5], f), arg(&[2], f)], &[arg(&[5], f)]),
        OperandError::Shape(_)
    ));
    assert!(matches!(
        fault(OpKind::Add, &[arg(&[5], f)], &[arg(&[5], f)]),
        OperandError::Count { .. }
    ));
    // Operand indices beyond those that the launch passes.
    let mut case = Case::new(OpKind::Neg, &[arg(&[5], f)], &[arg(&[5], f)], &mut Rng(1));
    case.op.inputs[0].place = Place::Read(3);
    let unknown = OperandError::UnknownSlot {
        place: Place::Read(3),
        count: 1,
    };
    assert_eq!(case.run().unwrap_err().fault, unknown);
    case.op.inputs[0] = Slot {
        place: Place::Read(0),
        offset: 1,
        ..case.op.inputs[0].clone()
    };
    assert!(size(6, 5)(&case.run().unwrap_err().fault));
    let message = case.run().unwrap_err().to_string();
    assert_eq!(
        message,
        "kernel `test`, op `neg`: an operand has 5 elements; expected 6"
    );
}

/// Casts per block, compared bit for bit, and the matmul of their results. Blocks extend beyond the
/// matrices, and one of each consists of zeros.
#[test]
fn blocks_have_scales_of_their_own() {
    let mut rng = Rng(17);
    let to = DType::F8E4m3;
    let (m, n, k) = (130u64, 140u64, 300u64);
    let mut factor = |rows: u64, block: ScaleBlock, transposed: bool| {
        let values: Vec<f64> = (0..rows * k)
            .map(|at| {
                let (row, col) = (at / k, at % k);
                let zero = row / block.rows == 1 && col / block.cols == 1;
                let size = f64::powi(2.0, (row / 16) as i32 - (col / 64) as i32);
                if zero {
                    0.0
                } else {
                    f64::from(rng.next() as f32) * size
                }
            })
            .collect();
        let grid = block.grid([rows, k]);
        let cast = op::Float8CastBlocks {
            to,
            block,
            transposed,
        };
        let kind = OpKind::Float8CastBlocks(cast);
        let turned =
            (0..values.len()).map(|i| values[i % rows as usize * k as usize + i / rows as usize]);
        let turned: Vec<f64> = turned.collect();
        let x = match transposed {
            true => arg(&[k, rows], DType::F32).values(&turned),
            false => arg(&[rows, k], DType::F32).values(&values),
        };
        let outs = [arg(&[rows, k], to), arg(&grid, block.inverse_type())];
        let mut case = Case::new(kind, &[x], &outs, &mut Rng(3));
        let exact = semantics::apply(&case.op, &[case.ins[0].values()]);
        case.run().unwrap();
        let found = case
            .buffers()
            .iter()
            .map(|b| b.values())
            .collect::<Vec<_>>();
        assert_eq!(found[1], exact[1], "{block:?}");
        let codes: Vec<f64> = exact[0]
            .iter()
            .map(|v| Buffer::of(to, &[*v]).get(0))
            .collect();
        assert!(found[0] == codes, "{block:?}");
        assert!(codes.iter().all(|c| c.abs() <= 448.0));
        let near = codes.iter().filter(|c| c.abs() >= 224.0).count() as u64;
        assert!(near + 1 >= grid[0] * grid[1], "{block:?}: {near}");
        let inputs = [
            arg(&[rows, k], to).values(&found[0]),
            arg(&grid, block.inverse_type()).values(&found[1]),
        ];
        (inputs, found, values)
    };
    for [a, b] in [
        [ScaleBlock::ROW, ScaleBlock::SQUARE],
        [ScaleBlock::ROW, ScaleBlock::ROW],
        [ScaleBlock::MX, ScaleBlock::MX],
    ] {
        let (([x, sx], fx, wx), ([y, sy], fy, wy)) = (factor(m, a, false), factor(n, b, true));
        let kind = OpKind::ScaledGemm(op::ScaledGemm {
            fast: false,
            bias: false,
            accumulate: false,
        });
        let out = [arg(&[m, n], DType::F32)];
        let mut case = Case::new(kind, &[x, y, sx, sy], &out, &mut Rng(4));
        let ins = [&fx[0], &fy[0], &fx[1], &fy[1]].map(Clone::clone);
        let exact = semantics::apply(&case.op, &ins);
        case.run().unwrap();
        let found = case.buffers()[0].values();
        let size = exact[0].iter().fold(0.0f64, |s, v| s.max(v.abs()));
        let (mut error, mut all) = (0.0, 0.0);
        for (at, (g, w)) in found.iter().zip(&exact[0]).enumerate() {
            assert!((g - w).abs() < 1e-5 * size, "{a:?} {b:?}: {g} {w}");
            let (i, j) = (at / n as usize * k as usize, at % n as usize * k as usize);
            let row = |v: &[f64], from: usize| v[from..from + k as usize].to_vec();
            let product = row(&wx, i).into_iter().zip(row(&wy, j)).map(|(a, b)| a * b);
            let product: f64 = product.sum();
            error += (g - product).powi(2);
            all += product.powi(2);
        }
        // Codes with 3 mantissa bits: about 28 dB.
        assert!(error < all / 300.0, "{a:?} {b:?}: {error} of {all}");
    }
}
