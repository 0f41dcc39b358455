//! Activation functions.

use super::build::Builder;
use crate::config::Activation;
use crate::graph::ValueId;
use crate::ir::OpKind;

/// Applies an activation function.
pub(super) fn activate(b: &mut Builder<'_>, activation: Activation, x: ValueId) -> ValueId {
    let kind = match activation {
        Activation::Silu => OpKind::Silu,
        Activation::Gelu => OpKind::GeluErf,
        Activation::GeluTanh => OpKind::Gelu,
        Activation::Relu | Activation::Relu2 => OpKind::Relu,
    };
    let y = b.g.unary(kind, x);
    match activation {
        Activation::Relu2 => b.g.binary(OpKind::Mul, y, y),
        _ => y,
    }
}
