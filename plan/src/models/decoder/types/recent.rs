//! Types of recent releases that combine parts of others.

use super::experts::{
    ATTENTION_MULTIPLIER, EMBEDDING_MULTIPLIER, EXPERT_FFN, EXPERTS as NUM_EXPERTS, LOGITS_SCALING,
    NORMALIZE, NORMALIZED, RESIDUAL_MULTIPLIER, SHAPE as EXPERT_SHAPE, TOP_K, mixed,
};
use super::llama_like::SWA_WINDOW;
use super::read::{FULL, LINEAR, Listed, NO_ROPE, SLIDING, by_layer, integer, size};
use super::routed::mlp_types;
use super::windowed::{LARGE_THETA, LOCAL_THETA, LOGIT_SCALE};
use super::{
    GLOBAL_THETA, HEAD_NORMS, HIDDEN_ACT, LAYER_NORM_EPS, RMS_EPS_5, TIED_BY_DEFAULT, WINDOW_THETA,
    derived, number,
};
use crate::models::hf::{
    BiasPart, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS,
    ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, HEAD_DIM_128, KV_HEADS, MLP_BIAS, NORM_EPS};
use crate::models::windows::{ALL_FULL, FIRST_OF_FOUR, WINDOW_4096, every_without_rope, layers};
use serde_json::{Value, json};

const SHAPE: &[Field] = &[
    VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS, HIDDEN_ACT,
];
const SIGMOID: (&str, Given) = ("router", Given::Str("sigmoid"));
const SOFTMAX_OF_CHOSEN: (&str, Given) = ("router", Given::Str("topk_softmax"));

fn text(file: Fields<'_>, name: &str) -> Option<String> {
    file(name)?.as_str().map(str::to_owned)
}

/// Returns the width of shared experts, each as wide as `intermediate_size`.
fn shared(file: Fields<'_>, name: &str, default: u64) -> Result<Option<Value>, String> {
    let count = file(name).and_then(|n| n.as_u64()).unwrap_or(default);
    Ok(Some((count * size(file, "intermediate_size", 1)?).into()))
}

/// Sizes of OLMo Hybrid's layers with the delta rule.
fn delta(file: Fields<'_>) -> Result<Option<Value>, String> {
    let heads = size(file, "num_attention_heads", 30)?;
    let key_heads = size(file, "linear_num_key_heads", heads)?;
    let width = size(file, "hidden_size", 3840)?;
    let key_dim = size(file, "linear_key_head_dim", 3 * width / 4 / key_heads)?;
    Ok(Some(json!({
        "key_heads": key_heads,
        "value_heads": size(file, "linear_num_value_heads", heads)?,
        "key_dim": key_dim,
        "value_dim": size(file, "linear_value_head_dim", 2 * key_dim)?,
        "conv": size(file, "linear_conv_kernel_dim", 4)?,
        "projections": 6,
    })))
}

const DELTA_FIELDS: &[&str] = &[
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "linear_allow_neg_eigval",
    "linear_a_log_min",
    "linear_a_log_max",
    "linear_dt_min",
    "linear_dt_max",
    "linear_dt_init_floor",
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "modernbert-decoder",
        architecture: "ModernBertDecoderForCausalLM",
        fixed: &[
            ("norm", Given::Str("layer_norm_no_bias")),
            ("packed_gate_up", Given::Bool(true)),
            ("embedding_norm", Given::Bool(true)),
            ("head_bias", Given::Bool(true)),
            ("plain_first_block", Given::Bool(true)),
            ("output_transform", Given::Bool(true)),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            POSITIONS,
            TIED_BY_DEFAULT,
        ],
        fields: &[
            field(&["norm_eps"], Meaning::Optional("norm_eps")),
            Field {
                names: &["hidden_activation"],
                meaning: Meaning::Choice(
                    "activation",
                    &[
                        ("gelu", "gelu"),
                        ("silu", "silu"),
                        ("gelu_new", "gelu_tanh"),
                    ],
                ),
            },
            GLOBAL_THETA,
            WINDOW_THETA,
            number(
                &["local_attention"],
                "sliding_window",
                |file| {
                    Ok(Some(
                        (size(file, "local_attention", 128)? / 2).max(1).into(),
                    ))
                },
                |model| Some((2 * model["sliding_window"].as_u64()?).into()),
            ),
            derived(
                "layer_types",
                &["layer_types", "global_attn_every_n_layers"],
                |file| {
                    let listed = Listed::of(file, &["layer_types"]);
                    let every = size(file, "global_attn_every_n_layers", 3)?;
                    by_layer(file, |layer| {
                        match listed.is(layer, FULL, layer.is_multiple_of(every)) {
                            true => FULL,
                            false => SLIDING,
                        }
                    })
                },
            ),
            field(
                &["attention_bias"],
                Meaning::HasBias(BiasPart::Attention, false),
            ),
            field(&["mlp_bias"], Meaning::HasBias(BiasPart::Mlp, false)),
            field(&["norm_bias"], Meaning::Off),
            field(&["classifier_bias"], Meaning::Off),
            field(&["decoder_bias"], Meaning::On),
            field(&["classifier_activation"], Meaning::Word(&["gelu"])),
        ],
    },
    HfType {
        model_type: "olmo_hybrid",
        architecture: "OlmoHybridForCausalLM",
        fixed: &[
            ("norm_position", Given::Str("after")),
            ("qk_norm", Given::Str("full")),
        ],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            ATTENTION_BIAS,
            TIED,
            ROPE_THETA,
            // Without a base, the class does not rotate.
            derived("position_embedding", &["rope_parameters"], |file| {
                let bases = ["rope_theta", "rope_parameters.rope_theta"];
                let rotates = bases.iter().any(|name| file(name).is_some());
                Ok((!rotates).then(|| "none".into()))
            }),
            derived("layer_types", &["layer_types"], |file| {
                let (n, listed) = (layers(file), Listed::of(file, &["layer_types"]));
                by_layer(file, |layer| {
                    // One of fewer than four layers attends, too.
                    let full = layer % 4 == 3 || n < 4 && layer + 1 == n;
                    let full = listed.is(layer, FULL, full && (listed.is_missing() || n >= 4));
                    if full { FULL } else { LINEAR }
                })
            }),
            derived("linear_attention", DELTA_FIELDS, delta),
        ],
    },
    HfType {
        model_type: "apertus1p5_text",
        architecture: "Apertus1p5TextForCausalLM",
        fixed: &[
            HEAD_NORMS,
            ("gated_mlp", Given::Bool(false)),
            ("activation", Given::Str("relu2")),
            ("activation_scalars", Given::Int(2)),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS,
        ],
        fields: &[
            Field {
                meaning: Meaning::Default("rope_theta", Given::Float(1.2e7)),
                ..ROPE_THETA
            },
            RMS_EPS_5,
            ATTENTION_BIAS,
            TIED,
            field(&["hidden_act"], Meaning::Word(&["xielu"])),
            derived("num_labels", &["output_vocab_size"], |file| {
                match file("output_vocab_size") {
                    Some(rows) if Some(&rows) != file("vocab_size").as_ref() => Err(format!(
                        "`output_vocab_size` ({rows}) must be null: a head with fewer columns than the table has rows is not planned"
                    )),
                    _ => Ok(None),
                }
            }),
        ],
    },
];

pub(super) const EXPERTS: &[HfType] = &[
    HfType {
        model_type: "aria_text",
        architecture: "AriaTextForCausalLM",
        fixed: &[SOFTMAX_OF_CHOSEN],
        common: SHAPE,
        fields: &[
            HEAD_DIM,
            NORM_EPS,
            ROPE_THETA,
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED,
            field(
                &["moe_num_experts"],
                Meaning::Default("experts", Given::Int(8)),
            ),
            field(&["moe_topk"], Meaning::Default("top_k", Given::Int(2))),
            derived("expert_ffn", &["pretraining_tp"], |file| {
                Ok(file("intermediate_size"))
            }),
            derived("shared_expert_ffn", &["moe_num_shared_experts"], |file| {
                shared(file, "moe_num_shared_experts", 2)
            }),
        ],
    },
    HfType {
        model_type: "granitemoe_swa",
        architecture: "GraniteMoeSWAForCausalLM",
        fixed: &[SOFTMAX_OF_CHOSEN, ("attention_sinks", Given::Bool(true))],
        common: EXPERT_SHAPE,
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
            SWA_WINDOW,
            FIRST_OF_FOUR,
            EMBEDDING_MULTIPLIER,
            ATTENTION_MULTIPLIER,
            RESIDUAL_MULTIPLIER,
            LOGITS_SCALING,
        ],
    },
    HfType {
        model_type: "cohere2_moe",
        architecture: "Cohere2MoeForCausalLM",
        fixed: &[
            ("residual", Given::Str("parallel_one_norm")),
            ("position_embedding", Given::Str("rotary_interleaved")),
        ],
        common: &[
            VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, POSITIONS, HIDDEN_ACT, ROPE_THETA,
        ],
        fields: &[
            HEAD_DIM_128,
            ATTENTION_BIAS,
            TIED_BY_DEFAULT,
            LOGIT_SCALE,
            LAYER_NORM_EPS,
            WINDOW_4096,
            NUM_EXPERTS,
            TOP_K,
            NORMALIZED,
            mlp_types::<0>(),
            derived("norm", &["rms_norm_eps"], |file| {
                let rms = file("rms_norm_eps").is_some();
                Ok(Some(
                    if rms {
                        "rms_norm"
                    } else {
                        "layer_norm_no_bias"
                    }
                    .into(),
                ))
            }),
            derived("router", &["expert_selection_fn"], |file| {
                match text(file, "expert_selection_fn").as_deref() {
                    None | Some("softmax") => Ok(Some("topk_softmax".into())),
                    Some("sigmoid") => Ok(Some("sigmoid".into())),
                    Some(other) => Err(format!(
                        "`expert_selection_fn` must be softmax or sigmoid, not {other:?}"
                    )),
                }
            }),
            derived("expert_ffn", &["intermediate_size"], |file| {
                Ok(file("intermediate_size"))
            }),
            derived("ffn", &["prefix_dense_intermediate_size"], |file| {
                let own = file("prefix_dense_intermediate_size");
                Ok(own.or_else(|| file("intermediate_size")))
            }),
            derived(
                "shared_expert_ffn",
                &["num_shared_experts", "shared_expert_combination_strategy"],
                |file| shared(file, "num_shared_experts", 0),
            ),
            // Layers that see all positions do not rotate, unless they are dense ones.
            derived(
                "layer_types",
                &[
                    "layer_types",
                    "sliding_window_pattern",
                    "prefix_dense_sliding_window_pattern",
                ],
                |file| {
                    let [listed, mlps] =
                        ["layer_types", "mlp_layer_types"].map(|name| Listed::of(file, &[name]));
                    let every = size(file, "sliding_window_pattern", 4)?;
                    let of_dense = size(file, "prefix_dense_sliding_window_pattern", 1)?;
                    let dense = integer(file, "first_k_dense_replace", 0);
                    by_layer(file, |layer| {
                        let is_dense = mlps.is(layer, "dense", layer < dense);
                        let slides = match layer < dense {
                            true => !(layer + 1).is_multiple_of(of_dense),
                            false => !(layer - dense + 1).is_multiple_of(every),
                        };
                        match (listed.is(layer, SLIDING, slides), is_dense && of_dense == 1) {
                            (true, _) => SLIDING,
                            (false, true) => FULL,
                            (false, false) => NO_ROPE,
                        }
                    })
                },
            ),
        ],
    },
    // The first two layers, the last one, and every fourth see all positions, without rotation.
    HfType {
        model_type: "flint",
        architecture: "FlintForCausalLM",
        fixed: &[SIGMOID, HEAD_NORMS, ("attention_sinks", Given::Bool(true))],
        common: EXPERT_SHAPE,
        fields: &[
            KV_HEADS,
            HEAD_DIM_128,
            ATTENTION_BIAS,
            NUM_EXPERTS,
            TOP_K,
            EXPERT_FFN,
            NORMALIZED,
            field(
                &["shared_expert_intermediate_size"],
                Meaning::Default("shared_expert_ffn", Given::Int(1024)),
            ),
            field(
                &["sliding_window"],
                Meaning::Default("sliding_window", Given::Int(513)),
            ),
            derived(
                "mlp_layer_types",
                &["mlp_only_layers", "decoder_sparse_step"],
                |file| {
                    let dense = file("mlp_only_layers").unwrap_or_else(|| json!([0, 1]));
                    mixed(file, dense.as_array().map_or(&[][..], |all| all))
                },
            ),
            derived("layer_types", &["layer_types"], |file| {
                let (n, listed) = (layers(file), Listed::of(file, &["layer_types"]));
                by_layer(file, |layer| {
                    let full = layer < 2 || layer % 4 == 1 || layer + 1 == n;
                    if listed.is(layer, FULL, full) {
                        NO_ROPE
                    } else {
                        SLIDING
                    }
                })
            }),
        ],
    },
    HfType {
        model_type: "kolibri1",
        architecture: "Kolibri1ForCausalLM",
        fixed: &[SIGMOID, HEAD_NORMS, ("norm_position", Given::Str("both"))],
        common: &[
            VOCAB, HIDDEN, LAYERS, HEADS, POSITIONS, HIDDEN_ACT, ROPE_THETA, NORM_EPS, TIED,
        ],
        fields: &[
            HEAD_DIM_128,
            NUM_EXPERTS,
            TOP_K,
            EXPERT_FFN,
            NORMALIZE,
            field(
                &["num_key_value_heads"],
                Meaning::Default("kv_heads", Given::Int(4)),
            ),
            field(
                &["sliding_window"],
                Meaning::Nullable("sliding_window", Given::Int(513)),
            ),
            every_without_rope::<5>(),
            field(
                &["shared_expert_intermediate_size"],
                Meaning::Default("shared_expert_ffn", Given::Int(512)),
            ),
        ],
    },
    HfType {
        model_type: "laguna",
        architecture: "LagunaForCausalLM",
        fixed: &[
            SIGMOID,
            HEAD_NORMS,
            ("router_bias", Given::Bool(true)),
            ("normalize_top_k", Given::Bool(true)),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, POSITIONS, HIDDEN_ACT, NORM_EPS, TIED,
        ],
        fields: &[
            HEAD_DIM_128,
            ATTENTION_BIAS,
            Field {
                meaning: Meaning::Default("rope_theta", Given::Float(5e5)),
                ..LARGE_THETA
            },
            LOCAL_THETA,
            NUM_EXPERTS,
            TOP_K,
            EXPERT_FFN,
            ALL_FULL,
            mlp_types::<1>(),
            field(
                &["num_key_value_heads"],
                Meaning::Default("kv_heads", Given::Int(8)),
            ),
            field(
                &["sliding_window"],
                Meaning::Default("sliding_window", Given::Int(512)),
            ),
            field(
                &["shared_expert_intermediate_size"],
                Meaning::Default("shared_expert_ffn", Given::Int(512)),
            ),
            field(
                &["moe_routed_scaling_factor"],
                Meaning::Default("route_scale", Given::Float(1.0)),
            ),
            field(&["moe_apply_router_weight_on_input"], Meaning::Off),
            number(
                &["gating"],
                "attention_gate",
                |file| match file("gating") {
                    None | Some(Value::Bool(true)) => Ok(Some("head".into())),
                    Some(Value::String(word)) if word == "per-head" => Ok(Some("head".into())),
                    Some(_) => Ok(Some("element".into())),
                },
                |model| {
                    Some(if model["attention_gate"] == "head" {
                        true.into()
                    } else {
                        "per-element".into()
                    })
                },
            ),
            derived(
                "num_labels",
                &[
                    "num_attention_heads_per_layer",
                    "moe_router_logit_softcapping",
                ],
                |file| {
                    let (all, heads) = (
                        file("num_attention_heads_per_layer"),
                        file("num_attention_heads"),
                    );
                    let list = all.as_ref().and_then(Value::as_array);
                    if list.is_some_and(|all| all.iter().any(|n| Some(n) != heads.as_ref())) {
                        return Err("`num_attention_heads_per_layer` must be `num_attention_heads` in every layer: layers with different numbers of queries are not planned".to_owned());
                    }
                    let per_head = matches!(file("gating"), None | Some(Value::Bool(true)))
                        || text(file, "gating").as_deref() == Some("per-head");
                    if !per_head && file("attention_bias") == Some(true.into()) {
                        return Err("`attention_bias` must be false where `gating` is per element: gates without a bias next to queries with one are not planned".to_owned());
                    }
                    match file("moe_router_logit_softcapping").and_then(|x| x.as_f64()) {
                        Some(cap) if cap > 0.0 => Err(format!(
                            "`moe_router_logit_softcapping` ({cap}) must be 0: a soft limit of the logits of routers is not planned"
                        )),
                        _ => Ok(None),
                    }
                },
            ),
        ],
    },
];
