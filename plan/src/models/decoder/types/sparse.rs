//! Mixtures of experts that differ more from Mixtral than in their sizes.

use super::experts::{
    AUX_LOSS, DEEPSEEK, EXPERT_FFN, FIRST_DENSE, HAS_AUX_LOSS, SIGMOID_LATENT, TOP_K, concat,
};
use super::{HIDDEN_ACT, derived, number};
use crate::models::hf::{
    BiasPart, FFN, Field, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA,
    TIED, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, KV_HEADS, NORM_EPS};
use crate::models::windows::{CHUNKED_LAYERS, WINDOW, every};

pub(super) const TYPES: &[HfType] = &[
    // Experts have the width of `intermediate_size`, dense layers that of `intermediate_size_mlp`.
    HfType {
        model_type: "llama4_text",
        architecture: "Llama4ForCausalLM",
        fixed: &[
            ("router", Given::Str("sigmoid")),
            ("normalize_top_k", Given::Bool(false)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            LAYERS,
            HEADS,
            HEAD_DIM,
            HIDDEN_ACT,
            POSITIONS,
            NORM_EPS,
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
            field(
                &["interleave_moe_layer_step"],
                Meaning::Optional("moe_every"),
            ),
            ATTENTION_BIAS,
            CHUNKED_LAYERS,
        ],
    },
    HfType {
        model_type: "deepseek_v32",
        architecture: "DeepseekV32ForCausalLM",
        fixed: &[("router", Given::Str("sigmoid"))],
        common: DEEPSEEK,
        fields: &concat::<{ SIGMOID_LATENT.len() + 3 }>(
            SIGMOID_LATENT,
            &[
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
            // A clamp of gate and factor, and a shift of the factor, are not counted.
            derived(
                "activation",
                &["swiglu_limit", "initial_context_length"],
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
