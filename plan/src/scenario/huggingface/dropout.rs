//! Probabilities of dropout. Each type has its own names for them, and several are the same.

use super::{Config, Key, Kind, Value};
use crate::scenario::value::Datum;

/// Names of the dropout of what layers add to the residual stream.
const RESIDUAL: &[&str] = &[
    "resid_pdrop",
    "residual_dropout",
    "resid_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout_rate",
    "dropout",
];

/// Names of that of the weights of attention.
const ATTENTION: &[&str] = &[
    "attn_pdrop",
    "attention_dropout",
    "attention_probs_dropout_prob",
];

/// Names of that of the embedded tokens. Encoders and GPT-NeoX have one value for both.
const EMBEDDING: &[&str] = &["embd_pdrop", "embedding_dropout", "embed_dropout"];

/// Types whose classes have dropout by default, of layers, attention and embedded tokens.
const DEFAULTS: &[(&str, [f64; 3])] = &[
    ("gpt2", [0.1, 0.1, 0.1]),
    ("gpt-sw3", [0.1, 0.1, 0.1]),
    ("gpt_bigcode", [0.1, 0.1, 0.1]),
    ("opt", [0.1, 0.0, 0.0]),
    ("biogpt", [0.1, 0.1, 0.1]),
    ("seed_oss", [0.1, 0.1, 0.0]),
    ("xglm", [0.1, 0.1, 0.1]),
    ("bert", [0.1, 0.1, 0.1]),
    ("roberta", [0.1, 0.1, 0.1]),
    ("xlm-roberta", [0.1, 0.1, 0.1]),
    ("electra", [0.1, 0.1, 0.1]),
    ("camembert", [0.1, 0.1, 0.1]),
    ("deberta", [0.1, 0.1, 0.1]),
    ("deberta-v2", [0.1, 0.1, 0.1]),
    ("bart", [0.1, 0.0, 0.1]),
    ("mbart", [0.1, 0.0, 0.1]),
    ("t5", [0.1, 0.1, 0.1]),
    ("mt5", [0.1, 0.1, 0.1]),
    ("big_bird", [0.1, 0.1, 0.1]),
    ("data2vec-text", [0.1, 0.1, 0.1]),
    ("distilbert", [0.1, 0.1, 0.1]),
    ("ernie", [0.1, 0.1, 0.1]),
    ("layoutlm", [0.1, 0.1, 0.1]),
    ("megatron-bert", [0.1, 0.1, 0.1]),
    ("mpnet", [0.1, 0.1, 0.1]),
    ("roformer", [0.1, 0.1, 0.1]),
    ("xlm-roberta-xl", [0.1, 0.1, 0.1]),
    ("longt5", [0.1, 0.1, 0.1]),
    ("umt5", [0.1, 0.1, 0.1]),
];

impl Config<'_> {
    /// Returns the keys of dropout that are not 0.
    pub(super) fn dropout(&self, kind: Kind) -> Vec<(Key, Value)> {
        if !kind.family.has("dropout") {
            return Vec::new();
        }
        let model_type = kind.hf.model_type;
        let default = DEFAULTS.iter().find(|(name, _)| *name == model_type);
        let default = default.map_or([0.0; 3], |(_, given)| *given);
        let shared = matches!(kind.family.name, "bert" | "gpt_neox");
        let embedding = if shared { RESIDUAL } else { EMBEDDING };
        let keys = [Key::Dropout, Key::AttentionDropout, Key::EmbeddingDropout];
        let names = [RESIDUAL, ATTENTION, embedding];
        let mut out = Vec::new();
        for ((key, names), default) in keys.into_iter().zip(names).zip(default) {
            let given = self.first(names);
            let is_number = |v: &Value| matches!(v.datum, Datum::Float(_) | Datum::Int(_));
            let value = given.filter(is_number).unwrap_or(Value {
                origin: self.whole(),
                datum: Datum::Float(default),
            });
            if !matches!(value.datum, Datum::Float(0.0) | Datum::Int(0)) {
                out.push((key, value));
            }
        }
        out
    }
}
