//! Inputs and losses.

use super::build::Builder;
use super::chunked::{self, Kept};
use super::cross_entropy;
use super::declare::{Layer, ROOT};
use super::implementation;
use crate::config::Loss;
use crate::graph::ValueId;
use crate::ir::{DType, OpKind, Real, op};

/// Adds token ids and labels: views of one `[batch, seq + 1]` buffer.
pub(super) fn tokens(b: &mut Builder<'_>) -> (ValueId, ValueId) {
    let (batch, seq) = (b.batch(), b.seq());
    let data = b.constant("tokens", &[batch, seq + 1], DType::I64, true);
    b.within(ROOT, |b| {
        (b.g.slice(data, 1, 0, seq), b.g.slice(data, 1, 1, seq))
    })
}

/// What is done to logits before the loss.
#[derive(Clone, Copy, Default)]
pub(super) struct Logits {
    /// Factor.
    pub(super) scale: Option<f64>,
    /// Soft limit, after the factor.
    pub(super) softcap: Option<f64>,
}

/// Adds output projection and cross entropy of hidden states `[batch, seq, hidden]`. A chunked loss
/// multiplies the hidden states instead of the logits by a factor, which are smaller; it has no
/// soft limit.
pub(super) fn head_and_loss(
    b: &mut Builder<'_>,
    head: Layer,
    hidden: ValueId,
    labels: ValueId,
    change: Logits,
) {
    let scaled = |b: &mut Builder<'_>, x| match change.scale {
        Some(by) => b.scale(x, by),
        None => x,
    };
    match b.s.train.loss {
        Loss::Materialized => {
            let logits = b.linear(head, hidden);
            let logits = b.within(ROOT, |b| {
                let logits = scaled(b, logits);
                soft_limit(b, logits, change.softcap)
            });
            let labels = match b.is_transformers() {
                true => b.within(ROOT, |b| implementation::shifted(b, labels)),
                false => labels,
            };
            cross_entropy(b, logits, labels);
        }
        Loss::Chunked => {
            let hidden = b.within(ROOT, |b| scaled(b, hidden));
            chunked::head_and_loss(b, head, hidden, labels);
        }
        Loss::CheckpointedChunks | Loss::SavedChunks | Loss::SplitLogits => {
            let kept = match b.s.train.loss {
                Loss::SavedChunks => Kept::Saved,
                Loss::SplitLogits => Kept::SavedAfterLogits,
                _ => Kept::Hidden,
            };
            chunked::differentiated(b, head, hidden, labels, kept, |b, logits| {
                let logits = scaled(b, logits);
                soft_limit(b, logits, change.softcap)
            });
        }
    }
}

fn soft_limit(b: &mut Builder<'_>, logits: ValueId, cap: Option<f64>) -> ValueId {
    match cap {
        Some(cap) if b.is_transformers() => implementation::softcap(b, logits, cap),
        Some(cap) => {
            let kind = OpKind::Softcap(op::Softcap { cap: Real(cap) });
            b.g.unary(kind, logits)
        }
        None => logits,
    }
}

/// Computes `F.cross_entropy(logits.view(-1, V).float(), labels.reshape(-1))`.
pub(super) fn cross_entropy(b: &mut Builder<'_>, logits: ValueId, labels: ValueId) {
    let loss = cross_entropy_of(b, logits, labels);
    b.set_loss(loss);
}

/// Computes the sum of two cross entropies.
pub(super) fn sum_of_cross_entropies(
    b: &mut Builder<'_>,
    [first, second]: [ValueId; 2],
    labels: [ValueId; 2],
) {
    let first = cross_entropy_of(b, first, labels[0]);
    let second = cross_entropy_of(b, second, labels[1]);
    let module = b.tree.loss();
    let loss = b.within(module, |b| b.g.binary(OpKind::Add, first, second));
    b.set_loss(loss);
}

/// Computes the mean of the cross entropies of two matrices with the same labels.
pub(super) fn two_cross_entropies(b: &mut Builder<'_>, both: [ValueId; 2], labels: ValueId) {
    let [first, second] = both.map(|logits| cross_entropy_of(b, logits, labels));
    let module = b.tree.loss();
    let loss = b.within(module, |b| {
        let sum = b.g.binary(OpKind::Add, first, second);
        b.scale(sum, 0.5)
    });
    b.set_loss(loss);
}

/// Computes `scale` times the sum of a function of `x * factors`, which costs as much as SiLU.
pub(super) fn sum_of(b: &mut Builder<'_>, x: ValueId, factors: ValueId, scale: f64) {
    let module = b.tree.loss();
    let loss = b.within(module, |b| {
        let factors = b.as_activation(factors);
        let x = b.g.binary(OpKind::Mul, x, factors);
        let x = b.g.unary(OpKind::Silu, x);
        let sum = b.compute(OpKind::SumAll, &[x], &[&[]])[0];
        b.scale(sum, -scale)
    });
    b.set_loss(loss);
}

fn cross_entropy_of(b: &mut Builder<'_>, logits: ValueId, labels: ValueId) -> ValueId {
    let module = b.tree.loss();
    b.within(module, |b| {
        let float = cross_entropy::float_rows(b, logits);
        let loss = cross_entropy::of_rows(b, float, labels);
        // The code around the call holds the logits.
        if b.s.train.keep_logits {
            b.g.keep(logits);
        } else {
            b.g.release(logits);
        }
        loss
    })
}

/// Computes `F.mse_loss(out.float(), target)`.
pub(crate) fn mean_square(b: &mut Builder<'_>, out: ValueId) {
    mean_square_of(b, out, "target");
}

/// Computes `F.mse_loss(out.float(), target)` with a target of this name.
pub(super) fn mean_square_of(b: &mut Builder<'_>, out: ValueId, name: &'static str) {
    let shape = b.g.value(out).shape.clone();
    let target = b.constant(name, &shape, DType::F32, true);
    let module = b.tree.loss();
    let loss = b.within(module, |b| {
        let scale = Real(1.0 / b.g.value(out).numel() as f64);
        let kind = OpKind::SquaredError(op::SquaredError { scale });
        let float = b.as_operand(kind, 0, out);
        let terms = b.g.compute_like(kind, &[float, target], &[float])[0];
        let loss = b.compute(OpKind::SumAll, &[terms], &[&[]])[0];
        b.g.release(float);
        b.g.release(out);
        loss
    });
    b.set_loss(loss);
}
