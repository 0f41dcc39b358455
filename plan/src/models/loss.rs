//! Inputs and losses.

use super::build::Builder;
use super::chunked;
use super::declare::{Layer, ROOT};
use crate::config::Loss;
use crate::graph::ValueId;
use crate::ir::{DType, OpKind, Real, op};

/// Token ids and labels: views of one `[batch, seq + 1]` buffer.
pub(super) fn tokens(b: &mut Builder<'_>) -> (ValueId, ValueId) {
    let (batch, seq) = (b.batch(), b.seq());
    let data = b.constant("tokens", &[batch, seq + 1], DType::I64, true);
    b.within(ROOT, |b| {
        (b.g.slice(data, 1, 0, seq), b.g.slice(data, 1, 1, seq))
    })
}

/// Output projection and cross entropy of hidden states `[batch, seq, hidden]`.
pub(super) fn head_and_loss(b: &mut Builder<'_>, head: Layer, hidden: ValueId, labels: ValueId) {
    match b.s.train.loss {
        Loss::Materialized => {
            let logits = b.linear(head, hidden);
            cross_entropy(b, logits, labels);
        }
        Loss::Chunked => chunked::head_and_loss(b, head, hidden, labels),
    }
}

/// `F.cross_entropy(logits.view(-1, V).float(), labels.reshape(-1))`.
fn cross_entropy(b: &mut Builder<'_>, logits: ValueId, labels: ValueId) {
    let module = b.tree.loss();
    let loss = b.within(module, |b| {
        let (rows, cols) = (b.g.value(logits).rows(), b.g.value(logits).cols());
        let flat = b.g.reshape(logits, &[rows, cols]);
        let float = b.g.cast(flat, DType::F32);
        let labels = b.g.reshape(labels, &[rows]);
        let log_probs = if b.g.functional() {
            // Compilers split it, so that backward can start from the logits and one number a row.
            let lse =
                b.g.compute(OpKind::LogSumExp, &[float], &[(&[rows, 1], DType::F32)])[0];
            b.g.binary(OpKind::LogProbs, float, lse)
        } else {
            b.g.unary(OpKind::LogSoftmax, float)
        };
        let out = b.g.compute(
            OpKind::NllLoss,
            &[log_probs, labels],
            &[(&[], DType::F32), (&[], DType::F32)],
        );
        // The arguments of the call live until it returns, the logits until the code around it
        // does.
        for v in [float, labels, logits] {
            b.g.release(v);
        }
        out[0]
    });
    b.set_loss(loss);
}

/// `F.mse_loss(out.float(), target)` against a target of zeros.
pub(crate) fn mean_square(b: &mut Builder<'_>, out: ValueId) {
    let shape = b.g.value(out).shape.clone();
    let target = b.constant("target", &shape, DType::F32, true);
    let module = b.tree.loss();
    let loss = b.within(module, |b| {
        let float = b.g.cast(out, DType::F32);
        let scale = Real(1.0 / b.g.value(float).numel() as f64);
        let terms = b.g.compute_like(
            OpKind::SquaredError(op::SquaredError { scale }),
            &[float, target],
            &[float],
        )[0];
        let loss = b.g.compute(OpKind::SumAll, &[terms], &[(&[], DType::F32)])[0];
        b.g.release(float);
        b.g.release(out);
        loss
    });
    b.set_loss(loss);
}
