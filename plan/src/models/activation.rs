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
