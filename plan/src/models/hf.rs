//! Families in the `config.json` of Hugging Face's transformers.
//!
//! Names and defaults are those of the configuration classes of transformers 5. The same rows read
//! a file into a scenario, compare a file with a scenario, and write the file of a trained model.

use super::defaults;
use crate::config::{Bias, Model, ModelOptions};
use serde_json::Value;
use std::collections::BTreeSet;

/// A `model_type` of transformers that a family covers.
#[derive(Clone, Copy)]
pub struct HfType {
    /// `model_type`.
    pub model_type: &'static str,
    /// Class of the language model.
    pub architecture: &'static str,
    /// Values of keys of `[model]` that every model of this type has, besides its own name
    /// ([`FamilySpec::keeps_type`](super::FamilySpec::keeps_type)).
    pub fixed: &'static [(&'static str, Given)],
    /// Fields that it has in common with other types.
    pub common: &'static [Field],
    /// Fields, in the order in which they are written.
    pub fields: &'static [Field],
}

/// A `model_type` of transformers that puts a vision tower in front of a language model.
#[derive(Clone, Copy)]
pub struct HfWrapper {
    /// `model_type`.
    pub model_type: &'static str,
    /// Class of the whole.
    pub architecture: &'static str,
    /// Who says whether embedding and head are one parameter.
    pub ties: Ties,
    /// Types of its language model: as `text_config` names them, and the type that reads them. The
    /// first one is the default. Other known types stand for themselves.
    pub text: &'static [(&'static str, &'static str)],
    /// Returns the key `vision` from a file, null without a tower.
    ///
    /// # Errors
    /// What the key cannot express.
    pub vision: fn(Fields<'_>) -> Result<Value, String>,
    /// Returns the key `audio` from a file, null without a second tower.
    ///
    /// # Errors
    /// What the key cannot express.
    pub audio: fn(Fields<'_>) -> Result<Value, String>,
}

/// Returns null, for types without a second tower.
#[allow(
    clippy::unnecessary_wraps,
    reason = "others read files, which may be wrong"
)]
pub(super) fn no_tower(_: Fields<'_>) -> Result<Value, String> {
    Ok(Value::Null)
}

/// Who says whether embedding and head are one parameter, if both files have `tie_word_embeddings`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ties {
    /// The whole.
    Whole,
    /// They are if one of both says so.
    Either,
    /// The language model.
    Text,
    /// The class: they never are.
    Never,
}

impl HfWrapper {
    /// Returns the class of the whole without an output layer.
    #[must_use]
    pub(crate) fn base_class(&self) -> Option<String> {
        let stem = self.architecture.strip_suffix("ForConditionalGeneration")?;
        Some(format!("{stem}Model"))
    }

    /// Returns the name of its language model's type in files that do not name it.
    #[must_use]
    pub(crate) fn text_name(&self) -> &'static str {
        self.text.first().map_or("", |(theirs, _)| theirs)
    }

    /// Returns the type that reads a language model of this `model_type`.
    #[must_use]
    pub(crate) fn text_type(&self, given: Option<&str>) -> Option<&'static str> {
        let own = self
            .text
            .iter()
            .find(|(theirs, _)| given.is_none_or(|g| g == *theirs));
        own.map(|(_, ours)| *ours).or_else(|| {
            let known = super::hf_types().map(|(_, hf)| hf.model_type);
            known.into_iter().find(|name| given == Some(name))
        })
    }
}

/// A field of `config.json`.
#[derive(Clone, Copy)]
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
    /// The value of a key. If it is absent, the default of the configuration class applies; null is
    /// the key's own default.
    Nullable(&'static str, Given),
    /// A word for each value of a key: theirs, then ours. If the field is absent, the first one
    /// applies.
    Choice(&'static str, &'static [(&'static str, &'static str)]),
    /// The value of a key, computed from the file.
    Computed(&'static str, Computed),
    /// Longest sequence.
    Positions,
    /// Whether some linear layers have a bias, and whether that is so if the field is absent.
    HasBias(BiasPart, bool),
    /// One of these words. If it is absent, the first one applies.
    Word(&'static [&'static str]),
    /// On, or absent.
    On,
    /// Off, or absent.
    Off,
    /// A number that is null or absent: the model has no use for it. Classes refuse `false`.
    Unset,
    /// The padding token, which the class numbers like this if the file says nothing. Transformers
    /// refuses one beyond the vocabulary. It is not read.
    Padding(u64),
    /// Written as 0 and not read: it does not change a step's time or memory.
    Dropout,
}

/// Fields of a file by name; null counts as absent.
pub type Fields<'f> = &'f dyn Fn(&str) -> Option<Value>;

/// A key whose value does not stand in one field.
#[derive(Clone, Copy)]
pub struct Computed {
    /// Names of more fields that are read.
    pub also: &'static [&'static str],
    /// Returns the key's value from a file; `None` for the key's default.
    ///
    /// # Errors
    /// If the file has a value that no key can express.
    pub read: fn(Fields<'_>) -> Result<Option<Value>, String>,
    /// Returns the field's value from the model, by key; `None` to leave it out.
    pub write: fn(&Value) -> Option<Value>,
}

/// Linear layers that have a bias or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BiasPart {
    /// Queries, keys and values.
    Qkv,
    /// The output of attention.
    AttentionOutput,
    /// All of attention.
    Attention,
    /// The feed-forward layer.
    Mlp,
    /// All.
    All,
}

impl BiasPart {
    /// Returns whether it belongs to the layers with a bias.
    #[must_use]
    pub fn within(self, bias: Bias) -> bool {
        match self {
            Self::Qkv => bias.qkv(),
            Self::AttentionOutput => bias.attention_output(),
            Self::Attention => bias.qkv() && bias.attention_output(),
            Self::Mlp => bias.mlp(),
            Self::All => bias == Bias::All,
        }
    }

    /// Returns the layers with a bias if exactly those of `parts` have one; `None` for a
    /// combination that no value of the key expresses.
    #[must_use]
    pub fn together(parts: &[Self]) -> Option<Bias> {
        let has = |part| parts.contains(&part);
        let all = has(Self::All);
        let qkv = all || has(Self::Qkv) || has(Self::Attention);
        let output = all || has(Self::AttentionOutput) || has(Self::Attention);
        Some(match (qkv, output, all || has(Self::Mlp)) {
            (false, false, false) => Bias::None,
            (true, false, false) => Bias::Qkv,
            (true, true, false) => Bias::Attention,
            (false, false, true) => Bias::Mlp,
            (false, true, true) => Bias::AllButQkv,
            (true, true, true) => Bias::All,
            _ => return None,
        })
    }
}

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
    /// A list of strings.
    Words(&'static [&'static str]),
}

impl From<Given> for Value {
    fn from(given: Given) -> Self {
        match given {
            Given::Bool(b) => b.into(),
            Given::Int(n) => n.into(),
            Given::Float(x) => x.into(),
            Given::Str(s) => s.into(),
            Given::Words(words) => words.into(),
        }
    }
}

/// Returns whether a key changes how a model is trained, but not its outputs.
#[must_use]
pub fn changes_training(key: &str) -> bool {
    matches!(
        key,
        "aux_loss" | "aux_loss_kind" | "z_loss" | "router_bias_update_speed"
    )
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
pub(super) const POSITIONS: Field = field(&["max_position_embeddings"], Meaning::Positions);
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
    /// Returns all fields.
    pub fn all_fields(&self) -> impl Iterator<Item = &'static Field> + Clone + use<> {
        self.common.iter().chain(self.fields)
    }

    /// Returns whether files of the type must have a field.
    #[must_use]
    pub fn requires(&self, name: &str) -> bool {
        let mut own = self.fields_named(name);
        own.any(|f| matches!(f.meaning, Meaning::Required(_)))
    }

    /// Returns whether a file gives a field, under any of its names; `has` says whether it has a
    /// name.
    pub fn gives(&self, name: &str, has: impl Fn(&str) -> bool) -> bool {
        let mut own = self.fields_named(name);
        own.any(|f| f.names.iter().any(|n| has(n)))
    }

    fn fields_named(&self, name: &str) -> impl Iterator<Item = &'static Field> {
        self.all_fields().filter(move |f| f.names.contains(&name))
    }

    /// Returns whether a model of the family is of this type: its fixed keys have their values, its
    /// fields can express their keys, and every other option has its default.
    #[must_use]
    pub fn describes(&self, model: &Model) -> bool {
        self.inexpressible(model).is_empty()
    }

    /// Returns the keys of `[model]` that keep a model of the family from being of this type, each
    /// once, in alphabetical order.
    #[must_use]
    pub fn inexpressible(&self, model: &Model) -> Vec<String> {
        let values = serde_json::to_value(model).unwrap_or_default();
        let defaults = serde_json::to_value(ModelOptions::default()).unwrap_or_default();
        let is_named = !model.family.spec().keeps_type || values["model_type"] == self.model_type;
        let fixed = self
            .fixed
            .iter()
            .filter(|(key, given)| !changes_training(key) && values[*key] != Value::from(*given));
        let unsaid = self.all_fields().filter_map(|f| f.unsaid(model, &values));
        let options = defaults.as_object().into_iter().flatten();
        let other = options.filter(|(key, default)| {
            let is_own_type = *key == "model_type" && values[key] == self.model_type;
            !is_own_type && !self.covers(key) && values[key] != **default
        });
        let keys = fixed.map(|(key, _)| *key).chain(unsaid);
        let named = [
            (!is_named, "model_type"),
            (!self.says_bias(model.bias), "bias"),
        ];
        let named = named.into_iter().filter_map(|(is, key)| is.then_some(key));
        let keys = keys.chain(named).chain(other.map(|(key, _)| key.as_str()));
        let keys: BTreeSet<&str> = keys.collect();
        keys.into_iter().map(str::to_owned).collect()
    }

    /// Returns whether a file of this type may have any value of a key, or its fixed one.
    fn covers(&self, key: &str) -> bool {
        // Options that classes of transformers have whatever the type, and those of predictions.
        const OF_ALL: [&str; 7] = [
            "head",
            "num_labels",
            "attn_implementation",
            "dropout",
            "attention_dropout",
            "embedding_dropout",
            "rope_scaling",
        ];
        let scores = self.fixed.iter().find(|(key, _)| *key == "router");
        let sigmoids = scores.is_some_and(|(_, given)| Value::from(*given) == "sigmoid");
        // A buffer next to sigmoids, which `config.json` does not mention.
        let is_buffer = key == "router_bias" && sigmoids;
        is_buffer
            || self.fixed.iter().any(|(fixed, _)| *fixed == key)
            || OF_ALL.contains(&key)
            || changes_training(key)
            || self.all_fields().any(|f| f.says(key))
    }

    /// Returns whether fields can say which layers have a bias.
    fn says_bias(&self, bias: Bias) -> bool {
        let part = |field: &Field| match field.meaning {
            Meaning::HasBias(part, _) => Some(part),
            _ => None,
        };
        let parts: Vec<BiasPart> = self.all_fields().filter_map(part).collect();
        let on = parts.iter().copied().filter(|part| part.within(bias));
        let on: Vec<BiasPart> = on.collect();
        parts.is_empty() || BiasPart::together(&on) == Some(bias)
    }
}

impl Field {
    /// Returns the field's key if the field has no word for its value.
    fn unsaid(&self, model: &Model, values: &Value) -> Option<&'static str> {
        let (key, is_said) = match self.meaning {
            Meaning::Required(key) | Meaning::Default(key, _) => (key, !values[key].is_null()),
            // The first word stands for the default, which is the family's if no value is given.
            Meaning::Choice(key, words) if values[key].is_null() => {
                let own = defaults::activation(model).name();
                (key, key == "activation" && own == words[0].1)
            }
            Meaning::Choice(key, words) => (key, words.iter().any(|(_, w)| values[key] == *w)),
            _ => return None,
        };
        (!is_said).then_some(key)
    }

    /// Returns whether the field is the value of a key.
    #[must_use]
    pub fn says(&self, key: &str) -> bool {
        match self.meaning {
            Meaning::Required(k)
            | Meaning::Optional(k)
            | Meaning::Default(k, _)
            | Meaning::Nullable(k, _)
            | Meaning::Choice(k, _)
            | Meaning::Computed(k, _) => k == key,
            _ => false,
        }
    }
}

/// Classes of transformers.
impl HfType {
    /// Returns the name that all classes begin with; `None` if the class of the language model has
    /// an unusual name.
    #[must_use]
    pub fn stem(&self) -> Option<&'static str> {
        let ends = [
            "ForCausalLM",
            "WithLMHeadModel",
            "LMHeadModel",
            "MTModel",
            "ForMaskedLM",
            "ForConditionalGeneration",
            "ForImageClassification",
            "ForCTC",
        ];
        ends.iter()
            .find_map(|end| self.architecture.strip_suffix(end))
    }

    /// Returns the class without an output layer.
    #[must_use]
    pub(crate) fn base_class(&self) -> Option<String> {
        Some(format!("{}Model", self.stem()?))
    }

    /// Returns whether a class has no output layer. A language model that is a part of others has
    /// a class of its own in transformers (`Gemma3TextModel`).
    #[must_use]
    pub(crate) fn is_base_class(&self, class: &str) -> bool {
        let has_own_head = self.fixed.iter().any(|(key, _)| *key == "head");
        let is_text = class.ends_with("TextModel") && !has_own_head;
        is_text || self.base_class().as_deref() == Some(class)
    }

    /// Returns whether the language model has an encoder.
    #[must_use]
    pub(crate) fn has_encoder(&self) -> bool {
        let ends = ["ForConditionalGeneration", "MTModel"];
        ends.iter().any(|end| self.architecture.ends_with(end))
    }

    /// Returns whether the class for pretraining scores pairs of sentences, too.
    #[must_use]
    pub(crate) fn pretrains_with_pairs(&self) -> bool {
        let types = ["albert", "bert", "big_bird", "ernie", "megatron-bert"];
        types.contains(&self.model_type)
    }

    /// Returns whether the class for multiple choice has the layers of the one for sequences, with
    /// one score.
    #[must_use]
    pub fn chooses(&self) -> bool {
        let types = [
            "albert",
            "bert",
            "camembert",
            "data2vec-text",
            "deberta-v2",
            "distilbert",
            "electra",
            "ernie",
            "longformer",
            "megatron-bert",
            "modernbert",
            "mpnet",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
        ];
        types.contains(&self.model_type)
    }

    /// Returns the number of scores per sentence pair for a file with `classes` classes.
    #[must_use]
    pub(crate) fn pair_scores(&self, classes: Option<u64>) -> Option<u64> {
        if self.model_type == "albert" {
            classes
        } else {
            Some(2)
        }
    }

    /// Returns the classes whose output layers are known.
    #[must_use]
    pub fn classes(&self, heads: bool) -> Vec<String> {
        let mut all = vec![self.architecture.to_owned()];
        let one = ["ForImageClassification", "ForCTC"];
        if one.iter().any(|end| self.architecture.ends_with(end)) {
            all.extend(self.base_class());
        } else if let Some(stem) = self.stem().filter(|_| heads) {
            let ends = [
                "ForSequenceClassification",
                "ForTokenClassification",
                "ForQuestionAnswering",
                "Model",
            ];
            // Encoders alone are another model.
            let encodes = |end: &str| self.has_encoder() && end == "ForTokenClassification";
            let ends = ends.into_iter().filter(|end| !encodes(end));
            all.extend(ends.map(|end| format!("{stem}{end}")));
            if self.pretrains_with_pairs() {
                all.push(format!("{stem}ForPreTraining"));
            }
        }
        all
    }
}
