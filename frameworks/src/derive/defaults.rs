//! Supplies the defaults of Axolotl, TRL, ms-swift and Megatron-Bridge that several keys depend on.
//!
//! Sources: `utils/schemas/config.py` of Axolotl, `trl/trainer/{base,sft}_config.py` of TRL,
//! `swift/arguments`, `swift/trainers/arguments.py` and `swift/cli/main.py` of ms-swift, and
//! `recipes/common.py` of Megatron-Bridge.

use crate::adapters::Targets;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::{
    AXOLOTL, MEGATRON_BRIDGE, SWIFT, SWIFT_MEGATRON, TRAINER, TRAINER_SCRIPT, TRL_SCRIPT,
};
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
    if is(&AXOLOTL) && !has(draft, &DTYPES) {
        dtype(draft, "Axolotl's default (bf16: auto)")?;
    }
    if is(&TRL_SCRIPT) || (is(&TRAINER) || is(&TRAINER_SCRIPT)) && is_trl(draft) {
        trl(draft)?;
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

/// Returns whether a key of the files has one of some names.
fn has(draft: &Draft, keys: &[&str]) -> bool {
    draft.rows.iter().any(|r| keys.contains(&r.key.as_str()))
}

/// Returns whether arguments of the Trainer are those of TRL's `SFTConfig`, and not those of
/// open-instruct, which has some of them.
fn is_trl(draft: &Draft) -> bool {
    has(draft, &OF_TRL) && !has(draft, &OF_OPEN_INSTRUCT)
}

const OF_TRL: [&str; 7] = [
    "use_peft",
    "packing",
    "packing_strategy",
    "completion_only_loss",
    "assistant_only_loss",
    "dataset_num_proc",
    "dataset_text_field",
];
const OF_OPEN_INSTRUCT: [&str; 4] = [
    "use_lora",
    "use_flash_attn",
    "dataset_mixer_list",
    "use_slow_tokenizer",
];

/// Sets the defaults of TRL's `SFTConfig` that differ from the Trainer's.
fn trl(draft: &mut Draft) -> Result<(), ConfigError> {
    draft.assume("train.seq_len", "1024", "TRL's default (max_length)");
    if !has(draft, &["gradient_checkpointing"]) {
        let why = "the default of current versions of TRL";
        draft.assume("train.recompute", quoted("full"), why);
    }
    if !has(draft, &["bf16", "fp16"]) {
        let row = draft.suppose("bf16", "true", "the default of current versions of TRL");
        draft.apply(row, Effect::Mixed(Dtype::Bf16))?;
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
