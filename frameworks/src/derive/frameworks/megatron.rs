//! What Megatron Core's adapter of Megatron-FSDP decides without a key.
//!
//! Source: `megatron/core/distributed/fsdp/mcore_fsdp_adapter.py` up to version 0.19.

use crate::draft::Draft;
use crate::error::ConfigError;
use crate::table::{Engine, quoted};

/// Makes the whole model one unit unless parameters are sharded: `fsdp_unit_modules` then is empty.
///
/// # Errors
/// Never fails.
pub(super) fn units(draft: &mut Draft) -> Result<(), ConfigError> {
    // Without Megatron-FSDP, ranks reduce gradients in buckets.
    let is_fsdp = draft.engine.is_some_and(|e| e.value == Engine::Megatron);
    let is = |key: &str, values: &[&str]| {
        let found = draft.value(key);
        found.is_some_and(|found| values.iter().any(|v| quoted(v) == found))
    };
    let whole = is("fsdp.strategy", &["optim", "optim_grads"]);
    if is_fsdp && whole && is("fsdp.policy", &["megatron"]) {
        draft.assume("fsdp.units", quoted("root"), ROOT);
    }
    Ok(())
}

const ROOT: &str = "up to Megatron Core 0.19, Megatron-FSDP has units only if it shards parameters (until Megatron-LM #6357)";
