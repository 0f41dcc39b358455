//! RWKV-5 to 7: the code that comes with files of RWKV World, and that of flash-linear-attention.

use super::derived;
use super::read::size;
use crate::models::hf::{
    Field, Fields, Given, HIDDEN, HfType, LAYERS, Meaning, TIED, VOCAB, field,
};
use serde_json::{Value, json};

const FIXED: &[(&str, Given)] = &[
    ("layer_types", Given::Words(&["rwkv"])),
    ("position_embedding", Given::Str("none")),
    ("heads", Given::Int(1)),
];

fn number(file: Fields<'_>, name: &str, default: f64) -> f64 {
    file(name).and_then(|n| n.as_f64()).unwrap_or(default)
}

/// The norm of the residual stream, and that of the embedded tokens.
const NORM: [Field; 2] = [
    derived("norm", &["norm_bias"], |file| {
        let bias = file("norm_bias") != Some(false.into());
        Ok(Some(
            if bias {
                "layer_norm"
            } else {
                "layer_norm_no_bias"
            }
            .into(),
        ))
    }),
    field(
        &["norm_first"],
        Meaning::Default("embedding_norm", Given::Bool(true)),
    ),
];

const EPS: Field = Field {
    names: &["norm_eps", "layer_norm_epsilon"],
    meaning: Meaning::Default("norm_eps", Given::Float(1e-5)),
};

const LONGEST: Field = Field {
    names: &["max_position_embeddings", "context_length"],
    meaning: Meaning::Default("max_seq_len", Given::Int(4096)),
};

/// Fields of flash-linear-attention that choose kernels, or layers that are not planned.
const KERNELS: [Field; 2] = [
    field(&["hidden_act"], Meaning::Word(&["sqrelu"])),
    derived(
        "num_labels",
        &[
            "attn",
            "attn_mode",
            "fuse_norm",
            "fuse_cross_entropy",
            "fuse_linear_cross_entropy",
            "use_l2warp",
            "rescale_every",
            "head_size_divisor",
            "model_version",
        ],
        |file| match file("attn") {
            None => Ok(None),
            Some(_) => Err(
                "`attn` must be null: layers of attention among those of RWKV are not planned"
                    .to_owned(),
            ),
        },
    ),
];

/// Fields of RWKV World, whose code has fixed widths between projections.
const WORLD: &[&str] = &["attention_hidden_size", "head_size", "num_attention_heads"];

/// Returns the width of the feed-forward layer: as given, or 3.5 times as wide.
fn ffn(file: Fields<'_>) -> Result<Option<Value>, String> {
    let hidden = size(file, "hidden_size", 2048)?;
    let wide = hidden as f64 * number(file, "hidden_ratio", 3.5);
    let made = match is_world(file) {
        true => wide as u64 / 32 * 32,
        false => (wide as u64).next_multiple_of(32),
    };
    Ok(Some(size(file, "intermediate_size", made)?.into()))
}

fn is_world(file: Fields<'_>) -> bool {
    WORLD.iter().any(|name| file(name).is_some())
}

/// Returns the sizes that the code of RWKV World has.
fn world(file: Fields<'_>, version: u64) -> Result<Value, String> {
    let hidden = size(file, "hidden_size", 2048)?;
    let inner = size(file, "attention_hidden_size", hidden)?;
    let dim = size(file, "head_size", 64)?;
    if inner != hidden {
        return Err(format!(
            "`attention_hidden_size` ({inner}) must be `hidden_size` ({hidden}), the width that heads are normalized with"
        ));
    }
    if !inner.is_multiple_of(dim) {
        return Err(format!(
            "`head_size` ({dim}) must divide the width, {inner}"
        ));
    }
    // Twice as wide in the model of 7 billion parameters.
    let ranks = [32, 64].map(|rank| if hidden == 4096 { 2 * rank } else { rank });
    Ok(json!({
        "version": version, "heads": inner / dim, "keys": inner, "values": inner,
        "mix_rank": ranks[0], "decay_rank": ranks[1],
    }))
}

/// Returns the sizes of RWKV-6 in flash-linear-attention.
fn six(file: Fields<'_>) -> Result<Option<Value>, String> {
    if is_world(file) {
        return world(file, 6).map(Some);
    }
    let hidden = size(file, "hidden_size", 2048)?;
    let part = |name, default| (hidden as f64 * number(file, name, default)) as u64;
    let (keys, values) = (part("expand_k", 0.5), part("expand_v", 1.0));
    let heads = size(file, "num_heads", 4)?;
    if !keys.is_multiple_of(heads) || !values.is_multiple_of(heads) {
        return Err(format!(
            "`num_heads` ({heads}) must divide the widths of keys ({keys}) and values ({values})"
        ));
    }
    Ok(Some(json!({
        "version": 6, "heads": heads, "keys": keys, "values": values,
        "mix_rank": size(file, "proj_low_rank_dim", 32)?,
        "decay_rank": size(file, "gate_low_rank_dim", 64)?,
    })))
}

/// Returns the sizes of RWKV-7.
fn seven(file: Fields<'_>) -> Result<Option<Value>, String> {
    let hidden = size(file, "hidden_size", 2048)?;
    let heads = match file("head_dim") {
        None if file("num_heads").is_some() => size(file, "num_heads", 1)?,
        _ => hidden / size(file, "head_dim", 64)?,
    };
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(format!("`head_dim` must divide `hidden_size` ({hidden})"));
    }
    let given = file("value_dim").unwrap_or_else(|| hidden.into());
    let same = |width: &Value| width.as_u64() == Some(hidden);
    let all_same = given
        .as_array()
        .map_or(same(&given), |all| all.iter().all(same));
    if !all_same {
        return Err(format!(
            "`value_dim` must be `hidden_size` ({hidden}) in every layer"
        ));
    }
    let factor = (hidden / heads) as f64 / 64.0;
    let rank = |name, by: f64| {
        let made = (by * (hidden as f64).sqrt() / 32.0).round_ties_even() as u64 * 32;
        size(file, name, made.max(32))
    };
    Ok(Some(json!({
        "version": 7, "heads": heads, "keys": hidden, "values": hidden,
        "decay_rank": rank("decay_low_rank_dim", 2.5 * factor)?,
        "rate_rank": rank("a_low_rank_dim", 2.5 * factor)?,
        "value_rank": rank("v_low_rank_dim", 1.7 * factor)?,
        "gate_rank": rank("gate_low_rank_dim", 5.0)?,
    })))
}

const COMMON: &[Field] = &[
    VOCAB, HIDDEN, LAYERS, TIED, NORM[0], NORM[1], EPS, LONGEST, KERNELS[0], KERNELS[1],
];
const FFN: Field = derived("ffn", &["intermediate_size", "hidden_ratio"], ffn);

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "rwkv5",
        architecture: "Rwkv5ForCausalLM",
        fixed: FIXED,
        common: COMMON,
        fields: &[FFN, derived("rwkv", WORLD, |file| world(file, 5).map(Some))],
    },
    HfType {
        model_type: "rwkv6",
        architecture: "RWKV6ForCausalLM",
        fixed: FIXED,
        common: COMMON,
        fields: &[
            FFN,
            derived(
                "rwkv",
                &[
                    "attention_hidden_size",
                    "head_size",
                    "num_attention_heads",
                    "num_heads",
                    "expand_k",
                    "expand_v",
                    "proj_low_rank_dim",
                    "gate_low_rank_dim",
                ],
                six,
            ),
        ],
    },
    HfType {
        model_type: "rwkv7",
        architecture: "RWKV7ForCausalLM",
        fixed: FIXED,
        common: COMMON,
        fields: &[
            derived("ffn", &["intermediate_size", "hidden_ratio"], |file| {
                let hidden = size(file, "hidden_size", 2048)?;
                let made = (hidden as f64 * number(file, "hidden_ratio", 4.0)) as u64;
                let made = made.next_multiple_of(32);
                Ok(Some(size(file, "intermediate_size", made)?.into()))
            }),
            derived(
                "rwkv",
                &[
                    "head_dim",
                    "num_heads",
                    "value_dim",
                    "decay_low_rank_dim",
                    "a_low_rank_dim",
                    "v_low_rank_dim",
                    "gate_low_rank_dim",
                ],
                seven,
            ),
        ],
    },
];
