//! Types whose experts are part of attention, or in parallel with it.

use super::experts::{LATENT_HALVES, TOP_K};
use super::read::integer;
use super::{HIDDEN_ACT, SILU_FIRST, TIED_BY_DEFAULT, derived, number};
use crate::models::hf::{
    FFN, Field, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, TIED, VOCAB,
    field,
};
use crate::models::llama::NORM_EPS;

/// Blocks, each with two layers of attention.
const BLOCKS: Field = number(
    &["num_layers"],
    "layers",
    |file| {
        let all = file("num_hidden_layers").and_then(|n| n.as_u64());
        let blocks = file("num_layers").or_else(|| Some((all? / 2).into()));
        match blocks {
            Some(blocks) => Ok(Some(blocks)),
            None => Err("`num_layers` is missing: a longcat_flash needs it".to_owned()),
        }
    },
    |model| Some(model["layers"].clone()),
);

/// Sizes of LongCat-Flash.
const LONGCAT: &[Field] = &[
    VOCAB,
    HIDDEN,
    HEADS,
    HIDDEN_ACT,
    POSITIONS,
    Field {
        meaning: Meaning::Default("norm_eps", Given::Float(1e-5)),
        ..NORM_EPS
    },
    Field {
        meaning: Meaning::Default("rope_theta", Given::Float(1e7)),
        ..ROPE_THETA
    },
    TIED,
    BLOCKS,
    field(&["ffn_hidden_size"], Meaning::Required("ffn")),
    field(&["expert_ffn_hidden_size"], Meaning::Required("expert_ffn")),
    field(&["n_routed_experts"], Meaning::Required("experts")),
    field(&["moe_topk"], Meaning::Required("top_k")),
    field(
        &["zero_expert_num"],
        Meaning::Default("zero_experts", Given::Int(256)),
    ),
    field(
        &["routed_scaling_factor"],
        Meaning::Default("route_scale", Given::Float(6.0)),
    ),
    field(&["router_bias"], Meaning::Off),
    field(&["zero_expert_type"], Meaning::Word(&["identity"])),
    derived(
        "router",
        &[
            "attention_method",
            "mla_scale_q_lora",
            "mla_scale_kv_lora",
            "head_dim",
            "qk_head_dim",
        ],
        |_| Ok(None),
    ),
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "longcat_flash",
        architecture: "LongcatFlashForCausalLM",
        fixed: &[
            ("shortcut_experts", Given::Bool(true)),
            ("mlp_layer_types", Given::Words(&["dense"])),
            ("position_embedding", Given::Str("rotary_interleaved")),
            ("normalize_top_k", Given::Bool(false)),
        ],
        common: LONGCAT,
        fields: LATENT_HALVES,
    },
    HfType {
        model_type: "jetmoe",
        architecture: "JetMoeForCausalLM",
        fixed: &[
            ("routed_attention", Given::Bool(true)),
            ("router", Given::Str("topk_softmax")),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            POSITIONS,
            ROPE_THETA,
            TIED_BY_DEFAULT,
        ],
        fields: &[
            TOP_K,
            field(&["num_local_experts"], Meaning::Required("experts")),
            field(&["num_key_value_heads"], Meaning::Required("kv_heads")),
            field(
                &["kv_channels"],
                Meaning::Default("head_dim", Given::Int(128)),
            ),
            derived("heads", &["num_attention_heads"], |file| {
                let sets = integer(file, "num_experts_per_tok", 2);
                Ok(Some(
                    (integer(file, "num_key_value_heads", 16) * sets).into(),
                ))
            }),
            Field {
                meaning: Meaning::Default("norm_eps", Given::Float(1e-6)),
                ..NORM_EPS
            },
            field(
                &["activation_function"],
                Meaning::Choice("activation", SILU_FIRST),
            ),
            derived(
                "aux_loss",
                &["output_router_logits", "aux_loss_coef"],
                |file| {
                    let asked = file("output_router_logits") == Some(true.into());
                    let given = file("aux_loss_coef").unwrap_or_else(|| 0.01.into());
                    Ok(asked.then_some(given))
                },
            ),
        ],
    },
];
