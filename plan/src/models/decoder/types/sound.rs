//! Types that encode audio samples.

use super::read::{flag, integer, size};
use super::{LAYER_EPS_5, derived};
use crate::models::hf::{FFN, Field, Fields, Given, HEADS, HIDDEN, HfType, LAYERS, Meaning, field};
use serde_json::{Map, Value, json};

/// Rows of ten seconds of 16,000 samples, of convolutions with the usual strides.
pub(super) const ROWS: u64 = 499;

/// Returns the numbers of each convolution over samples.
fn list(file: Fields<'_>, name: &str, default: [u64; 7]) -> Result<Value, String> {
    let Some(given) = file(name) else {
        return Ok(json!(default));
    };
    let numbers = given.as_array().filter(|all| all.iter().all(Value::is_u64));
    match numbers {
        Some(_) => Ok(given),
        None => Err(format!("`{name}` must be a list of numbers, not {given}")),
    }
}

/// Returns the convolutions of a file. Without `by_words` of `feat_extract_norm`, all are
/// normalized.
fn convolutions(file: Fields<'_>, by_words: bool) -> Result<Map<String, Value>, String> {
    let norm = file("feat_extract_norm");
    let norms = match norm.as_ref().and_then(Value::as_str) {
        _ if !by_words => true,
        None | Some("group") => false,
        Some("layer") => true,
        Some(other) => {
            return Err(format!(
                "`feat_extract_norm` must be group or layer, not {other:?}"
            ));
        }
    };
    let share = |name: &str, default: f64| file(name).and_then(|x| x.as_f64()).unwrap_or(default);
    let masks = share("mask_time_prob", 0.05) > 0.0 || share("mask_feature_prob", 0.0) > 0.0;
    let numbers = [
        ("widths", list(file, "conv_dim", [512; 7])?),
        (
            "kernels",
            list(file, "conv_kernel", [10, 3, 3, 3, 3, 2, 2])?,
        ),
        ("strides", list(file, "conv_stride", [5, 2, 2, 2, 2, 2, 2])?),
        ("bias", flag(file, "conv_bias", false).into()),
        ("norms", norms.into()),
        ("masked", masks.into()),
        (
            "position_groups",
            size(file, "num_conv_pos_embedding_groups", 16)?.into(),
        ),
    ];
    let named = numbers
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value));
    Ok(named.collect())
}

/// Returns the key `sound` of a type with wav2vec 2.0's code.
pub(super) fn wav2vec2(file: Fields<'_>) -> Result<Option<Value>, String> {
    let mut out = convolutions(file, true)?;
    let kernel = size(file, "num_conv_pos_embeddings", 128)?;
    out.insert("position_kernel".to_owned(), kernel.into());
    let norm = flag(file, "feat_proj_layer_norm", true);
    out.insert("input_norm".to_owned(), norm.into());
    Ok(Some(out.into()))
}

/// Returns whether the blocks normalize what they read.
fn reads_norms(file: Fields<'_>) -> bool {
    flag(file, "do_stable_layer_norm", false)
}

/// Refuses classes with output layers of their own.
pub(super) fn labels(file: Fields<'_>) -> Result<Option<Value>, String> {
    let classes = file("architectures");
    let first = classes.as_ref().and_then(|list| list.get(0)?.as_str());
    if let Some(class) = first.filter(|class| class.ends_with("ForSequenceClassification")) {
        return Err(format!(
            "the output layer of {class} is not planned: it projects rows before their mean is classified"
        ));
    }
    if let Some(width) = file("adapter_attn_dim") {
        return Err(format!("`adapter_attn_dim` must be null, not {width}"));
    }
    Ok(Some(integer(file, "vocab_size", 32).into()))
}

pub(super) const COMMON: &[Field] = &[
    HIDDEN,
    FFN,
    LAYERS,
    HEADS,
    LAYER_EPS_5,
    field(
        &["hidden_act"],
        Meaning::Choice(
            "activation",
            &[
                ("gelu", "gelu"),
                ("gelu_new", "gelu_new"),
                ("relu", "relu"),
                ("swish", "silu"),
                ("silu", "silu"),
            ],
        ),
    ),
    field(&["feat_extract_activation"], Meaning::Word(&["gelu"])),
    field(&["add_adapter"], Meaning::Off),
    field(&["conv_pos_batch_norm"], Meaning::Off),
    field(&["use_weighted_layer_sum"], Meaning::Off),
    derived("max_seq_len", &[], |_| Ok(Some(ROWS.into()))),
    derived(
        "num_labels",
        &[
            "vocab_size",
            "adapter_attn_dim",
            "layerdrop",
            "mask_time_prob",
            "mask_time_length",
            "mask_time_min_masks",
            "mask_feature_prob",
            "mask_feature_length",
            "mask_feature_min_masks",
            "apply_spec_augment",
            "num_feat_extract_layers",
            "ctc_loss_reduction",
            "ctc_zero_infinity",
            // Of other output layers.
            "adapter_kernel_size",
            "adapter_stride",
            "classifier_proj_size",
            "codevector_dim",
            "contrastive_logits_temperature",
            "diversity_loss_weight",
            "num_adapter_layers",
            "num_clusters",
            "num_codevector_groups",
            "num_codevectors_per_group",
            "num_ctc_classes",
            "num_negatives",
            "output_hidden_size",
            "proj_codevector_dim",
            "replace_prob",
            "tdnn_dilation",
            "tdnn_dim",
            "tdnn_kernel",
            "xvector_output_dim",
        ],
        labels,
    ),
];

/// Where blocks are normalized, as `do_stable_layer_norm` says.
const STABLE: [Field; 2] = [
    derived("norm_position", &["do_stable_layer_norm"], |file| {
        Ok(Some(
            if reads_norms(file) { "before" } else { "sum" }.into(),
        ))
    }),
    derived("embedding_norm", &[], |file| {
        Ok(Some((!reads_norms(file)).into()))
    }),
];

pub(super) const FIXED: &[(&str, Given)] = &[
    ("norm", Given::Str("layer_norm")),
    ("gated_mlp", Given::Bool(false)),
    ("bias", Given::Bool(true)),
    ("position_embedding", Given::Str("none")),
    ("class_token", Given::Bool(false)),
    ("pooler", Given::Bool(false)),
    ("head", Given::Str("token_classification")),
];

/// The key `sound` of types with wav2vec 2.0's code.
const SOUND: Field = derived("sound", SOUND_FIELDS, wav2vec2);

/// Returns the row of a type with wav2vec 2.0's code.
const fn like_wav2vec2(model_type: &'static str, architecture: &'static str) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed: FIXED,
        common: COMMON,
        fields: &[STABLE[0], STABLE[1], SOUND],
    }
}

pub(super) const TYPES: &[HfType] = &[
    like_wav2vec2("wav2vec2", "Wav2Vec2ForCTC"),
    like_wav2vec2("hubert", "HubertForCTC"),
    like_wav2vec2("unispeech", "UniSpeechForCTC"),
    HfType {
        fields: &[
            STABLE[0],
            STABLE[1],
            derived("sound", SOUND_FIELDS, |file| {
                let mut out = wav2vec2(file)?;
                // The learned row is there whatever is masked.
                if let Some(sound) = out.as_mut().and_then(Value::as_object_mut) {
                    sound.insert("masked".to_owned(), true.into());
                }
                Ok(out)
            }),
        ],
        ..like_wav2vec2("unispeech-sat", "UniSpeechSatForCTC")
    },
    HfType {
        fields: &[
            STABLE[0],
            STABLE[1],
            field(
                &["num_buckets"],
                Meaning::Default("relative_buckets", Given::Int(320)),
            ),
            derived("sound", SOUND_FIELDS, |file| {
                let mut out = wav2vec2(file)?;
                if let Some(sound) = out.as_mut().and_then(Value::as_object_mut) {
                    sound.insert("gated_biases".to_owned(), true.into());
                }
                Ok(out)
            }),
        ],
        ..like_wav2vec2("wavlm", "WavLMForCTC")
    },
    HfType {
        model_type: "data2vec-audio",
        architecture: "Data2VecAudioForCTC",
        fixed: &[
            FIXED[0],
            FIXED[1],
            FIXED[2],
            FIXED[3],
            FIXED[4],
            FIXED[5],
            FIXED[6],
            ("norm_position", Given::Str("sum")),
            ("embedding_norm", Given::Bool(true)),
        ],
        common: COMMON,
        fields: &[derived("sound", SOUND_FIELDS, |file| {
            let mut out = convolutions(file, false)?;
            let layers = size(file, "num_conv_pos_embeddings", 5)?;
            let kernel = size(file, "conv_pos_kernel_size", 19)?;
            out.insert("position_layers".to_owned(), layers.into());
            out.insert("position_kernel".to_owned(), kernel.into());
            out.insert("weight_norm".to_owned(), false.into());
            Ok(Some(out.into()))
        })],
    },
];

pub(super) const SOUND_FIELDS: &[&str] = &[
    "conv_dim",
    "conv_kernel",
    "conv_stride",
    "conv_bias",
    "conv_pos_kernel_size",
    "feat_extract_norm",
    "feat_proj_layer_norm",
    "max_bucket_distance",
    "num_conv_pos_embeddings",
    "num_conv_pos_embedding_groups",
];
