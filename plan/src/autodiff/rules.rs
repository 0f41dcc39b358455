//! One vector-Jacobian rule an op kind.

use crate::model::graph::{Act, Graph, Op, ValueId, View};
use crate::model::ops::OpKind;
use smallvec::{SmallVec, smallvec};

/// Gradients by input position.
pub(super) type Contributions = SmallVec<[(usize, ValueId); 4]>;

/// Whether an input gets a gradient at all (ids, labels and statistics do not).
pub(super) fn differentiable(op: &Op, input: usize) -> bool {
    match op.act {
        Act::Compute(OpKind::Embedding) => input == 1,
        Act::Compute(OpKind::NllLoss | OpKind::LogProbs) => input == 0,
        Act::Compute(OpKind::SquaredError { .. }) => input == 0,
        Act::View(View::Precomputed) => input == 1 || input == 2,
        _ => true,
    }
}

/// Emits the ops that turn gradients of `op`'s outputs into gradients of the inputs that need one.
pub(super) fn vjp(
    g: &mut Graph,
    op: &Op,
    grads: &[Option<ValueId>],
    needs: &[bool],
) -> Contributions {
    let first = grads.first().copied().flatten();
    match op.act {
        Act::View(View::Split { axis }) => split(g, op, grads, usize::from(axis)),
        Act::View(View::Precomputed) => precomputed(op, needs),
        Act::View(view) => first.map_or_else(SmallVec::new, |dy| {
            smallvec![(0, view_rule(g, op, view, dy))]
        }),
        Act::Compute(kind) => {
            first.map_or_else(SmallVec::new, |dy| compute(g, op, kind, dy, needs))
        }
    }
}

fn view_rule(g: &mut Graph, op: &Op, view: View, dy: ValueId) -> ValueId {
    let x = op.inputs[0];
    let shape = g.value(x).shape.clone();
    match view {
        View::Reshape => g.reshape(dy, &shape),
        View::Transpose(a, b) => g.transpose(dy, usize::from(a), usize::from(b)),
        View::Slice { axis, start } => {
            let zeros = g.fill_like(x, 0.0);
            let len = g.value(op.outputs[0]).shape[usize::from(axis)];
            let window = g.slice(zeros, usize::from(axis), start, len);
            g.compute_into(OpKind::Copy, &[dy], window);
            zeros
        }
        View::Expand => sum_to(g, dy, &shape),
        // `Join` is made by compilation, after differentiation.
        View::Split { .. } | View::Join { .. } | View::Precomputed | View::Pass => dy,
    }
}

fn split(g: &mut Graph, op: &Op, grads: &[Option<ValueId>], axis: usize) -> Contributions {
    let parts: SmallVec<[ValueId; 4]> = grads
        .iter()
        .zip(&op.outputs)
        .map(|(grad, &out)| grad.unwrap_or_else(|| g.fill_like(out, 0.0)))
        .collect();
    smallvec![(0, g.cat(&parts, axis))]
}

/// Gradients that the forward pass has computed.
fn precomputed(op: &Op, needs: &[bool]) -> Contributions {
    [1, 2]
        .into_iter()
        .filter(|&i| needs[i])
        .map(|i| (i, op.inputs[i + 2]))
        .collect()
}

fn compute(g: &mut Graph, op: &Op, kind: OpKind, dy: ValueId, needs: &[bool]) -> Contributions {
    let x = &op.inputs;
    let mut out = Contributions::new();
    let mut give = |i: usize, v: ValueId| out.push((i, v));
    match kind {
        OpKind::Gemm { bias, .. } => linear(g, op, dy, needs, bias, &mut give),
        OpKind::Add => {
            for i in [0, 1] {
                if needs[i] {
                    let shape = g.value(x[i]).shape.clone();
                    give(i, sum_to(g, dy, &shape));
                }
            }
        }
        OpKind::Sub => {
            if needs[0] {
                give(0, dy);
            }
            if needs[1] {
                give(1, g.unary(OpKind::Neg, dy));
            }
        }
        OpKind::Mul => {
            for i in [1, 0] {
                if needs[i] {
                    let d = g.binary(OpKind::Mul, dy, x[1 - i]);
                    let shape = g.value(x[i]).shape.clone();
                    give(i, sum_to(g, d, &shape));
                }
            }
        }
        OpKind::Neg => give(0, g.unary(OpKind::Neg, dy)),
        OpKind::Silu => give(0, g.compute_like(OpKind::SiluGrad, &[dy, x[0]], &[x[0]])[0]),
        OpKind::Gelu => give(0, g.compute_like(OpKind::GeluGrad, &[dy, x[0]], &[x[0]])[0]),
        OpKind::Relu => give(
            0,
            g.compute_like(OpKind::ReluGrad, &[dy, op.outputs[0]], &[x[0]])[0],
        ),
        OpKind::Copy => {
            let (shape, dtype) = (g.value(x[0]).shape.clone(), g.value(x[0]).dtype);
            let d = g.cast(dy, dtype);
            give(0, g.reshape(d, &shape));
        }
        OpKind::Cat { axis } => {
            let mut start = 0;
            for (i, &part) in x.iter().enumerate() {
                let len = g.value(part).shape[usize::from(axis)];
                if needs[i] {
                    give(i, g.slice(dy, usize::from(axis), start, len));
                }
                start += len;
            }
        }
        OpKind::RmsNorm { .. } => {
            let rstd = op.outputs[1];
            if needs[0] {
                give(
                    0,
                    g.compute_like(OpKind::RmsNormGrad, &[dy, x[0], x[1], rstd], &[x[0]])[0],
                );
            }
            if needs[1] {
                give(
                    1,
                    g.compute_like(OpKind::RmsNormWeightGrad, &[dy, x[0], rstd], &[x[1]])[0],
                );
            }
        }
        OpKind::LayerNorm { .. } => layer_norm(g, op, dy, needs, &mut give),
        OpKind::Embedding => {
            // The ids are kept as they came and made contiguous again.
            let ids = match g.computed_by(x[0]) {
                Some((OpKind::Copy, copy)) => {
                    let source = copy.inputs[0];
                    g.make_contiguous(source)
                }
                _ => x[0],
            };
            let zeros = g.fill_like(x[1], 0.0);
            give(
                1,
                g.compute_into(OpKind::EmbeddingGrad, &[dy, ids, zeros], zeros),
            );
        }
        OpKind::Attention { causal, scale } => {
            let mut inputs: SmallVec<[ValueId; 8]> = smallvec![dy, x[0], x[1], x[2]];
            inputs.extend_from_slice(&op.outputs);
            let d = g.compute_like(
                OpKind::AttentionGrad { causal, scale },
                &inputs,
                &[x[0], x[1], x[2]],
            );
            for i in 0..3 {
                if needs[i] {
                    give(i, d[i]);
                }
            }
        }
        OpKind::Conv { kernel } => {
            if needs[0] {
                give(
                    0,
                    g.compute_like(OpKind::ConvGradInput { kernel }, &[dy, x[1]], &[x[0]])[0],
                );
            }
            if needs[1] {
                give(
                    1,
                    g.compute_like(OpKind::ConvGradWeight { kernel }, &[dy, x[0]], &[x[1]])[0],
                );
            }
        }
        OpKind::LogSoftmax | OpKind::LogProbs => give(
            0,
            g.compute_like(OpKind::LogSoftmaxGrad, &[dy, op.outputs[0]], &[x[0]])[0],
        ),
        OpKind::NllLoss => {
            let zeros = g.fill_like(x[0], 0.0);
            give(
                0,
                g.compute_into(
                    OpKind::NllLossGrad,
                    &[dy, x[1], op.outputs[1], zeros],
                    zeros,
                ),
            );
        }
        OpKind::SquaredError { scale } => {
            let zeros = g.fill_like(x[0], 0.0);
            give(
                0,
                g.compute_into(
                    OpKind::SquaredErrorGrad { scale },
                    &[dy, x[0], x[1], zeros],
                    zeros,
                ),
            );
        }
        OpKind::SumAll => {
            let shape = g.value(x[0]).shape.clone();
            give(0, g.expand(dy, &shape));
        }
        OpKind::SumLeading | OpKind::SumChannels => {
            let shape = g.value(x[0]).shape.clone();
            give(0, g.expand(dy, &shape));
        }
        // These occur in backward graphs and after decomposition only, which are not differentiated again.
        OpKind::AttentionGrad { .. }
        | OpKind::ConvGradInput { .. }
        | OpKind::ConvGradWeight { .. }
        | OpKind::EmbeddingGrad
        | OpKind::RmsNormGrad
        | OpKind::RmsNormWeightGrad
        | OpKind::LayerNormGrad
        | OpKind::LayerNormParamGrad
        | OpKind::SiluGrad
        | OpKind::GeluGrad
        | OpKind::ReluGrad
        | OpKind::Fill { .. }
        | OpKind::LogSoftmaxGrad
        | OpKind::LogSumExp
        | OpKind::NllLossGrad
        | OpKind::SquaredErrorGrad { .. }
        | OpKind::CrossEntropy { .. }
        | OpKind::Shard(_) => {}
    }
    out
}

/// `y = x w^T + b`. PyTorch computes gradients in the alphabetical order of its arguments' names: `mm(self, mat2)` the weight's
/// first, `addmm(self, mat1, mat2)` the input's, the weight's, then the bias'.
fn linear(
    g: &mut Graph,
    op: &Op,
    dy: ValueId,
    needs: &[bool],
    bias: bool,
    give: &mut impl FnMut(usize, ValueId),
) {
    let (x, w) = (op.inputs[0], op.inputs[1]);
    let dy = g.make_contiguous(dy);
    let dtype = g.value(w).dtype;
    let order: &[usize] = if bias { &[0, 1, 2] } else { &[1, 0] };
    for &i in order {
        if !needs[i] {
            continue;
        }
        match i {
            0 => {
                let shape = g.value(x).shape.clone();
                let kind = OpKind::Gemm {
                    ta: false,
                    tb: false,
                    bias: false,
                    accumulate: false,
                };
                give(0, g.compute(kind, &[dy, w], &[(&shape, dtype)])[0]);
            }
            1 => {
                let shape = g.value(w).shape.clone();
                let kind = OpKind::Gemm {
                    ta: true,
                    tb: false,
                    bias: false,
                    accumulate: false,
                };
                give(1, g.compute(kind, &[dy, x], &[(&shape, dtype)])[0]);
            }
            _ => {
                let shape = g.value(op.inputs[2]).shape.clone();
                give(2, sum_to(g, dy, &shape));
            }
        }
        // Transposes of the operands.
        g.dispatches(2);
    }
}

fn layer_norm(
    g: &mut Graph,
    op: &Op,
    dy: ValueId,
    needs: &[bool],
    give: &mut impl FnMut(usize, ValueId),
) {
    let (x, mean, rstd) = (&op.inputs, op.outputs[1], op.outputs[2]);
    let dy = g.make_contiguous(dy);
    if needs[0] {
        give(
            0,
            g.compute_like(
                OpKind::LayerNormGrad,
                &[dy, x[0], x[1], mean, rstd],
                &[x[0]],
            )[0],
        );
    }
    if needs[1] || needs.get(2) == Some(&true) {
        let like: SmallVec<[ValueId; 2]> = x[1..].iter().copied().collect();
        let d = g.compute_like(OpKind::LayerNormParamGrad, &[dy, x[0], mean, rstd], &like);
        for (i, &v) in d.iter().enumerate() {
            if needs[i + 1] {
                give(i + 1, v);
            }
        }
    }
}

/// Sums a gradient over the dimensions along which an operand was broadcast.
fn sum_to(g: &mut Graph, d: ValueId, shape: &[u64]) -> ValueId {
    let v = g.value(d);
    if v.shape.as_slice() == shape {
        return d;
    }
    let dtype = v.dtype;
    let channels = shape.len() == 4 && shape[1] == v.shape[1] && shape[0] == 1;
    let kind = if shape.is_empty() {
        OpKind::SumAll
    } else if channels {
        OpKind::SumChannels
    } else {
        OpKind::SumLeading
    };
    g.compute(kind, &[d], &[(shape, dtype)])[0]
}
