//! Types with an encoder with local attention, followed by a decoder.

use super::encoders::{attention_window, seen};
use super::read::size;
use super::seq2seq::{
    D_MODEL, DECODER_FFN, DECODER_HEADS, DECODER_LAYERS, ENCODER_LAYERS, GELU_FIRST, RELU,
    SUM_PLAIN, bart, sizes, t5,
};
use super::{ALWAYS_TIED, LAYER_NORM, LEARNED, NO_GATE, derived, number};
use crate::models::hf::{Field, Fields, HfType, Meaning, VOCAB, field};
use serde_json::{Value, json};

/// Returns the window of LongT5's encoder, and the positions whose sum is one more key.
fn long_t5(file: Fields<'_>) -> Result<Option<Value>, String> {
    let window = size(file, "local_radius", 127)? + 1;
    let kind = file("encoder_attention_type");
    let block = match kind.as_ref().and_then(Value::as_str) {
        None | Some("local") => 0,
        Some("transient-global") => size(file, "global_block_size", 16)?,
        Some(other) => {
            return Err(format!(
                "`encoder_attention_type` must be local or transient-global, not {other:?}"
            ));
        }
    };
    Ok(Some(
        json!({"sliding_window": window, "summary_block": block}),
    ))
}

const LED: &[Field] = &[
    VOCAB,
    ALWAYS_TIED,
    D_MODEL,
    ENCODER_LAYERS,
    DECODER_LAYERS,
    DECODER_FFN,
    DECODER_HEADS,
    number(
        &["max_decoder_position_embeddings"],
        "max_seq_len",
        |file| {
            Ok(Some(
                size(file, "max_decoder_position_embeddings", 1024)?.into(),
            ))
        },
        |model| Some(model["max_seq_len"].clone()),
    ),
    derived(
        "encoder",
        &[
            "attention_window",
            "max_encoder_position_embeddings",
            "encoder_ffn_dim",
            "encoder_attention_heads",
            "encoder_layerdrop",
            "decoder_layerdrop",
            "classifier_dropout",
            "init_std",
        ],
        |file| {
            let mut out = sizes(file);
            let rows = size(file, "max_encoder_position_embeddings", 16_384)?;
            let both = attention_window(file)?;
            let window = both / 2 + 1;
            out.extend([
                ("max_seq_len".to_owned(), rows.into()),
                ("sliding_window".to_owned(), window.into()),
                ("global_projections".to_owned(), true.into()),
            ]);
            Ok(Some(out.into()))
        },
    ),
];

pub(super) const TYPES: &[HfType] = &[
    t5(
        "longt5",
        "LongT5ForConditionalGeneration",
        &[
            derived(
                "encoder",
                &[
                    "encoder_attention_type",
                    "local_radius",
                    "global_block_size",
                ],
                long_t5,
            ),
            RELU[0],
            RELU[1],
        ],
    ),
    HfType {
        model_type: "led",
        architecture: "LEDForConditionalGeneration",
        fixed: SUM_PLAIN,
        common: LED,
        fields: &[GELU_FIRST[0]],
    },
    bart(
        "bigbird_pegasus",
        "BigBirdPegasusForConditionalGeneration",
        &[LAYER_NORM, NO_GATE, LEARNED],
        &[
            field(
                &["activation_function"],
                Meaning::Choice(
                    "activation",
                    &[("gelu_new", "gelu_new"), ("gelu", "gelu"), ("relu", "relu")],
                ),
            ),
            derived("embedding_multiplier", &["scale_embedding"], |file| {
                let off = file("scale_embedding") == Some(false.into());
                let width = file("d_model").and_then(|n| n.as_f64());
                Ok(width.filter(|_| !off).map(|w| w.sqrt().into()))
            }),
            derived("bias", &["use_bias"], |file| {
                let all = file("use_bias") == Some(true.into());
                Ok(Some(if all { true.into() } else { "mlp".into() }))
            }),
            // As many keys as a window of this size has to both sides.
            derived(
                "encoder",
                &["attention_type", "block_size", "num_random_blocks"],
                |file| {
                    let mut out = sizes(file);
                    if let Some([keys, longest]) = seen(file)? {
                        let window = keys.div_ceil(2);
                        out.insert("sliding_window".to_owned(), window.into());
                        out.insert("window_from".to_owned(), longest.into());
                    }
                    Ok((!out.is_empty()).then(|| out.into()))
                },
            ),
        ],
    ),
];
