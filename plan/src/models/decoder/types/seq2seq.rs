//! Types with an encoder and a decoder.

use super::{TIED_BY_DEFAULT, derived, number};
use crate::models::hf::{Field, Fields, Given, HfType, Meaning, POSITIONS, VOCAB, field};
use serde_json::Value;

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
        "gated-gelu" => ("gelu_tanh", true),
        "gelu" => ("gelu", false),
        "gated-silu" => ("silu", true),
        other => return Err(format!("`feed_forward_proj` {other:?} is not known")),
    })
}

const COMMON: &[Field] = &[
    VOCAB,
    field(&["d_model"], Meaning::Required("hidden")),
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
    TIED_BY_DEFAULT,
    // Hidden states are scaled if embedding and head share a parameter.
    derived(
        "logits_scaling",
        &["is_gated_act", "dense_act_fn"],
        |file| {
            let tied = file("tie_word_embeddings") != Some(false.into());
            let width = file("d_model").and_then(|n| n.as_f64());
            Ok(width.filter(|_| tied).map(|w| w.sqrt().into()))
        },
    ),
];

/// Returns the row of a type with T5's code.
const fn t5(model_type: &'static str, architecture: &'static str, own: &'static [Field]) -> HfType {
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
            derived("activation", &["feed_forward_proj"], |file| {
                Ok(Some(activation(file, "relu")?.0.into()))
            }),
            derived("gated_mlp", &[], |file| {
                Ok(Some(activation(file, "relu")?.1.into()))
            }),
        ],
    ),
    t5(
        "mt5",
        "MT5ForConditionalGeneration",
        &[
            derived("model_type", &[], |_| Ok(Some("mt5".into()))),
            derived("activation", &["feed_forward_proj"], |file| {
                Ok(Some(activation(file, "gated-gelu")?.0.into()))
            }),
            derived("gated_mlp", &[], |file| {
                Ok(Some(activation(file, "gated-gelu")?.1.into()))
            }),
        ],
    ),
    t5(
        "umt5",
        "UMT5ForConditionalGeneration",
        &[
            derived("model_type", &[], |_| Ok(Some("umt5".into()))),
            derived("relative_bias_per_layer", &[], |_| Ok(Some(true.into()))),
            derived("activation", &["feed_forward_proj"], |file| {
                Ok(Some(activation(file, "gated-gelu")?.0.into()))
            }),
            derived("gated_mlp", &[], |file| {
                Ok(Some(activation(file, "gated-gelu")?.1.into()))
            }),
        ],
    ),
    HfType {
        model_type: "bart",
        architecture: "BartForConditionalGeneration",
        fixed: &[
            ("norm", Given::Str("layer_norm")),
            ("norm_position", Given::Str("sum")),
            ("bias", Given::Bool(true)),
            ("gated_mlp", Given::Bool(false)),
            ("position_embedding", Given::Str("learned")),
            ("position_offset", Given::Int(2)),
            ("embedding_norm", Given::Bool(true)),
        ],
        common: &[VOCAB, POSITIONS, TIED_BY_DEFAULT],
        fields: &[
            field(&["d_model"], Meaning::Required("hidden")),
            field(&["encoder_layers"], Meaning::Required("encoder_layers")),
            field(&["decoder_layers"], Meaning::Required("layers")),
            number(
                &["decoder_ffn_dim"],
                "ffn",
                |file| same(file, ["encoder_ffn_dim", "decoder_ffn_dim"]),
                |model| Some(model["ffn"].clone()),
            ),
            number(
                &["decoder_attention_heads"],
                "heads",
                |file| same(file, ["encoder_attention_heads", "decoder_attention_heads"]),
                |model| Some(model["heads"].clone()),
            ),
            derived(
                "embedding_multiplier",
                &["scale_embedding"],
                |file| match file("scale_embedding") == Some(true.into()) {
                    true => Err(
                        "`scale_embedding` must be false: scaled tokens are not planned".to_owned(),
                    ),
                    false => Ok(None),
                },
            ),
            field(
                &["activation_function"],
                Meaning::Choice(
                    "activation",
                    &[
                        ("gelu", "gelu"),
                        ("relu", "relu"),
                        ("silu", "silu"),
                        ("gelu_new", "gelu_tanh"),
                    ],
                ),
            ),
            derived(
                "num_labels",
                &[
                    "encoder_ffn_dim",
                    "encoder_attention_heads",
                    "encoder_layerdrop",
                    "decoder_layerdrop",
                    "classifier_dropout",
                    "init_std",
                ],
                |_| Ok(None),
            ),
        ],
    },
];

/// Returns a size that encoder and decoder have in common.
fn same(file: Fields<'_>, names: [&str; 2]) -> Result<Option<Value>, String> {
    let [of_encoder, of_decoder] = names.map(file);
    if of_encoder != of_decoder {
        let [a, b] = names;
        return Err(format!("`{a}` and `{b}` must be equal"));
    }
    Ok(of_decoder)
}
