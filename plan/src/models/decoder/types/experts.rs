//! Mixtures of experts.

use super::read::{FULL, LINEAR, Listed, by_layer, integer, size};
use super::{HIDDEN_ACT, PARTIAL_HALF, RMS_EPS_5, derived, number};
use crate::models::hf::{
    BiasPart, Computed, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning,
    POSITIONS, ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, KV_HEADS, NORM_EPS};
use crate::models::windows::{ASKED_LAYERS, ASKED_WINDOW, USES_WINDOW, WINDOW, layers, repeated};
use serde_json::{Value, json};

pub(super) const TOP_K: Field = field(&["num_experts_per_tok"], Meaning::Required("top_k"));
pub(super) const EXPERT_FFN: Field =
    field(&["moe_intermediate_size"], Meaning::Required("expert_ffn"));
pub(super) const NORMALIZE: Field = field(
    &["norm_topk_prob"],
    Meaning::Default("normalize_top_k", Given::Bool(false)),
);
/// As [`NORMALIZE`], in classes that normalize by default.
pub(super) const NORMALIZED: Field = field(
    &["norm_topk_prob"],
    Meaning::Default("normalize_top_k", Given::Bool(true)),
);
/// Transformers 5 writes the second name.
pub(super) const EXPERTS: Field = Field {
    names: &["num_experts", "num_local_experts"],
    meaning: Meaning::Required("experts"),
};
const SPARSE_STEP: Field = field(&["decoder_sparse_step"], Meaning::Optional("moe_every"));
/// Layers without experts: the first ones, or none.
pub(super) const DENSE: Field = field(
    &["mlp_only_layers"],
    Meaning::Computed(
        "dense_layers",
        Computed {
            also: &[],
            read: |file| {
                let dense = dense_layers(file);
                let first = are_first(&dense);
                Ok(first.then(|| dense.len().into()))
            },
            write: |model| Some((0..model["dense_layers"].as_u64()?).collect()),
        },
    ),
);
/// The kind of each layer, if those without experts are not the first ones.
pub(super) const MIXED: Field = derived(
    "mlp_layer_types",
    &["mlp_only_layers", "decoder_sparse_step"],
    |file| {
        let dense = dense_layers(file);
        if are_first(&dense) {
            return Ok(None);
        }
        mixed(file, &dense)
    },
);

/// Returns the kind of each layer: `dense` in a list, and where the step does not come to experts.
pub(super) fn mixed(file: Fields<'_>, dense: &[Value]) -> Result<Option<Value>, String> {
    let every = size(file, "decoder_sparse_step", 1)?;
    by_layer(file, |layer| {
        match dense.contains(&layer.into()) || !(layer + 1).is_multiple_of(every) {
            true => "dense",
            false => "sparse",
        }
    })
}

/// Returns the layers that `mlp_only_layers` lists.
fn dense_layers(file: Fields<'_>) -> Vec<Value> {
    match file("mlp_only_layers") {
        Some(Value::Array(layers)) => layers,
        _ => Vec::new(),
    }
}

/// Returns whether layers are the first ones, in order.
fn are_first(layers: &[Value]) -> bool {
    (0u64..).zip(layers).all(|(n, layer)| *layer == n)
}

/// The first layers, which have no experts, and every n-th of the others, which has.
pub(super) const FIRST_DENSE: Field = field(
    &["first_k_dense_replace"],
    Meaning::Default("dense_layers", Given::Int(0)),
);
const LAYER_FREQUENCY: Field = field(&["moe_layer_freq"], Meaning::Optional("moe_every"));
pub(super) const ROUTED: Field = field(&["n_routed_experts"], Meaning::Required("experts"));
pub(super) const ROUTE_SCALE: Field = field(
    &["routed_scaling_factor"],
    Meaning::Default("route_scale", Given::Float(1.0)),
);
pub(super) const GROUPS: Field = field(&["n_group"], Meaning::Optional("router_groups"));
pub(super) const KEPT_GROUPS: Field =
    field(&["topk_group"], Meaning::Optional("router_group_top_k"));
/// Shared experts are one of their total width.
pub(super) const SHARED: Field = field(
    &["n_shared_experts"],
    Meaning::Computed(
        "shared_expert_ffn",
        Computed {
            also: &[],
            read: |file| shared(file, &["n_shared_experts"], 0),
            write: |model| {
                let [all, each] = ["shared_expert_ffn", "expert_ffn"].map(|k| model[k].as_u64());
                Some((all? / each?.max(1)).into())
            },
        },
    ),
);
const SCORES: Field = number(
    &["scoring_func"],
    "router",
    |file| match file("scoring_func").as_ref().and_then(Value::as_str) {
        None | Some("softmax") => Ok(None),
        Some("sigmoid") => Ok(Some("sigmoid".into())),
        Some(other) => Err(format!(
            "`scoring_func` must be softmax or sigmoid, not {other:?}"
        )),
    },
    |model| {
        Some(
            if model["router"] == "sigmoid" {
                "sigmoid"
            } else {
                "softmax"
            }
            .into(),
        )
    },
);

/// Returns the width of all shared experts together. A file gives their number by one of these
/// names, or there are `default`.
pub(super) fn shared(
    file: Fields<'_>,
    names: &[&str],
    default: u64,
) -> Result<Option<Value>, String> {
    let number = |name: &str| file(name).and_then(|n| n.as_u64());
    let count = names.iter().find_map(|name| number(name));
    let count = count.unwrap_or(default);
    let each = number("moe_intermediate_size").ok_or("`moe_intermediate_size` is missing")?;
    Ok(Some((count * each).into()))
}

/// Refuses queries of width 0. transformers makes them from projections without elements, and only
/// null stands for queries that are not compressed.
fn check_queries(file: Fields<'_>) -> Result<(), String> {
    match file("q_lora_rank").and_then(|n| n.as_u64()) {
        Some(0) => {
            Err("`q_lora_rank` must be above 0, or null if queries are not compressed".to_owned())
        }
        _ => Ok(()),
    }
}

/// Fields of latent attention that rotates halves.
pub(super) const LATENT_HALVES: &[Field] = &[
    field(&["kv_lora_rank"], Meaning::Required("kv_lora_rank")),
    field(
        &["q_lora_rank"],
        Meaning::Nullable("q_lora_rank", Given::Int(1536)),
    ),
    field(&["qk_rope_head_dim"], Meaning::Required("qk_rope_head_dim")),
    field(&["v_head_dim"], Meaning::Required("v_head_dim")),
    number(
        &["qk_nope_head_dim"],
        "head_dim",
        |file| {
            check_queries(file)?;
            let number = |name: &str| file(name).and_then(|n| n.as_u64());
            let [plain, rotated] = ["qk_nope_head_dim", "qk_rope_head_dim"].map(number);
            Ok(plain
                .zip(rotated)
                .map(|(plain, rotated)| (plain + rotated).into()))
        },
        |model| {
            let [all, rotated] = ["head_dim", "qk_rope_head_dim"].map(|k| model[k].as_u64());
            Some((all? - rotated?).into())
        },
    ),
    // With YaRN, scores are multiplied by the square of the scale of the longest distance.
    derived("attention_multiplier", &[], |file| {
        let Some(scaling) = ["rope_scaling", "rope_parameters"]
            .iter()
            .find_map(|n| file(n))
        else {
            return Ok(None);
        };
        let number = |name: &str| scaling.get(name).and_then(Value::as_f64);
        let size = |name: &str| file(name).and_then(|n| n.as_f64());
        let found = (number("factor"), number("mscale_all_dim"));
        let sizes = size("qk_nope_head_dim").zip(size("qk_rope_head_dim"));
        let ((Some(factor), Some(all)), Some((plain, rotated))) = (found, sizes) else {
            return Ok(None);
        };
        let scale = 1.0 + 0.1 * all * factor.max(1.0).ln();
        Ok(Some((scale * scale / (plain + rotated).sqrt()).into()))
    }),
    field(&["num_key_value_heads"], Meaning::Optional("kv_heads")),
    ATTENTION_BIAS,
];

/// Fields of latent attention that rotates adjacent pairs unless the file says otherwise.
pub(super) const LATENT: &[Field] =
    &concat::<{ LATENT_HALVES.len() + 1 }>(
        LATENT_HALVES,
        &[number(
            &["rope_interleave"],
            "position_embedding",
            |file| {
                Ok((file("rope_interleave") != Some(false.into()))
                    .then(|| "rotary_interleaved".into()))
            },
            |model| Some((model["position_embedding"] == "rotary_interleaved").into()),
        )],
    );

/// As [`FIRST_DENSE`], in classes whose first three layers are dense.
const FIRST_3_DENSE: Field = Field {
    meaning: Meaning::Default("dense_layers", Given::Int(3)),
    ..FIRST_DENSE
};

const DEEPSEEK_V3: &[Field] =
    &concat::<{ DEEPSEEK_SIZES.len() + 2 }>(DEEPSEEK_SIZES, &[FIRST_3_DENSE, LAYER_FREQUENCY]);

pub(super) const DEEPSEEK: &[Field] =
    &concat::<{ DEEPSEEK_SIZES.len() + 2 }>(DEEPSEEK_SIZES, &[FIRST_DENSE, LAYER_FREQUENCY]);

/// Sizes of DeepSeek's layers, without what says which layers have experts.
pub(super) const DEEPSEEK_SIZES: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    HIDDEN_ACT,
    POSITIONS,
    NORM_EPS,
    ROPE_THETA,
    TIED,
    ROUTED,
    TOP_K,
    EXPERT_FFN,
    SHARED,
    NO_MLP_BIAS,
];

const NO_MLP_BIAS: Field = field(&["mlp_bias"], Meaning::Off);

/// Without the logits of the routers, transformers computes no loss of them.
pub(super) const HAS_AUX_LOSS: Field = field(
    &["output_router_logits"],
    Meaning::Computed(
        "aux_loss",
        Computed {
            also: &["router_aux_loss_coef"],
            read: aux_loss,
            write: |model| Some((model["aux_loss"].as_f64() > Some(0.0)).into()),
        },
    ),
);
pub(super) const AUX_LOSS: Field = field(
    &["router_aux_loss_coef"],
    Meaning::Computed(
        "aux_loss",
        Computed {
            also: &["output_router_logits"],
            read: aux_loss,
            write: |model| Some(model["aux_loss"].clone()),
        },
    ),
);

/// Returns the coefficient of the load-balancing loss if there is one. Classes of transformers
/// default to 0.001.
fn aux_loss(file: Fields<'_>) -> Result<Option<Value>, String> {
    let on = file("output_router_logits") == Some(true.into());
    let coefficient = || file("router_aux_loss_coef").unwrap_or_else(|| 0.001.into());
    Ok(on.then(coefficient))
}

pub(super) const SHAPE: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    HIDDEN_ACT,
    POSITIONS,
    NORM_EPS,
    ROPE_THETA,
    HAS_AUX_LOSS,
    AUX_LOSS,
    TIED,
];

/// Mixtral's blocks.
const MIXTRAL_FIXED: &[(&str, Given)] = &[
    ("bias", Given::Bool(false)),
    ("normalize_top_k", Given::Bool(true)),
    ("aux_loss_kind", Given::Str("hf")),
];
/// Fields of Mixtral but the base of the rotary embedding.
const MIXTRAL: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    HIDDEN_ACT,
    POSITIONS,
    HAS_AUX_LOSS,
    AUX_LOSS,
    TIED,
    field(
        &["num_key_value_heads"],
        Meaning::Default("kv_heads", Given::Int(8)),
    ),
    HEAD_DIM,
    field(
        &["rms_norm_eps"],
        Meaning::Default("norm_eps", Given::Float(1e-5)),
    ),
    WINDOW,
    field(
        &["num_local_experts"],
        Meaning::Default("experts", Given::Int(8)),
    ),
    field(
        &["num_experts_per_tok"],
        Meaning::Default("top_k", Given::Int(2)),
    ),
];

/// Returns which layers of a MiniMax-Text-01 have lightning attention: as listed, or every second.
fn lightning_layers(file: Fields<'_>) -> Result<Option<Value>, String> {
    let listed = Listed::of(file, &["layer_types"]);
    by_layer(file, |layer| {
        match listed.is(layer, FULL, layer.is_multiple_of(2)) {
            true => FULL,
            false => LINEAR,
        }
    })
}

pub(super) const TYPES: &[HfType] = &[
    // What blocks add is added to what they read, normalized; the plan adds it to the stream.
    HfType {
        model_type: "minimax",
        architecture: "MiniMaxForCausalLM",
        fixed: MIXTRAL_FIXED,
        common: MIXTRAL,
        fields: &[
            Field {
                meaning: Meaning::Default("rope_theta", Given::Float(1e6)),
                ..ROPE_THETA
            },
            derived(
                "layer_types",
                &["layer_types", "attn_type_list"],
                lightning_layers,
            ),
            derived(
                "linear_attention",
                &[
                    "block_size",
                    "full_attn_alpha_factor",
                    "full_attn_beta_factor",
                    "linear_attn_alpha_factor",
                    "linear_attn_beta_factor",
                    "mlp_alpha_factor",
                    "mlp_beta_factor",
                    "router_jitter_noise",
                ],
                |file| {
                    let heads = integer(file, "num_attention_heads", 32);
                    let width = integer(file, "hidden_size", 4096) / heads.max(1);
                    let width = integer(file, "head_dim", width);
                    Ok(Some(json!({
                        "key_heads": heads,
                        "value_heads": heads,
                        "key_dim": width,
                        "value_dim": width,
                        "fixed_decays": true,
                        "chunk": integer(file, "block_size", 256),
                    })))
                },
            ),
        ],
    },
    HfType {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        fixed: MIXTRAL_FIXED,
        common: MIXTRAL,
        fields: &[ROPE_THETA],
    },
    HfType {
        model_type: "qwen2_moe",
        architecture: "Qwen2MoeForCausalLM",
        fixed: &[
            ("shared_expert_gate", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: SHAPE,
        fields: &[
            KV_HEADS,
            HEAD_DIM,
            ASKED_WINDOW,
            USES_WINDOW,
            ASKED_LAYERS,
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            field(
                &["shared_expert_intermediate_size"],
                Meaning::Required("shared_expert_ffn"),
            ),
            NORMALIZE,
            SPARSE_STEP,
            DENSE,
            MIXED,
            field(&["qkv_bias"], Meaning::HasBias(BiasPart::Qkv, true)),
        ],
    },
    HfType {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        fixed: &[
            ("qk_norm", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: SHAPE,
        fields: &[
            KV_HEADS,
            HEAD_DIM,
            ATTENTION_BIAS,
            ASKED_WINDOW,
            USES_WINDOW,
            ASKED_LAYERS,
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            NORMALIZE,
            SPARSE_STEP,
            DENSE,
            MIXED,
        ],
    },
    HfType {
        model_type: "olmoe",
        architecture: "OlmoeForCausalLM",
        fixed: &[
            ("qk_norm", Given::Str("full")),
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
            KV_HEADS,
            field(
                &["rms_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-5)),
            ),
            ATTENTION_BIAS,
            field(
                &["num_experts"],
                Meaning::Default("experts", Given::Int(64)),
            ),
            field(
                &["num_experts_per_tok"],
                Meaning::Default("top_k", Given::Int(8)),
            ),
            NORMALIZE,
            field(&["clip_qkv"], Meaning::Unset),
        ],
    },
    HfType {
        model_type: "deepseek",
        architecture: "DeepseekForCausalLM",
        fixed: &[],
        common: DEEPSEEK,
        fields: &[KV_HEADS, ATTENTION_BIAS, SCORES, NORMALIZE],
    },
    HfType {
        model_type: "deepseek_v2",
        architecture: "DeepseekV2ForCausalLM",
        fixed: &[],
        common: DEEPSEEK,
        fields: &concat::<{ LATENT.len() + 5 }>(
            LATENT,
            &[SCORES, NORMALIZE, ROUTE_SCALE, GROUPS, KEPT_GROUPS],
        ),
    },
    HfType {
        model_type: "deepseek_v3",
        architecture: "DeepseekV3ForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK_V3,
        fields: SIGMOID_LATENT,
    },
    HfType {
        model_type: "kimi_k2",
        architecture: "DeepseekV3ForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK_V3,
        fields: SIGMOID_LATENT,
    },
    HfType {
        model_type: "glm4_moe",
        architecture: "Glm4MoeForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HIDDEN_ACT, POSITIONS, ROPE_THETA, TIED,
            ROUTED, TOP_K, EXPERT_FFN, SHARED,
        ],
        fields: &[
            HEAD_DIM,
            RMS_EPS_5,
            PARTIAL_HALF,
            field(&["attention_bias"], Meaning::HasBias(BiasPart::Qkv, false)),
            field(&["use_qk_norm"], Meaning::Optional("qk_norm")),
            field(
                &["first_k_dense_replace"],
                Meaning::Default("dense_layers", Given::Int(1)),
            ),
            NORMALIZED,
            ROUTE_SCALE,
            GROUPS,
            KEPT_GROUPS,
        ],
    },
    HfType {
        model_type: "dots1",
        architecture: "Dots1ForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("qk_norm", Given::Bool(true)),
        ],
        common: DEEPSEEK,
        fields: &[
            KV_HEADS,
            HEAD_DIM,
            ATTENTION_BIAS,
            NORMALIZE,
            ROUTE_SCALE,
            GROUPS,
            KEPT_GROUPS,
        ],
    },
    HfType {
        model_type: "minimax_m2",
        architecture: "MiniMaxM2ForCausalLM",
        fixed: &[
            ("bias", Given::Bool(false)),
            ("router", Given::Str("sigmoid")),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN_ACT, POSITIONS, NORM_EPS,
            ROPE_THETA, TIED, TOP_K,
        ],
        fields: &[
            field(&["num_local_experts"], Meaning::Required("experts")),
            number(
                &["use_qk_norm"],
                "qk_norm",
                |file| Ok((file("use_qk_norm") != Some(false.into())).then(|| "full".into())),
                |model| Some((model["qk_norm"] == "full").into()),
            ),
            field(&["qk_norm_type"], Meaning::Word(&["per_layer"])),
            field(&["scoring_func"], Meaning::Word(&["sigmoid"])),
            field(&["use_routing_bias"], Meaning::On),
            number(
                &["rotary_dim"],
                "partial_rotary_factor",
                |file| {
                    let number = |name: &str| file(name).and_then(|n| n.as_f64());
                    let [rotated, whole] = ["rotary_dim", "head_dim"].map(number);
                    Ok(rotated
                        .zip(whole)
                        .map(|(rotated, whole)| (rotated / whole).into()))
                },
                |model| {
                    let [part, whole] =
                        ["partial_rotary_factor", "head_dim"].map(|k| model[k].as_f64());
                    Some(((part? * whole?) as u64).into())
                },
            ),
        ],
    },
    HfType {
        model_type: "dbrx",
        architecture: "DbrxForCausalLM",
        fixed: &[
            ("bias", Given::Bool(false)),
            ("norm", Given::Str("layer_norm_no_bias")),
            ("packed_qkv", Given::Str("concatenated")),
        ],
        common: &[],
        fields: &[
            VOCAB,
            field(&["d_model"], Meaning::Required("hidden")),
            field(&["n_layers"], Meaning::Required("layers")),
            field(&["n_heads"], Meaning::Required("heads")),
            field(&["max_seq_len"], Meaning::Positions),
            field(
                &["attn_config.kv_n_heads"],
                Meaning::Default("kv_heads", Given::Int(1)),
            ),
            field(&["attn_config.rope_theta"], Meaning::Optional("rope_theta")),
            field(&["ffn_config.ffn_hidden_size"], Meaning::Required("ffn")),
            field(
                &["ffn_config.moe_num_experts"],
                Meaning::Default("experts", Given::Int(4)),
            ),
            field(
                &["ffn_config.moe_top_k"],
                Meaning::Default("top_k", Given::Int(1)),
            ),
            TIED,
        ],
    },
    HfType {
        model_type: "phimoe",
        architecture: "PhimoeForCausalLM",
        fixed: &[("norm", Given::Str("layer_norm"))],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HIDDEN_ACT, POSITIONS, ROPE_THETA, TIED,
            TOP_K,
        ],
        fields: &[
            RMS_EPS_5,
            field(&["num_local_experts"], Meaning::Required("experts")),
            ATTENTION_BIAS,
            field(&["lm_head_bias"], Meaning::Optional("head_bias")),
        ],
    },
    HfType {
        model_type: "granitemoe",
        architecture: "GraniteMoeForCausalLM",
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
            EMBEDDING_MULTIPLIER,
            ATTENTION_MULTIPLIER,
            RESIDUAL_MULTIPLIER,
            LOGITS_SCALING,
        ],
    },
    HfType {
        model_type: "ernie4_5_moe",
        architecture: "Ernie4_5_MoeForCausalLM",
        fixed: &[
            ("position_embedding", Given::Str("rotary_interleaved")),
            ("router_bias", Given::Bool(true)),
            ("normalize_top_k", Given::Bool(true)),
        ],
        common: SHAPE_OF_ALL,
        fields: &[
            KV_HEADS,
            RMS_EPS_5,
            super::TIED_BY_DEFAULT,
            FFN,
            Field {
                names: &["moe_num_experts", "num_experts"],
                meaning: Meaning::Default("experts", Given::Int(64)),
            },
            Field {
                names: &["moe_k", "num_experts_per_tok"],
                meaning: Meaning::Default("top_k", Given::Int(6)),
            },
            field(
                &["moe_intermediate_size"],
                Meaning::Default("expert_ffn", Given::Int(1536)),
            ),
            number(
                &["moe_num_shared_experts"],
                "shared_expert_ffn",
                |file| {
                    let number = |name: &str, default| {
                        file(name).and_then(|n| n.as_u64()).unwrap_or(default)
                    };
                    let count = number("moe_num_shared_experts", 2);
                    Ok(Some((count * number("moe_intermediate_size", 1536)).into()))
                },
                |model| {
                    let [all, each] =
                        ["shared_expert_ffn", "expert_ffn"].map(|k| model[k].as_u64());
                    Some((all? / each?.max(1)).into())
                },
            ),
            derived(
                "mlp_layer_types",
                &[
                    "moe_layer_start_index",
                    "moe_layer_end_index",
                    "moe_layer_interval",
                    "moe_norm_min",
                ],
                |file| {
                    let number = |name: &str, default: i64| {
                        file(name).and_then(|n| n.as_i64()).unwrap_or(default)
                    };
                    let count = layers(file) as i64;
                    let start = number("moe_layer_start_index", 1);
                    let end = match number("moe_layer_end_index", -1) {
                        -1 => count - 1,
                        end => end,
                    };
                    let every = number("moe_layer_interval", 1).max(1);
                    let kind = |n: i64| match (n + 1) % every == 0 && (start..=end).contains(&n) {
                        true => "sparse",
                        false => "dense",
                    };
                    Ok(Some(repeated(&(0..count).map(kind).collect::<Vec<_>>())))
                },
            ),
            derived("bias", &["use_bias"], |file| {
                match file("use_bias") == Some(true.into()) {
                    true => Err("`use_bias` must be false: experts with biases in shared layers alone are not planned".to_owned()),
                    false => Ok(None),
                }
            }),
        ],
    },
];

pub(super) const EMBEDDING_MULTIPLIER: Field = field(
    &["embedding_multiplier"],
    Meaning::Optional("embedding_multiplier"),
);
pub(super) const ATTENTION_MULTIPLIER: Field = field(
    &["attention_multiplier"],
    Meaning::Default("attention_multiplier", Given::Float(1.0)),
);
pub(super) const RESIDUAL_MULTIPLIER: Field = field(
    &["residual_multiplier"],
    Meaning::Optional("residual_multiplier"),
);
pub(super) const LOGITS_SCALING: Field =
    field(&["logits_scaling"], Meaning::Optional("logits_scaling"));

/// Sizes of all layers.
const SHAPE_OF_ALL: &[Field] = &[
    VOCAB, HIDDEN, LAYERS, HEADS, HIDDEN_ACT, POSITIONS, ROPE_THETA,
];

pub(super) const SIGMOID_LATENT: &[Field] = &concat::<{ LATENT.len() + 5 }>(
    LATENT,
    &[
        field(&["scoring_func"], Meaning::Word(&["sigmoid"])),
        NORMALIZED,
        ROUTE_SCALE,
        GROUPS,
        KEPT_GROUPS,
    ],
);

/// Returns the fields of both lists, `N` in all.
pub(super) const fn concat<const N: usize>(first: &[Field], second: &[Field]) -> [Field; N] {
    let mut all = [first[0]; N];
    let mut i = 0;
    while i < N {
        all[i] = if i < first.len() {
            first[i]
        } else {
            second[i - first.len()]
        };
        i += 1;
    }
    all
}
