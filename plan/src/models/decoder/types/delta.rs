//! Types with linear attention in some layers: the gated delta rule.

use super::experts::{
    DENSE, EXPERT_FFN, EXPERTS as ALL_EXPERTS, KEPT_GROUPS, MIXED, NORMALIZED, ROUTE_SCALE, concat,
    shared,
};
use super::hybrid::NO_POSITIONS;
use super::read::{FULL, LINEAR, Listed, NO_ROPE, SLIDING, by_layer, integer, words};
use super::routed::mlp_types;
use super::{HEAD_DIM_256, HIDDEN_ACT, PARTIAL, RMS_EPS_5, TIED_BY_DEFAULT, derived, number};
use crate::models::hf::{
    FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, TIED,
    VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM_128, KV_HEADS, NORM_EPS};
use crate::models::windows::{layers, repeated};
use serde_json::{Value, json};

/// Every `full_attention_interval`-th layer has softmax attention, if no list says otherwise.
const DELTA_LAYERS: Field = number(
    &["layer_types"],
    "layer_types",
    |file| {
        let listed = Listed::of(file, &["layer_types"]);
        let n = integer(file, "full_attention_interval", 4).max(1);
        by_layer(file, |layer| {
            let full = listed.is(layer, FULL, (layer + 1).is_multiple_of(n));
            if full { FULL } else { LINEAR }
        })
    },
    |_| None,
);

/// Sizes of the gated delta rule, whose defaults are those of `Qwen3NextConfig`.
const fn delta(projections: DeltaProjections) -> Field {
    let read: fn(Fields<'_>) -> Result<Option<Value>, String> = match projections {
        DeltaProjections::Two => |file| Ok(Some(delta_sizes(file, [16, 32], 2))),
        DeltaProjections::Four => |file| Ok(Some(delta_sizes(file, [16, 32], 4))),
        DeltaProjections::FourOfLara => |file| Ok(Some(delta_sizes(file, [8, 16], 4))),
    };
    derived(
        "linear_attention",
        &[
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "full_attention_interval",
            "attn_output_gate",
            "mamba_ssm_dtype",
        ],
        read,
    )
}

enum DeltaProjections {
    Two,
    Four,
    /// As many, with the fewer heads that Lara Mini's class has by default.
    FourOfLara,
}

/// `heads` are those of keys and of values by default.
fn delta_sizes(file: Fields<'_>, heads: [u64; 2], projections: u64) -> Value {
    json!({
        "key_heads": integer(file, "linear_num_key_heads", heads[0]),
        "value_heads": integer(file, "linear_num_value_heads", heads[1]),
        "key_dim": integer(file, "linear_key_head_dim", 128),
        "value_dim": integer(file, "linear_value_head_dim", 128),
        "conv": integer(file, "linear_conv_kernel_dim", 4),
        "projections": projections,
    })
}

/// Returns the heads of Kimi Linear's layers with the delta rule, the width of one, and the
/// positions that the convolution sees. An object of published files has precedence.
fn kimi_sizes(file: Fields<'_>) -> [u64; 3] {
    let inner = file("linear_attn_config");
    let of = |theirs: &str, name: &str, default| {
        let nested = inner.as_ref().and_then(|all| all.get(theirs)?.as_u64());
        nested.unwrap_or_else(|| integer(file, name, default))
    };
    [
        of("num_heads", "linear_num_heads", 32),
        of("head_dim", "linear_head_dim", 128),
        of("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    ]
}

/// Every fourth layer after the first has latent attention unless a list says otherwise; those of
/// the object of published files count from 1.
fn kimi_layers(file: Fields<'_>) -> Result<Option<Value>, String> {
    let listed = words(file, "layer_types");
    let inner = file("linear_attn_config");
    let named = |name: &str| {
        inner
            .as_ref()
            .and_then(|all| all.get(name)?.as_array().cloned())
    };
    let both = named("full_attn_layers").zip(named("kda_layers"));
    let n = layers(file);
    let kind = |layer: u64| {
        if let Some(listed) = &listed {
            return match listed.get(layer as usize).map(String::as_str) {
                Some(FULL) => Ok(FULL),
                Some(LINEAR) => Ok(LINEAR),
                _ => Err(format!(
                    "`layer_types` must name {FULL} or {LINEAR} for each layer"
                )),
            };
        }
        let Some((full, delta)) = &both else {
            return Ok(if layer > 0 && layer.is_multiple_of(4) {
                FULL
            } else {
                LINEAR
            });
        };
        let has = |list: &[Value]| list.contains(&(layer + 1).into());
        match (has(full), has(delta)) {
            (true, false) => Ok(FULL),
            (false, true) => Ok(LINEAR),
            _ => Err(format!(
                "`linear_attn_config`: layer {} must be in one of `full_attn_layers` and `kda_layers`",
                layer + 1
            )),
        }
    };
    let all: Vec<&str> = (0..n).map(kind).collect::<Result<_, _>>()?;
    Ok(Some(repeated(&all)))
}

const PARTIAL_QUARTER: Field = Field {
    meaning: Meaning::Default("partial_rotary_factor", Given::Float(0.25)),
    ..PARTIAL
};
const DELTA_FIXED: [(&str, Given); 3] = [
    ("norm", Given::Str("rms_norm_unit_offset")),
    ("qk_norm", Given::Bool(true)),
    ("attention_gate", Given::Str("element")),
];
const DELTA_SHAPE: &[Field] = &[
    VOCAB,
    HIDDEN,
    LAYERS,
    HEADS,
    KV_HEADS,
    HEAD_DIM_256,
    HIDDEN_ACT,
    POSITIONS,
    NORM_EPS,
    ROPE_THETA,
    PARTIAL_QUARTER,
    ATTENTION_BIAS,
    TIED,
    DELTA_LAYERS,
];

const SPARSE: &[Field] = &[
    field(
        &["num_experts"],
        Meaning::Default("experts", Given::Int(512)),
    ),
    field(
        &["num_experts_per_tok"],
        Meaning::Default("top_k", Given::Int(10)),
    ),
    field(
        &["moe_intermediate_size"],
        Meaning::Default("expert_ffn", Given::Int(512)),
    ),
    field(
        &["shared_expert_intermediate_size"],
        Meaning::Default("shared_expert_ffn", Given::Int(512)),
    ),
    field(&["decoder_sparse_step"], Meaning::Optional("moe_every")),
    field(&["norm_topk_prob"], Meaning::Optional("normalize_top_k")),
    field(&["intermediate_size"], Meaning::Optional("ffn")),
];

/// Fields of types with the delta rule in some layers, latent attention in the others, and experts.
const LATENT_AND_DELTA: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    KV_HEADS,
    HIDDEN_ACT,
    EXPERT_FFN,
    ALL_EXPERTS,
    KEPT_GROUPS,
    ATTENTION_BIAS,
    Field {
        names: &["max_position_embeddings", "model_max_length"],
        ..POSITIONS
    },
    Field {
        names: &["num_experts_per_token", "num_experts_per_tok"],
        meaning: Meaning::Default("top_k", Given::Int(8)),
    },
    Field {
        names: &["moe_renormalize", "norm_topk_prob"],
        ..NORMALIZED
    },
    Field {
        names: &["num_expert_group", "n_group"],
        meaning: Meaning::Optional("router_groups"),
    },
    derived(
        "shared_expert_ffn",
        &["num_shared_experts", "n_shared_experts"],
        |file| shared(file, &["num_shared_experts", "n_shared_experts"], 1),
    ),
    field(
        &["kv_lora_rank"],
        Meaning::Default("kv_lora_rank", Given::Int(512)),
    ),
    field(&["q_lora_rank"], Meaning::Optional("q_lora_rank")),
    field(
        &["qk_rope_head_dim"],
        Meaning::Default("qk_rope_head_dim", Given::Int(64)),
    ),
    field(
        &["v_head_dim"],
        Meaning::Default("v_head_dim", Given::Int(128)),
    ),
    derived(
        "head_dim",
        // The file's `head_dim` is read by nothing.
        &["qk_nope_head_dim", "qk_head_dim", "head_dim", "rope_theta"],
        |file| {
            let of = |name, default| integer(file, name, default);
            Ok(Some(
                (of("qk_nope_head_dim", 128) + of("qk_rope_head_dim", 64)).into(),
            ))
        },
    ),
];

pub(super) const TYPES: &[HfType] = &[HfType {
    model_type: "qwen3_5_text",
    architecture: "Qwen3_5ForCausalLM",
    fixed: &[DELTA_FIXED[0], DELTA_FIXED[1], DELTA_FIXED[2]],
    common: DELTA_SHAPE,
    fields: &[FFN, delta(DeltaProjections::Four)],
}];

/// Types of family `moe`.
pub(super) const EXPERTS: &[HfType] = &[
    HfType {
        model_type: "qwen3_next",
        architecture: "Qwen3NextForCausalLM",
        fixed: &[
            DELTA_FIXED[0],
            DELTA_FIXED[1],
            DELTA_FIXED[2],
            ("shared_expert_gate", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: DELTA_SHAPE,
        fields: &concat::<{ SPARSE.len() + 3 }>(
            SPARSE,
            &[DENSE, MIXED, delta(DeltaProjections::Two)],
        ),
    },
    HfType {
        model_type: "qwen3_5_moe_text",
        architecture: "Qwen3_5MoeForCausalLM",
        fixed: &[
            DELTA_FIXED[0],
            DELTA_FIXED[1],
            DELTA_FIXED[2],
            ("shared_expert_gate", Given::Bool(true)),
            ("normalize_top_k", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: DELTA_SHAPE,
        fields: &concat::<{ SPARSE.len() + 1 }>(SPARSE, &[delta(DeltaProjections::Four)]),
    },
    HfType {
        model_type: "kimi_linear",
        architecture: "KimiLinearForCausalLM",
        fixed: &[("router", Given::Str("sigmoid")), NO_POSITIONS],
        common: LATENT_AND_DELTA,
        fields: &[
            RMS_EPS_5,
            // The class has no weights to tie.
            field(&["tie_word_embeddings"], Meaning::Off),
            Field {
                meaning: Meaning::Default("route_scale", Given::Float(2.446)),
                ..ROUTE_SCALE
            },
            field(&["mla_use_nope"], Meaning::On),
            field(&["moe_router_activation_func"], Meaning::Word(&["sigmoid"])),
            derived("layer_types", &["layer_types"], kimi_layers),
            mlp_types::<1>(),
            derived(
                "linear_attention",
                &[
                    "linear_attn_config",
                    "linear_head_dim",
                    "linear_num_heads",
                    "linear_conv_kernel_dim",
                    "use_grouped_topk",
                    "moe_layer_freq",
                    "num_nextn_predict_layers",
                    "output_router_logits",
                ],
                |file| {
                    if integer(file, "moe_layer_freq", 1) != 1 {
                        return Err("`moe_layer_freq` must be 1".to_owned());
                    }
                    let [heads, width, conv] = kimi_sizes(file);
                    Ok(Some(json!({
                        "key_heads": heads,
                        "value_heads": heads,
                        "key_dim": width,
                        "value_dim": width,
                        "conv": conv,
                        "gate_rank": width,
                    })))
                },
            ),
        ],
    },
    // Layers that see all positions do not rotate.
    HfType {
        model_type: "lara_mini",
        architecture: "LaraMiniForCausalLM",
        fixed: &[
            DELTA_FIXED[1],
            ("normalize_top_k", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: &[
            VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HIDDEN_ACT, POSITIONS, NORM_EPS, ROPE_THETA,
        ],
        fields: &[
            HEAD_DIM_128,
            ATTENTION_BIAS,
            TIED_BY_DEFAULT,
            field(
                &["sliding_window"],
                Meaning::Default("sliding_window", Given::Int(512)),
            ),
            derived("layer_types", &["layer_types"], |file| {
                const PATTERN: [&str; 5] = [LINEAR, SLIDING, LINEAR, NO_ROPE, SLIDING];
                let listed = Listed::of(file, &["layer_types"]);
                by_layer(file, |layer| match listed.word(layer) {
                    Some(FULL) => NO_ROPE,
                    Some(SLIDING) => SLIDING,
                    Some(_) => LINEAR,
                    None => PATTERN[(layer % 5) as usize],
                })
            }),
            delta(DeltaProjections::FourOfLara),
            derived("ffn", &[], |file| Ok(file("moe_intermediate_size"))),
            Field {
                names: &["num_experts", "num_local_experts"],
                meaning: Meaning::Default("experts", Given::Int(128)),
            },
            field(
                &["num_experts_per_tok"],
                Meaning::Default("top_k", Given::Int(4)),
            ),
            SPARSE[2],
            SPARSE[3],
            NORMALIZED,
        ],
    },
    // Gates of the delta rule have one projection each, and every channel has a decay.
    HfType {
        model_type: "bailing_hybrid",
        architecture: "BailingHybridForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("position_embedding", Given::Str("rotary_interleaved")),
            ("attention_gate", Given::Str("head")),
        ],
        common: LATENT_AND_DELTA,
        fields: &[
            NORM_EPS,
            // The class has no weights to tie.
            field(&["tie_word_embeddings"], Meaning::Off),
            Field {
                meaning: Meaning::Default("rope_theta", Given::Float(6e6)),
                ..ROPE_THETA
            },
            Field {
                meaning: Meaning::Default("route_scale", Given::Float(2.5)),
                ..ROUTE_SCALE
            },
            mlp_types::<2>(),
            derived(
                "layer_types",
                &["layer_types", "layer_group_size"],
                |file| {
                    let listed = Listed::of(file, &["layer_types"]);
                    let n = integer(file, "layer_group_size", 6).max(1);
                    by_layer(file, |layer| {
                        let full = listed.is(layer, FULL, (layer + 1).is_multiple_of(n));
                        if full { FULL } else { LINEAR }
                    })
                },
            ),
            derived(
                "linear_attention",
                &[
                    "short_conv_kernel_size",
                    "linear_conv_kernel_dim",
                    "linear_head_dim",
                    "linear_num_heads",
                    "kda_safe_gate",
                    "kda_lower_bound",
                    "mtp_loss_scaling_factor",
                    "num_mtp_layers",
                    "num_nextn_predict_layers",
                    "output_router_logits",
                ],
                |file| {
                    // Files that transformers writes have a `head_dim` of latent attention.
                    let heads = integer(file, "num_attention_heads", 32);
                    let heads = integer(file, "linear_num_heads", heads);
                    let width = integer(file, "head_dim", 128);
                    let width = integer(file, "linear_head_dim", width);
                    // The class computes the second name from the first one, unless it is given.
                    let conv = integer(file, "short_conv_kernel_size", 4);
                    Ok(Some(json!({
                        "key_heads": heads,
                        "value_heads": heads,
                        "key_dim": width,
                        "value_dim": width,
                        "conv": integer(file, "linear_conv_kernel_dim", conv),
                        "projections": 6,
                        "channel_decays": true,
                    })))
                },
            ),
        ],
    },
];
