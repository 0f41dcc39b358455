//! Types with windows, norms in other places, or positions in some layers only.

use super::read::{FULL, Listed, NO_ROPE, SLIDING, by_layer};
use super::{
    HEAD_DIM_256, HIDDEN_ACT, LAYER_NORM_EPS, RMS_EPS_5, TIED_BY_DEFAULT, derived, number, rounded,
};
use crate::models::hf::{
    FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, POSITIONS, ROPE_THETA, TIED,
    VOCAB, field,
};
use crate::models::llama::{ATTENTION_BIAS, HEAD_DIM, KV_HEADS, NORM_EPS};
use crate::models::windows::{
    ROPE_LAYERS, ROPE_MARKS, WINDOW, WINDOW_4096, every, every_without_rope,
};

const SHAPE: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    KV_HEADS,
    POSITIONS,
    ROPE_THETA,
    ATTENTION_BIAS,
];

/// As [`SHAPE`], in types whose layers with a window have a base of their own.
const SHAPE_WITHOUT_ROPE: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    KV_HEADS,
    POSITIONS,
    ATTENTION_BIAS,
];

/// Command's blocks.
const COHERE: &[(&str, Given)] = &[
    ("norm", Given::Str("layer_norm_no_bias")),
    ("residual", Given::Str("parallel_one_norm")),
    ("position_embedding", Given::Str("rotary_interleaved")),
];

/// Activation of Gemma's classes, which replace exact GELU.
pub(super) const GELU_TANH: Field = Field {
    names: &["hidden_activation"],
    meaning: Meaning::Choice(
        "activation",
        &[("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu_tanh")],
    ),
};

/// Gemma multiplies embedded tokens by the root of the width.
pub(super) const ROOT_OF_WIDTH: Field = derived("embedding_multiplier", &["hidden_act"], |file| {
    Ok(file("hidden_size").and_then(|h| Some(h.as_f64()?.sqrt().into())))
});

/// The number whose root divides attention scores.
const QUERY_SCALAR: Field = number(
    &["query_pre_attn_scalar"],
    "attention_multiplier",
    |file| {
        let scalar = file("query_pre_attn_scalar").and_then(|x| x.as_f64());
        Ok(Some(scalar.unwrap_or(256.0).powf(-0.5).into()))
    },
    |model| Some(rounded(model["attention_multiplier"].as_f64()?.powi(-2))),
);

/// Command R multiplies logits.
pub(super) const LOGIT_SCALE: Field = number(
    &["logit_scale"],
    "logits_scaling",
    |file| {
        let scale = file("logit_scale").and_then(|x| x.as_f64());
        Ok(Some((1.0 / scale.unwrap_or(0.0625)).into()))
    },
    |model| Some((1.0 / model["logits_scaling"].as_f64()?).into()),
);

/// Command R+ normalizes queries and keys.
const HEAD_NORMS: Field = number(
    &["use_qk_norm"],
    "qk_norm",
    |file: Fields<'_>| {
        let on = file("use_qk_norm") == Some(true.into());
        Ok(on.then(|| "each_head".into()))
    },
    |model| Some((model["qk_norm"] == "each_head").into()),
);

/// The base of layers with a window.
pub(super) const LOCAL_THETA: Field = Field {
    names: &[
        "rope_local_base_freq",
        "rope_parameters.sliding_attention.rope_theta",
    ],
    meaning: Meaning::Default("rope_local_theta", Given::Float(1e4)),
};
pub(super) const LARGE_THETA: Field = Field {
    names: &[
        "rope_theta",
        "rope_parameters.full_attention.rope_theta",
        "rope_parameters.rope_theta",
    ],
    meaning: Meaning::Default("rope_theta", Given::Float(1e6)),
};

/// Fields of Gemma 2 next to its shape.
const GEMMA2: &[Field] = &[
    HEAD_DIM_256,
    NORM_EPS,
    GELU_TANH,
    ROOT_OF_WIDTH,
    TIED_BY_DEFAULT,
    QUERY_SCALAR,
    WINDOW_4096,
    every::<2>(),
    field(
        &["attn_logit_softcapping"],
        Meaning::Nullable("attention_softcap", Given::Float(50.0)),
    ),
    field(
        &["final_logit_softcapping"],
        Meaning::Nullable("logits_softcap", Given::Float(30.0)),
    ),
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "gemma",
        architecture: "GemmaForCausalLM",
        fixed: &[("norm", Given::Str("rms_norm_unit_offset"))],
        common: SHAPE,
        fields: &[
            HEAD_DIM_256,
            NORM_EPS,
            GELU_TANH,
            ROOT_OF_WIDTH,
            TIED_BY_DEFAULT,
        ],
    },
    HfType {
        model_type: "gemma2",
        architecture: "Gemma2ForCausalLM",
        fixed: &[
            ("norm", Given::Str("rms_norm_unit_offset")),
            ("norm_position", Given::Str("both")),
        ],
        common: SHAPE,
        fields: GEMMA2,
    },
    HfType {
        model_type: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        fixed: &[
            ("norm", Given::Str("rms_norm_unit_offset")),
            ("norm_position", Given::Str("both")),
            ("qk_norm", Given::Bool(true)),
        ],
        common: SHAPE_WITHOUT_ROPE,
        fields: &[
            LARGE_THETA,
            LOCAL_THETA,
            HEAD_DIM_256,
            NORM_EPS,
            GELU_TANH,
            ROOT_OF_WIDTH,
            TIED_BY_DEFAULT,
            QUERY_SCALAR,
            WINDOW_4096,
            every::<6>(),
            field(
                &["attn_logit_softcapping"],
                Meaning::Optional("attention_softcap"),
            ),
            field(
                &["final_logit_softcapping"],
                Meaning::Optional("logits_softcap"),
            ),
        ],
    },
    HfType {
        model_type: "cohere",
        architecture: "CohereForCausalLM",
        fixed: COHERE,
        common: SHAPE,
        fields: &[
            HEAD_DIM,
            LAYER_NORM_EPS,
            HIDDEN_ACT,
            LOGIT_SCALE,
            HEAD_NORMS,
            TIED_BY_DEFAULT,
        ],
    },
    HfType {
        model_type: "cohere2",
        architecture: "Cohere2ForCausalLM",
        fixed: COHERE,
        common: SHAPE,
        fields: &[
            HEAD_DIM,
            LAYER_NORM_EPS,
            HIDDEN_ACT,
            LOGIT_SCALE,
            TIED_BY_DEFAULT,
            WINDOW_4096,
            every_without_rope::<4>(),
        ],
    },
    // Layers of a type without `rope_parameters` do not rotate.
    HfType {
        model_type: "cohere_compass_text",
        architecture: "CohereCompassForCausalLM",
        fixed: COHERE,
        common: SHAPE_WITHOUT_ROPE,
        fields: &[
            Field {
                names: &[
                    "rope_theta",
                    "rope_parameters.sliding_attention.rope_theta",
                    "rope_parameters.full_attention.rope_theta",
                    "rope_parameters.rope_theta",
                ],
                ..ROPE_THETA
            },
            HEAD_DIM,
            LAYER_NORM_EPS,
            HIDDEN_ACT,
            derived("logits_scaling", &["logit_scale"], |file| {
                let scale = file("logit_scale").and_then(|x| x.as_f64());
                Ok(scale.map(|scale| (1.0 / scale).into()))
            }),
            TIED_BY_DEFAULT,
            WINDOW_4096,
            derived("layer_types", &["layer_types", "pooling"], |file| {
                let listed = Listed::of(file, &["layer_types"]);
                let rotates = |kind: &str| {
                    let by_type = file("rope_parameters");
                    let own = by_type.as_ref().and_then(|all| all.get(kind));
                    own.is_none_or(|own| !own.is_null())
                };
                let full = if rotates(FULL) { FULL } else { NO_ROPE };
                by_layer(file, |layer| match listed.is(layer, SLIDING, false) {
                    true => SLIDING,
                    false => full,
                })
            }),
        ],
    },
    HfType {
        model_type: "olmo",
        architecture: "OlmoForCausalLM",
        fixed: &[("norm", Given::Str("layer_norm_no_weight"))],
        common: SHAPE,
        fields: &[HIDDEN_ACT, TIED, field(&["clip_qkv"], Meaning::Unset)],
    },
    HfType {
        model_type: "olmo2",
        architecture: "Olmo2ForCausalLM",
        fixed: &[
            ("norm_position", Given::Str("after")),
            ("qk_norm", Given::Str("full")),
        ],
        common: SHAPE,
        fields: &[RMS_EPS_5, HIDDEN_ACT, TIED],
    },
    HfType {
        model_type: "olmo3",
        architecture: "Olmo3ForCausalLM",
        fixed: &[
            ("norm_position", Given::Str("after")),
            ("qk_norm", Given::Str("full")),
        ],
        common: SHAPE_WITHOUT_ROPE,
        fields: &[
            Field {
                names: &[
                    "rope_parameters.full_attention.rope_theta",
                    "rope_theta",
                    "rope_parameters.rope_theta",
                ],
                meaning: Meaning::Default("rope_theta", Given::Float(5e5)),
            },
            // Layers with a window rotate without scaling.
            Field {
                names: &[
                    "rope_parameters.sliding_attention.rope_theta",
                    "rope_theta",
                    "rope_parameters.rope_theta",
                ],
                meaning: Meaning::Default("rope_local_theta", Given::Float(5e5)),
            },
            RMS_EPS_5,
            HIDDEN_ACT,
            TIED,
            WINDOW_4096,
            every::<4>(),
        ],
    },
    HfType {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &[
            NORM_EPS,
            HIDDEN_ACT,
            ROPE_LAYERS,
            ROPE_MARKS,
            TIED_BY_DEFAULT,
            field(&["pad_token_id"], Meaning::Padding(128_004)),
            field(
                &["mlp_bias"],
                Meaning::HasBias(crate::models::BiasPart::Mlp, false),
            ),
        ],
    },
    HfType {
        model_type: "exaone4",
        architecture: "Exaone4ForCausalLM",
        fixed: &[
            ("norm_position", Given::Str("after")),
            ("qk_norm", Given::Bool(true)),
        ],
        common: SHAPE,
        fields: &[
            HEAD_DIM,
            RMS_EPS_5,
            HIDDEN_ACT,
            TIED,
            WINDOW,
            every_without_rope::<4>(),
        ],
    },
    HfType {
        model_type: "vaultgemma",
        architecture: "VaultGemmaForCausalLM",
        fixed: &[("norm", Given::Str("rms_norm_unit_offset"))],
        common: SHAPE,
        fields: GEMMA2,
    },
];
