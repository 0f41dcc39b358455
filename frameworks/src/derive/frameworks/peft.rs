//! Supplies PEFT's default for the layers that get adapters.
//!
//! Source: `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING` in `peft/utils/constants.py` of
//! PEFT 0.21.

use crate::adapters::Targets;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::model;
use crate::table::{Effect, Fact};

const QUERY_AND_VALUE: &[&str] = &["q_proj", "v_proj"];
const FUSED: &[&str] = &["query_key_value"];
const OF_BERT: &[&str] = &["query", "value"];
const OF_T5: &[&str] = &["q", "v"];

/// Layers by the type of the model.
const TARGETS: [(&str, &[&str]); 34] = [
    ("bart", QUERY_AND_VALUE),
    ("bert", OF_BERT),
    ("bloom", FUSED),
    ("chatglm", FUSED),
    ("codegen", &["qkv_proj"]),
    ("deberta", &["in_proj"]),
    ("deberta-v2", &["query_proj", "value_proj"]),
    ("electra", OF_BERT),
    ("falcon", FUSED),
    ("gemma", QUERY_AND_VALUE),
    ("gemma2", QUERY_AND_VALUE),
    ("gemma3_text", QUERY_AND_VALUE),
    ("gpt2", &["c_attn"]),
    ("gpt_bigcode", &["c_attn"]),
    ("gpt_neo", QUERY_AND_VALUE),
    ("gpt_neox", FUSED),
    ("gptj", QUERY_AND_VALUE),
    ("layoutlm", OF_BERT),
    ("llama", QUERY_AND_VALUE),
    ("llama4", QUERY_AND_VALUE),
    ("mistral", QUERY_AND_VALUE),
    ("mixtral", QUERY_AND_VALUE),
    ("mpt", &["Wqkv"]),
    ("mt5", OF_T5),
    ("nemotron_h", &["q_proj", "k_proj", "v_proj", "o_proj"]),
    ("opt", QUERY_AND_VALUE),
    ("phi", &["q_proj", "v_proj", "fc1", "fc2"]),
    ("qwen2", QUERY_AND_VALUE),
    ("qwen3", QUERY_AND_VALUE),
    ("roberta", OF_BERT),
    ("rwkv", &["key", "value", "receptance", "output"]),
    ("stablelm", QUERY_AND_VALUE),
    ("t5", OF_T5),
    ("xlm-roberta", OF_BERT),
];

/// Puts adapters, if they are trained, on the layers that PEFT adapts if `target_modules` is
/// missing.
///
/// # Errors
/// Fails if another key gives a different value.
pub(super) fn targets(draft: &mut Draft) -> Result<(), ConfigError> {
    let trained = draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1);
    if !trained || draft.has_targets() {
        return Ok(());
    }
    let types = draft
        .value("model.preset")
        .map(|preset| model::types(preset.trim_matches('"')));
    let Some(kind) = types.unwrap_or_default().into_iter().next() else {
        return super::all_linear(draft, UNKNOWN);
    };
    let Some((_, names)) = TARGETS.iter().find(|(of, _)| *of == kind) else {
        let why = format!(
            "no default of PEFT for models of type `{kind}` is known here: all linear layers are predicted"
        );
        return super::all_linear(draft, &why);
    };
    let why = format!("PEFT's default for models of type `{kind}`");
    let row = draft.suppose("target_modules", &names.join(" "), &why);
    draft.apply(row, Effect::Targets(Targets::named(names)))
}

/// Note on a model without a type.
const UNKNOWN: &str = "PEFT's default depends on the type of the model, which is not known here: all linear layers are predicted";
