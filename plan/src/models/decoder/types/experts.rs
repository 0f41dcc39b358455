//! Mixtures of experts.

use super::HIDDEN_ACT;
use crate::models::hf::{
    BiasPart, Computed, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning,
    POSITIONS, ROPE_THETA, TIED, VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, KV_HEADS, NORM_EPS};
use crate::models::windows::{ASKED_WINDOW, USES_WINDOW, WINDOW};
use serde_json::Value;

const TOP_K: Field = field(&["num_experts_per_tok"], Meaning::Required("top_k"));
const EXPERT_FFN: Field = field(&["moe_intermediate_size"], Meaning::Required("expert_ffn"));
const NORMALIZE: Field = field(
    &["norm_topk_prob"],
    Meaning::Default("normalize_top_k", Given::Bool(false)),
);
/// Transformers 5 writes the second name.
const EXPERTS: Field = Field {
    names: &["num_experts", "num_local_experts"],
    meaning: Meaning::Required("experts"),
};
const SPARSE_STEP: Field = field(&["decoder_sparse_step"], Meaning::Optional("moe_every"));
/// Layers without experts: the first ones, or none.
const DENSE: Field = field(
    &["mlp_only_layers"],
    Meaning::Computed(
        "dense_layers",
        Computed {
            also: &[],
            read: |file| {
                let Some(Value::Array(layers)) = file("mlp_only_layers") else {
                    return Ok(None);
                };
                let first = (0u64..).zip(&layers).all(|(n, layer)| *layer == n);
                match first {
                    true => Ok(Some(layers.len().into())),
                    false => Err("`mlp_only_layers` must list the first layers".to_owned()),
                }
            },
            write: |model| Some((0..model["dense_layers"].as_u64()?).collect()),
        },
    ),
);
/// Without the logits of the routers, transformers computes no loss of them.
const HAS_AUX_LOSS: Field = field(
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
const AUX_LOSS: Field = field(
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

const SHAPE: &[Field] = &[
    VOCAB, HIDDEN, FFN, LAYERS, HEADS, HIDDEN_ACT, POSITIONS, NORM_EPS, ROPE_THETA, HAS_AUX_LOSS,
    AUX_LOSS, TIED,
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        fixed: &[
            ("model_type", Given::Str("mixtral")),
            ("bias", Given::Bool(false)),
            ("normalize_top_k", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, HIDDEN_ACT, POSITIONS, ROPE_THETA, HAS_AUX_LOSS,
            AUX_LOSS, TIED,
        ],
        fields: &[
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
        ],
    },
    HfType {
        model_type: "qwen2_moe",
        architecture: "Qwen2MoeForCausalLM",
        fixed: &[
            ("model_type", Given::Str("qwen2_moe")),
            ("shared_expert_gate", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: SHAPE,
        fields: &[
            KV_HEADS,
            HEAD_DIM,
            ASKED_WINDOW,
            USES_WINDOW,
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
            field(&["qkv_bias"], Meaning::HasBias(BiasPart::Qkv, true)),
        ],
    },
    HfType {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        fixed: &[
            ("model_type", Given::Str("qwen3_moe")),
            ("qk_norm", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: SHAPE,
        fields: &[
            KV_HEADS,
            field(&["head_dim"], Meaning::Default("head_dim", Given::Int(128))),
            ATTENTION_BIAS,
            ASKED_WINDOW,
            USES_WINDOW,
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            NORMALIZE,
            SPARSE_STEP,
            DENSE,
        ],
    },
    HfType {
        model_type: "olmoe",
        architecture: "OlmoeForCausalLM",
        fixed: &[
            ("model_type", Given::Str("olmoe")),
            ("qk_norm", Given::Str("full")),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        common: &[
            VOCAB, HIDDEN, FFN, LAYERS, HEADS, HIDDEN_ACT, POSITIONS, ROPE_THETA, HAS_AUX_LOSS,
            AUX_LOSS, TIED,
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
            field(&["clip_qkv"], Meaning::Off),
        ],
    },
];
