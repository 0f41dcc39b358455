//! Mixtures of experts that differ more from Mixtral than in their sizes.

use super::experts::{
    AUX_LOSS, DEEPSEEK_SIZES, EXPERT_FFN, FIRST_DENSE, GROUPS, HAS_AUX_LOSS, KEPT_GROUPS,
    NORMALIZED, ROUTE_SCALE, ROUTED, SIGMOID_LATENT, TOP_K, concat,
};
use super::read::FULL;
use super::routed::mlp_types;
use super::{HIDDEN_ACT, RMS_EPS_5, derived, number};
use crate::models::activation::ALPHA;
use crate::models::hf::{
    BiasPart, Computed, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning,
    POSITIONS, ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, KV_HEADS, NORM_EPS};
use crate::models::windows::{CHUNKED_LAYERS, CHUNKED_MARKS, WINDOW, every, layers, repeated};
use serde_json::Value;

/// Returns what layers have after attention: as listed, marked with 1 for experts, or experts after
/// the first layers, of which there are `DENSE`.
pub(super) const fn mlp_marks<const DENSE: u64>() -> Field {
    derived(
        "mlp_layer_types",
        &["mlp_layer_types", "moe_layer_freq", "first_k_dense_replace"],
        |file| {
            let words = file("mlp_layer_types");
            let marks = file("moe_layer_freq");
            let of = |layer: u64| {
                let at = |list: &Option<Value>| list.as_ref()?.get(layer as usize).cloned();
                let dense = match (at(&words), at(&marks)) {
                    (Some(word), _) => word == "dense",
                    (None, Some(mark)) => mark == 0,
                    (None, None) => layer < DENSE,
                };
                if dense { "dense" } else { "sparse" }
            };
            let all: Vec<&str> = (0..layers(file)).map(of).collect();
            Ok(Some(repeated(&all)))
        },
    )
}

/// Layers of Llama 4 with experts: all of them unless the file says otherwise.
const SPARSE_LAYERS: Field = field(
    &["moe_layers"],
    Meaning::Computed(
        "mlp_layer_types",
        Computed {
            also: &["interleave_moe_layer_step"],
            read: |file| {
                let listed = file("moe_layers");
                let listed = listed.as_ref().and_then(Value::as_array);
                let step = file("interleave_moe_layer_step").and_then(|n| n.as_u64());
                let step = step.unwrap_or(1).max(1);
                let is_sparse = |layer: u64| match listed {
                    Some(list) => list.contains(&layer.into()),
                    None => (layer + 1).is_multiple_of(step),
                };
                let word = |layer| if is_sparse(layer) { "sparse" } else { "dense" };
                let all: Vec<&str> = (0..layers(file)).map(word).collect();
                let dense = all.contains(&"dense");
                Ok(dense.then(|| repeated(&all)))
            },
            write: |model| {
                let types = model["mlp_layer_types"].as_array()?;
                let layers = model["layers"].as_u64()?;
                let is_sparse = |layer: &u64| {
                    let n = types.len() as u64;
                    n == 0 || types[(layer % n) as usize] == "sparse"
                };
                Some((0..layers).filter(is_sparse).collect::<Vec<_>>().into())
            },
        },
    ),
);

/// Norms of Llama 4's rotated queries and keys.
const ROTATED_NORMS: Field = field(
    &["use_qk_norm"],
    Meaning::Computed(
        "qk_norm",
        Computed {
            also: &[],
            read: |file| {
                let off = file("use_qk_norm") == Some(false.into());
                Ok((!off).then(|| AFTER_ROPE_NO_WEIGHT.into()))
            },
            write: |model| Some((model["qk_norm"] == AFTER_ROPE_NO_WEIGHT).into()),
        },
    ),
);
const AFTER_ROPE_NO_WEIGHT: &str = "after_rope_no_weight";

/// Whether Llama 4 scales queries by their positions. Published files have a number, which counts
/// as true.
const HAS_TEMPERATURE: Field = field(
    &["attn_temperature_tuning"],
    Meaning::Computed(
        "attention_temperature",
        Computed {
            also: &["attn_scale"],
            read: temperature,
            write: |model| Some((model["attention_temperature"].as_f64() > Some(0.0)).into()),
        },
    ),
);
const TEMPERATURE: Field = field(
    &["attn_scale"],
    Meaning::Computed(
        "attention_temperature",
        Computed {
            also: &["attn_temperature_tuning"],
            read: temperature,
            write: |model| {
                let scale = &model["attention_temperature"];
                (scale.as_f64() > Some(0.0)).then(|| scale.clone())
            },
        },
    ),
);

/// Returns how far Llama 4 scales queries, 0.1 unless the file says otherwise.
fn temperature(file: Fields<'_>) -> Result<Option<Value>, String> {
    let off = matches!(file("attn_temperature_tuning"), Some(flag) if flag == false || flag == 0);
    let scale = file("attn_scale").and_then(|scale| scale.as_f64());
    Ok(Some(if off { 0.0 } else { scale.unwrap_or(0.1) }.into()))
}

pub(super) const TYPES: &[HfType] = &[
    // Experts have the width of `intermediate_size`, dense layers that of `intermediate_size_mlp`.
    HfType {
        model_type: "llama4_text",
        architecture: "Llama4ForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("normalize_top_k", Given::Bool(false)),
            ("score_before_experts", Given::Bool(true)),
            ("position_embedding", Given::Str("rotary_interleaved")),
        ],
        common: &[
            VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM, HIDDEN_ACT, POSITIONS, NORM_EPS, ROPE_THETA,
            TIED,
        ],
        fields: &[
            field(
                &["num_key_value_heads"],
                Meaning::Default("kv_heads", Given::Int(8)),
            ),
            field(
                &["intermediate_size_mlp"],
                Meaning::Default("ffn", Given::Int(16384)),
            ),
            field(&["intermediate_size"], Meaning::Required("expert_ffn")),
            number(
                &["intermediate_size"],
                "shared_expert_ffn",
                |file| Ok(file("intermediate_size")),
                |_| None,
            ),
            field(
                &["num_local_experts"],
                Meaning::Default("experts", Given::Int(16)),
            ),
            field(
                &["num_experts_per_tok"],
                Meaning::Default("top_k", Given::Int(1)),
            ),
            SPARSE_LAYERS,
            // The class has these fields, and neither a loss of routers nor noise.
            derived(
                "aux_loss",
                &[
                    "output_router_logits",
                    "router_aux_loss_coef",
                    "router_jitter_noise",
                ],
                |_| Ok(None),
            ),
            ATTENTION_BIAS,
            ROTATED_NORMS,
            CHUNKED_MARKS,
            CHUNKED_LAYERS,
            field(
                &["attention_chunk_size"],
                Meaning::Nullable("attention_chunk", Given::Int(8192)),
            ),
            HAS_TEMPERATURE,
            TEMPERATURE,
            field(
                &["floor_scale"],
                Meaning::Default("attention_temperature_floor", Given::Int(8192)),
            ),
        ],
    },
    HfType {
        model_type: "deepseek_v32",
        architecture: "DeepseekV32ForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK_SIZES,
        fields: &concat::<{ SIGMOID_LATENT.len() + 4 }>(
            SIGMOID_LATENT,
            &[
                mlp_types::<3>(),
                field(
                    &["index_n_heads"],
                    Meaning::Default("index_n_heads", Given::Int(64)),
                ),
                field(&["index_head_dim"], Meaning::Optional("index_head_dim")),
                field(&["index_topk"], Meaning::Optional("index_topk")),
            ],
        ),
    },
    HfType {
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        fixed: &[
            ("router", Given::Str("topk_softmax")),
            ("expert_bias", Given::Bool(true)),
            ("glu", Given::Str("gpt_oss")),
            ("attention_sinks", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            HIDDEN_ACT,
            POSITIONS,
            ROPE_THETA,
            HAS_AUX_LOSS,
            AUX_LOSS,
            TIED,
        ],
        fields: &[
            field(
                &["num_key_value_heads"],
                Meaning::Default("kv_heads", Given::Int(8)),
            ),
            field(&["head_dim"], Meaning::Default("head_dim", Given::Int(64))),
            field(
                &["rms_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-5)),
            ),
            field(
                &["attention_bias"],
                Meaning::HasBias(BiasPart::Attention, true),
            ),
            field(
                &["sliding_window"],
                Meaning::Nullable("sliding_window", Given::Int(128)),
            ),
            every::<2>(),
            Field {
                names: &["num_local_experts", "num_experts"],
                meaning: Meaning::Default("experts", Given::Int(128)),
            },
            Field {
                names: &["num_experts_per_tok", "experts_per_token"],
                meaning: Meaning::Default("top_k", Given::Int(4)),
            },
            field(
                &["swiglu_limit"],
                Meaning::Default("glu_limit", Given::Float(7.0)),
            ),
            derived(
                "glu",
                &["swiglu_alpha", "initial_context_length"],
                |file| match file("swiglu_alpha").and_then(|n| n.as_f64()) {
                    None | Some(ALPHA) => Ok(Some("gpt_oss".into())),
                    Some(other) => Err(format!(
                        "`swiglu_alpha` must be {ALPHA}, not {other}: the key `glu` knows no other"
                    )),
                },
            ),
        ],
    },
    // Layers with a window have twice the keys, and sinks.
    HfType {
        model_type: "mimo_v2_flash",
        architecture: "MiMoV2FlashForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("attention_sinks", Given::Str("sliding")),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HIDDEN_ACT, POSITIONS, TIED, ROUTED,
            TOP_K, EXPERT_FFN,
        ],
        fields: &[
            Field {
                names: &["rms_norm_eps", "layernorm_epsilon"],
                ..RMS_EPS_5
            },
            field(&["head_dim"], Meaning::Default("head_dim", Given::Int(192))),
            field(
                &["v_head_dim"],
                Meaning::Default("value_head_dim", Given::Int(128)),
            ),
            Field {
                names: &["rope_theta", "rope_parameters.full_attention.rope_theta"],
                meaning: Meaning::Default("rope_theta", Given::Float(5e6)),
            },
            Field {
                names: &[
                    "swa_rope_theta",
                    "rope_parameters.sliding_attention.rope_theta",
                ],
                meaning: Meaning::Default("rope_local_theta", Given::Float(1e4)),
            },
            Field {
                names: &[
                    "partial_rotary_factor",
                    "rope_parameters.full_attention.partial_rotary_factor",
                ],
                meaning: Meaning::Default("partial_rotary_factor", Given::Float(0.334)),
            },
            field(&["attention_bias"], Meaning::HasBias(BiasPart::Qkv, false)),
            field(&["scoring_func"], Meaning::Word(&["sigmoid"])),
            field(&["n_shared_experts"], Meaning::Off),
            NORMALIZED,
            ROUTE_SCALE,
            GROUPS,
            KEPT_GROUPS,
            // Queries see `sliding_window_size` earlier positions, and their own.
            derived(
                "sliding_window",
                &[
                    "sliding_window",
                    "sliding_window_size",
                    "attention_chunk_size",
                ],
                |file| {
                    let number = |name: &str| file(name).and_then(|n| n.as_u64());
                    let before = number("sliding_window_size").map(|n| n + 1);
                    let window = before.or_else(|| number("sliding_window"));
                    Ok(Some(window.unwrap_or(129).into()))
                },
            ),
            derived(
                "layer_types",
                &["layer_types", "hybrid_layer_pattern"],
                |file| Ok(Some(repeated(&mimo_layers(file)))),
            ),
            derived(
                "layer_kv_heads",
                &[
                    "swa_num_key_value_heads",
                    "swa_num_attention_heads",
                    "swa_head_dim",
                    "swa_v_head_dim",
                ],
                |file| {
                    same_with_window(file)?;
                    let number = |name: &str| file(name).and_then(|n| n.as_u64());
                    let full = number("num_key_value_heads").unwrap_or(4);
                    let sliding = number("swa_num_key_value_heads").unwrap_or(2 * full);
                    let of = |word: &&str| if *word == FULL { full } else { sliding };
                    Ok(Some(mimo_layers(file).iter().map(of).collect()))
                },
            ),
            mlp_marks::<1>(),
            derived(
                "activation",
                &["topk_method", "attention_value_scale"],
                |_| Ok(None),
            ),
        ],
    },
    HfType {
        model_type: "step3p7",
        architecture: "Step3p7FlashForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("qk_norm", Given::Bool(true)),
            ("attention_gate", Given::Str("head")),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            HIDDEN_ACT,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            TIED,
            TOP_K,
            EXPERT_FFN,
            FIRST_DENSE,
            ATTENTION_BIAS,
            WINDOW,
        ],
        fields: &[
            every::<4>(),
            field(&["num_experts"], Meaning::Required("experts")),
            number(
                &["share_expert_dim"],
                "shared_expert_ffn",
                |file| {
                    let number = |name: &str| file(name).and_then(|n| n.as_u64());
                    let count = number("n_shared_experts").unwrap_or(1);
                    Ok(number("share_expert_dim").map(|each| (count * each).into()))
                },
                |_| None,
            ),
            field(&["scoring_func"], Meaning::Word(&["sigmoid"])),
            field(
                &["moe_router_scaling_factor"],
                Meaning::Default("route_scale", Given::Float(1.0)),
            ),
        ],
    },
];

/// Returns what the layers of a MiMo-V2 see: listed, marked with 1 for a window, or all positions
/// in the first one and every sixth.
fn mimo_layers(file: Fields<'_>) -> Vec<&'static str> {
    let (words, marks) = (file("layer_types"), file("hybrid_layer_pattern"));
    let of = |layer: u64| {
        let at = |list: &Option<Value>| list.as_ref()?.get(layer as usize).cloned();
        let full = match (at(&words), at(&marks)) {
            (Some(word), _) => word == FULL,
            (None, Some(mark)) => mark == 0,
            (None, None) => layer == 0 || (layer + 1).is_multiple_of(6),
        };
        if full { FULL } else { "sliding_attention" }
    };
    (0..layers(file)).map(of).collect()
}

/// Refuses layers with a window whose heads differ from those of the others.
fn same_with_window(file: Fields<'_>) -> Result<(), String> {
    let pairs = [
        ("swa_num_attention_heads", "num_attention_heads"),
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", "v_head_dim"),
    ];
    for (own, all) in pairs {
        let (given, other) = (file(own), file(all));
        if given.is_some() && other.is_some() && given != other {
            return Err(format!("`{own}` must be `{all}`"));
        }
    }
    Ok(())
}
