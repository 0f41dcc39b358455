//! T5Gemma: an encoder and a decoder of Gemma 2's blocks, with different sizes.

use super::{TIED_BY_DEFAULT, derived};
use crate::models::hf::{Field, Fields, Given, HfType, Meaning};
use crate::models::windows::repeated;
use serde_json::{Map, Value};

/// Returns the value of a key that a field of the decoder gives.
const fn of_decoder(name: &'static [&'static str; 1], meaning: Meaning) -> Field {
    Field {
        names: name,
        meaning,
    }
}

/// Returns what the attention of each layer of a part sees.
fn layer_types(file: Fields<'_>, part: &str) -> Result<Value, String> {
    let field = |name: &str| file(&format!("{part}.{name}"));
    let layers = field("num_hidden_layers").and_then(|n| n.as_u64());
    let listed = field("layer_types");
    let word = |layer: u64| {
        let own = listed.as_ref().and_then(|list| list.get(layer as usize));
        match own.and_then(Value::as_str) {
            None if layer.is_multiple_of(2) => Ok("sliding_attention"),
            None => Ok("full_attention"),
            Some("sliding_attention") => Ok("sliding_attention"),
            Some("full_attention") => Ok("full_attention"),
            Some(other) => Err(format!(
                "`{part}.layer_types` must be full_attention or sliding_attention, not {other:?}"
            )),
        }
    };
    let all: Result<Vec<&str>, String> = (0..layers.unwrap_or(26)).map(word).collect();
    Ok(repeated(&all?))
}

/// Returns a soft limit: that of the file, the default of the class, or none where it is null.
fn softcap(file: Fields<'_>, name: &str, default: f64) -> Option<Value> {
    let decoder = file("decoder")?;
    match decoder.get(name) {
        None => Some(default.into()),
        Some(Value::Null) => None,
        Some(given) => Some(given.clone()),
    }
}

/// Returns the sizes of the encoder.
fn encoder(file: Fields<'_>) -> Result<Option<Value>, String> {
    let of = |part: &str, name: &str| file(&format!("{part}.{name}"));
    let same = [
        "vocab_size",
        "rms_norm_eps",
        "hidden_activation",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "attention_bias",
    ];
    if let Some(name) = same
        .iter()
        .find(|name| of("encoder", name) != of("decoder", name))
    {
        return Err(format!(
            "`encoder.{name}` and `decoder.{name}` must be equal"
        ));
    }
    let sizes = [
        ("hidden", "hidden_size"),
        ("heads", "num_attention_heads"),
        ("kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("ffn", "intermediate_size"),
        ("sliding_window", "sliding_window"),
    ];
    let mut out = Map::new();
    for (key, name) in sizes {
        if let Some(value) = of("encoder", name) {
            out.insert(key.to_owned(), value);
        }
    }
    out.insert("layer_types".to_owned(), layer_types(file, "encoder")?);
    out.insert("own_tokens".to_owned(), true.into());
    Ok(Some(out.into()))
}

pub(super) const TYPES: &[HfType] = &[HfType {
    model_type: "t5gemma",
    architecture: "T5GemmaForConditionalGeneration",
    fixed: &[
        ("norm", Given::Str("rms_norm_unit_offset")),
        ("norm_position", Given::Str("both")),
    ],
    common: &[TIED_BY_DEFAULT],
    fields: &[
        of_decoder(&["decoder.vocab_size"], Meaning::Required("vocab")),
        of_decoder(&["decoder.hidden_size"], Meaning::Required("hidden")),
        of_decoder(&["decoder.intermediate_size"], Meaning::Required("ffn")),
        of_decoder(&["decoder.num_hidden_layers"], Meaning::Required("layers")),
        of_decoder(&["decoder.num_attention_heads"], Meaning::Required("heads")),
        of_decoder(
            &["decoder.num_key_value_heads"],
            Meaning::Default("kv_heads", Given::Int(4)),
        ),
        of_decoder(
            &["decoder.head_dim"],
            Meaning::Default("head_dim", Given::Int(256)),
        ),
        of_decoder(
            &["encoder.num_hidden_layers"],
            Meaning::Required("encoder_layers"),
        ),
        of_decoder(
            &["decoder.max_position_embeddings"],
            Meaning::Default("max_seq_len", Given::Int(8192)),
        ),
        of_decoder(
            &["decoder.rms_norm_eps"],
            Meaning::Default("norm_eps", Given::Float(1e-6)),
        ),
        of_decoder(
            &["decoder.sliding_window"],
            Meaning::Default("sliding_window", Given::Int(4096)),
        ),
        of_decoder(
            &["decoder.attention_bias"],
            Meaning::HasBias(crate::models::hf::BiasPart::Attention, false),
        ),
        of_decoder(
            &["decoder.hidden_activation"],
            Meaning::Choice(
                "activation",
                &[
                    ("gelu_pytorch_tanh", "gelu_tanh"),
                    ("gelu", "gelu"),
                    ("silu", "silu"),
                ],
            ),
        ),
        Field {
            names: &["decoder.rope_theta", "decoder.rope_parameters.rope_theta"],
            meaning: Meaning::Optional("rope_theta"),
        },
        derived("layer_types", &[], |file| {
            layer_types(file, "decoder").map(Some)
        }),
        derived("attention_multiplier", &[], |file| {
            let scalar = file("decoder.query_pre_attn_scalar").and_then(|n| n.as_f64());
            Ok(Some(scalar.unwrap_or(256.0).powf(-0.5).into()))
        }),
        derived("embedding_multiplier", &[], |file| {
            let width = file("decoder.hidden_size").and_then(|n| n.as_f64());
            Ok(width.map(|w| w.sqrt().into()))
        }),
        derived("attention_softcap", &[], |file| {
            Ok(softcap(file, "attn_logit_softcapping", 50.0))
        }),
        derived("logits_softcap", &[], |file| {
            Ok(softcap(file, "final_logit_softcapping", 30.0))
        }),
        derived("encoder", &["vocab_size", "encoder"], encoder),
    ],
}];
