//! Families in the `config.json` of Hugging Face's transformers.
//!
//! Names and defaults are those of the configuration classes of transformers 5. The same rows read
//! a file into a scenario, compare a file with a scenario, and write the file of a trained model.

use crate::config::{Model, ModelOptions};
use serde_json::Value;

/// A `model_type` of transformers that a family covers.
pub struct HfType {
    /// `model_type`.
    pub model_type: &'static str,
    /// Class of the language model.
    pub architecture: &'static str,
    /// Values of keys of `[model]` that every model of this type has.
    pub fixed: &'static [(&'static str, Given)],
    /// Fields, in the order in which they are written.
    pub fields: &'static [Field],
}

/// A field of `config.json`.
pub struct Field {
    /// Name. A dot leads into an object. If there are several names, the first one in a file
    /// counts.
    pub names: &'static [&'static str],
    /// Its meaning.
    pub meaning: Meaning,
}

/// Meaning of a field.
#[derive(Clone, Copy)]
pub enum Meaning {
    /// The value of a key, without which the shape is not defined.
    Required(&'static str),
    /// The value of a key. If it is absent or null, the key's own default applies.
    Optional(&'static str),
    /// The value of a key. If it is absent or null, the default of the configuration class applies.
    Default(&'static str, Given),
    /// The longest sequence, or `sliding_window` if that is shorter.
    Positions {
        /// Whether the window slides if `use_sliding_window` is absent.
        slides: bool,
    },
    /// Whether the window slides. Our models see the whole sequence, so false is written.
    Slides,
    /// Whether some linear layers have a bias: key `bias` is true if all such fields are.
    HasBias,
    /// One of these words. If it is absent, the first one applies.
    Word(&'static [&'static str]),
    /// On, or absent.
    On,
    /// Off, or absent.
    Off,
    /// Written as 0 and not read: it does not change a step's time or memory.
    Dropout,
    /// The value of a key if another field is true. If it is absent, the default of the
    /// configuration class applies.
    When(&'static str, &'static str, Given),
    /// Whether the value of a key is above 0.
    Positive(&'static str),
    /// An empty list, or absent.
    NoneOf,
}

/// Keys that change training, not the model.
const LOSSES: [&str; 3] = ["aux_loss", "aux_loss_kind", "z_loss"];

/// A value of a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Given {
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(u64),
    /// A number.
    Float(f64),
    /// A string.
    Str(&'static str),
}

impl From<Given> for Value {
    fn from(given: Given) -> Self {
        match given {
            Given::Bool(b) => b.into(),
            Given::Int(n) => n.into(),
            Given::Float(x) => x.into(),
            Given::Str(s) => s.into(),
        }
    }
}

/// Returns a field with one name.
pub(super) const fn field(name: &'static [&'static str; 1], meaning: Meaning) -> Field {
    Field {
        names: name,
        meaning,
    }
}

/// Shapes that every decoder of transformers names alike.
pub(super) const LAYERS: Field = field(&["num_hidden_layers"], Meaning::Required("layers"));
pub(super) const HIDDEN: Field = field(&["hidden_size"], Meaning::Required("hidden"));
pub(super) const HEADS: Field = field(&["num_attention_heads"], Meaning::Required("heads"));
pub(super) const FFN: Field = field(&["intermediate_size"], Meaning::Required("ffn"));
pub(super) const VOCAB: Field = field(&["vocab_size"], Meaning::Required("vocab"));
pub(super) const TIED: Field = field(
    &["tie_word_embeddings"],
    Meaning::Optional("tie_embeddings"),
);
/// Transformers 5 writes it next to the kind of the embedding.
pub(super) const ROPE_THETA: Field = Field {
    names: &["rope_theta", "rope_parameters.rope_theta"],
    meaning: Meaning::Optional("rope_theta"),
};

impl HfType {
    /// Returns whether a model of the family is of this type: its fixed keys have their values, its
    /// fields can express their keys, and every other option has its default.
    #[must_use]
    pub fn describes(&self, model: &Model) -> bool {
        let values = serde_json::to_value(model).unwrap_or_default();
        let defaults = serde_json::to_value(ModelOptions::default()).unwrap_or_default();
        let is_fixed = |(key, given): &(&str, Given)| {
            LOSSES.contains(key) || values[key] == Value::from(*given)
        };
        let can_say = |field: &Field| match field.meaning {
            Meaning::Required(key) | Meaning::Default(key, _) => !values[key].is_null(),
            Meaning::HasBias => values["bias"].is_boolean(),
            _ => true,
        };
        let has_default = |(key, default): (&String, &Value)| {
            let is_fixed = self.fixed.iter().any(|(fixed, _)| fixed == key);
            let free = is_fixed || LOSSES.contains(&key.as_str());
            free || self.fields.iter().any(|f| f.says(key)) || values[key] == *default
        };
        self.fixed.iter().all(is_fixed)
            && self.fields.iter().all(can_say)
            && defaults.as_object().into_iter().flatten().all(has_default)
    }
}

impl Field {
    /// Returns whether the field is the value of a key.
    fn says(&self, key: &str) -> bool {
        match self.meaning {
            Meaning::Required(k) | Meaning::Optional(k) | Meaning::Default(k, _) => k == key,
            _ => false,
        }
    }
}
