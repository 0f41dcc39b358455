//! How the code of a model is written: the operations that norms, rotary embeddings and losses
//! consist of. Kernels, saved tensors and host time follow from them.
//!
//! [`Implementation::Transformers`] is the modeling code of transformers 5 with `sdpa` attention.
//! The code of the other implementations is in the files of the layers: `build.rs`, `rope.rs`,
//! `loss.rs`.

mod attention;
mod code;
mod norm;
mod rotary;
#[cfg(test)]
mod tests;

use super::build::Builder;
use crate::graph::ValueId;
use crate::ir::{OpKind, Real, op};
pub(super) use attention::{Masks, Scores, attention, biased, causal, with_sinks};
use code::Code;
pub(super) use norm::{has_own_code, layer_norm, rms_norm};
pub(super) use rotary::{of_layer, rotate, table};

/// `tanh(x)`.
const TANH: OpKind = OpKind::Softcap(op::Softcap { cap: Real(1.0) });

/// Framework calls of `F.pad(labels, (0, 1), value=-100)[..., 1:]`.
const LABEL_CALLS: u8 = 6;

impl Builder<'_> {
    /// Returns how transformers implements this model type.
    fn code(&self) -> Code {
        Code::of(&self.s.model)
    }
}

/// Returns whether the model's code converts logits to float32 for its loss.
pub(super) fn converts_logits(b: &Builder<'_>) -> bool {
    b.code().float_loss
}

/// Returns whether dropout follows the output projection of attention.
pub(super) fn drops_attention(b: &Builder<'_>) -> bool {
    b.code().dropout.after_attention
}

/// Returns whether the input of the last matmul of a feed-forward layer has dropout.
pub(super) fn drops_inner(b: &Builder<'_>) -> bool {
    b.code().dropout.inside_ffn
}

/// Applies `NewGELUActivation`: `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
pub(super) fn gelu_new(b: &mut Builder<'_>, x: ValueId) -> ValueId {
    let half = b.scale(x, 0.5);
    let exponent = Real(3.0);
    let cube = b.g.unary(OpKind::Pow(op::Pow { exponent }), x);
    let cube = b.scale(cube, 0.044_715);
    let sum = b.g.binary(OpKind::Add, x, cube);
    let inner = b.scale(sum, (2.0 / std::f64::consts::PI).sqrt());
    let tanh = b.g.unary(TANH, inner);
    let by = Real(1.0);
    let factor = b.g.unary(OpKind::Shift(op::Shift { by }), tanh);
    b.g.binary(OpKind::Mul, half, factor)
}

/// Limits logits softly: `cap * tanh(logits / cap)`.
pub(super) fn softcap(b: &mut Builder<'_>, logits: ValueId, cap: f64) -> ValueId {
    let x = b.scale(logits, 1.0 / cap);
    let y = b.g.unary(TANH, x);
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
