//! Types with an encoder and a decoder.

use super::read::flag;
use super::{
    AFTER_SUM, ALWAYS_TIED, BIASES, EMBEDDING_NORM, LAYER_NORM, LEARNED, NO_GATE, OFFSET,
    TIED_BY_DEFAULT, derived, number, wrappers,
};
use crate::models::hf::{Field, Fields, Given, HfType, Meaning, POSITIONS, VOCAB, field};
use serde_json::{Map, Value};

/// Blocks of the decoder; of the encoder, if the file does not say otherwise.
const LAYERS: Field = number(
    &["num_decoder_layers"],
    "layers",
    |file| Ok(file("num_decoder_layers").or_else(|| file("num_layers"))),
    |model| Some(model["layers"].clone()),
);

/// Returns the word of the activation, and whether it has a gate.
fn activation(file: Fields<'_>, default: &str) -> Result<(&'static str, bool), String> {
    let given = file("feed_forward_proj");
    let given = given.as_ref().and_then(Value::as_str).unwrap_or(default);
    Ok(match given {
        "relu" => ("relu", false),
        // The class takes the variant of eight operations (`dense_act_fn`).
        "gated-gelu" => ("gelu_new", true),
        "gelu" => ("gelu", false),
        "gated-silu" => ("silu", true),
        other => return Err(format!("`feed_forward_proj` {other:?} is not known")),
    })
}

/// Returns whether there is a gate: as the word of the activation says, or a field of its own.
fn gated(file: Fields<'_>, default: &str) -> Result<Option<Value>, String> {
    let word = activation(file, default)?.1;
    Ok(Some(flag(file, "is_gated_act", word).into()))
}

/// Activation and gate of classes without one by default.
pub(super) const RELU: [Field; 2] = [
    derived("activation", &["feed_forward_proj"], |file| {
        Ok(Some(activation(file, "relu")?.0.into()))
    }),
    derived("gated_mlp", &["is_gated_act"], |file| gated(file, "relu")),
];
/// The same of classes with one.
const GATED_GELU: [Field; 2] = [
    derived("activation", &["feed_forward_proj"], |file| {
        Ok(Some(activation(file, "gated-gelu")?.0.into()))
    }),
    derived("gated_mlp", &["is_gated_act"], |file| {
        gated(file, "gated-gelu")
    }),
];

const COMMON: &[Field] = &[
    VOCAB,
    D_MODEL,
    field(&["d_ff"], Meaning::Required("ffn")),
    field(&["num_layers"], Meaning::Required("encoder_layers")),
    LAYERS,
    field(&["num_heads"], Meaning::Required("heads")),
    field(&["d_kv"], Meaning::Default("head_dim", Given::Int(64))),
    field(
        &["layer_norm_epsilon"],
        Meaning::Default("norm_eps", Given::Float(1e-6)),
    ),
    field(
        &["relative_attention_num_buckets"],
        Meaning::Default("relative_buckets", Given::Int(32)),
    ),
    derived(
        "max_seq_len",
        &["n_positions", "relative_attention_max_distance"],
        |file| Ok(Some(file("n_positions").unwrap_or_else(|| 512.into()))),
    ),
    // The classes of transformers 5 share embedding and head whatever the file says, which decides
    // whether hidden states are scaled.
    derived("tie_embeddings", &[], |_| Ok(Some(true.into()))),
    derived(
        "logits_scaling",
        &["tie_word_embeddings", "dense_act_fn"],
        |file| {
            let tied = file("tie_word_embeddings") != Some(false.into());
            let width = file("d_model").and_then(|n| n.as_f64());
            Ok(width.filter(|_| tied).map(|w| w.sqrt().into()))
        },
    ),
];

/// Returns the row of a type with T5's code.
pub(super) const fn t5(
    model_type: &'static str,
    architecture: &'static str,
    own: &'static [Field],
) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed: &[
            ("position_embedding", Given::Str("none")),
            ("attention_multiplier", Given::Float(1.0)),
        ],
        common: COMMON,
        fields: own,
    }
}

pub(super) const TYPES: &[HfType] = &[
    t5(
        "t5",
        "T5ForConditionalGeneration",
        &[
            derived("model_type", &[], |_| Ok(Some("t5".into()))),
            RELU[0],
            RELU[1],
        ],
    ),
    t5(
        "mt5",
        "MT5ForConditionalGeneration",
        &[
            derived("model_type", &[], |_| Ok(Some("mt5".into()))),
            GATED_GELU[0],
            GATED_GELU[1],
        ],
    ),
    t5(
        "umt5",
        "UMT5ForConditionalGeneration",
        &[
            derived("model_type", &[], |_| Ok(Some("umt5".into()))),
            derived("relative_bias_per_layer", &[], |_| Ok(Some(true.into()))),
            GATED_GELU[0],
            GATED_GELU[1],
        ],
    ),
    HfType {
        model_type: "whisper",
        architecture: "WhisperForConditionalGeneration",
        fixed: &[
            LAYER_NORM,
            BIASES,
            NO_GATE,
            LEARNED,
            ("key_bias", Given::Bool(false)),
        ],
        common: &[VOCAB, TIED_BY_DEFAULT],
        fields: &[
            D_MODEL,
            DECODER_LAYERS,
            DECODER_FFN,
            DECODER_HEADS,
            GELU,
            field(
                &["max_target_positions"],
                Meaning::Default("max_seq_len", Given::Int(448)),
            ),
            derived(
                "vision",
                &[
                    "encoder_layers",
                    "encoder_ffn_dim",
                    "encoder_attention_heads",
                    "num_mel_bins",
                    "max_source_positions",
                    "num_hidden_layers",
                    // Which sounds are masked or decoded, and layers that are dropped at random.
                    "apply_spec_augment",
                    "mask_time_prob",
                    "mask_time_length",
                    "mask_time_min_masks",
                    "mask_feature_prob",
                    "mask_feature_length",
                    "mask_feature_min_masks",
                    "begin_suppress_tokens",
                    "suppress_tokens",
                    "max_length",
                    "median_filter_width",
                    "encoder_layerdrop",
                    "decoder_layerdrop",
                    // Of other output layers.
                    "classifier_proj_size",
                    "use_weighted_layer_sum",
                    // Not read by the code.
                    "scale_embedding",
                    "init_std",
                ],
                |file| {
                    let mut tower = wrappers::whisper(file, [4, 384, 6, 1536], 80)?;
                    tower["memory"] = true.into();
                    tower["projector"] = false.into();
                    Ok(Some(tower))
                },
            ),
        ],
    },
    bart("bart", "BartForConditionalGeneration", SUM, GELU_FIRST),
    bart(
        "mvp",
        "MvpForConditionalGeneration",
        SUM,
        &[
            GELU,
            SCALE,
            SIZES,
            // Learned rows in front of the keys and values of each layer.
            field(&["use_prompt"], Meaning::Off),
            derived("num_labels", &["prompt_length", "prompt_mid_dim"], |_| {
                Ok(None)
            }),
        ],
    ),
    bart("plbart", "PLBartForConditionalGeneration", SUM, GELU_FIRST),
    bart(
        "mbart",
        "MBartForConditionalGeneration",
        &[LAYER_NORM, BIASES, NO_GATE, LEARNED, OFFSET, EMBEDDING_NORM],
        GELU_FIRST,
    ),
    bart(
        "blenderbot",
        "BlenderbotForConditionalGeneration",
        &[LAYER_NORM, BIASES, NO_GATE, LEARNED],
        GELU_FIRST,
    ),
    bart(
        "blenderbot-small",
        "BlenderbotSmallForConditionalGeneration",
        SUM_PLAIN,
        GELU_FIRST,
    ),
    bart(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        &[LAYER_NORM, BIASES, NO_GATE, SINUSOIDAL, OFFSET],
        &[M2M_ACTIVATION, M2M_SCALE, SIZES],
    ),
    bart(
        "pegasus",
        "PegasusForConditionalGeneration",
        &[LAYER_NORM, BIASES, NO_GATE, SINUSOIDAL_TABLE],
        GELU_FIRST,
    ),
    bart(
        "marian",
        "MarianMTModel",
        &[LAYER_NORM, AFTER_SUM, BIASES, NO_GATE, SINUSOIDAL_TABLE],
        &[
            GELU,
            SCALE,
            SIZES,
            derived(
                "num_labels",
                &["share_encoder_decoder_embeddings", "decoder_vocab_size"],
                |file| {
                    if file("share_encoder_decoder_embeddings") == Some(false.into()) {
                        return Err("`share_encoder_decoder_embeddings` must be true".to_owned());
                    }
                    let (own, all) = (file("decoder_vocab_size"), file("vocab_size"));
                    match own.is_some_and(|own| Some(own) != all) {
                        true => {
                            Err("`decoder_vocab_size` and `vocab_size` must be equal".to_owned())
                        }
                        false => Ok(None),
                    }
                },
            ),
        ],
    ),
];

const SINUSOIDAL: (&str, Given) = ("position_embedding", Given::Str("sinusoidal"));
const SINUSOIDAL_TABLE: (&str, Given) = ("position_embedding", Given::Str("sinusoidal_table"));
/// BART's without rows for padding.
pub(super) const SUM_PLAIN: &[(&str, Given)] = &[
    LAYER_NORM,
    AFTER_SUM,
    BIASES,
    NO_GATE,
    LEARNED,
    EMBEDDING_NORM,
];
/// BART's.
const SUM: &[(&str, Given)] = &[
    LAYER_NORM,
    AFTER_SUM,
    BIASES,
    NO_GATE,
    LEARNED,
    OFFSET,
    EMBEDDING_NORM,
];

const GELU: Field = field(
    &["activation_function"],
    Meaning::Choice(
        "activation",
        &[
            ("gelu", "gelu"),
            ("relu", "relu"),
            ("silu", "silu"),
            ("swish", "silu"),
            ("gelu_new", "gelu_tanh"),
        ],
    ),
);
const M2M_ACTIVATION: Field = field(
    &["activation_function"],
    Meaning::Choice("activation", &[("relu", "relu"), ("gelu", "gelu")]),
);
/// Embedded tokens are multiplied by the root of the width on request.
const SCALE: Field = derived("embedding_multiplier", &["scale_embedding"], |file| {
    let on = file("scale_embedding") == Some(true.into());
    Ok(root_of_width(file).filter(|_| on))
});
/// The same, unless the file says that they are not.
const M2M_SCALE: Field = derived("embedding_multiplier", &["scale_embedding"], |file| {
    let off = file("scale_embedding") == Some(false.into());
    Ok(root_of_width(file).filter(|_| !off))
});
pub(super) const GELU_FIRST: &[Field] = &[GELU, SCALE, SIZES];

fn root_of_width(file: Fields<'_>) -> Option<Value> {
    let width = file("d_model").and_then(|n| n.as_f64());
    width.map(|w| w.sqrt().into())
}

/// Sizes as BART's files name them.
pub(super) const D_MODEL: Field = field(&["d_model"], Meaning::Required("hidden"));
pub(super) const ENCODER_LAYERS: Field =
    field(&["encoder_layers"], Meaning::Required("encoder_layers"));
pub(super) const DECODER_LAYERS: Field = field(&["decoder_layers"], Meaning::Required("layers"));
pub(super) const DECODER_FFN: Field = field(&["decoder_ffn_dim"], Meaning::Required("ffn"));
pub(super) const DECODER_HEADS: Field =
    field(&["decoder_attention_heads"], Meaning::Required("heads"));

const BART: &[Field] = &[
    VOCAB,
    POSITIONS,
    ALWAYS_TIED,
    D_MODEL,
    ENCODER_LAYERS,
    DECODER_LAYERS,
    DECODER_FFN,
    DECODER_HEADS,
    derived(
        "num_labels",
        &[
            "encoder_layerdrop",
            "decoder_layerdrop",
            "classifier_dropout",
            "init_std",
        ],
        |_| Ok(None),
    ),
];

/// Returns the row of a type with BART's code.
pub(super) const fn bart(
    model_type: &'static str,
    architecture: &'static str,
    fixed: &'static [(&'static str, Given)],
    own: &'static [Field],
) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed,
        common: BART,
        fields: own,
    }
}

/// Returns sizes of an encoder that differ from those of the decoder (BART's names).
pub(super) fn sizes(file: Fields<'_>) -> Map<String, Value> {
    let mut out = Map::new();
    for (key, part) in [("heads", "attention_heads"), ("ffn", "ffn_dim")] {
        let own = file(&format!("encoder_{part}"));
        if own != file(&format!("decoder_{part}"))
            && let Some(own) = own
        {
            out.insert(key.to_owned(), own);
        }
    }
    out
}

/// The key `encoder` of types with BART's names whose encoder sees all positions.
const SIZES: Field = derived(
    "encoder",
    &["encoder_ffn_dim", "encoder_attention_heads"],
    |file| {
        let out = sizes(file);
        Ok((!out.is_empty()).then(|| out.into()))
    },
);
