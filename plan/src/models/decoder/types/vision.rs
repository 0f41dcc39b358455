//! Types that encode images.

use super::read::size;
use super::{LAYER_EPS_5, QUICK_GELU, derived, number};
use crate::models::hf::{
    BiasPart, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, field,
};
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
const EPS_6: Field = field(
    &["layer_norm_eps"],
    Meaning::Default("norm_eps", Given::Float(1e-6)),
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
        let (pooled, width) = (file("pooler_output_size"), file("hidden_size"));
        if pooled.is_some() && pooled != width {
            return Err("`pooler_output_size` must be `hidden_size`".to_owned());
        }
        match file("pooler_act").as_ref().and_then(Value::as_str) {
            None | Some("tanh") => {}
            Some(other) => return Err(format!("`pooler_act` must be tanh, not {other:?}")),
        }
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
            derived("second_classifier", &[], |file| {
                let classes = file("architectures");
                let first = classes.as_ref().and_then(|list| list.get(0)?.as_str());
                let two = first.is_some_and(|class| class.ends_with("WithTeacher"));
                Ok(Some(two.into()))
            }),
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
    // The tower of SigLIP alone, which makes one vector of an image.
    HfType {
        model_type: "siglip_vision_model",
        architecture: "SiglipVisionModel",
        fixed: &[
            LAYER_NORM,
            ("gated_mlp", Given::Bool(false)),
            BIASES,
            LEARNED,
            ("head", Given::Str("none")),
            ("pooler", Given::Bool(false)),
            ("class_token", Given::Bool(false)),
        ],
        common: &[HIDDEN, FFN, LAYERS, HEADS],
        fields: &[
            EPS_6,
            field(
                &["hidden_act"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("gelu_pytorch_tanh", "gelu_tanh"),
                        ("gelu", "gelu"),
                        ("gelu_new", "gelu_tanh"),
                    ],
                ),
            ),
            rows::<224, 16, 0>(),
            PATCH_DIM_16,
            field(
                &["vision_use_head"],
                Meaning::Default("attention_pooling", Given::Bool(true)),
            ),
        ],
    },
    // Without an output layer. The code rotates rows of patches only.
    HfType {
        model_type: "dinov3_vit",
        architecture: "DINOv3ViTModel",
        fixed: &[
            LAYER_NORM,
            ("position_embedding", Given::Str("rotary")),
            ("head", Given::Str("none")),
            ("pooler", Given::Bool(false)),
            ("layer_scale", Given::Bool(true)),
            ("mask_token", Given::Bool(true)),
        ],
        common: &[HIDDEN, FFN, LAYERS, HEADS],
        fields: &[
            LAYER_EPS_5,
            field(
                &["hidden_act"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("gelu", "gelu"),
                        ("silu", "silu"),
                        ("gelu_new", "gelu_tanh"),
                    ],
                ),
            ),
            field(
                &["use_gated_mlp"],
                Meaning::Default("gated_mlp", Given::Bool(false)),
            ),
            field(&["query_bias"], Meaning::HasBias(BiasPart::Qkv, true)),
            field(
                &["proj_bias"],
                Meaning::HasBias(BiasPart::AttentionOutput, true),
            ),
            field(&["mlp_bias"], Meaning::HasBias(BiasPart::Mlp, true)),
            derived("key_bias", &["key_bias", "value_bias"], |file| {
                let has = |name, default| file(name).map_or(default, |on| on == true);
                let [q, k, v] = [
                    has("query_bias", true),
                    has("key_bias", false),
                    has("value_bias", true),
                ];
                match q == v && (q || !k) {
                    true => Ok(Some(k.into())),
                    false => Err("`query_bias` and `value_bias` must be equal, and true if `key_bias` is: other biases are not planned".to_owned()),
                }
            }),
            field(
                &["rope_theta"],
                Meaning::Default("rope_theta", Given::Float(100.0)),
            ),
            field(
                &["num_register_tokens"],
                Meaning::Default("register_tokens", Given::Int(0)),
            ),
            number(
                &["image_size"],
                "max_seq_len",
                |file| {
                    let registers = file("num_register_tokens").and_then(|n| n.as_u64());
                    let learned = 1 + registers.unwrap_or(0);
                    Ok(Some((patches(file, 224, 16)? + learned).into()))
                },
                |_| None,
            ),
            PATCH_DIM_16,
            derived(
                "num_labels",
                &[
                    "layerscale_value",
                    "drop_path_rate",
                    "pos_embed_shift",
                    "pos_embed_jitter",
                    "pos_embed_rescale",
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
