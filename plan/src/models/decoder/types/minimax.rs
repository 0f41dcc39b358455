//! MiniMax-M3: in most layers, an indexer chooses the blocks of keys that a query attends to.

use super::experts::TOP_K;
use super::sparse::mlp_marks;
use super::{derived, number};
use crate::models::hf::{
    Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, TIED,
    VOCAB, field,
};
use crate::models::llama::{HEAD_DIM_128, NORM_EPS};
use crate::models::windows::layers;
use serde_json::Value;

/// Returns a number that files give by one of two names.
fn either(file: Fields<'_>, own: &str, of_block: &str, default: u64) -> u64 {
    let nested = format!("sparse_attention_config.{of_block}");
    let found = file(own).or_else(|| file(&nested));
    found.and_then(|n| n.as_u64()).unwrap_or(default)
}

/// Returns which layers have an indexer: listed, or marked with 1.
fn indexers(file: Fields<'_>) -> Vec<&'static str> {
    let words = file("layer_types");
    let marks = file("sparse_attention_config.sparse_attention_freq");
    let of = |layer: u64| {
        let at = |list: &Option<Value>| list.as_ref()?.get(layer as usize).cloned();
        let chooses = match (at(&words), at(&marks)) {
            (Some(word), _) => word == "minimax_m3_sparse",
            (None, mark) => mark.is_some_and(|mark| mark != 0),
        };
        if chooses { "full" } else { "none" }
    };
    (0..layers(file)).map(of).collect()
}

const FIELDS: &[Field] = &[
    VOCAB,
    HIDDEN,
    LAYERS,
    HEADS,
    HEAD_DIM_128,
    POSITIONS,
    NORM_EPS,
    TOP_K,
    TIED,
    Field {
        meaning: Meaning::Default("rope_theta", Given::Float(5e6)),
        ..ROPE_THETA
    },
    field(
        &["num_key_value_heads"],
        Meaning::Default("kv_heads", Given::Int(4)),
    ),
    field(
        &["dense_intermediate_size"],
        Meaning::Default("ffn", Given::Int(12288)),
    ),
    field(&["intermediate_size"], Meaning::Required("expert_ffn")),
    field(
        &["shared_intermediate_size"],
        Meaning::Default("shared_expert_ffn", Given::Int(3072)),
    ),
    field(&["num_local_experts"], Meaning::Required("experts")),
    field(
        &["routed_scaling_factor"],
        Meaning::Default("route_scale", Given::Float(2.0)),
    ),
    field(&["scoring_func"], Meaning::Word(&["sigmoid"])),
    field(&["use_routing_bias"], Meaning::On),
    field(&["use_gemma_norm"], Meaning::On),
    field(&["use_qk_norm"], Meaning::On),
    field(&["qk_norm_type"], Meaning::Word(&["per_head"])),
    field(&["attention_output_gate"], Meaning::Off),
    field(&["attention_bias"], Meaning::Off),
    number(
        &["rotary_dim"],
        "partial_rotary_factor",
        |file| {
            let number = |name: &str| file(name).and_then(|n| n.as_f64());
            let whole = number("head_dim").unwrap_or(128.0);
            Ok(Some((number("rotary_dim").unwrap_or(64.0) / whole).into()))
        },
        |_| None,
    ),
    // A clamp of gate and factor, and a shift of the factor, are not counted.
    derived(
        "activation",
        &[
            "hidden_act",
            "swiglu_alpha",
            "swiglu_limit",
            "partial_rotary_factor",
        ],
        |_| Ok(Some("silu".into())),
    ),
    mlp_marks::<0>(),
    derived(
        "indexer_types",
        &["layer_types", "sparse_attention_config"],
        |file| Ok(Some(indexers(file).into())),
    ),
    derived(
        "index_n_heads",
        &["index_n_heads", "n_shared_experts", "moe_intermediate_size"],
        |file| {
            let heads = either(file, "index_n_heads", "sparse_num_index_heads", 4);
            let used = indexers(file).contains(&"full");
            Ok(used.then(|| heads.into()))
        },
    ),
    derived("index_head_dim", &["index_head_dim"], |file| {
        let width = either(file, "index_head_dim", "sparse_index_dim", 128);
        Ok(Some(width.into()))
    }),
    derived(
        "index_topk",
        &[
            "index_topk_blocks",
            "index_block_size",
            "index_local_blocks",
            "num_mtp_modules",
            "num_nextn_predict_layers",
        ],
        |file| {
            let blocks = either(file, "index_topk_blocks", "sparse_topk_blocks", 16);
            let each = either(file, "index_block_size", "sparse_block_size", 128);
            Ok(Some((blocks * each).into()))
        },
    ),
];

/// Returns the row of a name of the type.
const fn m3(model_type: &'static str, architecture: &'static str) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed: &[
            ("norm", Given::Str("rms_norm_unit_offset")),
            ("qk_norm", Given::Bool(true)),
            ("router", Given::Str("sigmoid")),
            ("normalize_top_k", Given::Bool(true)),
        ],
        common: FIELDS,
        fields: &[],
    }
}

pub(super) const TYPES: &[HfType] = &[
    m3("minimax_m3", "MiniMaxM3ForCausalLM"),
    m3("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
];
