//! Activation functions.

use super::build::Builder;
use super::implementation;
use crate::config::Activation;
use crate::graph::ValueId;
use crate::ir::{OpKind, Real, op};

/// Applies an activation function.
pub(super) fn activate(b: &mut Builder<'_>, activation: Activation, x: ValueId) -> ValueId {
    if activation == Activation::GeluNew && b.is_transformers() {
        return implementation::gelu_new(b, x);
    }
    let kind = match activation {
        Activation::Silu => OpKind::Silu,
        Activation::Gelu => OpKind::GeluErf,
        Activation::GeluTanh | Activation::GeluNew => OpKind::Gelu,
        Activation::Relu | Activation::Relu2 => OpKind::Relu,
    };
    let y = b.g.unary(kind, x);
    match activation {
        Activation::Relu2 if b.is_transformers() => {
            let exponent = Real(2.0);
            b.g.unary(OpKind::Pow(op::Pow { exponent }), y)
        }
        Activation::Relu2 => b.g.binary(OpKind::Mul, y, y),
        _ => y,
    }
}

/// Factor of gates in the sigmoid of [`clamped_glu`] (`swiglu_alpha` of gpt-oss).
pub(super) const ALPHA: f64 = 1.702;

/// Computes `gate * sigmoid(1.702 * gate) * (up + 1)` of clamped operands, call by call as in the
/// code of gpt-oss: gates are at most `limit`, other factors between `-limit` and `limit`.
pub(super) fn clamped_glu(b: &mut Builder<'_>, gate: ValueId, up: ValueId, limit: f64) -> ValueId {
    let clamp = |min: Option<f64>| {
        let (min, max) = (min.map(Real), Real(limit));
        OpKind::Clamp(op::Clamp { min, max })
    };
    let gate = b.g.unary(clamp(None), gate);
    let up = b.g.unary(clamp(Some(-limit)), up);
    let scaled = b.scale(gate, ALPHA);
    let share = b.g.unary(OpKind::Sigmoid, scaled);
    let glu = b.g.binary(OpKind::Mul, gate, share);
    let shifted = b.g.unary(OpKind::Shift(op::Shift { by: Real(1.0) }), up);
    b.g.binary(OpKind::Mul, shifted, glu)
}
