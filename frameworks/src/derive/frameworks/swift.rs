//! Supplies the defaults of ms-swift and Megatron-SWIFT.
//!
//! Sources: `swift/arguments`, `swift/trainers/arguments.py` and `swift/cli/main.py` of ms-swift.

use super::{all_linear, distributed_optimizer, in_bf16};
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::table::{Fact, quoted};

const WHY: &str = "ms-swift's default";
/// Sequences per step that ms-swift accumulates by default.
const SEQUENCES: u64 = 16;

/// Sets quantities that no key of the files gives.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    draft.suppose_fact(Fact::Adapter, 1, "tuner_type", "lora", WHY);
    let why = "ms-swift starts one process without NPROC_PER_NODE";
    if draft.fact(Fact::Processes).is_none() {
        draft.suppose_fact(Fact::GpusPerNode, 1, "NPROC_PER_NODE", "1", why);
    }
    if draft.fact(Fact::Recompute).is_none() {
        draft.assume("train.recompute", quoted("full"), WHY);
    }
    in_bf16(draft, WHY)?;
    all_linear(draft, WHY)
}

/// Sets quantities that no argument of Megatron-SWIFT gives.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn megatron_defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    draft.suppose_fact(Fact::Adapter, 0, "tuner_type", "full", WHY);
    let (key, value) = ("global_batch_size", SEQUENCES.to_string());
    draft.suppose_fact(Fact::GlobalBatch, SEQUENCES, key, &value, WHY);
    in_bf16(draft, WHY)?;
    all_linear(draft, WHY)?;
    distributed_optimizer(draft, WHY);
    Ok(())
}

/// Accumulates micro-batches until a step has 16 sequences.
///
/// # Errors
/// Never fails.
pub(super) fn batch(draft: &mut Draft, ranks: u64) -> Result<(), ConfigError> {
    if draft.fact(Fact::GlobalBatch).is_some() {
        return Ok(());
    }
    let micro = draft
        .value("train.micro_batch")
        .and_then(|v| v.parse().ok());
    let each = micro.unwrap_or(1_u64).saturating_mul(ranks).max(1);
    let steps = SEQUENCES.div_ceil(each).max(1);
    let why = "ms-swift accumulates 16 sequences per step by default";
    draft.assume("train.grad_accum", steps.to_string(), why);
    Ok(())
}
