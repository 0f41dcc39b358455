//! Supplies the defaults of Axolotl, ms-swift and Megatron-Bridge that several keys depend on.
//!
//! Sources: `utils/schemas/config.py` of Axolotl, `swift/arguments`, `swift/trainers/arguments.py` and `swift/cli/main.py` of ms-swift, and
//! `recipes/common.py` of Megatron-Bridge.

use crate::adapters::Targets;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::{AXOLOTL, MEGATRON_BRIDGE, SWIFT, SWIFT_MEGATRON};
use crate::table::{Dtype, Effect, Fact, Format, quoted};

const BY_SWIFT: &str = "ms-swift's default";
/// Axolotl's keys for the dtype.
const DTYPES: [&str; 6] = [
    "bf16",
    "bfloat16",
    "fp16",
    "float16",
    "float32",
    "bf16_full_eval",
];
const BY_BRIDGE: &str = "the default of Megatron-Bridge's recipes";
/// Sequences per step that ms-swift accumulates by default.
const SEQUENCES: u64 = 16;

/// Sets quantities that no key of the files gives.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn decide(draft: &mut Draft, formats: &[&'static Format]) -> Result<(), ConfigError> {
    let is = |format: &Format| formats.iter().any(|f| f.name == format.name);
    if is(&SWIFT) {
        draft.suppose_fact(Fact::Adapter, 1, "tuner_type", "lora", BY_SWIFT);
        let why = "ms-swift starts one process without NPROC_PER_NODE";
        if draft.fact(Fact::Processes).is_none() {
            draft.suppose_fact(Fact::GpusPerNode, 1, "NPROC_PER_NODE", "1", why);
        }
        if draft.fact(Fact::Recompute).is_none() {
            draft.assume("train.recompute", quoted("full"), BY_SWIFT);
        }
    }
    if is(&AXOLOTL) && draft.rows.iter().all(|r| !DTYPES.contains(&r.key.as_str())) {
        dtype(draft, "Axolotl's default (bf16: auto)")?;
    }
    if is(&SWIFT_MEGATRON) {
        draft.suppose_fact(Fact::Adapter, 0, "tuner_type", "full", BY_SWIFT);
        draft.suppose_fact(
            Fact::GlobalBatch,
            SEQUENCES,
            "global_batch_size",
            "16",
            BY_SWIFT,
        );
    }
    for (format, why) in [
        (&SWIFT, BY_SWIFT),
        (&SWIFT_MEGATRON, BY_SWIFT),
        (&MEGATRON_BRIDGE, BY_BRIDGE),
    ] {
        if !is(format) {
            continue;
        }
        dtype(draft, why)?;
        targets(draft, why)?;
        if format.name != SWIFT.name {
            let key = "use_distributed_optimizer";
            draft.suppose_fact(Fact::DistributedOptimizer, 1, key, "true", why);
        }
    }
    Ok(())
}

/// Computes in bfloat16, the dtype of most checkpoints.
fn dtype(draft: &mut Draft, why: &str) -> Result<(), ConfigError> {
    if draft.mixed.is_some() || draft.weights.is_some() {
        return Ok(());
    }
    let row = draft.suppose("torch_dtype", "bfloat16", why);
    let effects = vec![Effect::Weights(Dtype::Bf16), Effect::Mixed(Dtype::Bf16)];
    draft.apply(row, Effect::All(effects))
}

/// Puts adapters on all linear layers of the blocks.
fn targets(draft: &mut Draft, why: &str) -> Result<(), ConfigError> {
    let trained = draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1);
    if !trained || draft.has_targets() {
        return Ok(());
    }
    let row = draft.suppose("target_modules", "all-linear", why);
    draft.apply(row, Effect::Targets(Targets::AllLinear))
}

/// Accumulates micro-batches until a step has 16 sequences, as ms-swift does.
pub(super) fn accumulation(draft: &mut Draft, formats: &[&'static Format], ranks: u64) {
    let is_swift = formats.iter().any(|f| f.name == SWIFT.name);
    if !is_swift || draft.fact(Fact::GlobalBatch).is_some() {
        return;
    }
    let micro = draft
        .value("train.micro_batch")
        .and_then(|v| v.parse().ok());
    let each = micro.unwrap_or(1_u64).saturating_mul(ranks).max(1);
    let steps = SEQUENCES.div_ceil(each).max(1);
    let why = "ms-swift accumulates 16 sequences per step by default";
    draft.assume("train.grad_accum", steps.to_string(), why);
}
