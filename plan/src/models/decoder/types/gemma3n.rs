//! The language model of Gemma 3n.

use super::windowed::{GELU_TANH, LARGE_THETA, LOCAL_THETA, ROOT_OF_WIDTH};
use super::{HEAD_DIM_256, TIED_BY_DEFAULT, derived, number};
use crate::models::hf::{
    Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, NORM_EPS};
use crate::models::windows::{every, layers};
use serde_json::{Value, json};

/// Embedded tokens of each layer.
pub(super) const LAYER_EMBEDDING: [Field; 2] = [
    field(
        &["hidden_size_per_layer_input"],
        Meaning::Default("layer_embedding_width", Given::Int(256)),
    ),
    field(
        &["vocab_size_per_layer_input"],
        Meaning::Default("layer_embedding_rows", Given::Int(262_144)),
    ),
];

/// The width of the feed-forward layer, or that of the first one of a list.
const FFN: Field = number(
    &["intermediate_size"],
    "ffn",
    |file| {
        let given = file("intermediate_size");
        let first = given.as_ref().and_then(|of| of.get(0)).cloned();
        Ok(Some(first.or(given).unwrap_or_else(|| 16_384.into())))
    },
    |model| Some(model["ffn"].clone()),
);

/// The shares that `activation_sparsity_pattern` lists, or 0.95 in the first ten of more layers.
fn sparsity(file: Fields<'_>) -> Result<Option<Value>, String> {
    let n = layers(file);
    let listed = file("activation_sparsity_pattern");
    let Some(listed) = listed else {
        let share = |layer: u64| if layer < 10 && n > 10 { 0.95 } else { 0.0 };
        return Ok(Some((0..n).map(share).collect()));
    };
    let Some(all) = listed.as_array() else {
        return Err(format!(
            "`activation_sparsity_pattern` must be a list with a number for each layer, not {listed}"
        ));
    };
    let used = all.iter().any(|share| share.as_f64() != Some(0.0));
    Ok(used.then_some(listed))
}

const ALTUP_FIELDS: &[&str] = &[
    "altup_num_inputs",
    "altup_active_idx",
    "altup_correct_scale",
    "altup_coef_clip",
    "laurel_rank",
];

/// Returns the key `altup`.
fn altup(file: Fields<'_>) -> Result<Option<Value>, String> {
    let streams = super::read::size(file, "altup_num_inputs", 4)?;
    let active = file("altup_active_idx").unwrap_or_else(|| 0.into());
    if active.as_u64().is_none_or(|n| n >= streams) {
        return Err(format!(
            "`altup_active_idx` must be less than `altup_num_inputs` ({streams}), not {active}"
        ));
    }
    Ok(Some(json!({
        "streams": streams,
        "active": active,
        "scale": file("altup_correct_scale").unwrap_or(Value::Bool(true)),
        "laurel_rank": super::read::size(file, "laurel_rank", 64)?,
    })))
}

pub(super) const TYPES: &[HfType] = &[HfType {
    model_type: "gemma3n_text",
    architecture: "Gemma3nForCausalLM",
    fixed: &[
        ("norm_position", Given::Str("both")),
        ("qk_norm", Given::Bool(true)),
        ("value_norm", Given::Bool(true)),
        ("attention_multiplier", Given::Float(1.0)),
    ],
    common: &LAYER_EMBEDDING,
    fields: &[
        VOCAB,
        HIDDEN,
        FFN,
        LAYERS,
        HEADS,
        POSITIONS,
        ATTENTION_BIAS,
        LARGE_THETA,
        LOCAL_THETA,
        HEAD_DIM_256,
        NORM_EPS,
        GELU_TANH,
        ROOT_OF_WIDTH,
        TIED_BY_DEFAULT,
        every::<5>(),
        field(
            &["num_key_value_heads"],
            Meaning::Default("kv_heads", Given::Int(2)),
        ),
        field(
            &["sliding_window"],
            Meaning::Default("sliding_window", Given::Int(512)),
        ),
        field(
            &["final_logit_softcapping"],
            Meaning::Nullable("logits_softcap", Given::Float(30.0)),
        ),
        field(
            &["num_kv_shared_layers"],
            Meaning::Default("shared_kv_layers", Given::Int(15)),
        ),
        derived("layer_ffn", &["intermediate_size"], |file| {
            Ok(file("intermediate_size").filter(Value::is_array))
        }),
        derived(
            "activation_sparsity",
            &["activation_sparsity_pattern"],
            sparsity,
        ),
        derived("altup", ALTUP_FIELDS, altup),
    ],
}];
