//! Mixtures of experts in the `config.json` and the weights of transformers.

use super::super::hf::{
    FFN, Field, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, ROPE_THETA, TIED, VOCAB, field,
};
use super::super::llama::{HEAD_DIM, KV_HEADS, NORM_EPS, SILU, SLIDES};
use crate::config::{Bias, Model};

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
const DENSE: Field = field(&["mlp_only_layers"], Meaning::NoneOf);
const POSITIONS: Field = field(
    &["max_position_embeddings"],
    Meaning::Positions { slides: false },
);
/// Without the logits of the routers, transformers computes no loss of them.
const ROUTER_LOGITS: &str = "output_router_logits";
const HAS_AUX_LOSS: Field = field(&[ROUTER_LOGITS], Meaning::Positive("aux_loss"));
const AUX_LOSS: Field = field(
    &["router_aux_loss_coef"],
    Meaning::When("aux_loss", ROUTER_LOGITS, Given::Float(0.001)),
);

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        fixed: &[
            ("bias", Given::Bool(false)),
            ("normalize_top_k", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            field(
                &["num_key_value_heads"],
                Meaning::Default("kv_heads", Given::Int(8)),
            ),
            HEAD_DIM,
            SILU,
            field(
                &["max_position_embeddings"],
                Meaning::Positions { slides: true },
            ),
            field(
                &["rms_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-5)),
            ),
            ROPE_THETA,
            field(
                &["num_local_experts"],
                Meaning::Default("experts", Given::Int(8)),
            ),
            field(
                &["num_experts_per_tok"],
                Meaning::Default("top_k", Given::Int(2)),
            ),
            HAS_AUX_LOSS,
            AUX_LOSS,
            TIED,
        ],
    },
    HfType {
        model_type: "qwen2_moe",
        architecture: "Qwen2MoeForCausalLM",
        fixed: &[
            ("bias", Given::Str("qkv")),
            ("shared_expert_gate", Given::Bool(true)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            SILU,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            SLIDES,
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
            HAS_AUX_LOSS,
            AUX_LOSS,
            TIED,
        ],
    },
    HfType {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        fixed: &[
            ("qk_norm", Given::Bool(true)),
            ("bias", Given::Bool(false)),
            ("aux_loss_kind", Given::Str("hf")),
        ],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            field(&["head_dim"], Meaning::Default("head_dim", Given::Int(128))),
            SILU,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            SLIDES,
            field(&["attention_bias"], Meaning::Off),
            EXPERTS,
            TOP_K,
            EXPERT_FFN,
            NORMALIZE,
            SPARSE_STEP,
            DENSE,
            HAS_AUX_LOSS,
            AUX_LOSS,
            TIED,
        ],
    },
];

/// Names of modules within a block.
pub(super) struct Names {
    pub(super) router: &'static str,
    pub(super) experts: &'static str,
    /// Layers of an expert whose weights form the first stack.
    pub(super) gate_up: &'static [&'static str],
    pub(super) down: &'static [&'static str],
    pub(super) shared: &'static str,
    pub(super) shared_gate: &'static str,
}

const MIXTRAL: Names = Names {
    router: "block_sparse_moe.gate",
    experts: "block_sparse_moe.experts",
    gate_up: &["w1", "w3"],
    down: &["w2"],
    ..QWEN
};

const QWEN: Names = Names {
    router: "mlp.gate",
    experts: "mlp.experts",
    gate_up: &["gate_proj", "up_proj"],
    down: &["down_proj"],
    shared: "mlp.shared_expert",
    shared_gate: "mlp.shared_expert_gate",
};

/// Returns the names of a model's modules: Mixtral's if it has none of Qwen's options.
pub(super) fn names(m: &Model) -> &'static Names {
    let of = &m.options.experts;
    let qwen = m.options.qk_norm || m.bias != Bias::None || of.shared_expert_ffn > 0;
    if qwen || of.expert_ffn.is_some() || of.moe_every > 1 {
        &QWEN
    } else {
        &MIXTRAL
    }
}
