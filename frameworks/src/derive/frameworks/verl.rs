//! Supplies the defaults of verl's SFT trainers.
//!
//! Sources: `verl/trainer/config/sft_trainer.yaml`, `sft_trainer_engine.yaml` and
//! `engine/fsdp.yaml`, `FSDPSFTTrainer._build_model_optimizer`, and `apply_fsdp2` of
//! `verl/utils/fsdp_utils.py`.

use crate::adapters::Targets;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::{Lack, Row};
use crate::table::{Dtype, Effect, Fact, quoted};

const WHY: &str = "verl's default";
/// Note on the default of `engine/fsdp.yaml`.
const FSDP1: &str = "verl's default is FSDP1, whose schedule is predicted as that of FSDP2";

/// Sets quantities that no key of the files gives.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    let engine = draft.rows.iter().any(of_engine);
    batch(draft, engine);
    let (key, version, name, why) = match engine {
        true => ("engine.strategy", 1, "fsdp", FSDP1),
        false => ("model.strategy", 2, "fsdp2", WHY),
    };
    draft.suppose_fact(Fact::FsdpVersion, version, key, name, why);
    if draft.fact(Fact::FsdpVersion).is_some_and(|v| v.value == 2) {
        let why = "verl shards embeddings apart from the blocks, unless they are tied";
        draft.assume("fsdp.units", quoted("block_and_ends"), why);
    }
    if !draft.rows.iter().any(|r| r.key == RECOMPUTE) {
        draft.assume("train.recompute", quoted("full"), WHY);
    }
    if draft.mixed.is_none() {
        let row = draft.suppose("mixed_precision", "bfloat16", "verl's trainer sets it");
        draft.apply(row, Effect::Mixed(Dtype::Bf16))?;
    }
    if draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1) {
        adapters(draft)?;
    }
    Ok(())
}

const RECOMPUTE: &str = "model.enable_gradient_checkpointing";

/// Keys that only `sft_trainer` has, which trains with engines.
const OF_ENGINES: [&str; 5] = [
    "model.path",
    "engine",
    "data.pad_mode",
    "data.use_dynamic_bsz",
    "data.max_token_len_per_gpu",
];

/// Returns whether a key is one of `sft_trainer`.
fn of_engine(row: &Row) -> bool {
    let key = row.key.as_str();
    OF_ENGINES.contains(&key) || key.starts_with("engine.")
}

/// Sets the batch sizes. Packed micro-batches have at most a number of tokens.
fn batch(draft: &mut Draft, engine: bool) {
    let key = "data.train_batch_size";
    draft.suppose_fact(Fact::GlobalBatch, 256, key, "256", WHY);
    draft.assume("train.seq_len", "1024", WHY);
    let packed = draft.fact(Fact::DynamicBatch);
    let tokens = draft.fact(Fact::MostTokens);
    if !packed.map_or(engine, |d| d.value == 1) {
        if let Some(tokens) = tokens {
            let why = "without use_dynamic_bsz";
            draft.none(tokens.row, Lack::Nothing, why);
        }
        draft.assume("train.micro_batch", "4", WHY);
        return;
    }
    let why = "micro-batches hold packed sequences up to max_token_len_per_gpu";
    draft.unset("train.micro_batch", Lack::Nothing, why);
    let key = "data.max_token_len_per_gpu";
    draft.suppose_fact(Fact::MostTokens, 8192, key, "8192", WHY);
    if let Some(tokens) = draft.fact(Fact::MostTokens) {
        let length = draft.value("train.seq_len").and_then(|v| v.parse().ok());
        let sequences = (tokens.value / length.unwrap_or(1024_u64).max(1)).max(1);
        let setting = ("train.micro_batch", sequences.to_string());
        if draft.set(tokens.row, setting.0, setting.1).is_ok() {
            let why = "micro-batches are predicted with full sequences";
            draft.approximates(tokens.row, why);
        }
    }
}

/// Trains adapters of all linear layers unless a key names others.
fn adapters(draft: &mut Draft) -> Result<(), ConfigError> {
    if !draft.has_targets() {
        let row = draft.suppose("model.target_modules", "all-linear", WHY);
        draft.apply(row, Effect::Targets(Targets::AllLinear))?;
    }
    draft.assume("lora.lora_alpha", "16.0", WHY);
    if draft.weights.is_none_or(|w| w.value == Dtype::F32) {
        let why = "verl keeps the frozen model in model_dtype";
        draft.assume("precision.frozen_params", quoted("f32"), why);
    }
    Ok(())
}
