//! Types with latent attention and dense feed-forward layers.

use super::experts::{LATENT, LATENT_HALVES, concat};
use super::llama_like::MINICPM_SCALES;
use super::{HIDDEN_ACT, RMS_EPS_5, TIED_BY_DEFAULT};
use crate::models::hf::{FFN, Field, HEADS, HIDDEN, HfType, LAYERS, POSITIONS, ROPE_THETA, VOCAB};
use crate::models::llama::{MLP_BIAS, NORM_EPS};

const SHAPE: &[Field] = &[
    VOCAB,
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    HIDDEN_ACT,
    POSITIONS,
    ROPE_THETA,
    MLP_BIAS,
    TIED_BY_DEFAULT,
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "youtu",
        architecture: "YoutuForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &concat::<{ LATENT.len() + 1 }>(LATENT, &[NORM_EPS]),
    },
    HfType {
        model_type: "minicpm3",
        architecture: "MiniCPM3ForCausalLM",
        fixed: &[],
        common: SHAPE,
        fields: &concat::<{ LATENT_HALVES.len() + 4 }>(
            LATENT_HALVES,
            &concat::<4>(&MINICPM_SCALES, &[RMS_EPS_5]),
        ),
    },
];
