//! Refuses jobs of torchtune that train nothing, and supplies what its code decides without a key.
//!
//! Sources: `recipes/full_finetune_distributed.py` and `training/quantization.py` of torchtune.

use super::{chunk_tokens, compile_loss};
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::NO_TRAINING;
use crate::row::Lack;
use crate::table::{COMPILED_BLOCKS, COMPILED_LOSS, Fact, quoted};

/// Refuses torchtune's recipe that quantizes a model. Recipes for quantization-aware training have
/// a quantizer, too, and an optimizer.
pub(super) fn refuse(draft: &mut Draft) {
    let under = |section: &str| {
        let mut rows = draft.rows.iter();
        rows.position(|r| r.key.split('.').next() == Some(section))
    };
    let trains = ["optimizer", "loss", "dataset"];
    if let Some(row) = under("quantizer")
        && trains.iter().all(|section| under(section).is_none())
    {
        draft.none(row, Lack::Everything, NO_TRAINING);
    }
}

/// Chunks of a loss by default (`num_output_chunks`).
const CHUNKS: u64 = 8;

/// Sets what is compiled, and the size of the chunks of a loss: torchtune gives their number.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn last(draft: &mut Draft) -> Result<(), ConfigError> {
    compiled_parts(draft)?;
    let mut losses = ["saved_chunks", "split_logits"].iter();
    let chunked = losses.any(|loss| draft.is("train.loss", loss));
    let given = draft
        .rows
        .iter()
        .find(|r| r.key == "loss.num_output_chunks");
    let given = given.and_then(|row| row.value.parse().ok());
    let chunks = given.filter(|n| *n > 0).unwrap_or(CHUNKS);
    if let Some(tokens) = chunk_tokens(draft, chunks).filter(|_| chunked) {
        let why = "the number of chunks of torchtune's loss";
        draft.assume("train.loss_chunk_tokens", tokens.to_string(), why);
    }
    Ok(())
}

fn compiled_parts(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::CompiledParts) else {
        return Ok(());
    };
    if given.value == 0 {
        draft.none(given.row, Lack::Nothing, "off");
    }
    if given.value & COMPILED_BLOCKS != 0 {
        draft.set(given.row, "compile.mode", quoted("blocks"))?;
    }
    if given.value & COMPILED_LOSS != 0 {
        compile_loss(draft, Some(given.row))?;
    }
    Ok(())
}

/// Gathers weights in 8 bits if no recipe is named. Recipes of torchao, `tensorwise` among them,
/// gather in 16 bits.
///
/// # Errors
/// Never fails.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
    let on = draft.fact(Fact::Float8).is_some_and(|f| f.value == 1);
    if on && draft.fact(Fact::Float8Scaling).is_none() {
        let key = "enable_fsdp_float8_all_gather";
        draft.suppose_fact(Fact::Float8Gather, 1, key, "true", GATHER);
        draft.suppose_fact(Fact::Float8Ahead, 1, SCALES, "true", GATHER);
    }
    Ok(())
}

const GATHER: &str = "torchtune's default without fp8_recipe_name";
const SCALES: &str = "precompute_float8_dynamic_scale_for_fsdp";
