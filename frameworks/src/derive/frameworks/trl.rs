//! Supplies TRL's defaults.
//!
//! Sources: `trl/trainer/{base,sft,model}_config.py`, `trl/trainer/sft_trainer.py` and
//! `trl/kernels/chunked_logprob.py` of TRL 1.4 to 1.16; pull request #3912 on `max_seq_length`.

use super::{all_linear, has, in_bf16, peft};
use crate::adapters::Targets;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::chunked_nll;
use crate::row::Doubt;
use crate::table::{Dtype, Effect, Fact, quoted};

const OF_TRL: [&str; 11] = [
    "loss_type",
    "model_init_kwargs.attn_implementation",
    "model_init_kwargs.dtype",
    "model_init_kwargs.torch_dtype",
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
        let (value, why) = if is_old(draft) {
            ("none", OLD)
        } else {
            ("full", "the default of current versions of TRL")
        };
        draft.assume("train.recompute", quoted(value), why);
    }
    if !has(draft, &["bf16", "fp16"]) {
        let row = draft.suppose("bf16", "true", "the default of current versions of TRL");
        draft.apply(row, Effect::Mixed(Dtype::Bf16))?;
    }
    loss(draft)?;
    if !of_peft(draft)? && is_on(draft, "use_peft") {
        let why = "TRL's default";
        draft.assume("lora.r", "16", why);
        draft.assume("lora.lora_alpha", "32.0", why);
        draft.assume("lora.lora_dropout", "0.05", why);
    }
    peft::targets(draft)
}

/// Returns whether adapters are trained because of a flag.
fn is_on(draft: &Draft, flag: &str) -> bool {
    let trained = draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1);
    trained && has(draft, &[flag])
}

/// Sets the adapters of PEFT's example (`examples/sft/train.py`), if a script has its flag. Returns
/// whether it has.
///
/// # Errors
/// Fails if another key gives a different value.
fn of_peft(draft: &mut Draft) -> Result<bool, ConfigError> {
    if !is_on(draft, "use_peft_lora") {
        return Ok(false);
    }
    let why = "the default of PEFT's example";
    draft.assume("lora.r", "64", why);
    draft.assume("lora.lora_alpha", "16.0", why);
    draft.assume("lora.lora_dropout", "0.1", why);
    all_linear(draft, why)?;
    Ok(true)
}

/// Sets the loss of TRL's `SFTTrainer` unless a key or Liger's kernels decide it.
///
/// # Errors
/// Fails if another key gives a different value.
fn loss(draft: &mut Draft) -> Result<(), ConfigError> {
    let decided = draft.value("train.loss").is_some();
    let other = [Fact::UnfusedLoss, Fact::Pairs];
    if decided || other.into_iter().any(|fact| draft.fact(fact).is_some()) {
        return Ok(());
    }
    if is_old(draft) {
        draft.assume("train.loss", quoted("materialized"), OLD);
        return Ok(());
    }
    let row = draft.suppose("loss_type", "chunked_nll", CHUNKED);
    draft.apply(row, chunked_nll())
}

/// Returns whether a job runs with old versions of TRL only: 0.20 removed `max_seq_length` (July
/// 2025). Recompute became the default in August 2025, and the loss in chunks in 1.7.
fn is_old(draft: &Draft) -> bool {
    has(draft, &["max_seq_length"])
}

const OLD: &str = "the default of TRL before 0.20, the last with max_seq_length";

/// Why the loss is chunked. TRL 1.15 computes tiles of 4,096 tokens and 32,768 words without
/// `torch.utils.checkpoint`, whose memory is closer to that of small chunks than to that of all
/// logits.
const CHUNKED: &str =
    "the default of TRL since 1.7; the tiles of logits since 1.15 are predicted as chunks";

/// Does the same for arguments of the Trainer, if they are TRL's.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn defaults_of_trainer(draft: &mut Draft) -> Result<(), ConfigError> {
    if is_trl(draft) {
        return defaults(draft);
    }
    if has(draft, &OF_QLORA) {
        return qlora(draft);
    }
    open_instruct(draft)?;
    of_peft(draft)?;
    lora_of_scripts(draft)?;
    peft::targets(draft)
}

/// Arguments of qlora.py that other scripts do not have.
const OF_QLORA: [&str; 3] = ["source_max_len", "target_max_len", "full_finetune"];

/// Sets the defaults of qlora.py (artidoro/qlora).
///
/// # Errors
/// Fails if another key gives a different value.
fn qlora(draft: &mut Draft) -> Result<(), ConfigError> {
    let why = "the default of qlora.py";
    let length = |key: &str, default: u64| {
        let row = draft.rows.iter().find(|r| r.key == key);
        row.map_or(Some(default), |r| r.value.parse().ok())
    };
    if let Some((source, target)) =
        length("source_max_len", 1024).zip(length("target_max_len", 256))
    {
        let sum = source.saturating_add(target).to_string();
        draft.assume("train.seq_len", sum, "source_max_len + target_max_len");
    }
    draft.assume("train.micro_batch", "1", why);
    draft.assume("train.grad_accum", "16", why);
    draft.assume("train.clip_norm", "0.3", why);
    if !has(draft, &["gradient_checkpointing"]) {
        draft.assume("train.recompute", quoted("full"), why);
    }
    draft.suppose_fact(Fact::Adapter, 1, "full_finetune", "false", why);
    if draft.fact(Fact::Adapter).is_none_or(|a| a.value == 0) {
        return Ok(());
    }
    if !has(draft, &["bits"]) {
        draft.suppose_fact(Fact::FourBitsToo, 2, "bits", "4", why);
    }
    draft.assume("lora.r", "64", why);
    draft.assume("lora.lora_alpha", "16.0", why);
    all_linear(draft, "qlora.py adapts all linear layers")
}

/// Sets the adapters of the script that Qwen ships for fine-tuning.
///
/// # Errors
/// Fails if another key gives a different value.
fn lora_of_qwen(draft: &mut Draft) -> Result<(), ConfigError> {
    let why = "the default of Qwen's finetune.py";
    draft.assume("lora.r", "64", why);
    draft.assume("lora.lora_alpha", "16.0", why);
    draft.assume("lora.lora_dropout", "0.05", why);
    all_linear(draft, why)
}

/// Sets what open-instruct's `finetune.py` does without a key: it computes QLoRA in bfloat16, and
/// does not clip gradients.
///
/// # Errors
/// Fails if another key gives a different value.
fn open_instruct(draft: &mut Draft) -> Result<(), ConfigError> {
    // LMFlow has `use_qlora`, too, and calls the rank `lora_r` in place of `lora_rank`.
    let of_lmflow = has(draft, &["lora_r", "save_aggregated_lora", "use_lisa"]);
    let own = has(draft, &["use_slow_tokenizer", "dataset_mixer_list"]);
    if !own && (of_lmflow || !has(draft, &["use_qlora"])) {
        return Ok(());
    }
    if !has(draft, &["clip_grad_norm", "max_grad_norm"]) {
        let why = "open-instruct's default (clip_grad_norm = -1)";
        draft.assume("train.clip_norm", "0.0", why);
    }
    if draft.fact(Fact::FourBits).is_some() {
        in_bf16(draft, "open-instruct's code (bnb_4bit_compute_dtype)")?;
    }
    all_linear(draft, "open-instruct's code (finetune.py)")
}

/// Sets what scripts with adapters that are not TRL's do without a key: those in the style of
/// LLaVA (`lora_enable`) have a rank of 64, and those of FastChat have no flag for adapters.
///
/// # Errors
/// Fails if another key gives a different value.
fn lora_of_scripts(draft: &mut Draft) -> Result<(), ConfigError> {
    let trained = draft.fact(Fact::Adapter).map(|a| a.value == 1);
    if trained == Some(true)
        && ["use_lora", "lazy_preprocess"]
            .iter()
            .all(|k| has(draft, &[k]))
    {
        return lora_of_qwen(draft);
    }
    if trained == Some(true) && has(draft, &["lora_enable"]) {
        let of_qwen = has(draft, &["tune_mm_vision", "tune_mm_mlp", "tune_mm_llm"]);
        let (alpha, why) = if of_qwen {
            ("128.0", "the default of Qwen-VL's training script")
        } else {
            ("16.0", "the default of LLaVA's training script")
        };
        draft.assume("lora.r", "64", why);
        draft.assume("lora.lora_alpha", alpha, why);
        if of_qwen {
            let names = ["q_proj", "k_proj", "v_proj", "o_proj"];
            let row = draft.suppose("target_modules", "q_proj k_proj v_proj o_proj", why);
            return draft.apply(row, Effect::Targets(Targets::named(&names)));
        }
        return all_linear(draft, why);
    }
    let rank = draft.rows.iter().position(|r| {
        let sets_rank = r.settings.iter().any(|s| s.key == "lora.r");
        sets_rank && r.place.is_some() && r.key.starts_with("lora_")
    });
    let open = OF_OPEN_INSTRUCT.iter().chain(&FLAGS);
    if trained.is_none()
        && let Some(rank) = rank.filter(|row| draft.is_of_command(*row))
        && !has(draft, &open.copied().collect::<Vec<_>>())
    {
        draft.apply(rank, Effect::Fact(Fact::Adapter, 1))?;
        draft.approximates(rank, SILENT);
        let row = &mut draft.rows[rank];
        let message = format!(
            "{} = {}: {SILENT}; remove them from the command to predict training of the model itself",
            row.key, row.value
        );
        let key = "lora.r";
        row.doubt = Some(Doubt { key, message });
    }
    Ok(())
}

/// Flags that turn adapters on.
const FLAGS: [&str; 3] = ["use_peft", "use_peft_lora", "lora_enable"];
/// Note on adapters that no flag turns on.
const SILENT: &str = "no argument turns adapters on or off: the options of LoRA are taken to mean that it is trained";

/// Returns whether arguments of the Trainer are those of TRL's `SFTConfig`, and not those of
/// open-instruct, which has some of them.
fn is_trl(draft: &Draft) -> bool {
    has(draft, &OF_TRL) && !has(draft, &OF_OPEN_INSTRUCT)
}
