//! Decides the element types.

use super::engine::Kind;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::table::{Dtype, quoted};

/// Sets the keys of `[precision]`.
pub(super) fn decide(draft: &mut Draft, kind: Kind, accelerated: bool) -> Result<(), ConfigError> {
    let mixed = draft.mixed.filter(|m| m.value != Dtype::F32);
    let weights = draft.weights;
    let low_weights = weights.filter(|w| w.value != Dtype::F32);
    let (row, dtype) = match (mixed, low_weights) {
        (Some(mixed), _) => (mixed.row, mixed.value),
        (None, Some(weights)) => (weights.row, weights.value),
        (None, None) => {
            let given = draft.mixed.or(weights);
            match given {
                Some(given) => draft.set(given.row, "precision.param_dtype", quoted("f32"))?,
                None if accelerated => {
                    draft.assume(
                        "precision.param_dtype",
                        quoted("f32"),
                        "no mixed precision is given",
                    );
                }
                None => {
                    draft.assume(
                        "precision.param_dtype",
                        quoted("bf16"),
                        "the framework's default",
                    );
                }
            }
            return Ok(());
        }
    };
    draft.set(row, "precision.param_dtype", quoted(dtype.name()))?;
    match kind {
        // Weights are float32 copies of their shards, gradients have the type of computation.
        Kind::DeepSpeed => {
            let why = "DeepSpeed's default";
            draft.assume("precision.main_grads", quoted(dtype.name()), why);
            draft.assume("precision.reduce_dtype", quoted(dtype.name()), why);
        }
        // Accelerate converts parameters to float32 if there is mixed precision.
        Kind::Fsdp if mixed.is_some() => {
            if accelerated {
                draft.assume(
                    "precision.reduce_dtype",
                    quoted(dtype.name()),
                    "Accelerate reduces in the type of computation",
                );
            }
        }
        // Without FSDP, or without mixed precision, parameters stay as they are loaded.
        Kind::Fsdp | Kind::Ddp => {
            if let Some(weights) = low_weights {
                let name = weights.value.name();
                draft.set(weights.row, "precision.main_params", quoted("none"))?;
                for key in [
                    "precision.main_grads",
                    "precision.reduce_dtype",
                    "precision.moments",
                ] {
                    draft.assume(
                        key,
                        quoted(name),
                        "gradients and moments have the type of the weights",
                    );
                }
            }
        }
        Kind::Megatron => {}
    }
    Ok(())
}
