//! Mixtures of experts whose attention is that of a dense type.

use super::experts::{
    ATTENTION_MULTIPLIER, AUX_LOSS, DEEPSEEK_SIZES, EMBEDDING_MULTIPLIER, EXPERT_FFN, EXPERTS,
    GROUPS, HAS_AUX_LOSS, KEPT_GROUPS, LATENT, LOGITS_SCALING, NORMALIZE, NORMALIZED,
    RESIDUAL_MULTIPLIER, ROUTE_SCALE, ROUTED, SHAPE, SIGMOID_LATENT, TOP_K, concat, shared,
};
use super::llama_like::MINICPM_SCALES;
use super::read::{FULL, Listed, NO_ROPE, SLIDING, by_layer, integer};
use super::windowed::{LARGE_THETA, LOCAL_THETA};
use super::{HIDDEN_ACT, PARTIAL, PARTIAL_HALF, RMS_EPS_5, TIED_BY_DEFAULT, derived, number};
use crate::models::hf::{
    BiasPart, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS,
    ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, HEAD_DIM_128, KV_HEADS, NORM_EPS};
use crate::models::windows::{ALL_FULL, WINDOW, every_without_rope, layers, repeated};
use serde_json::Value;

/// Returns what a layer has after attention, layer by layer: as the file lists it, or experts after
/// the first layers, of which there are `DENSE` if the file does not say how many.
pub(super) const fn mlp_types<const DENSE: u64>() -> Field {
    derived(
        "mlp_layer_types",
        &[
            "mlp_layer_types",
            "first_k_dense_replace",
            "num_dense_layers",
        ],
        |file| {
            let listed = Listed::of(file, &["mlp_layer_types"]);
            let dense = ["first_k_dense_replace", "num_dense_layers"];
            let dense = dense.iter().find_map(|name| file(name)?.as_u64());
            let dense = dense.unwrap_or(DENSE);
            let kind = |layer: u64| match listed.word(layer) {
                Some("dense") => Ok("dense"),
                Some("sparse") => Ok("sparse"),
                Some(other) => Err(format!(
                    "layer {layer} has a feed-forward layer of type \"{other}\"; known are dense and sparse"
                )),
                None if layer < dense => Ok("dense"),
                None => Ok("sparse"),
            };
            let all: Vec<&str> = (0..layers(file)).map(kind).collect::<Result<_, _>>()?;
            Ok(Some(repeated(&all)))
        },
    )
}

/// Shared experts are one of their total width.
const SHARED: Field = derived(
    "shared_expert_ffn",
    &["num_shared_experts", "n_shared_experts"],
    |file| shared(file, &["num_shared_experts", "n_shared_experts"], 1),
);

/// Returns a number that a file gives once, or as a list with one number per layer.
fn of_all_layers(file: Fields<'_>, name: &str, default: u64) -> Result<u64, String> {
    let Some(given) = file(name) else {
        return Ok(default);
    };
    let all: Vec<Option<u64>> = match given {
        Value::Array(list) => list.iter().map(Value::as_u64).collect(),
        one => vec![one.as_u64()],
    };
    match (all.first(), all.iter().all(|n| *n == all[0])) {
        (Some(Some(n)), true) => Ok(*n),
        _ => Err(format!("`{name}` must be a number that all layers have")),
    }
}

pub(super) const TYPES: &[HfType] = &[
    // A `minicpm` with experts.
    HfType {
        model_type: "minicpm_moe",
        architecture: "MiniCPMForCausalLM",
        fixed: &[("normalize_top_k", Given::Bool(true))],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HIDDEN_ACT,
            POSITIONS,
            ROPE_THETA,
            TIED_BY_DEFAULT,
        ],
        fields: &[
            NORM_EPS,
            ATTENTION_BIAS,
            MINICPM_SCALES[0],
            MINICPM_SCALES[1],
            MINICPM_SCALES[2],
            EXPERTS,
            TOP_K,
        ],
    },
    HfType {
        model_type: "granitemoeshared",
        architecture: "GraniteMoeSharedForCausalLM",
        fixed: &[("router", Given::Str("topk_softmax"))],
        common: SHAPE,
        fields: &[
            KV_HEADS,
            ATTENTION_BIAS,
            field(
                &["num_local_experts"],
                Meaning::Default("experts", Given::Int(8)),
            ),
            field(
                &["num_experts_per_tok"],
                Meaning::Default("top_k", Given::Int(2)),
            ),
            field(
                &["shared_intermediate_size"],
                Meaning::Optional("shared_expert_ffn"),
            ),
            EMBEDDING_MULTIPLIER,
            ATTENTION_MULTIPLIER,
            RESIDUAL_MULTIPLIER,
            LOGITS_SCALING,
        ],
    },
    HfType {
        model_type: "hunyuan_v1_moe",
        architecture: "HunYuanMoEV1ForCausalLM",
        fixed: &[
            ("qk_norm", Given::Str("after_rope")),
            ("normalize_top_k", Given::Bool(true)),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN_ACT, POSITIONS,
            ROPE_THETA, TIED,
        ],
        fields: &[
            RMS_EPS_5,
            ATTENTION_BIAS,
            number(
                &["num_experts"],
                "experts",
                |file| Ok(Some(of_all_layers(file, "num_experts", 1)?.into())),
                |model| Some(model["experts"].clone()),
            ),
            number(
                &["moe_topk"],
                "top_k",
                |file| Ok(Some(of_all_layers(file, "moe_topk", 1)?.into())),
                |model| Some(model["top_k"].clone()),
            ),
            // The shared expert and the routed ones have the same width.
            derived("shared_expert_ffn", &[], |file| {
                Ok(file("intermediate_size"))
            }),
        ],
    },
    HfType {
        model_type: "flex_olmo",
        architecture: "FlexOlmoForCausalLM",
        fixed: &[
            ("norm_position", Given::Str("after")),
            ("qk_norm", Given::Str("full")),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: SHAPE,
        fields: &[
            KV_HEADS,
            ATTENTION_BIAS,
            field(&["pad_token_id"], Meaning::Padding(100_277)),
            field(&["num_experts"], Meaning::Default("experts", Given::Int(7))),
            field(
                &["num_experts_per_tok"],
                Meaning::Default("top_k", Given::Int(5)),
            ),
            NORMALIZE,
        ],
    },
    HfType {
        model_type: "mellum",
        architecture: "MellumForCausalLM",
        fixed: &[
            ("qk_norm", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM_128,
            HIDDEN_ACT,
            POSITIONS,
            NORM_EPS,
            HAS_AUX_LOSS,
            AUX_LOSS,
            TIED,
        ],
        fields: &[
            LARGE_THETA,
            LOCAL_THETA,
            ATTENTION_BIAS,
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            NORMALIZED,
            mlp_types::<0>(),
            WINDOW,
            ALL_FULL,
            derived(
                "z_loss",
                &[
                    "mtp_layer_types",
                    "mtp_mlp_layer_types",
                    "num_nextn_predict_layers",
                ],
                |_| Ok(None),
            ),
        ],
    },
    HfType {
        model_type: "exaone_moe",
        architecture: "ExaoneMoeForCausalLM",
        fixed: &[
            ("qk_norm", Given::Bool(true)),
            ("router", Given::Str("sigmoid")),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN_ACT, POSITIONS,
            ROPE_THETA, TIED,
        ],
        fields: &[
            RMS_EPS_5,
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            SHARED,
            NORMALIZED,
            ROUTE_SCALE,
            GROUPS,
            KEPT_GROUPS,
            mlp_types::<1>(),
            WINDOW,
            every_without_rope::<4>(),
        ],
    },
    HfType {
        model_type: "hy_v3",
        architecture: "HYV3ForCausalLM",
        fixed: &[
            ("qk_norm", Given::Bool(true)),
            ("router", Given::Str("sigmoid")),
            ("normalize_top_k", Given::Bool(true)),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM_128,
            HIDDEN_ACT,
            POSITIONS,
            ROPE_THETA,
            TIED,
        ],
        fields: &[
            RMS_EPS_5,
            ATTENTION_BIAS,
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            derived(
                "shared_expert_ffn",
                &["num_shared_experts"],
                |file| match file("num_shared_experts") {
                    Some(none) if none == 0 => {
                        Err("`num_shared_experts` must be at least 1".to_owned())
                    }
                    _ => shared(file, &["num_shared_experts"], 1),
                },
            ),
            field(
                &["router_scaling_factor"],
                Meaning::Default("route_scale", Given::Float(2.826)),
            ),
            field(&["mlp_bias"], Meaning::Off),
            mlp_types::<1>(),
        ],
    },
    // Without dense layers, whose width a file need not give.
    HfType {
        model_type: "solar_open",
        architecture: "SolarOpenForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: &[
            VOCAB,
            HIDDEN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM_128,
            HIDDEN_ACT,
            POSITIONS,
            ROPE_THETA,
            TIED,
        ],
        fields: &[
            derived("ffn", &["intermediate_size"], |file| {
                Ok(file("moe_intermediate_size"))
            }),
            RMS_EPS_5,
            PARTIAL,
            field(&["attention_bias"], Meaning::HasBias(BiasPart::Qkv, false)),
            field(&["use_qk_norm"], Meaning::Off),
            field(&["first_k_dense_replace"], Meaning::Off),
            ROUTED,
            TOP_K,
            EXPERT_FFN,
            SHARED,
            NORMALIZED,
            ROUTE_SCALE,
            GROUPS,
            KEPT_GROUPS,
        ],
    },
    HfType {
        model_type: "afmoe",
        architecture: "AfmoeForCausalLM",
        fixed: &[
            ("qk_norm", Given::Bool(true)),
            ("norm_position", Given::Str("both")),
            ("attention_gate", Given::Str("separate")),
            ("router", Given::Str("sigmoid")),
            ("router_bias", Given::Bool(true)),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM_128,
            HIDDEN_ACT,
            POSITIONS,
            ROPE_THETA,
            TIED,
        ],
        fields: &[
            RMS_EPS_5,
            field(&["attention_bias"], Meaning::Off),
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            SHARED,
            field(&["score_func"], Meaning::Word(&["sigmoid"])),
            field(
                &["route_norm"],
                Meaning::Default("normalize_top_k", Given::Bool(true)),
            ),
            field(
                &["route_scale"],
                Meaning::Default("route_scale", Given::Float(1.0)),
            ),
            mlp_types::<1>(),
            derived("embedding_multiplier", &["mup_enabled"], |file| {
                let on = file("mup_enabled") == Some(true.into());
                let width = file("hidden_size").and_then(|h| h.as_f64());
                Ok(width.filter(|_| on).map(|w| w.sqrt().into()))
            }),
            field(
                &["sliding_window"],
                Meaning::Nullable("sliding_window", Given::Int(1024)),
            ),
            derived(
                "layer_types",
                &["layer_types", "global_attn_every_n_layers"],
                |file| {
                    let n = integer(file, "global_attn_every_n_layers", 4).max(1);
                    let listed = Listed::of(file, &["layer_types"]);
                    by_layer(file, |layer| {
                        match listed.is(layer, FULL, (layer + 1).is_multiple_of(n)) {
                            true => NO_ROPE,
                            false => SLIDING,
                        }
                    })
                },
            ),
        ],
    },
    // The language model of GLM-4.5V.
    HfType {
        model_type: "glm4v_moe_text",
        architecture: "Glm4vMoeForConditionalGeneration",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK_SIZES,
        fields: &[
            KV_HEADS,
            HEAD_DIM,
            PARTIAL_HALF,
            field(&["attention_bias"], Meaning::HasBias(BiasPart::Qkv, true)),
            field(&["use_qk_norm"], Meaning::Off),
            NORMALIZED,
            ROUTE_SCALE,
            GROUPS,
            KEPT_GROUPS,
            mlp_types::<1>(),
        ],
    },
    HfType {
        model_type: "glm4_moe_lite",
        architecture: "Glm4MoeLiteForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK_SIZES,
        fields: &concat::<{ SIGMOID_LATENT.len() + 1 }>(SIGMOID_LATENT, &[mlp_types::<1>()]),
    },
    HfType {
        model_type: "axk1",
        architecture: "AXK1ForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("expert_norm", Given::Bool(true)),
        ],
        common: DEEPSEEK_SIZES,
        fields: &concat::<{ SIGMOID_LATENT.len() + 1 }>(SIGMOID_LATENT, &[mlp_types::<1>()]),
    },
    HfType {
        model_type: "mistral4",
        architecture: "Mistral4ForCausalLM",
        fixed: &[],
        common: DEEPSEEK_SIZES,
        fields: &concat::<{ LATENT.len() + 5 }>(
            LATENT,
            &[
                NORMALIZED,
                ROUTE_SCALE,
                GROUPS,
                KEPT_GROUPS,
                mlp_types::<0>(),
            ],
        ),
    },
    HfType {
        model_type: "sarvam_moe",
        architecture: "SarvamMoEForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, HIDDEN_ACT, POSITIONS, ROPE_THETA, NORM_EPS, TIED,
            TOP_K, EXPERT_FFN,
        ],
        fields: &[
            field(
                &["num_key_value_heads"],
                Meaning::Default("kv_heads", Given::Int(4)),
            ),
            field(&["head_dim"], Meaning::Default("head_dim", Given::Int(64))),
            PARTIAL,
            Field {
                names: &["n_routed_experts", "num_experts", "num_local_experts"],
                ..EXPERTS
            },
            derived(
                "shared_expert_ffn",
                &["n_shared_experts", "num_shared_experts"],
                |file| shared(file, &["n_shared_experts", "num_shared_experts"], 1),
            ),
            Field {
                names: &["attention_bias", "use_qkv_bias"],
                meaning: Meaning::HasBias(BiasPart::Qkv, false),
            },
            field(
                &["use_qk_norm"],
                Meaning::Default("qk_norm", Given::Bool(true)),
            ),
            field(
                &["first_k_dense_replace"],
                Meaning::Default("dense_layers", Given::Int(1)),
            ),
            field(
                &["routed_scaling_factor"],
                Meaning::Default("route_scale", Given::Float(2.5)),
            ),
            NORMALIZED,
            GROUPS,
            KEPT_GROUPS,
        ],
    },
    HfType {
        model_type: "sarvam_mla",
        architecture: "SarvamMLAForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK_SIZES,
        fields: &concat::<{ SIGMOID_LATENT.len() + 1 }>(SIGMOID_LATENT, &[mlp_types::<1>()]),
    },
    HfType {
        model_type: "glm_moe_dsa",
        architecture: "GlmMoeDsaForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK_SIZES,
        fields: &concat::<{ SIGMOID_LATENT.len() + 5 }>(
            SIGMOID_LATENT,
            &[
                mlp_types::<3>(),
                field(
                    &["index_head_dim"],
                    Meaning::Default("index_head_dim", Given::Int(128)),
                ),
                field(&["index_topk"], Meaning::Optional("index_topk")),
                number(
                    &["index_n_heads"],
                    "index_n_heads",
                    |file| Ok(file("index_n_heads").or_else(|| Some(32.into()))),
                    |model| Some(model["index_n_heads"].clone()),
                ),
                derived(
                    "indexer_types",
                    &[
                        "indexer_types",
                        "index_topk_pattern",
                        "index_topk_freq",
                        "index_skip_topk_offset",
                    ],
                    indexers,
                ),
            ],
        ),
    },
];

/// Returns which layers of a GLM-5 have an indexer: as listed, by a pattern of letters, or every
/// n-th after the first ones.
fn indexers(file: Fields<'_>) -> Result<Option<Value>, String> {
    let number = |name: &str, default| file(name).and_then(|n| n.as_u64()).unwrap_or(default);
    let (listed, pattern) = (file("indexer_types"), file("index_topk_pattern"));
    let of = |layer: u64| {
        let at = |list: &Option<Value>| {
            list.as_ref()?
                .get(layer as usize)?
                .as_str()
                .map(str::to_owned)
        };
        let letter = pattern.as_ref().and_then(Value::as_str);
        let letter = letter.and_then(|all| all.chars().nth(layer as usize));
        if let Some(word) = at(&listed).or_else(|| at(&pattern)) {
            return word == "full";
        }
        if let Some(letter) = letter {
            return letter == 'F';
        }
        let (every, first) = (
            number("index_topk_freq", 1),
            number("index_skip_topk_offset", 2),
        );
        (layer + 1)
            .saturating_sub(first)
            .is_multiple_of(every.max(1))
    };
    let all: Vec<bool> = (0..layers(file)).map(of).collect();
    if all.iter().all(|full| *full) {
        return Ok(None);
    }
    let word = |full: &bool| if *full { "full" } else { "shared" };
    Ok(Some(all.iter().map(word).collect()))
}
