//! Types that encode images.

use super::encoders::no_class;
use super::read::{flag, integer, size};
use super::{
    BIASES, EPS_12, LAYER_EPS_5, LAYER_NORM, LEARNED, NO_GATE, QUICK_GELU, derived, number,
};
use crate::models::hf::{
    BiasPart, FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, field,
};
use serde_json::{Value, json};

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
const VIT: &[(&str, Given)] = &[LAYER_NORM, NO_GATE, BIASES, LEARNED, CLASSES];
/// The same, with a distillation token.
const DEIT: &[(&str, Given)] = &[
    LAYER_NORM,
    NO_GATE,
    BIASES,
    LEARNED,
    CLASSES,
    ("distillation_token", Given::Bool(true)),
];
const CLASSES: (&str, Given) = ("head", Given::Str("sequence_classification"));

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
        labels(file)
    },
);

/// Fields of DINOv2's blocks.
const DINOV2: &[Field] = &[
    HIDDEN,
    LAYERS,
    HEADS,
    field(
        &["layer_norm_eps"],
        Meaning::Default("norm_eps", Given::Float(1e-6)),
    ),
    derived(
        "ffn",
        &[
            "mlp_ratio",
            "layerscale_value",
            "drop_path_rate",
            "stage_names",
            "out_features",
            "out_indices",
            "apply_layernorm",
            "reshape_hidden_states",
        ],
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
    LABELS,
];

/// DINOv2's blocks; the class and the mean of the patches are classified.
const DINOV2_FIXED: &[(&str, Given)] = &[
    LAYER_NORM,
    BIASES,
    LEARNED,
    CLASSES,
    ("pooler", Given::Bool(false)),
    ("layer_scale", Given::Bool(true)),
    ("image_pooling", Given::Str("class_and_mean")),
];

/// Returns the rows of the class and of registers, and those of patches.
fn rows_with_registers(file: Fields<'_>, patch: u64, registers: u64) -> Result<Value, String> {
    let registers = integer(file, "num_register_tokens", registers);
    Ok((patches(file, 224, patch)? + 1 + registers).into())
}

/// Fields of BEiT. Keys have no bias; positions are biases of scores, of each layer or of all.
const BEIT: &[Field] = &[
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    EPS_12,
    GELU,
    PATCH_DIM_16,
    field(
        &["use_mask_token"],
        Meaning::Default("mask_token", Given::Bool(false)),
    ),
    derived(
        "position_embedding",
        &["use_absolute_position_embeddings"],
        |file| {
            let learned = flag(file, "use_absolute_position_embeddings", false);
            Ok(Some(if learned { "learned" } else { "none" }.into()))
        },
    ),
    derived(
        "relative_buckets",
        &[
            "use_relative_position_bias",
            "use_shared_relative_position_bias",
        ],
        |file| {
            let each = flag(file, "use_relative_position_bias", false);
            let all = flag(file, "use_shared_relative_position_bias", false);
            if each && all {
                return Err("`use_relative_position_bias` and `use_shared_relative_position_bias` must not both be true".to_owned());
            }
            let edge = size(file, "image_size", 224)? / size(file, "patch_size", 16)?;
            // Distances of patches, and three for the class.
            let rows = (2 * edge - 1) * (2 * edge - 1) + 3;
            Ok(Some(if each || all { rows } else { 0 }.into()))
        },
    ),
    derived("relative_bias_per_layer", &[], |file| {
        Ok(Some(flag(file, "use_relative_position_bias", false).into()))
    }),
    derived("layer_scale", &["layer_scale_init_value"], |file| {
        let scale = file("layer_scale_init_value").and_then(|x| x.as_f64());
        Ok(Some((scale.unwrap_or(0.1) > 0.0).into()))
    }),
    derived("image_pooling", &["use_mean_pooling"], |file| {
        let means = flag(file, "use_mean_pooling", true);
        Ok(Some(if means { "mean" } else { "class" }.into()))
    }),
    rows::<224, 16, 1>(),
    derived(
        "num_labels",
        &[
            "id2label",
            "vocab_size",
            "drop_path_rate",
            "pool_scales",
            "use_auxiliary_head",
            "auxiliary_loss_weight",
            "auxiliary_channels",
            "auxiliary_num_convs",
            "auxiliary_concat_input",
            "semantic_loss_ignore_index",
            "add_fpn",
            "reshape_hidden_states",
            "stage_names",
            "out_features",
            "out_indices",
        ],
        labels,
    ),
];

/// Returns the row of a type with BEiT's code.
const fn beit(
    model_type: &'static str,
    architecture: &'static str,
    fields: &'static [Field],
) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            CLASSES,
            ("key_bias", Given::Bool(false)),
            ("pooler", Given::Bool(false)),
        ],
        common: BEIT,
        fields,
    }
}

/// Returns the number of classes that a file gives or names.
fn labels(file: Fields<'_>) -> Result<Option<Value>, String> {
    let listed = file("id2label").and_then(|l| Some(l.as_object()?.len() as u64));
    Ok(file("num_labels").or(listed.map(Into::into)))
}

/// Returns a list of positive numbers of the file.
fn sizes(file: Fields<'_>, name: &str, default: &[u64]) -> Result<Vec<u64>, String> {
    let Some(given) = file(name) else {
        return Ok(default.to_vec());
    };
    let list = given.as_array().map_or(&[][..], |all| all);
    let all: Option<Vec<u64>> = list.iter().map(|n| n.as_u64().filter(|n| *n > 0)).collect();
    match all {
        Some(all) if !all.is_empty() => Ok(all),
        _ => Err(format!(
            "`{name}` must be a list of positive numbers, not {given}"
        )),
    }
}

/// Returns the stages of a Swin.
fn swin(file: Fields<'_>) -> Result<Value, String> {
    let depths = sizes(file, "depths", &[2, 2, 6, 2])?;
    let first = size(file, "embed_dim", 96)?;
    let widths: Vec<u64> = (0..depths.len()).map(|n| first << n).collect();
    Ok(json!({
        "depths": depths,
        "widths": widths,
        "heads": sizes(file, "num_heads", &[3, 6, 12, 24])?,
        "edge": size(file, "image_size", 224)? / size(file, "patch_size", 4)?,
        "window": size(file, "window_size", 7)?,
        "positions": flag(file, "use_absolute_embeddings", false),
    }))
}

/// Returns the stages of a Swin with a key that differs.
fn swin_with(file: Fields<'_>, key: &str, value: bool) -> Result<Option<Value>, String> {
    let mut of = swin(file)?;
    of[key] = value.into();
    Ok(Some(of))
}

/// Returns the stages of a ConvNeXt.
fn convnext(file: Fields<'_>, response_norm: bool) -> Result<Value, String> {
    Ok(json!({
        "depths": sizes(file, "depths", &[3, 3, 9, 3])?,
        "widths": sizes(file, "hidden_sizes", &[96, 192, 384, 768])?,
        "edge": size(file, "image_size", 224)? / size(file, "patch_size", 4)?,
        "window": 1,
        "kernel": 7,
        "response_norm": response_norm,
    }))
}

/// Returns the sum of the depths of stages.
fn blocks(file: Fields<'_>, default: &[u64]) -> Result<Option<Value>, String> {
    let depths = sizes(file, "depths", default)?;
    Ok(Some(depths.iter().sum::<u64>().into()))
}

/// Returns the square of the patches along an edge.
fn square(file: Fields<'_>) -> Result<Option<Value>, String> {
    let edge = size(file, "image_size", 224)? / size(file, "patch_size", 4)?;
    Ok(Some((edge * edge).into()))
}

const STAGED: &[(&str, Given)] = &[
    LAYER_NORM,
    NO_GATE,
    CLASSES,
    ("heads", Given::Int(1)),
    ("position_embedding", Given::Str("none")),
    ("class_token", Given::Bool(false)),
    ("pooler", Given::Bool(false)),
    ("image_pooling", Given::Str("mean")),
];
/// Fields of a ConvNeXt but its stages.
const CONVNEXT: &[Field] = &[
    EPS_12,
    GELU,
    derived("hidden", &["num_stages", "drop_path_rate"], |file| {
        let widths = sizes(file, "hidden_sizes", &[96, 192, 384, 768])?;
        Ok(Some(widths[0].into()))
    }),
    derived("ffn", &[], |file| {
        let widths = sizes(file, "hidden_sizes", &[96, 192, 384, 768])?;
        Ok(Some((4 * widths[0]).into()))
    }),
    derived("layers", &["depths"], |file| blocks(file, &[3, 3, 9, 3])),
    derived("max_seq_len", &["image_size"], square),
    derived("patch_dim", &["patch_size", "num_channels"], |file| {
        patch_dim(file, 4)
    }),
    derived(
        "num_labels",
        &["id2label", "stage_names", "out_features", "out_indices"],
        labels,
    ),
];

/// Fields of a Swin but its stages.
const SWIN: &[Field] = &[
    LAYER_EPS_5,
    GELU,
    number(
        &["embed_dim"],
        "hidden",
        |file| Ok(Some(size(file, "embed_dim", 96)?.into())),
        |model| Some(model["hidden"].clone()),
    ),
    derived("ffn", &["mlp_ratio"], |file| {
        let ratio = file("mlp_ratio").and_then(|x| x.as_f64()).unwrap_or(4.0);
        let width = size(file, "embed_dim", 96)? as f64;
        Ok(Some(((ratio * width) as u64).into()))
    }),
    derived("layers", &["depths", "num_layers"], |file| {
        blocks(file, &[2, 2, 6, 2])
    }),
    derived("max_seq_len", &["image_size"], square),
    derived("patch_dim", &["patch_size", "num_channels"], |file| {
        patch_dim(file, 4)
    }),
    derived("bias", &["qkv_bias"], |file| {
        Ok(Some(match flag(file, "qkv_bias", true) {
            true => true.into(),
            false => "all_but_qkv".into(),
        }))
    }),
    derived(
        "num_labels",
        &["id2label", "stage_names", "out_features", "out_indices"],
        labels,
    ),
];
const SWIN_FIELDS: &[&str] = &[
    "num_heads",
    "window_size",
    "pretrained_window_sizes",
    "use_absolute_embeddings",
    "drop_path_rate",
    "encoder_stride",
    "path_norm",
    "hidden_size",
];

/// Fields of types with ViT's blocks.
const VIT_FIELDS: &[Field] = &[
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    GELU,
    field(&["qkv_bias"], Meaning::On),
    PATCH_DIM_16,
    LABELS,
];

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "vit",
        architecture: "ViTForImageClassification",
        fixed: VIT,
        common: VIT_FIELDS,
        fields: &[
            EPS_12,
            // One row more than patches, for the class.
            rows::<224, 16, 1>(),
        ],
    },
    HfType {
        model_type: "vit_mae",
        architecture: "ViTMAEForPreTraining",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            LEARNED,
            ("head", Given::Str("none")),
            ("pooler", Given::Bool(false)),
        ],
        common: &[HIDDEN, FFN, LAYERS, HEADS, GELU, PATCH_DIM_16],
        fields: &[
            EPS_12,
            field(&["qkv_bias"], Meaning::On),
            // A row for the class, and those patches that are not masked.
            number(
                &["image_size"],
                "max_seq_len",
                |file| {
                    let share = file("mask_ratio").and_then(|x| x.as_f64()).unwrap_or(0.75);
                    if !(0.0..1.0).contains(&share) {
                        return Err(format!("`mask_ratio` must be below 1, not {share}"));
                    }
                    let all = patches(file, 224, 16)? as f64;
                    Ok(Some(((all * (1.0 - share)) as u64 + 1).into()))
                },
                |_| None,
            ),
            derived(
                "reconstruction",
                &[
                    "mask_ratio",
                    "norm_pix_loss",
                    "decoder_num_attention_heads",
                    "decoder_hidden_size",
                    "decoder_num_hidden_layers",
                    "decoder_intermediate_size",
                ],
                |file| {
                    Ok(Some(json!({
                        "patches": patches(file, 224, 16)?,
                        "layers": size(file, "decoder_num_hidden_layers", 8)?,
                        "hidden": size(file, "decoder_hidden_size", 512)?,
                        "heads": size(file, "decoder_num_attention_heads", 16)?,
                        "ffn": size(file, "decoder_intermediate_size", 2048)?,
                    })))
                },
            ),
        ],
    },
    HfType {
        model_type: "deit",
        architecture: "DeiTForImageClassification",
        fixed: DEIT,
        common: VIT_FIELDS,
        fields: &[
            EPS_12,
            // Two rows more than patches.
            rows::<224, 16, 2>(),
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
            NO_GATE,
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
            NO_GATE,
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
    HfType {
        model_type: "dinov2",
        architecture: "Dinov2ForImageClassification",
        fixed: DINOV2_FIXED,
        common: DINOV2,
        fields: &[
            field(
                &["use_mask_token"],
                Meaning::Default("mask_token", Given::Bool(true)),
            ),
            rows::<224, 14, 1>(),
            derived("patch_dim", &["patch_size", "num_channels"], |file| {
                patch_dim(file, 14)
            }),
        ],
    },
    HfType {
        model_type: "dinov2_with_registers",
        architecture: "Dinov2WithRegistersForImageClassification",
        fixed: DINOV2_FIXED,
        common: DINOV2,
        fields: &[
            derived("mask_token", &[], |_| Ok(Some(true.into()))),
            field(
                &["num_register_tokens"],
                Meaning::Default("register_tokens", Given::Int(4)),
            ),
            number(
                &["image_size"],
                "max_seq_len",
                |file| Ok(Some(rows_with_registers(file, 16, 4)?)),
                |_| None,
            ),
            PATCH_DIM_16,
        ],
    },
    HfType {
        model_type: "vit_msn",
        architecture: "ViTMSNForImageClassification",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            LEARNED,
            CLASSES,
            ("pooler", Given::Bool(false)),
        ],
        common: VIT_FIELDS,
        fields: &[EPS_6, rows::<224, 16, 1>()],
    },
    HfType {
        model_type: "ijepa",
        architecture: "IJepaForImageClassification",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            BIASES,
            LEARNED,
            CLASSES,
            ("class_token", Given::Bool(false)),
            ("pooler", Given::Bool(false)),
            ("image_pooling", Given::Str("mean")),
        ],
        common: VIT_FIELDS,
        fields: &[EPS_12, rows::<224, 16, 0>()],
    },
    // The mean is normalized, not the rows.
    beit("beit", "BeitForImageClassification", &[]),
    beit(
        "data2vec-vision",
        "Data2VecVisionForImageClassification",
        &[derived("image_pooling", &[], |file| {
            let why = "it has no norm after its blocks; the class for images has one";
            no_class(file, "Data2VecVisionModel", why)
        })],
    ),
    HfType {
        model_type: "swin",
        architecture: "SwinForImageClassification",
        fixed: STAGED,
        common: SWIN,
        fields: &[derived("stages", SWIN_FIELDS, |file| Ok(Some(swin(file)?)))],
    },
    HfType {
        model_type: "swinv2",
        architecture: "Swinv2ForImageClassification",
        fixed: STAGED,
        common: SWIN,
        fields: &[
            derived("key_bias", &[], |_| Ok(Some(false.into()))),
            // The table would have one row more than there are patches.
            field(&["use_absolute_embeddings"], Meaning::Off),
            derived("stages", SWIN_FIELDS, |file| {
                swin_with(file, "cosine", true)
            }),
        ],
    },
    HfType {
        model_type: "donut-swin",
        architecture: "DonutSwinForImageClassification",
        fixed: STAGED,
        common: SWIN,
        fields: &[
            // The table would have one row more than there are patches.
            field(&["use_absolute_embeddings"], Meaning::Off),
            derived("stages", SWIN_FIELDS, |file| {
                swin_with(file, "last_norm", false)
            }),
        ],
    },
    HfType {
        model_type: "convnext",
        architecture: "ConvNextForImageClassification",
        fixed: STAGED,
        common: CONVNEXT,
        fields: &[
            derived("bias", &[], |_| Ok(Some(true.into()))),
            derived("stages", &["hidden_sizes"], |file| {
                Ok(Some(convnext(file, false)?))
            }),
            derived("layer_scale", &["layer_scale_init_value"], |file| {
                let scale = file("layer_scale_init_value").and_then(|x| x.as_f64());
                Ok(Some((scale.unwrap_or(1e-6) > 0.0).into()))
            }),
        ],
    },
    HfType {
        model_type: "dinov3_convnext",
        architecture: "DINOv3ConvNextModel",
        fixed: &[
            LAYER_NORM,
            NO_GATE,
            ("head", Given::Str("none")),
            STAGED[3],
            STAGED[4],
            STAGED[5],
            STAGED[6],
            STAGED[7],
        ],
        common: CONVNEXT,
        fields: &[
            derived("bias", &[], |_| Ok(Some(true.into()))),
            derived("stages", &["hidden_sizes"], |file| {
                Ok(Some(convnext(file, false)?))
            }),
            derived("layer_scale", &["layer_scale_init_value"], |file| {
                let scale = file("layer_scale_init_value").and_then(|x| x.as_f64());
                Ok(Some((scale.unwrap_or(1e-6) > 0.0).into()))
            }),
        ],
    },
    HfType {
        model_type: "convnextv2",
        architecture: "ConvNextV2ForImageClassification",
        fixed: STAGED,
        common: CONVNEXT,
        fields: &[
            derived("bias", &[], |_| Ok(Some(true.into()))),
            derived("stages", &["hidden_sizes"], |file| {
                Ok(Some(convnext(file, true)?))
            }),
        ],
    },
];
