//! Decides settings that LitGPT's code fixes for each command.
//!
//! Sources: `setup` of `litgpt/finetune/{full,lora}.py` and `litgpt/pretrain.py`, `parallelize_fn`
//! of `lora.py`, `get_default_supported_precision` of `litgpt/utils.py`, and `FSDPPrecision` of
//! Lightning Fabric.

use super::has;
use crate::adapters::Targets;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::LitGptCommand as Command;
use crate::row::Lack;
use crate::table::{Dtype, Effect, Fact, quoted};

const WHY: &str = "LitGPT's default";
/// Why a precision that is not given is an approximation, too.
const DEFAULT_PRECISION: &str = "LitGPT's default: weights in float32, cast under autocast; they are predicted as gathered in bfloat16";
const BY_CODE: &str = "LitGPT's code";
const IN_F32: &str = "weights are gathered in float32 and cast under autocast; they are predicted as gathered in the type of computation";
/// Keys that only `pretrain` has.
const OF_PRETRAIN: [&str; 3] = ["model_name", "tokenizer_dir", "initial_checkpoint_dir"];

/// Sets quantities that no key of the files gives.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    let command = command(draft);
    sizes(draft);
    let (all, micro) = match command {
        Command::Pretrain => (512, "4"),
        Command::Full | Command::Lora => (16, "1"),
    };
    let key = "train.global_batch_size";
    draft.suppose_fact(Fact::GlobalBatch, all, key, &all.to_string(), WHY);
    draft.assume("train.micro_batch", micro, WHY);
    if command != Command::Pretrain && !has(draft, &["devices"]) {
        draft.suppose_fact(Fact::GpusPerNode, 1, "devices", "1", WHY);
    }
    if draft.mixed.is_none() && draft.weights.is_none() {
        let row = draft.suppose("precision", "bf16-mixed", DEFAULT_PRECISION);
        draft.apply(row, Effect::Mixed(Dtype::Bf16))?;
    }
    // `logits = model(input_ids)` in the loop of each command. The chunks that `finetune_lora`
    // computes are predicted as one tensor.
    let why = "LitGPT's training loop has the logits in a variable during backward";
    draft.assume("train.keep_logits", "true", why);
    if command == Command::Lora {
        adapters(draft)?;
    }
    if command == Command::Pretrain {
        draft.assume("train.clip_norm", "1.0", WHY);
        let why = "pretrain shards within nodes";
        let key = "sharding_strategy";
        draft.suppose_fact(Fact::Strategy, HYBRID, key, "HYBRID_SHARD", why);
    }
    Ok(())
}

/// Returns the command that the configuration is for: the one that the user gives, or the one that
/// has its keys.
fn command(draft: &mut Draft) -> Command {
    let all = [Command::Full, Command::Lora, Command::Pretrain];
    if let Some(given) = draft.fact(Fact::LitGpt) {
        let is = |c: &Command| *c as u64 == given.value;
        return all.into_iter().find(is).unwrap_or(Command::Full);
    }
    let lora = |key: &str| key.starts_with("lora_") || key == "quantize";
    let found = if draft.rows.iter().any(|r| lora(&r.key)) {
        Command::Lora
    } else if has(draft, &OF_PRETRAIN) {
        Command::Pretrain
    } else {
        Command::Full
    };
    let name = match found {
        Command::Full => "finetune_full",
        Command::Lora => "finetune_lora",
        Command::Pretrain => "pretrain",
    };
    let why = "the command that has these keys";
    draft.suppose_fact(Fact::LitGpt, found as u64, "litgpt", name, why);
    found
}

/// Drops the sizes of a model that `--model` replaces.
fn sizes(draft: &mut Draft) {
    let own = |key: &str| key == "model_config" || key.starts_with("model_config.");
    let replaced = draft
        .rows
        .iter()
        .any(|r| r.place.is_none() && r.key == "model.preset");
    let rows: Vec<usize> = (0..draft.rows.len())
        .filter(|&row| replaced && own(&draft.rows[row].key))
        .collect();
    for row in rows {
        draft.none(row, Lack::Nothing, "replaced by --model");
    }
}

/// Trains adapters of queries and values unless keys say otherwise.
fn adapters(draft: &mut Draft) -> Result<(), ConfigError> {
    if let Some(given) = draft.fact(Fact::LitGpt) {
        draft.apply(given.row, Effect::Fact(Fact::Adapter, 1))?;
    }
    for (key, name) in [("lora_query", "q_proj"), ("lora_value", "v_proj")] {
        if !has(draft, &[key]) {
            let row = draft.suppose(key, "true", WHY);
            draft.apply(row, Effect::Targets(Targets::named(&[name])))?;
        }
    }
    draft.assume("lora.r", "8", WHY);
    draft.assume("lora.lora_alpha", "16.0", WHY);
    draft.assume("lora.lora_dropout", "0.05", WHY);
    Ok(())
}

/// Keeps the frozen model in float32 under mixed precision, as LitGPT loads it.
fn frozen(draft: &mut Draft, ranks: u64) {
    if draft.weights.is_some() {
        return;
    }
    let why = "LitGPT loads the model in float32 under mixed precision";
    if ranks > 1 {
        draft.assume("precision.frozen_params", quoted("f32"), why);
        return;
    }
    let why = "on one GPU, the frozen model is predicted in the type of computation, with half of its memory";
    let row = draft.suppose("frozen weights", "float32", why);
    draft.none(row, Lack::Accuracy, why);
}

/// Sets what LitGPT's code fixes if several GPUs train: how it shards, recomputes and compiles.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn sharding(draft: &mut Draft, ranks: u64) -> Result<(), ConfigError> {
    let command = draft.fact(Fact::LitGpt).map(|c| c.value);
    let is = |c: Command| command == Some(c as u64);
    if is(Command::Pretrain) {
        let why = "pretrain compiles the model";
        draft.assume("compile.mode", quoted("regions"), why);
    }
    draft.assume("fsdp.gradient_sync", quoted("last"), "no_backward_sync");
    let mixed = draft.mixed.filter(|m| m.value != Dtype::F32);
    if let Some(mixed) = mixed {
        draft.approximates(mixed.row, IN_F32);
    }
    if is(Command::Lora) && mixed.is_some() {
        frozen(draft, ranks);
    }
    if ranks <= 1 {
        return Ok(());
    }
    if is(Command::Lora) {
        for fact in [Fact::FourBits, Fact::EightBits] {
            if let Some(given) = draft.fact(fact) {
                let why = "this job does not start: LitGPT quantizes models on one GPU alone";
                draft.none(given.row, Lack::Everything, why);
            }
        }
        let why = "finetune_lora calls fully_shard for each block";
        draft.suppose_fact(
            Fact::FsdpVersion,
            2,
            "strategy",
            "ModelParallelStrategy",
            why,
        );
    } else {
        let name = "FSDPStrategy";
        draft.suppose_fact(Fact::FsdpVersion, 1, "strategy", name, BY_CODE);
        if let Some(mixed) = mixed {
            let dtype = quoted(mixed.value.name());
            draft.set(mixed.row, "precision.reduce_dtype", dtype)?;
        }
    }
    if !is(Command::Pretrain) {
        let why = "LitGPT recomputes blocks on several GPUs";
        draft.assume("train.recompute", quoted("full"), why);
    }
    Ok(())
}

/// PyTorch's number of `HYBRID_SHARD`.
const HYBRID: u64 = 4;
