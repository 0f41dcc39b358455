//! Cross entropy of rows of logits.

use super::build::Builder;
use super::implementation;
use crate::graph::ValueId;
use crate::ir::OpKind;

/// Computes `logits.view(-1, V).float()`, or leaves the type as it is where a model's code does.
pub(super) fn float_rows(b: &mut Builder<'_>, logits: ValueId) -> ValueId {
    let (rows, cols) = (b.g.value(logits).rows(), b.g.value(logits).cols());
    let flat = b.g.reshape(logits, &[rows, cols]);
    if b.is_transformers() && !implementation::converts_logits(b) {
        return flat;
    }
    b.as_operand(OpKind::LogSoftmax, 0, flat)
}

/// Computes `F.cross_entropy(logits, labels.reshape(-1))` of float32 logits `[rows, V]`, which live
/// until the call returns.
pub(super) fn of_rows(b: &mut Builder<'_>, logits: ValueId, labels: ValueId) -> ValueId {
    let rows = b.g.value(logits).rows();
    let labels = b.g.reshape(labels, &[rows]);
    let log_probs = if b.g.functional() {
        // Compilers split it, so that backward can start from the logits and one number per row.
        let lse = b.compute(OpKind::LogSumExp, &[logits], &[&[rows, 1]])[0];
        b.g.binary(OpKind::LogProbs, logits, lse)
    } else {
        b.g.unary(OpKind::LogSoftmax, logits)
    };
    let out = b.compute(OpKind::NllLoss, &[log_probs, labels], &[&[], &[]]);
    for v in [logits, labels] {
        b.g.release(v);
    }
    out[0]
}
