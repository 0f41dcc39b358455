//! Types that encode images.

use super::{derived, number};
use crate::models::hf::{FFN, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, field};

fn size(file: Fields<'_>, name: &str, default: u64) -> u64 {
    file(name)
        .and_then(|n| n.as_u64())
        .unwrap_or(default)
        .max(1)
}

pub(super) const TYPES: &[HfType] = &[
    HfType {
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
    },
    // Without an output layer.
    HfType {
        model_type: "dinov2",
        architecture: "Dinov2Model",
        fixed: &[
            ("norm", Given::Str("layer_norm")),
            ("bias", Given::Bool(true)),
            ("position_embedding", Given::Str("learned")),
            ("head", Given::Str("none")),
            ("pooler", Given::Bool(false)),
            ("layer_scale", Given::Bool(true)),
        ],
        common: &[HIDDEN, LAYERS, HEADS],
        fields: &[
            field(
                &["layer_norm_eps"],
                Meaning::Default("norm_eps", Given::Float(1e-6)),
            ),
            derived(
                "ffn",
                &["mlp_ratio", "layerscale_value", "drop_path_rate"],
                |file| {
                    let wide = size(file, "hidden_size", 768) * size(file, "mlp_ratio", 4);
                    let gated = file("use_swiglu_ffn") == Some(true.into());
                    let third = (wide * 2 / 3).next_multiple_of(8);
                    Ok(Some(if gated { third } else { wide }.into()))
                },
            ),
            derived("gated_mlp", &["use_swiglu_ffn"], |file| {
                Ok(Some((file("use_swiglu_ffn") == Some(true.into())).into()))
            }),
            derived("activation", &["hidden_act"], |file| {
                if file("use_swiglu_ffn") == Some(true.into()) {
                    return Ok(Some("silu".into()));
                }
                match file("hidden_act").as_ref().and_then(|word| word.as_str()) {
                    None | Some("gelu") => Ok(Some("gelu".into())),
                    Some("gelu_new") => Ok(Some("gelu_tanh".into())),
                    Some(other) => Err(format!("`hidden_act` {other:?} is not known")),
                }
            }),
            field(&["qkv_bias"], Meaning::On),
            field(
                &["use_mask_token"],
                Meaning::Default("mask_token", Given::Bool(true)),
            ),
            number(
                &["image_size"],
                "max_seq_len",
                |file| {
                    let edge = size(file, "image_size", 224) / size(file, "patch_size", 14);
                    Ok(Some((edge * edge + 1).into()))
                },
                |_| None,
            ),
            derived("patch_dim", &["patch_size", "num_channels"], |file| {
                let edge = size(file, "patch_size", 14);
                Ok(Some((size(file, "num_channels", 3) * edge * edge).into()))
            }),
            derived(
                "num_labels",
                &[
                    "stage_names",
                    "out_features",
                    "out_indices",
                    "apply_layernorm",
                    "reshape_hidden_states",
                ],
                |_| Ok(None),
            ),
        ],
    },
];
