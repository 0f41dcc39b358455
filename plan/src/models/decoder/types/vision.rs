//! Types that encode images.

use super::{derived, number};
use crate::models::hf::{FFN, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, field};

fn size(file: Fields<'_>, name: &str, default: u64) -> u64 {
    file(name)
        .and_then(|n| n.as_u64())
        .unwrap_or(default)
        .max(1)
}

pub(super) const TYPES: &[HfType] = &[HfType {
    model_type: "vit",
    architecture: "ViTForImageClassification",
    fixed: &[
        ("norm", Given::Str("layer_norm")),
        ("gated_mlp", Given::Bool(false)),
        ("bias", Given::Bool(true)),
        ("position_embedding", Given::Str("learned")),
        ("head", Given::Str("sequence_classification")),
    ],
    common: &[HIDDEN, FFN, LAYERS, HEADS],
    fields: &[
        field(
            &["layer_norm_eps"],
            Meaning::Default("norm_eps", Given::Float(1e-12)),
        ),
        field(
            &["hidden_act"],
            Meaning::Choice("activation", &[("gelu", "gelu"), ("gelu_new", "gelu_tanh")]),
        ),
        field(&["qkv_bias"], Meaning::On),
        // One row more than patches, for the class.
        number(
            &["image_size"],
            "max_seq_len",
            |file| {
                let edge = size(file, "image_size", 224) / size(file, "patch_size", 16);
                Ok(Some((edge * edge + 1).into()))
            },
            |_| None,
        ),
        derived("patch_dim", &["patch_size", "num_channels"], |file| {
            let edge = size(file, "patch_size", 16);
            Ok(Some((size(file, "num_channels", 3) * edge * edge).into()))
        }),
        derived(
            "num_labels",
            &[
                "id2label",
                "encoder_stride",
                "pooler_act",
                "pooler_output_size",
            ],
            |file| {
                let listed = file("id2label").and_then(|l| Some(l.as_object()?.len() as u64));
                Ok(file("num_labels").or(listed.map(Into::into)))
            },
        ),
    ],
}];
