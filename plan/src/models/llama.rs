//! Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU. With `qk_norm`, Qwen3; with
//! multipliers, Granite. The plain case of [`decoder`](super::decoder).

use super::declare::Weights;
use super::decoder::{Decoder, rotated};
use super::hf::{
    BiasPart, FFN, Field, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA,
    TIED, VOCAB, field,
};
use super::spec::{Conflict, DEFAULT_SEQ_LEN, Defaults, FamilySpec, Inputs, Mask};
use super::windows::{ASKED_LAYERS, ASKED_WINDOW, USES_WINDOW, WINDOW_4096};
use crate::config::{Bias, Family, Model};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Llama,
    name: "llama",
    keys: &[
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "tie_embeddings",
        "norm_eps",
        "qk_norm",
        "rope_theta",
        "rope_scaling",
        "sliding_window",
        "layer_types",
        "vision",
        "audio",
        "vision_patches",
        "max_seq_len",
        "implementation",
        "attn_implementation",
        "dropout",
        "attention_dropout",
        "embedding_dropout",
        "model_type",
        "head",
        "num_labels",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ],
    defaults: Defaults {
        bias: Bias::None,
        tie_embeddings: false,
        ffn: |hidden| (8 * hidden).div_ceil(3).next_multiple_of(FFN_MULTIPLE),
        ffn_multiple: FFN_MULTIPLE,
        max_seq_len: |asked| Some(asked.unwrap_or(DEFAULT_SEQ_LEN)),
        seq_len: |max| max.unwrap_or(DEFAULT_SEQ_LEN).min(DEFAULT_SEQ_LEN),
    },
    inputs: Inputs::Tokens,
    attention: Some(Mask::Causal),
    tensor_parallel: None,
    expert_parallel: None,
    torch_modules: false,
    keeps_type: false,
    weights: Weights::Normal,
    hf: HF,
    dimensions: |m| {
        vec![
            ("vocab", m.vocab),
            ("hidden", m.hidden),
            ("ffn", m.ffn),
            ("heads x head_dim", m.heads * m.head_dim),
            ("kv_heads x head_dim", m.kv_heads * m.head_dim),
        ]
    },
    check: check_rotary,
    declare: |d, m| Box::new(Decoder::new(d, m)),
};

pub(super) const SILU: Field = field(&["hidden_act"], Meaning::Word(&["silu", "swish"]));
pub(super) const KV_HEADS: Field = field(&["num_key_value_heads"], Meaning::Optional("kv_heads"));
pub(super) const HEAD_DIM: Field = field(&["head_dim"], Meaning::Optional("head_dim"));
/// As [`HEAD_DIM`], in classes whose heads have 128 dimensions by default.
pub(super) const HEAD_DIM_128: Field =
    field(&["head_dim"], Meaning::Default("head_dim", Given::Int(128)));
pub(super) const NORM_EPS: Field = field(
    &["rms_norm_eps"],
    Meaning::Default("norm_eps", Given::Float(1e-6)),
);
pub(super) const ATTENTION_BIAS: Field = field(
    &["attention_bias"],
    Meaning::HasBias(BiasPart::Attention, false),
);
pub(super) const MLP_BIAS: Field = field(&["mlp_bias"], Meaning::HasBias(BiasPart::Mlp, false));

const HF: &[HfType] = &[
    HfType {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        fixed: &[],
        common: &[],
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
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED,
        ],
    },
    HfType {
        model_type: "granite",
        architecture: "GraniteForCausalLM",
        fixed: &[],
        common: &[],
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
            ATTENTION_BIAS,
            MLP_BIAS,
            TIED,
            field(
                &["embedding_multiplier"],
                Meaning::Optional("embedding_multiplier"),
            ),
            field(
                &["attention_multiplier"],
                Meaning::Default("attention_multiplier", Given::Float(1.0)),
            ),
            field(
                &["residual_multiplier"],
                Meaning::Optional("residual_multiplier"),
            ),
            field(&["logits_scaling"], Meaning::Optional("logits_scaling")),
        ],
    },
    HfType {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        fixed: &[("bias", Given::Bool(false))],
        common: &[],
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
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            WINDOW_4096,
            TIED,
        ],
    },
    HfType {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        fixed: &[("bias", Given::Str("qkv"))],
        common: &[],
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
            ASKED_WINDOW,
            USES_WINDOW,
            ASKED_LAYERS,
            TIED,
        ],
    },
    HfType {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        fixed: &[("qk_norm", Given::Bool(true))],
        common: &[],
        fields: &[
            VOCAB,
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            KV_HEADS,
            HEAD_DIM_128,
            SILU,
            POSITIONS,
            NORM_EPS,
            ROPE_THETA,
            ASKED_WINDOW,
            USES_WINDOW,
            ASKED_LAYERS,
            ATTENTION_BIAS,
            TIED,
        ],
    },
];

/// The default width of the feed-forward layer is a multiple of this.
pub(super) const FFN_MULTIPLE: u64 = 256;

/// Refuses rotary embeddings that do not fit the heads.
pub(super) fn check_rotary(m: &Model) -> Result<(), Conflict> {
    let dims = rotated(m);
    let full = m
        .options
        .attention
        .full_head_dim
        .filter(|_| !m.options.latent.is_used());
    let full = full.map(|dims| (dims as f64 * m.options.positions.partial_rotary_factor) as u64);
    if let Some(dims) = full.filter(|dims| *dims == 0 || !dims.is_multiple_of(2)) {
        let message = format!(
            "the rotary embedding rotates pairs: the rotated part of full_head_dim ({dims}) must be even"
        );
        return Err(Conflict::new(
            &["full_head_dim", "partial_rotary_factor"],
            message,
        ));
    }
    if dims == 0 || !dims.is_multiple_of(2) {
        let message = format!(
            "the rotary embedding rotates pairs: the rotated part of the head dimension ({dims}) must be even"
        );
        return Err(Conflict::new(
            &["head_dim", "partial_rotary_factor", "heads", "hidden"],
            message,
        ));
    }
    let scaling = m.options.positions.rope_scaling.as_ref();
    match scaling.and_then(|scaling| scaling.missing(dims / 2)) {
        Some(what) => Err(Conflict::new(
            &["rope_scaling"],
            format!("rope_scaling: {what}"),
        )),
        None => Ok(()),
    }
}
