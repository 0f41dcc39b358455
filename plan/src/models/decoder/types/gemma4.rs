//! Gemma 4.
//!
//! Layers with full attention have wider heads than the others, and may use keys as values. Layers
//! of E2B and E4B have separate token embeddings, and the last layers use the keys of earlier ones.

use super::gemma3n::LAYER_EMBEDDING;
use super::read::{FULL, Listed, SLIDING};
use super::windowed::{GELU_TANH, LARGE_THETA, LOCAL_THETA, ROOT_OF_WIDTH};
use super::{HEAD_DIM_256, TIED_BY_DEFAULT, derived, number};
use crate::models::hf::{
    FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, NORM_EPS};
use crate::models::windows::{layers, repeated};

/// Returns what the layers see: as listed, or all positions in every sixth; the last one always
/// does.
fn kinds(file: Fields<'_>) -> Vec<&'static str> {
    let (listed, n) = (Listed::of(file, &["layer_types"]), layers(file));
    let kind = |layer: u64| {
        let full = listed.is(layer, FULL, (layer + 1).is_multiple_of(6));
        if full || layer + 1 == n {
            FULL
        } else {
            SLIDING
        }
    };
    (0..n).map(kind).collect()
}

fn integer(file: Fields<'_>, name: &str) -> Option<u64> {
    file(name)?.as_u64()
}

/// Returns the value of a field in `per_layer_config`, of a layer that sees all positions.
fn of_full_layer(file: Fields<'_>, name: &str) -> Option<u64> {
    let each = file("per_layer_config")?;
    let at = kinds(file).iter().position(|kind| *kind == FULL)?;
    // Published files write the numbers of layers with leading zeros.
    let is_it = |layer: &str| layer.parse() == Ok(at);
    let fields = each.as_object()?.iter().find(|(layer, _)| is_it(layer))?.1;
    fields.get(name)?.as_u64()
}

const FIXED: &[(&str, Given)] = &[
    ("norm_position", Given::Str("both")),
    ("qk_norm", Given::Bool(true)),
    ("value_norm", Given::Bool(true)),
    ("attention_multiplier", Given::Float(1.0)),
    ("stream_scale", Given::Bool(true)),
];

/// The window of classes with this default.
const fn window(default: u64) -> Field {
    field(
        &["sliding_window"],
        Meaning::Default("sliding_window", Given::Int(default)),
    )
}

const COMMON: &[Field] = &[
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
    field(
        &["num_key_value_heads"],
        Meaning::Default("kv_heads", Given::Int(4)),
    ),
    field(
        &["final_logit_softcapping"],
        Meaning::Optional("logits_softcap"),
    ),
    field(&["use_bidirectional_attention"], Meaning::Word(&["vision"])),
    derived("layer_types", &["layer_types"], |file| {
        Ok(Some(repeated(&kinds(file))))
    }),
    number(
        &["global_head_dim"],
        "full_head_dim",
        |file| {
            // The class ignores `global_head_dim` if layers have fields of their own.
            let size = match file("per_layer_config") {
                Some(_) => of_full_layer(file, "head_dim")
                    .or_else(|| integer(file, "head_dim"))
                    .unwrap_or(256),
                None => integer(file, "global_head_dim").unwrap_or(512),
            };
            Ok(Some(size.into()))
        },
        |model| Some(model["full_head_dim"].clone()),
    ),
    field(
        &["attention_k_eq_v"],
        Meaning::Default("keys_as_values", Given::Bool(false)),
    ),
    derived(
        "layer_kv_heads",
        &["num_global_key_value_heads", "per_layer_config"],
        |file| {
            let asked = file("attention_k_eq_v") == Some(true.into());
            let given = integer(file, "num_global_key_value_heads").filter(|_| asked);
            let Some(full) = of_full_layer(file, "num_key_value_heads").or(given) else {
                return Ok(None);
            };
            let sliding = integer(file, "num_key_value_heads").unwrap_or(4);
            let of = |kind: &&str| if *kind == FULL { full } else { sliding };
            Ok(Some(kinds(file).iter().map(of).collect()))
        },
    ),
    field(
        &["num_kv_shared_layers"],
        Meaning::Default("shared_kv_layers", Given::Int(0)),
    ),
    derived("layer_ffn", &["use_double_wide_mlp"], |file| {
        let wide = file("use_double_wide_mlp") == Some(true.into());
        let shared = integer(file, "num_kv_shared_layers").unwrap_or(0);
        let (Some(ffn), n) = (integer(file, "intermediate_size"), layers(file)) else {
            return Ok(None);
        };
        let of = |layer: u64| ffn << u64::from(layer + shared >= n);
        Ok((wide && shared > 0).then(|| (0..n).map(of).collect()))
    }),
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "gemma4_text",
        architecture: "Gemma4ForCausalLM",
        fixed: FIXED,
        common: COMMON,
        fields: &[LAYER_EMBEDDING[0], LAYER_EMBEDDING[1], window(512)],
    },
    HfType {
        model_type: "gemma4_unified_text",
        architecture: "Gemma4UnifiedForCausalLM",
        fixed: FIXED,
        common: COMMON,
        fields: &[window(1024)],
    },
];

pub(super) const EXPERTS: &[HfType] = &[HfType {
    model_type: "gemma4_moe_text",
    architecture: "Gemma4ForCausalLM",
    fixed: &[
        FIXED[0],
        FIXED[1],
        FIXED[2],
        FIXED[3],
        FIXED[4],
        ("dense_and_experts", Given::Bool(true)),
        ("normalize_top_k", Given::Bool(true)),
    ],
    common: COMMON,
    fields: &[
        LAYER_EMBEDDING[0],
        LAYER_EMBEDDING[1],
        window(512),
        field(&["num_experts"], Meaning::Required("experts")),
        field(&["top_k_experts"], Meaning::Required("top_k")),
        field(&["moe_intermediate_size"], Meaning::Required("expert_ffn")),
        field(&["enable_moe_block"], Meaning::On),
    ],
}];
