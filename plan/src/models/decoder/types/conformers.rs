//! Audio encoders with attention and convolutions (Conformer).

use super::read::{flag, integer, size};
use super::sound::{COMMON, FIXED, ROWS, SOUND_FIELDS, labels, wav2vec2};
use super::{LAYER_EPS_5, derived};
use crate::models::hf::{FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, field};
use serde_json::{Value, json};

/// Words for the activation, the default first.
const SWISH_FIRST: &[(&str, &str)] = &[
    ("swish", "silu"),
    ("silu", "silu"),
    ("gelu", "gelu"),
    ("relu", "relu"),
];

/// Returns how blocks of wav2vec 2.0's kind know distances, in our words.
fn distances(file: Fields<'_>, default: &str) -> Result<&'static str, String> {
    let given = file("position_embeddings_type");
    let word = given.as_ref().and_then(Value::as_str).unwrap_or(default);
    Ok(match word {
        "relative" => "projected",
        "relative_key" => "keys",
        "rotary" => "none",
        other => {
            return Err(format!(
                "`position_embeddings_type` {other:?} is not known: expected relative, relative_key or rotary"
            ));
        }
    })
}

/// Returns the blocks of wav2vec 2.0's kind.
fn blocks(file: Fields<'_>, default: &str, norm: &str) -> Result<Value, String> {
    let left = integer(file, "left_max_position_embeddings", 64);
    let right = integer(file, "right_max_position_embeddings", 8);
    Ok(json!({
        "kernel": size(file, "conv_depthwise_kernel_size", 31)?,
        "pointwise_bias": false,
        "depthwise_bias": false,
        "norm": norm,
        "distances": distances(file, default)?,
        "distance_rows": left + right + 1,
    }))
}

/// Positions of queries and keys: rotated, or as `conformer` says.
fn positions(file: Fields<'_>) -> Result<Option<Value>, String> {
    let rotates = file("position_embeddings_type") == Some("rotary".into());
    Ok(Some(if rotates { "rotary" } else { "none" }.into()))
}

const POSITION_FIELDS: &[&str] = &[
    "position_embeddings_type",
    "rotary_embedding_base",
    "max_source_positions",
];
const BLOCK_FIELDS: &[&str] = &[
    "conv_depthwise_kernel_size",
    "conformer_conv_dropout",
    "left_max_position_embeddings",
    "right_max_position_embeddings",
];

/// What all have that is not a position embedding.
const OF_ALL: [(&str, Given); 6] = [FIXED[0], FIXED[1], FIXED[2], FIXED[4], FIXED[5], FIXED[6]];

const CONFORMER_FIXED: &[(&str, Given)] = &OF_ALL;
/// Without a norm after the last block.
const NO_LAST_NORM: &[(&str, Given)] = &[
    OF_ALL[0],
    OF_ALL[1],
    OF_ALL[2],
    OF_ALL[3],
    OF_ALL[4],
    OF_ALL[5],
    ("norm_position", Given::Str("sum")),
];

/// Refuses parts after the encoder of w2v-BERT, and its output layers of their own.
fn bert_labels(file: Fields<'_>) -> Result<Option<Value>, String> {
    if flag(file, "add_adapter", false) {
        return Err(
            "`add_adapter` must be false: an adapter after the encoder is not planned".to_owned(),
        );
    }
    labels(file)
}

/// A field of Parakeet's encoder.
const fn encoder(names: &'static [&'static str], key: &'static str, default: u64) -> Field {
    Field {
        names,
        meaning: Meaning::Default(key, Given::Int(default)),
    }
}

/// Returns a field of Parakeet's encoder.
fn of_encoder(file: Fields<'_>, name: &str) -> Option<Value> {
    file(&format!("encoder_config.{name}"))
}

/// Returns an integer of Parakeet's encoder.
fn int_of_encoder(file: Fields<'_>, name: &str, default: u64) -> u64 {
    let given = of_encoder(file, name).and_then(|n| n.as_u64());
    given.unwrap_or(default)
}

/// Returns the key `sound` of Parakeet.
fn parakeet_sound(file: Fields<'_>) -> Result<Option<Value>, String> {
    for (name, wanted) in [
        ("subsampling_conv_kernel_size", 3),
        ("subsampling_conv_stride", 2),
    ] {
        let given = int_of_encoder(file, name, wanted);
        if given != wanted {
            return Err(format!(
                "`encoder_config.{name}` must be {wanted}, not {given}"
            ));
        }
    }
    let factor = int_of_encoder(file, "subsampling_factor", 8);
    if factor < 2 || !factor.is_power_of_two() {
        return Err(format!(
            "`encoder_config.subsampling_factor` must be a power of 2, not {factor}"
        ));
    }
    let bands = int_of_encoder(file, "num_mel_bins", 80);
    if !bands.is_multiple_of(factor) {
        return Err(format!(
            "`encoder_config.num_mel_bins` ({bands}) must be divisible by `subsampling_factor` ({factor})"
        ));
    }
    let channels = int_of_encoder(file, "subsampling_conv_channels", 256);
    let scaled = of_encoder(file, "scale_input") != Some(false.into());
    Ok(Some(json!({
        "masked": false,
        "position_layers": 0,
        "bands": bands,
        "scaled": scaled,
        "subsampling": { "channels": vec![channels; factor.ilog2() as usize] },
    })))
}

/// Returns the blocks of Parakeet.
fn parakeet_blocks(file: Fields<'_>) -> Result<Option<Value>, String> {
    let bias = of_encoder(file, "convolution_bias") != Some(false.into());
    Ok(Some(json!({
        "kernel": int_of_encoder(file, "conv_kernel_size", 9),
        "pointwise_bias": bias,
        "depthwise_bias": bias,
    })))
}

/// Rows of ten seconds of 1,000 frames.
fn parakeet_rows(file: Fields<'_>) -> Result<Option<Value>, String> {
    let factor = int_of_encoder(file, "subsampling_factor", 8).max(1);
    Ok(Some(1000_u64.div_ceil(factor).into()))
}

pub(super) const TYPES: &[HfType] = &[
    HfType {
        model_type: "wav2vec2-conformer",
        architecture: "Wav2Vec2ConformerForCTC",
        fixed: CONFORMER_FIXED,
        common: COMMON,
        fields: &[
            derived("position_embedding", POSITION_FIELDS, positions),
            derived("sound", SOUND_FIELDS, |file| {
                let mut out = wav2vec2(file)?;
                if let Some(sound) = out.as_mut().and_then(Value::as_object_mut) {
                    // Nothing reads the convolution for positions.
                    sound.insert("positions_used".to_owned(), false.into());
                    sound.insert("input_norm".to_owned(), true.into());
                }
                Ok(out)
            }),
            derived("conformer", BLOCK_FIELDS, |file| {
                blocks(file, "relative", "batch").map(Some)
            }),
        ],
    },
    HfType {
        model_type: "wav2vec2-bert",
        architecture: "Wav2Vec2BertForCTC",
        fixed: NO_LAST_NORM,
        common: &[
            HIDDEN,
            FFN,
            LAYERS,
            HEADS,
            LAYER_EPS_5,
            field(&["hidden_act"], Meaning::Choice("activation", SWISH_FIRST)),
            field(&["use_weighted_layer_sum"], Meaning::Off),
            derived("max_seq_len", &[], |_| Ok(Some(ROWS.into()))),
            derived("position_embedding", POSITION_FIELDS, positions),
            derived(
                "num_labels",
                &[
                    "add_adapter",
                    "adapter_act",
                    "use_intermediate_ffn_before_adapter",
                    "vocab_size",
                    "layerdrop",
                    "mask_time_length",
                    "mask_time_min_masks",
                    "mask_feature_length",
                    "mask_feature_min_masks",
                    "apply_spec_augment",
                    "ctc_loss_reduction",
                    "ctc_zero_infinity",
                    "adapter_kernel_size",
                    "adapter_stride",
                    "classifier_proj_size",
                    "num_adapter_layers",
                    "output_hidden_size",
                    "tdnn_dilation",
                    "tdnn_dim",
                    "tdnn_kernel",
                    "xvector_output_dim",
                ],
                bert_labels,
            ),
        ],
        fields: &[
            derived(
                "sound",
                &[
                    "feature_projection_input_dim",
                    "mask_time_prob",
                    "mask_feature_prob",
                ],
                |file| {
                    let share = |name: &str, default: f64| {
                        file(name).and_then(|x| x.as_f64()).unwrap_or(default)
                    };
                    let masked = share("mask_time_prob", 0.05) > 0.0
                        || share("mask_feature_prob", 0.0) > 0.0;
                    Ok(Some(json!({
                        "bands": size(file, "feature_projection_input_dim", 160)?,
                        "masked": masked,
                        "position_layers": 0,
                    })))
                },
            ),
            derived("conformer", BLOCK_FIELDS, |file| {
                blocks(file, "relative_key", "layer").map(Some)
            }),
        ],
    },
    HfType {
        model_type: "parakeet_ctc",
        architecture: "ParakeetForCTC",
        fixed: &[
            OF_ALL[0],
            OF_ALL[1],
            OF_ALL[3],
            OF_ALL[4],
            OF_ALL[5],
            ("norm_position", Given::Str("sum")),
            ("position_embedding", Given::Str("none")),
        ],
        common: &[
            encoder(&["encoder_config.hidden_size"], "hidden", 1024),
            encoder(&["encoder_config.intermediate_size"], "ffn", 4096),
            encoder(&["encoder_config.num_hidden_layers"], "layers", 24),
            encoder(&["encoder_config.num_attention_heads"], "heads", 8),
            field(
                &["encoder_config.hidden_act"],
                Meaning::Choice("activation", SWISH_FIRST),
            ),
            encoder(&["vocab_size"], "num_labels", 1025),
            field(
                &["encoder_config.attention_bias"],
                Meaning::Default("bias", Given::Bool(true)),
            ),
        ],
        fields: &[
            derived(
                "max_seq_len",
                &["ctc_loss_reduction", "ctc_zero_infinity", "encoder_config"],
                parakeet_rows,
            ),
            derived("sound", &[], parakeet_sound),
            derived("conformer", &[], parakeet_blocks),
        ],
    },
];
