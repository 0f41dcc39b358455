//! Refuses jobs of torchtune that train nothing, and divides its losses into chunks.

use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::NO_TRAINING;
use crate::row::Lack;

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

/// Sets the size of the chunks of a loss: torchtune gives their number.
///
/// # Errors
/// Never fails.
pub(super) fn last(draft: &mut Draft) -> Result<(), ConfigError> {
    let number = |key: &str| draft.value(key).and_then(|value| value.parse::<u64>().ok());
    let chunked = matches!(
        draft.value("train.loss"),
        Some("\"saved_chunks\"" | "\"split_logits\"")
    );
    let tokens = number("train.micro_batch").zip(number("train.seq_len"));
    let Some((batch, length)) = tokens.filter(|_| chunked) else {
        return Ok(());
    };
    let given = draft
        .rows
        .iter()
        .find(|r| r.key == "loss.num_output_chunks");
    let given = given.and_then(|row| row.value.parse().ok());
    let chunks = given.filter(|n| *n > 0).unwrap_or(CHUNKS);
    let rows = batch.saturating_mul(length).div_ceil(chunks);
    let why = "the number of chunks of torchtune's loss";
    draft.assume("train.loss_chunk_tokens", rows.to_string(), why);
    Ok(())
}
