//! XLM and FlauBERT: encoders with a table of languages.

use super::encoders::no_class;
use super::read::{flag, integer, size};
use super::{ALWAYS_TIED, derived, number};
use crate::models::hf::{Field, Given, HfType, Meaning, VOCAB, field};

const FIELDS: &[Field] = &[
    VOCAB,
    ALWAYS_TIED,
    field(&["emb_dim"], Meaning::Required("hidden")),
    field(&["n_layers"], Meaning::Required("layers")),
    field(&["n_heads"], Meaning::Required("heads")),
    derived("ffn", &[], |file| {
        Ok(Some((4 * size(file, "emb_dim", 2048)?).into()))
    }),
    number(
        &["max_position_embeddings"],
        "max_seq_len",
        |file| Ok(Some(size(file, "max_position_embeddings", 512)?.into())),
        |model| Some(model["max_seq_len"].clone()),
    ),
    field(
        &["layer_norm_eps"],
        Meaning::Default("norm_eps", Given::Float(1e-12)),
    ),
    derived("activation", &["gelu_activation"], |file| {
        let gelu = flag(file, "gelu_activation", true);
        Ok(Some(if gelu { "gelu" } else { "relu" }.into()))
    }),
    derived("position_embedding", &["sinusoidal_embeddings"], |file| {
        let waves = flag(file, "sinusoidal_embeddings", false);
        let kind = if waves { "sinusoidal_table" } else { "learned" };
        Ok(Some(kind.into()))
    }),
    derived("token_types", &["n_langs", "use_lang_emb"], |file| {
        let languages = integer(file, "n_langs", 1);
        let has_table = languages > 1 && flag(file, "use_lang_emb", true);
        Ok(Some(if has_table { languages } else { 0 }.into()))
    }),
    field(&["causal"], Meaning::Off),
    field(&["is_encoder"], Meaning::On),
    field(&["asm"], Meaning::Off),
    field(&["pre_norm"], Meaning::Off),
    derived(
        "num_labels",
        &[
            "embed_init_std",
            "init_std",
            "lang_id",
            "layerdrop",
            "mask_index",
            "unk_index",
            // Of other output layers.
            "end_n_top",
            "start_n_top",
        ],
        |file| {
            let why = "it scores the first position of each sequence, without a pooler; the class for tokens does not";
            for class in [
                "XLMForSequenceClassification",
                "FlaubertForSequenceClassification",
            ] {
                no_class(file, class, why)?;
            }
            let why = "it chooses among several starts and ends";
            for class in ["XLMForQuestionAnswering", "FlaubertForQuestionAnswering"] {
                no_class(file, class, why)?;
            }
            Ok(None)
        },
    ),
];

/// Returns the row of a type with XLM's code.
const fn xlm(model_type: &'static str, architecture: &'static str) -> HfType {
    HfType {
        model_type,
        architecture,
        fixed: &[
            ("norm", Given::Str("layer_norm")),
            ("norm_position", Given::Str("sum")),
            ("gated_mlp", Given::Bool(false)),
            ("bias", Given::Bool(true)),
            ("head_bias", Given::Bool(true)),
            ("embedding_norm", Given::Bool(true)),
            ("head_transform", Given::Bool(false)),
            ("pooler", Given::Bool(false)),
        ],
        common: FIELDS,
        fields: &[],
    }
}

pub(super) const TYPES: &[HfType] = &[
    xlm("xlm", "XLMWithLMHeadModel"),
    xlm("flaubert", "FlaubertWithLMHeadModel"),
];
