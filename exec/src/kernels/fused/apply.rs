//! One operation on one block.

use super::super::error::Fault;
use super::super::{norm, pointwise, softmax};
use super::plan::Step;
use shardlab_plan::ir::{OpKind, op};

/// Computes the outputs of a step from its inputs, rows `row..` of the stage's `rows`; `sum` collects over blocks.
pub(super) fn apply(
    step: &Step<'_>,
    x: &[&[f32]],
    y: &mut [&mut [f32]],
    row: usize,
    rows: usize,
    sum: &mut f64,
) -> Result<(), Fault> {
    let d = step.cols;
    match step.op.op {
        OpKind::Add => pointwise::add(x[0], x[1], y[0]),
        OpKind::Sub | OpKind::LogProbs => pointwise::sub(x[0], x[1], y[0]),
        OpKind::Mul => pointwise::mul(x[0], x[1], y[0]),
        OpKind::Neg => pointwise::neg(x[0], y[0]),
        OpKind::Silu => pointwise::silu(x[0], y[0]),
        OpKind::SiluGrad => pointwise::silu_grad(x[0], x[1], y[0]),
        OpKind::Gelu => pointwise::gelu(x[0], y[0]),
        OpKind::GeluGrad => pointwise::gelu_grad(x[0], x[1], y[0]),
        OpKind::Relu => pointwise::relu(x[0], y[0]),
        OpKind::ReluGrad => pointwise::relu_grad(x[0], x[1], y[0]),
        OpKind::Copy => y[0].copy_from_slice(x[0]),
        OpKind::Fill(op::Fill { value }) => y[0].fill(value.0 as f32),
        OpKind::SquaredError(op::SquaredError { scale }) => {
            pointwise::squared_error(x[0], x[1], scale.0 as f32, y[0]);
        }
        OpKind::SquaredErrorGrad(op::SquaredErrorGrad { scale }) => {
            pointwise::squared_error_grad(x[0], x[1], x[2], scale.0 as f32, y[0]);
        }
        OpKind::RmsNorm(op::RmsNorm { eps }) => {
            if let [y, rstd] = y {
                norm::rms_norm(x[0], x[1], eps.0, y, rstd);
            }
        }
        OpKind::RmsNormGrad => norm::rms_norm_grad(x[0], x[1], x[2], x[3], y[0]),
        OpKind::LayerNorm(op::LayerNorm { eps }) => {
            let bias = x.get(2).copied().unwrap_or(&[]);
            if let [y, mean, rstd] = y {
                norm::layer_norm(x[0], x[1], bias, eps.0, y, mean, rstd);
            }
        }
        OpKind::LayerNormGrad => norm::layer_norm_grad(x[0], x[1], x[2], x[3], x[4], y[0]),
        OpKind::LogSoftmax => softmax::log_softmax(x[0], d, y[0]),
        OpKind::LogSoftmaxGrad => softmax::log_softmax_grad(x[0], x[1], d, y[0]),
        OpKind::LogSumExp => softmax::log_sum_exp(x[0], d, y[0]),
        OpKind::NllLoss => {
            let first = row * (step.ins[1].view.numel / rows);
            for (i, (log_probs, &l)) in x[0].chunks_exact(d).zip(x[1]).enumerate() {
                *sum -= f64::from(log_probs[label(first + i, l, d)?]);
            }
        }
        OpKind::NllLossGrad => {
            let first = row * (step.ins[1].view.numel / rows);
            y[0].copy_from_slice(x[3]);
            let value = -x[0][0] / x[2][0];
            for (i, (dx, &l)) in y[0].chunks_exact_mut(d).zip(x[1]).enumerate() {
                dx[label(first + i, l, d)?] = value;
            }
        }
        OpKind::Cat(op::Cat { axis }) => cat(step, x, y[0], usize::from(axis)),
        _ => return Err(Fault::Unsupported),
    }
    Ok(())
}

/// A label as an index.
fn label(row: usize, l: f32, limit: usize) -> Result<usize, Fault> {
    if l >= 0.0 && l < limit as f32 {
        Ok(l as usize)
    } else {
        Err(Fault::Label {
            row,
            value: l as i64,
            limit,
        })
    }
}

/// Interleaves the parts' blocks.
fn cat(step: &Step<'_>, x: &[&[f32]], y: &mut [f32], axis: usize) {
    let tail = |shape: &[u64]| shape[axis..].iter().product::<u64>() as usize;
    let whole = tail(&step.op.outputs[0].shape);
    let mut from = 0;
    for (x, slot) in x.iter().zip(&step.op.inputs) {
        let part = tail(&slot.shape);
        if part == 0 {
            continue;
        }
        for (y, x) in y.chunks_exact_mut(whole).zip(x.chunks_exact(part)) {
            y[from..from + part].copy_from_slice(x);
        }
        from += part;
    }
}
