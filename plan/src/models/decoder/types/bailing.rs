//! Ling and Ring (Bailing): mixtures of experts in the code that comes with their files.

use super::experts::{
    EXPERT_FFN, EXPERTS as ALL_EXPERTS, FIRST_DENSE, GROUPS, KEPT_GROUPS, NORMALIZED, ROUTE_SCALE,
    TOP_K,
};
use super::read::integer;
use super::{HIDDEN_ACT, PARTIAL, derived, number};
use crate::models::hf::{
    BiasPart, FFN, Field, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA,
    TIED, VOCAB, field,
};
use crate::models::llama::{HEAD_DIM, KV_HEADS, NORM_EPS};
use serde_json::Value;

const FIELDS: &[Field] = &[
    HIDDEN_ACT,
    NORM_EPS,
    TIED,
    PARTIAL,
    FIRST_DENSE,
    NORMALIZED,
    ROUTE_SCALE,
    GROUPS,
    KEPT_GROUPS,
    field(
        &["use_qk_norm"],
        Meaning::Default("qk_norm", Given::Bool(false)),
    ),
    field(&["use_qkv_bias"], Meaning::HasBias(BiasPart::Qkv, false)),
    field(&["use_bias"], Meaning::Off),
    field(&["norm_head"], Meaning::Off),
    // Shared experts are one of their total width.
    derived(
        "shared_expert_ffn",
        &["num_shared_experts", "moe_shared_expert_intermediate_size"],
        |file| {
            let each = integer(file, "moe_intermediate_size", 0);
            let each = integer(file, "moe_shared_expert_intermediate_size", each);
            Ok(Some((each * integer(file, "num_shared_experts", 0)).into()))
        },
    ),
    // Version 2 has sigmoids and biases that choose experts.
    number(
        &["score_function"],
        "router",
        |file| {
            let second = file("architectures").is_some_and(|classes| {
                let first = classes.get(0).and_then(Value::as_str);
                first.is_some_and(|class| class.starts_with("BailingMoeV2"))
            });
            match file("score_function").as_ref().and_then(Value::as_str) {
                Some("sigmoid") => Ok(Some("sigmoid".into())),
                Some("softmax") => Ok(None),
                None => Ok(second.then(|| "sigmoid".into())),
                Some(other) => Err(format!(
                    "`score_function` must be softmax or sigmoid, not {other:?}"
                )),
            }
        },
        |model| Some(model["router"].clone()),
    ),
];

const fn bailing(model_type: &'static str, architecture: &'static str) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed: &[],
        common: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            POSITIONS,
            ROPE_THETA,
            ALL_EXPERTS,
            TOP_K,
            EXPERT_FFN,
        ],
        fields: FIELDS,
    }
}

pub(super) const TYPES: &[HfType] = &[
    bailing("bailing_moe", "BailingMoeForCausalLM"),
    bailing("bailing_moe_v2", "BailingMoeV2ForCausalLM"),
];
