//! Types that encode images.

use super::{LAYER_EPS_5, QUICK_GELU, derived, number, size};
use crate::models::hf::{FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, field};
use serde_json::Value;

/// Returns the number of patches of an image, whose edge is `image` unless the file says otherwise;
/// that of a patch is `patch`.
fn patches(file: Fields<'_>, image: u64, patch: u64) -> Result<u64, String> {
    let edge = size(file, "image_size", image)? / size(file, "patch_size", patch)?;
    Ok(edge * edge)
}

/// Reads the rows of an image: those of its patches, and `MORE` learned ones, for the class and the
/// distillation token. `IMAGE` and `PATCH` are the edges that the type has by default.
const fn rows<const IMAGE: u64, const PATCH: u64, const MORE: u64>() -> Field {
    number(
        &["image_size"],
        "max_seq_len",
        |file| Ok(Some((patches(file, IMAGE, PATCH)? + MORE).into())),
        |_| None,
    )
}

/// Returns the numbers of a patch.
fn patch_dim(file: Fields<'_>, patch: u64) -> Result<Option<Value>, String> {
    let edge = size(file, "patch_size", patch)?;
    Ok(Some((size(file, "num_channels", 3)? * edge * edge).into()))
}

/// ViT's blocks and output layer.
const VIT: &[(&str, Given)] = &[
    LAYER_NORM,
    ("gated_mlp", Given::Bool(false)),
    BIASES,
    LEARNED,
    CLASSES,
];
/// The same, with a distillation token.
const DEIT: &[(&str, Given)] = &[
    LAYER_NORM,
    ("gated_mlp", Given::Bool(false)),
    BIASES,
    LEARNED,
    CLASSES,
    ("distillation_token", Given::Bool(true)),
];
const LAYER_NORM: (&str, Given) = ("norm", Given::Str("layer_norm"));
const BIASES: (&str, Given) = ("bias", Given::Bool(true));
const LEARNED: (&str, Given) = ("position_embedding", Given::Str("learned"));
const CLASSES: (&str, Given) = ("head", Given::Str("sequence_classification"));

const EPS_12: Field = field(
    &["layer_norm_eps"],
    Meaning::Default("norm_eps", Given::Float(1e-12)),
);
const GELU: Field = field(
    &["hidden_act"],
    Meaning::Choice("activation", &[("gelu", "gelu"), ("gelu_new", "gelu_tanh")]),
);
const PATCH_DIM_16: Field = derived("patch_dim", &["patch_size", "num_channels"], |file| {
    patch_dim(file, 16)
});
/// As many as the file names.
const LABELS: Field = derived(
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
);

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "vit",
        architecture: "ViTForImageClassification",
        fixed: VIT,
        common: &[HIDDEN, FFN, LAYERS, HEADS],
        fields: &[
            EPS_12,
            GELU,
            field(&["qkv_bias"], Meaning::On),
            // One row more than patches, for the class.
            rows::<224, 16, 1>(),
            PATCH_DIM_16,
            LABELS,
        ],
    },
    HfType {
        model_type: "deit",
        architecture: "DeiTForImageClassification",
        fixed: DEIT,
        common: &[HIDDEN, FFN, LAYERS, HEADS],
        fields: &[
            EPS_12,
            GELU,
            field(&["qkv_bias"], Meaning::On),
            // Two rows more than patches.
            rows::<224, 16, 2>(),
            PATCH_DIM_16,
            LABELS,
        ],
    },
    // The tower of CLIP alone, without an output layer. The norm after the blocks is one of all
    // rows, not of the class alone.
    HfType {
        model_type: "clip_vision_model",
        architecture: "CLIPVisionModel",
        fixed: &[
            LAYER_NORM,
            ("gated_mlp", Given::Bool(false)),
            BIASES,
            LEARNED,
            ("head", Given::Str("none")),
            ("pooler", Given::Bool(false)),
            ("embedding_norm", Given::Bool(true)),
            ("patch_bias", Given::Bool(false)),
        ],
        common: &[HIDDEN, FFN, LAYERS, HEADS],
        fields: &[
            LAYER_EPS_5,
            QUICK_GELU,
            rows::<224, 32, 1>(),
            derived(
                "patch_dim",
                &["patch_size", "num_channels", "projection_dim"],
                |file| patch_dim(file, 32),
            ),
        ],
    },
    // Without an output layer.
    HfType {
        model_type: "dinov2",
        architecture: "Dinov2Model",
        fixed: &[
            LAYER_NORM,
            BIASES,
            LEARNED,
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
                    let wide = size(file, "hidden_size", 768)? * size(file, "mlp_ratio", 4)?;
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
            rows::<224, 14, 1>(),
            derived("patch_dim", &["patch_size", "num_channels"], |file| {
                patch_dim(file, 14)
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
