//! What torchtitan's code decides without a key, by version.
//!
//! Sources: `parallelize.py` of its models, `distributed/{fsdp,activation_checkpoint}.py`,
//! `config_manager.py` and `components/loss.py` of torchtitan, April 2024 to August 2026.

use super::{chunk_tokens, compile_loss};
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::row::{Lack, Row};
use crate::table::{COMPILED_BLOCKS, COMPILED_LOSS, Fact, list, quoted};

const RECOMPUTE: &str = "train.recompute";
const LAYERS: &str = "train.recompute_layers";
const RESHARD: &str = "fsdp.reshard_after_forward";
const UNITS: &str = "fsdp.units";

/// Keys that torchtitan removed before 2025-07-28, when it made units of the first and the last
/// modules (#1094). `training.compile` lasted a few weeks longer.
const OLD_KEYS: [&str; 8] = [
    "training.batch_size",
    "training.compile",
    "training.data_parallel_degree",
    "training.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree",
    "training.tensor_parallel_degree",
    "training.warmup_steps",
    "model.norm_type",
];
const OLD_SECTION: &str = "experimental.";

/// Sets what backward recomputes, and the chunks of the loss.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn step(draft: &mut Draft, _ranks: u64) -> Result<(), ConfigError> {
    if let Some(length) = draft.value("train.seq_len").map(str::to_owned) {
        draft.assume("model.max_seq_len", length, POSITIONS);
    }
    loss_chunks(draft)?;
    compiled_parts(draft)?;
    recompute(draft)
}

const POSITIONS: &str = "torchtitan makes as many positions as a sequence has";

/// Compiles what `compile.components` lists: by default, blocks and the loss.
fn compiled_parts(draft: &mut Draft) -> Result<(), ConfigError> {
    let given = draft.fact(Fact::CompiledParts);
    if draft.value("compile.mode").is_none() {
        if let Some(given) = given {
            draft.none(given.row, Lack::Nothing, "nothing is compiled");
        }
        return Ok(());
    }
    let Some(given) = given else {
        // The loss is compiled since April 2025. `batch_size`, which became two keys in June 2025,
        // stands for the versions before.
        let is_old = |r: &Row| r.place.is_some() && r.key == "training.batch_size";
        return match draft.rows.iter().any(is_old) {
            true => Ok(()),
            false => compile_loss(draft, None),
        };
    };
    if given.value & COMPILED_BLOCKS == 0 {
        draft.unset("compile.mode", Lack::Nothing, "no block is compiled");
    }
    if given.value & COMPILED_LOSS != 0 {
        compile_loss(draft, Some(given.row))?;
    } else {
        draft.none(given.row, Lack::Nothing, "the loss is eager");
    }
    Ok(())
}

/// Divides the tokens of a micro-batch by the number of chunks of the loss.
fn loss_chunks(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(chunks) = draft.fact(Fact::LossChunks) else {
        return Ok(());
    };
    draft.set(chunks.row, "train.loss", quoted("chunked"))?;
    if let Some(tokens) = chunk_tokens(draft, chunks.value) {
        draft.set(chunks.row, "train.loss_chunk_tokens", tokens.to_string())?;
    }
    Ok(())
}

/// Sets what mode `selective` recomputes: every second matmul and everything that is cheap, or
/// every Nth block as a whole.
fn recompute(draft: &mut Draft) -> Result<(), ConfigError> {
    // Since June 2026, configurations name a class or nothing.
    let nothing = |r: &Row| r.key == "activation_checkpoint" && r.place.is_some();
    if let Some(row) = draft.rows.iter().position(nothing) {
        return draft.set(row, RECOMPUTE, quoted("none"));
    }
    let option = draft.fact(Fact::RecomputeEvery);
    let decided = draft.value(RECOMPUTE).is_some() || draft.fact(Fact::Recompute).is_some();
    let row = match draft.fact(Fact::SelectiveMode) {
        Some(mode) => mode.row,
        None if decided => {
            if let Some(option) = option {
                let why = "part of mode selective, which is off";
                draft.none(option.row, Lack::Nothing, why);
            }
            return Ok(());
        }
        None => draft.suppose("activation_checkpoint.mode", "selective", DEFAULT),
    };
    selective(draft, row, option.map(|o| (o.row, o.value)))
}

/// Operations that option `op` saves. No version saves grouped matmuls of experts (`_grouped_mm`).
const SAVED: [&str; 4] = ["mm", "addmm", "attention", "conv"];

fn selective(
    draft: &mut Draft,
    mode: usize,
    option: Option<(usize, u64)>,
) -> Result<(), ConfigError> {
    let (row, every) = option.unwrap_or_else(|| {
        // TOML files are older than the versions without this option.
        let in_toml = |r: &Row| r.place.as_ref().is_some_and(|p| p.file.ends_with(".toml"));
        let (value, every) = if draft.rows.iter().any(in_toml) {
            ("2", 2)
        } else {
            ("op", 0)
        };
        let key = "activation_checkpoint.selective_ac_option";
        (draft.suppose(key, value, DEFAULT), every)
    });
    if every == 0 {
        draft.set(mode, RECOMPUTE, quoted("selective"))?;
        let saved = SAVED.map(str::to_owned);
        draft.set(row, "train.recompute_save", list(&saved))?;
        return draft.set(row, "train.recompute_nth_matmul", "2".to_owned());
    }
    draft.set(mode, RECOMPUTE, quoted("full"))?;
    match blocks(every) {
        Some(globs) if globs.is_empty() => draft.none(row, Lack::Nothing, "every block"),
        Some(globs) => draft.set(row, LAYERS, list(&globs))?,
        None => {
            let why = "blocks at this distance are not predicted: all blocks are recomputed";
            draft.none(row, Lack::Accuracy, why);
        }
    }
    Ok(())
}

/// Returns globs of the modules of every Nth block, of which the first is number N - 1. `None` if
/// their last digits do not repeat.
fn blocks(every: u64) -> Option<Vec<String>> {
    match every {
        1 => Some(Vec::new()),
        2 | 5 | 10 => {
            let digits = (0..10_u64).filter(|d| (d + 1).is_multiple_of(every));
            Some(digits.map(|d| format!("layers.*{d}")).collect())
        }
        _ => None,
    }
}

const DEFAULT: &str = "torchtitan's default";

/// Sets the modules that are gathered together, and which of them stay gathered after forward.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn units(draft: &mut Draft) -> Result<(), ConfigError> {
    if draft.value("fsdp.policy") != Some(&quoted("fsdp2")) {
        return Ok(());
    }
    let is_old = draft.rows.iter().any(|row| {
        let is_parallel = row.key.starts_with(OLD_SECTION) && row.key.contains("parallel_degree");
        row.place.is_some() && (is_parallel || OLD_KEYS.contains(&row.key.as_str()))
    });
    let by_default = draft.fact(Fact::ReshardByDefault);
    let is_given = draft.fact(Fact::Reshard).is_some();
    if is_old {
        // The root owns the first and the last modules. Only the last block stays gathered.
        match by_default {
            Some(given) => draft.set(given.row, RESHARD, quoted("auto"))?,
            None if !is_given => draft.assume(RESHARD, quoted("auto"), LAST_BLOCK),
            None => {}
        }
        return Ok(());
    }
    if let Some(given) = by_default {
        draft.set(given.row, RESHARD, "true".to_owned())?;
    }
    let always = draft.fact(Fact::Reshard).is_some_and(|r| r.value == 1);
    if always {
        let each = ["layers.*", "tok_embeddings", "norm+output"].map(str::to_owned);
        draft.assume(UNITS, list(&each), ENDS);
    } else {
        draft.assume(UNITS, quoted("block_and_ends"), ENDS);
    }
    Ok(())
}

const ENDS: &str = "torchtitan shards the embedding, and the last norm with the output layer, apart from the blocks";
const LAST_BLOCK: &str = "this version of torchtitan keeps the last block gathered after forward";
