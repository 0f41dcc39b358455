//! How the code of a model is written: the operations that norms, rotary embeddings and losses
//! consist of. Kernels, saved tensors and host time follow from them.
//!
//! [`Implementation::Transformers`] is the modeling code of transformers 5 with `sdpa` attention.
//! What the other implementations do is where the layers are: `build.rs`, `rope.rs`, `loss.rs`.

#[cfg(test)]
mod tests;

use super::build::Builder;
use super::declare::ROOT;
use crate::config::{Implementation, Norm};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, OpKind, Real, op};

/// Framework calls between embedding and first block, until the host reads whether the positions of
/// packed sequences start again (`find_packed_sequence_indices`): 12 small kernels, each a call and
/// a launch.
const MASK_CALLS: u8 = 24;

/// Framework calls that make the tables of a rotary embedding (`LlamaRotaryEmbedding.forward`),
/// without those of the two copies that the graph has.
const TABLE_CALLS: u8 = 8;

/// Framework calls of `F.pad(labels, (0, 1), value=-100)[..., 1:]`.
const LABEL_CALLS: u8 = 6;

impl Builder<'_> {
    /// Returns whether the model is the code of transformers.
    pub(super) fn is_transformers(&self) -> bool {
        self.s.implementation() == Implementation::Transformers
    }
}

/// Adds the check for packed sequences, whose result the host reads before the first block.
pub(super) fn mask(b: &mut Builder<'_>) {
    if b.is_transformers() {
        b.within(ROOT, |b| b.g.host_read(MASK_CALLS));
    }
}

/// Normalizes the rows of `x` in float32 and multiplies them by the weight `w`.
///
/// `LlamaRMSNorm` multiplies in the type of `x`, `GemmaRMSNorm`, whose factor is `1 + w`, in
/// float32.
pub(super) fn rms_norm(
    b: &mut Builder<'_>,
    module: ModuleId,
    x: ValueId,
    w: ValueId,
    kind: Norm,
) -> ValueId {
    let eps = Real(b.s.model.norm_eps);
    b.within(module, |b| {
        let g = &mut b.g;
        let dtype = g.value(x).dtype;
        let float = g.cast(x, DType::F32);
        let exponent = Real(2.0);
        let squares = g.unary(OpKind::Pow(op::Pow { exponent }), float);
        let scale = Real(1.0 / g.value(x).cols() as f64);
        let mut rows = g.value(x).shape.clone();
        if let Some(last) = rows.last_mut() {
            *last = 1;
        }
        let mean = OpKind::RowSum(op::RowSum { scale });
        let mean = g.compute(mean, &[squares], &[(&rows, DType::F32)])[0];
        let mean = g.unary(OpKind::Shift(op::Shift { by: eps }), mean);
        let rstd = g.unary(OpKind::Rsqrt, mean);
        let normalized = g.binary(OpKind::Mul, float, rstd);
        let y = if kind == Norm::RmsUnitOffset {
            let w = g.cast(w, DType::F32);
            let by = Real(1.0);
            let factor = g.unary(OpKind::Shift(op::Shift { by }), w);
            let y = g.binary(OpKind::Mul, normalized, factor);
            g.cast(y, dtype)
        } else {
            let y = g.cast(normalized, dtype);
            g.binary(OpKind::Mul, w, y)
        };
        // The local variables of `forward`.
        for v in [float, mean] {
            g.release(v);
        }
        y
    })
}

/// Makes a table for all rotated dimensions from one for half of them, in the type of activations.
pub(super) fn table(b: &mut Builder<'_>, half: ValueId) -> ValueId {
    let whole = b.g.cat(&[half, half], 1);
    b.g.dispatches(TABLE_CALLS);
    b.as_activation(whole)
}

/// Rotates queries or keys `[batch, heads, seq, dims]`: `x * cos + rotate_half(x) * sin`
/// (`apply_rotary_pos_emb`).
pub(super) fn rotate(b: &mut Builder<'_>, x: ValueId, [cos, sin]: [ValueId; 2]) -> ValueId {
    let g = &mut b.g;
    let half = g.value(x).shape[3] / 2;
    let straight = g.binary(OpKind::Mul, x, cos);
    let x1 = g.slice(x, 3, 0, half);
    let x2 = g.slice(x, 3, half, half);
    let negative = g.unary(OpKind::Neg, x2);
    let turned = g.cat(&[negative, x1], 3);
    let crossed = g.binary(OpKind::Mul, turned, sin);
    g.binary(OpKind::Add, straight, crossed)
}

/// Limits logits softly: `cap * tanh(logits / cap)`.
pub(super) fn softcap(b: &mut Builder<'_>, logits: ValueId, cap: f64) -> ValueId {
    let x = b.scale(logits, 1.0 / cap);
    let tanh = OpKind::Softcap(op::Softcap { cap: Real(1.0) });
    let y = b.g.unary(tanh, x);
    b.scale(y, cap)
}

/// Copies the labels, shifted by one token.
pub(super) fn shifted(b: &mut Builder<'_>, labels: ValueId) -> ValueId {
    let (shape, dtype) = {
        let v = b.g.value(labels);
        (v.shape.clone(), v.dtype)
    };
    let copy = b.g.compute(OpKind::Copy, &[labels], &[(&shape, dtype)])[0];
    b.g.dispatches(LABEL_CALLS);
    copy
}
