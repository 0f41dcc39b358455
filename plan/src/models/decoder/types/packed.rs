//! Types with packed projections.

use super::read::flag;
use super::{
    HIDDEN_ACT, LAYER_NORM, LAYER_NORM_EPSILON, PARTIAL, PARTIAL_HALF, RMS_EPS_5, TIED_BY_DEFAULT,
    derived, number,
};
use crate::models::hf::{
    BiasPart, Computed, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning,
    POSITIONS, ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{HEAD_DIM, HEAD_DIM_128, KV_HEADS, NORM_EPS};
use crate::models::windows::WINDOW;
use serde_json::Value;

const SHAPE: &[Field] = &[
    VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS, ROPE_THETA,
];
const CONCATENATED: (&str, Given) = ("packed_qkv", Given::Str("concatenated"));
const GATE_UP: (&str, Given) = ("packed_gate_up", Given::Bool(true));
const INTERLEAVED: (&str, Given) = ("position_embedding", Given::Str("rotary_interleaved"));
const QKV_BIAS: Meaning = Meaning::HasBias(BiasPart::Qkv, false);

/// Falcon's older classes have one key for all queries (`multi_query`), or a key for each.
const FALCON_KEYS: Field = falcon(&["num_kv_heads"], "kv_heads", falcon_keys, |model| {
    Some(model["kv_heads"].clone())
});
const FALCON_ONE_KEY: Field = falcon(&["multi_query"], "packed_qkv", falcon_packing, |model| {
    Some((model["packed_qkv"] == "concatenated").into())
});
const FALCON_NEW: Field = falcon(
    &["new_decoder_architecture"],
    "packed_qkv",
    falcon_packing,
    |model| Some((model["packed_qkv"] == "per_group").into()),
);
const FALCON_PARALLEL: Field = falcon(&["parallel_attn"], "residual", falcon_residual, |model| {
    Some((model["residual"] != "sequential").into())
});
/// The old architecture has one norm, whatever the field says.
const FALCON_NORMS: Field = falcon(
    &["num_ln_in_parallel_attn"],
    "residual",
    falcon_residual,
    |model| {
        let new = model["packed_qkv"] == "per_group";
        let norms = if model["residual"] == "parallel" {
            2
        } else {
            1
        };
        new.then(|| norms.into())
    },
);

/// A key that follows from several of Falcon's fields.
const fn falcon(
    name: &'static [&'static str; 1],
    key: &'static str,
    read: fn(Fields<'_>) -> Result<Option<Value>, String>,
    write: fn(&Value) -> Option<Value>,
) -> Field {
    let also = &["n_head_kv"];
    field(name, Meaning::Computed(key, Computed { also, read, write }))
}

/// One of the fields that say how many keys MPT's attention has.
const fn mpt(name: &'static [&'static str; 1], write: fn(&Value) -> Option<Value>) -> Field {
    number(name, "kv_heads", mpt_keys, write)
}

/// Returns the key heads of MPT's attention: as many as there are queries, one, or a given number.
fn mpt_keys(file: Fields<'_>) -> Result<Option<Value>, String> {
    let (kind, keys) = ("attn_config.attn_type", "attn_config.kv_n_heads");
    let given = file(kind);
    match given.as_ref().and_then(Value::as_str) {
        None if given.is_none() => Ok(None),
        Some("multihead_attention") => Ok(None),
        Some("multiquery_attention") => Ok(Some(1.into())),
        Some("grouped_query_attention") => file(keys).map(Some).ok_or_else(|| {
            format!("`{kind}` is \"grouped_query_attention\", which needs `{keys}`: it is missing")
        }),
        _ => Err(format!(
            "`{kind}` must be multihead_attention, multiquery_attention or grouped_query_attention, not {}",
            given.unwrap_or_default()
        )),
    }
}

fn falcon_keys(file: Fields<'_>) -> Result<Option<Value>, String> {
    let keys = ["num_kv_heads", "n_head_kv"];
    let keys = keys.iter().find_map(|name| file(name));
    let new = flag(file, "new_decoder_architecture", false);
    Ok(match (new, flag(file, "multi_query", true)) {
        (true, _) => keys,
        (false, true) => Some(1.into()),
        (false, false) => None,
    })
}

fn falcon_packing(file: Fields<'_>) -> Result<Option<Value>, String> {
    let new = flag(file, "new_decoder_architecture", false);
    let packed = match (new, flag(file, "multi_query", true)) {
        (true, _) => "per_group",
        (false, true) => "concatenated",
        (false, false) => "per_head",
    };
    Ok(Some(packed.into()))
}

fn falcon_residual(file: Fields<'_>) -> Result<Option<Value>, String> {
    let new = flag(file, "new_decoder_architecture", false);
    let parallel = flag(file, "parallel_attn", true);
    let norms = file("num_ln_in_parallel_attn").and_then(|n| n.as_u64());
    if !new && parallel && norms == Some(2) {
        return Err(
            "`num_ln_in_parallel_attn` is 2 for the new decoder architecture only".to_owned(),
        );
    }
    let residual = match (new, parallel) {
        // The norms that forward reads do not exist.
        (true, false) => {
            return Err(
                "`parallel_attn` is false for the old decoder architecture only".to_owned(),
            );
        }
        (true, true) if norms.unwrap_or(2) == 2 => "parallel",
        (true, true) | (false, true) => "parallel_one_norm",
        (false, false) => "sequential",
    };
    Ok(Some(residual.into()))
}

const FALCON: &[Field] = &[
    VOCAB,
    HIDDEN,
    // RefinedWeb, Falcon's first name.
    Field {
        names: &["num_hidden_layers", "n_layer"],
        ..LAYERS
    },
    POSITIONS,
    TIED_BY_DEFAULT,
    Field {
        names: &["num_attention_heads", "n_head"],
        ..HEADS
    },
    field(&["ffn_hidden_size"], Meaning::Optional("ffn")),
    FALCON_KEYS,
    FALCON_ONE_KEY,
    FALCON_NEW,
    FALCON_PARALLEL,
    FALCON_NORMS,
    LAYER_NORM_EPSILON,
    field(
        &["activation"],
        Meaning::Choice("activation", &[("gelu", "gelu"), ("relu", "relu")]),
    ),
    field(&["bias"], Meaning::HasBias(BiasPart::All, false)),
];

/// Baichuan 13B has no table of longest positions, and slopes instead of a rotation.
const BAICHUAN_POSITIONS: Field = derived("position_embedding", &["model_max_length"], |file| {
    let rotary = file("max_position_embeddings").is_some();
    Ok((!rotary).then(|| "alibi".into()))
});

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        fixed: &[CONCATENATED, GATE_UP],
        common: SHAPE,
        fields: &[
            field(&["pad_token_id"], Meaning::Padding(32_000)),
            RMS_EPS_5,
            HIDDEN_ACT,
            PARTIAL,
            WINDOW,
            field(&["attention_bias"], Meaning::Off),
            TIED,
        ],
    },
    HfType {
        model_type: "glm",
        architecture: "GlmForCausalLM",
        fixed: &[GATE_UP, INTERLEAVED],
        common: SHAPE,
        fields: &[
            field(&["pad_token_id"], Meaning::Padding(151_329)),
            HEAD_DIM_128,
            field(
                &["rms_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1.5625e-7)),
            ),
            HIDDEN_ACT,
            PARTIAL_HALF,
            field(&["attention_bias"], QKV_BIAS),
            TIED,
        ],
    },
    HfType {
        model_type: "glm4",
        architecture: "Glm4ForCausalLM",
        fixed: &[GATE_UP, INTERLEAVED, ("norm_position", Given::Str("both"))],
        common: SHAPE,
        fields: &[
            field(&["pad_token_id"], Meaning::Padding(151_329)),
            HEAD_DIM_128,
            field(
                &["rms_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1.5625e-7)),
            ),
            HIDDEN_ACT,
            PARTIAL_HALF,
            field(&["attention_bias"], QKV_BIAS),
            TIED,
        ],
    },
    // The language model of GLM-4.1V.
    HfType {
        model_type: "glm4v_text",
        architecture: "Glm4vForConditionalGeneration",
        fixed: &[
            GATE_UP,
            INTERLEAVED,
            ("norm_position", Given::Str("both")),
            ("bias", Given::Str("qkv")),
        ],
        common: SHAPE,
        fields: &[RMS_EPS_5, HIDDEN_ACT, PARTIAL_HALF, TIED],
    },
    // The language model of GLM-OCR.
    HfType {
        model_type: "glm_ocr_text",
        architecture: "GlmOcrForConditionalGeneration",
        fixed: &[GATE_UP, INTERLEAVED, ("norm_position", Given::Str("both"))],
        common: SHAPE,
        fields: &[HEAD_DIM, RMS_EPS_5, HIDDEN_ACT, PARTIAL, TIED],
    },
    HfType {
        model_type: "chatglm",
        architecture: "ChatGLMModel",
        fixed: &[
            CONCATENATED,
            GATE_UP,
            INTERLEAVED,
            ("partial_rotary_factor", Given::Float(0.5)),
        ],
        common: &[HIDDEN, HEADS, TIED],
        fields: &[
            field(&["padded_vocab_size"], Meaning::Required("vocab")),
            field(&["num_layers"], Meaning::Required("layers")),
            field(&["ffn_hidden_size"], Meaning::Required("ffn")),
            field(&["kv_channels"], Meaning::Optional("head_dim")),
            field(&["seq_length"], Meaning::Positions),
            field(&["layernorm_epsilon"], Meaning::Optional("norm_eps")),
            field(&["add_qkv_bias"], QKV_BIAS),
            field(&["add_bias_linear"], Meaning::Off),
            field(&["rmsnorm"], Meaning::On),
            field(&["post_layer_norm"], Meaning::On),
            field(&["apply_residual_connection_post_layernorm"], Meaning::Off),
            number(
                &["multi_query_group_num"],
                "kv_heads",
                |file| {
                    let grouped = file("multi_query_attention") == Some(true.into());
                    Ok(file("multi_query_group_num").filter(|_| grouped))
                },
                |model| Some(model["kv_heads"].clone()),
            ),
            number(
                &["rope_ratio"],
                "rope_theta",
                |file| {
                    let ratio = file("rope_ratio").and_then(|r| r.as_f64());
                    Ok(ratio.map(|ratio| (1e4 * ratio).into()))
                },
                |model| Some((model["rope_theta"].as_f64()? / 1e4).into()),
            ),
        ],
    },
    HfType {
        model_type: "baichuan",
        architecture: "BaichuanForCausalLM",
        fixed: &[CONCATENATED],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, ROPE_THETA, NORM_EPS, HIDDEN_ACT, TIED,
        ],
        fields: &[
            Field {
                names: &["max_position_embeddings", "model_max_length"],
                ..POSITIONS
            },
            BAICHUAN_POSITIONS,
        ],
    },
    HfType {
        model_type: "qwen",
        architecture: "QWenLMHeadModel",
        fixed: &[CONCATENATED, ("bias", Given::Str("qkv"))],
        common: &[VOCAB, HIDDEN, LAYERS, HEADS, TIED],
        fields: &[
            // Gate and up are two halves of it.
            number(
                &["intermediate_size"],
                "ffn",
                |file| {
                    let both = file("intermediate_size").and_then(|n| n.as_u64());
                    Ok(both.map(|both| (both / 2).into()))
                },
                |model| Some((2 * model["ffn"].as_u64()?).into()),
            ),
            field(&["kv_channels"], Meaning::Optional("head_dim")),
            Field {
                names: &["max_position_embeddings", "seq_length"],
                ..POSITIONS
            },
            Field {
                names: &["rotary_emb_base"],
                ..ROPE_THETA
            },
            field(
                &["layer_norm_epsilon"],
                Meaning::Default("norm_eps", Given::Float(1e-6)),
            ),
            field(&["no_bias"], Meaning::On),
        ],
    },
    HfType {
        model_type: "internlm2",
        architecture: "InternLM2ForCausalLM",
        fixed: &[("packed_qkv", Given::Str("per_group"))],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            field(&["bias"], Meaning::HasBias(BiasPart::Attention, true)),
            TIED,
        ],
    },
    HfType {
        model_type: "falcon",
        architecture: "FalconForCausalLM",
        fixed: &[LAYER_NORM, ("gated_mlp", Given::Bool(false))],
        common: FALCON,
        fields: &[ROPE_THETA, field(&["alibi"], Meaning::Off)],
    },
    HfType {
        model_type: "falcon_alibi",
        architecture: "FalconForCausalLM",
        fixed: &[
            LAYER_NORM,
            ("gated_mlp", Given::Bool(false)),
            ("position_embedding", Given::Str("alibi")),
        ],
        common: FALCON,
        fields: &[field(&["alibi"], Meaning::On)],
    },
    HfType {
        model_type: "bloom",
        architecture: "BloomForCausalLM",
        fixed: &[
            LAYER_NORM,
            ("packed_qkv", Given::Str("per_head")),
            ("gated_mlp", Given::Bool(false)),
            ("activation", Given::Str("gelu_tanh")),
            ("position_embedding", Given::Str("alibi")),
            ("embedding_norm", Given::Bool(true)),
            ("bias", Given::Bool(true)),
        ],
        common: &[VOCAB, TIED_BY_DEFAULT],
        fields: &[
            Field {
                names: &["hidden_size", "n_embed"],
                ..HIDDEN
            },
            Field {
                names: &["n_layer", "num_hidden_layers"],
                ..LAYERS
            },
            Field {
                names: &["n_head", "num_attention_heads"],
                ..HEADS
            },
            field(&["seq_length"], Meaning::Positions),
            LAYER_NORM_EPSILON,
            field(&["apply_residual_connection_post_layernorm"], Meaning::Off),
        ],
    },
    HfType {
        model_type: "mpt",
        architecture: "MptForCausalLM",
        fixed: &[
            ("norm", Given::Str("layer_norm_no_bias")),
            CONCATENATED,
            ("gated_mlp", Given::Bool(false)),
            ("activation", Given::Str("gelu")),
            ("position_embedding", Given::Str("alibi")),
        ],
        common: &[VOCAB, TIED_BY_DEFAULT],
        fields: &[
            field(&["d_model"], Meaning::Required("hidden")),
            field(&["n_layers"], Meaning::Required("layers")),
            field(&["n_heads"], Meaning::Required("heads")),
            field(&["max_seq_len"], Meaning::Positions),
            derived("ffn", &["expansion_ratio"], |file| {
                let ratio = file("expansion_ratio").and_then(|r| r.as_f64());
                match ratio {
                    Some(ratio) if ratio != 4.0 => Err(format!(
                        "`expansion_ratio` must be 4, not {ratio}: transformers' class reads no other"
                    )),
                    _ => Ok(file("d_model")
                        .and_then(|d| d.as_u64())
                        .map(|width| (4 * width).into())),
                }
            }),
            field(&["no_bias"], Meaning::On),
            mpt(&["attn_config.attn_type"], |model| {
                let grouped = model["kv_heads"] != model["heads"];
                grouped.then(|| "grouped_query_attention".into())
            }),
            mpt(&["attn_config.kv_n_heads"], |model| {
                let grouped = model["kv_heads"] != model["heads"];
                grouped.then(|| model["kv_heads"].clone())
            }),
            field(&["attn_config.alibi"], Meaning::On),
            field(&["attn_config.qk_ln"], Meaning::Off),
            field(&["attn_config.prefix_lm"], Meaning::Off),
            field(&["attn_config.clip_qkv"], Meaning::Unset),
        ],
    },
];
