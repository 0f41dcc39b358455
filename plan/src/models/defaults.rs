//! Defaults of a family for values that a scenario does not set.

use crate::config::{Activation, Family, Model};

/// Returns the activation of a model's feed-forward layers: the given one, or that of its family.
pub(super) fn activation(m: &Model) -> Activation {
    m.options.activation.unwrap_or(match m.family {
        Family::Gpt2 => Activation::GeluNew,
        Family::GptNeox => Activation::Gelu,
        _ => Activation::Silu,
    })
}
