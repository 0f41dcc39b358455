//! Supplies TRL's defaults.
//!
//! Sources: `trl/trainer/{base,sft}_config.py` of TRL.

use super::has;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::table::{Dtype, Effect, quoted};

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
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults(draft: &mut Draft) -> Result<(), ConfigError> {
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

/// Does the same for arguments of the Trainer, if they are TRL's.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults_of_trainer(draft: &mut Draft) -> Result<(), ConfigError> {
    if is_trl(draft) {
        defaults(draft)?;
    }
    Ok(())
}

/// Returns whether arguments of the Trainer are those of TRL's `SFTConfig`, and not those of
/// open-instruct, which has some of them.
fn is_trl(draft: &Draft) -> bool {
    has(draft, &OF_TRL) && !has(draft, &OF_OPEN_INSTRUCT)
}
