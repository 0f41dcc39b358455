//! `config.json`.

use crate::train::TrainError;
use serde_json::Value;
use serde_json::value::RawValue;
use shardlab_plan::config::{Model, ModelOptions, RopeScaling};
use shardlab_plan::models::{
    Field, HfType, Meaning, changes_training, class_defaults, name_in_files, rope_scaling,
};
use std::path::Path;

/// Returns the type of transformers that describes a model; `None` if there is none.
pub(super) fn type_of(m: &Model) -> Option<&'static HfType> {
    m.family.spec().hf.iter().find(|hf| hf.describes(m))
}

/// Returns the type that a file names, if it describes the model: several types may.
pub(super) fn type_in(config: &Value, m: &Model) -> Option<&'static HfType> {
    let mut types = m.family.spec().hf.iter();
    types.find(|hf| config["model_type"] == name_in_files(hf) && hf.describes(m))
}

/// Returns why no type of transformers describes a model: what keeps it from being of the type that
/// comes nearest, and from which other values one would.
pub(super) fn no_type(m: &Model) -> TrainError {
    let types = m.family.spec().hf.iter();
    let nearest = types
        .map(|hf| (hf, hf.inexpressible(m)))
        .min_by_key(|(_, keys)| keys.len());
    let family = m.family.name();
    let why = match nearest {
        None => format!("family {family} has no `model_type`"),
        Some((hf, keys)) => {
            let ours = serde_json::to_value(m).unwrap_or_default();
            let said = keys
                .iter()
                .map(|key| format!("model.{key} = {}", ours[key]));
            format!(
                "no `model_type` of family {family} has exactly these options; the nearest, {}, cannot have {}",
                name_in_files(hf),
                said.collect::<Vec<_>>().join(", ")
            )
        }
    };
    TrainError::NoNames { why }
}

/// Types whose files have a language model and more, and what the names of its tensors begin with.
const WHOLES: [(&str, &str); 1] = [("llama4", "language_model.")];

/// Returns the configuration of the language model, and what the names of its tensors begin with:
/// if a file is of a known whole, that in `text_config`, with what the class has where it says
/// nothing.
pub(crate) fn of_language_model(mut config: Value) -> (Value, &'static str) {
    let whole = WHOLES
        .iter()
        .find(|(name, _)| config["model_type"] == *name);
    let Some((_, prefix)) = whole else {
        return (config, "");
    };
    let Some(Value::Object(mut text)) = config.get_mut("text_config").map(Value::take) else {
        return (config, "");
    };
    let named = text.get("model_type").and_then(Value::as_str);
    for (name, value) in class_defaults(named.unwrap_or_default()) {
        text.entry(name).or_insert(read(value));
    }
    (text.into(), prefix)
}

/// Collects differences between a file and a model.
pub(super) struct Differences<'a> {
    config: &'a Value,
    model: &'a Model,
    /// The model by key.
    ours: &'a Value,
    pub(super) all: Vec<String>,
}

impl<'a> Differences<'a> {
    pub(super) fn new(config: &'a Value, model: &'a Model, ours: &'a Value) -> Self {
        Self {
            config,
            model,
            ours,
            all: Vec::new(),
        }
    }

    /// Returns the value of a field that is present and not null. A dot leads into an object.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        let mut path = name.split('.');
        path.try_fold(self.config, |value, name| value.get(name))
            .filter(|v| !v.is_null())
    }

    /// Compares a field with a key. `default` is its value if the field is absent.
    fn same(&mut self, names: &[&str], key: &str, default: &Value, ours: &Value) {
        let found = names.iter().find_map(|n| self.get(n));
        let theirs = &found.unwrap_or(default).clone();
        self.equal(names[0], key, theirs, ours);
    }

    /// Compares what a field says with a key.
    fn equal(&mut self, name: &str, key: &str, theirs: &Value, ours: &Value) {
        // Decimal literals of equal settings parse to equal numbers. Values that are computed from
        // the file's may be rounded differently.
        let close = |(a, b): (f64, f64)| (a - b).abs() <= 1e-12 * b.abs();
        let numbers = theirs.as_f64().zip(ours.as_f64());
        if numbers.is_some_and(close) || theirs == ours {
            return;
        }
        self.all.push(match theirs {
            Value::Null => format!("`{name}` is missing, model.{key} {ours}"),
            Value::Bool(_) => format!("`{name}` is not model.{key} = {ours}"),
            value => format!("`{name}` is {value}, model.{key} {ours}"),
        });
    }

    fn word(&mut self, name: &str, allowed: &[&str]) {
        let theirs = self.get(name).map_or(Some(allowed[0]), Value::as_str);
        if !theirs.is_some_and(|t| allowed.contains(&t)) {
            let theirs = self.get(name).map(ToString::to_string).unwrap_or_default();
            self.all.push(format!(
                "`{name}` is {theirs}; known is {}",
                allowed.join(" or ")
            ));
        }
    }

    fn on(&mut self, name: &str) {
        if self.get(name).is_some_and(|v| *v != Value::Bool(true)) {
            self.all
                .push(format!("`{name}` is false, but this model has it"));
        }
    }

    fn off(&mut self, name: &str, why: &str) {
        if self.get(name).is_some_and(|v| *v != Value::Bool(false)) {
            self.all.push(format!("`{name}` is true, but {why}"));
        }
    }

    /// Compares what scales the frequencies of rotary embeddings.
    pub(super) fn rope_scaling(&mut self) {
        let ours = self.model.options.positions.rope_scaling.as_ref();
        let theirs = match rope_scaling(&|name| self.get(name).cloned()) {
            Ok(found) => found,
            Err(what) => return self.all.push(what),
        };
        let read = |v: &Value| serde_json::from_value::<RopeScaling>(v.clone()).ok();
        if theirs.as_ref().and_then(read).as_ref() != ours {
            let name = |of: Option<&RopeScaling>| of.map_or("default", |s| s.rope_type.name());
            self.all.push(format!(
                "`rope_scaling` is {}, model.rope_scaling is of type {}",
                theirs.unwrap_or_default(),
                name(ours)
            ));
        }
    }

    /// Compares a field with the model, and the longest sequence with that of the scenario.
    pub(super) fn field(&mut self, field: &Field, seq_len: u64) {
        let (m, ours) = (self.model, self.ours);
        let name = field.names[0];
        match field.meaning {
            Meaning::Required(key) => self.same(field.names, key, &Value::Null, &ours[key]),
            Meaning::Optional(key) => {
                let default = absent(key, m);
                self.same(field.names, key, &default, &ours[key]);
            }
            Meaning::Default(key, given) => self.same(field.names, key, &given.into(), &ours[key]),
            Meaning::Nullable(key, given) => {
                let default = match self.config.get(name) {
                    None => given.into(),
                    Some(_) => absent(key, m),
                };
                self.same(field.names, key, &default, &ours[key]);
            }
            Meaning::Choice(key, words) => {
                let found = field.names.iter().find_map(|n| self.get(n));
                let theirs = found.map_or(Some(words[0].0), Value::as_str);
                let word = words.iter().find(|(word, _)| Some(*word) == theirs);
                let ours = ours[key].as_str().unwrap_or(words[0].1);
                match word {
                    Some((_, word)) => self.equal(name, key, &(*word).into(), &ours.into()),
                    None => self.word(name, &words.iter().map(|(w, _)| *w).collect::<Vec<_>>()),
                }
            }
            Meaning::Computed(key, _) if changes_training(key) => {}
            Meaning::Computed(key, computed) => {
                let read = (computed.read)(&|name| self.get(name).cloned());
                match read {
                    Ok(found) => {
                        let theirs = found.unwrap_or_else(|| absent(key, m));
                        let name = if name.is_empty() { key } else { name };
                        self.equal(name, key, &theirs, &ours[key]);
                    }
                    Err(what) => self.all.push(what),
                }
            }
            Meaning::Positions => {
                let longest = field.names.iter().find_map(|n| self.get(n)?.as_u64());
                if let Some(longest) = longest.filter(|n| *n < seq_len) {
                    self.all
                        .push(format!("`{name}` is {longest}, train.seq_len {seq_len}"));
                }
            }
            Meaning::HasBias(part, default) => {
                let on = part.within(m.bias).into();
                self.same(field.names, "bias", &default.into(), &on);
            }
            Meaning::Word(words) => self.word(name, words),
            Meaning::On => self.on(name),
            Meaning::Off | Meaning::Unset => self.off(name, "this model does not have it"),
            Meaning::Padding(_) | Meaning::Dropout => {}
        }
    }
}

/// Adds the defaults of the class in transformers for fields that the file does not have, as the
/// scenario does.
fn with_class_defaults(config: &Value, hf: &HfType) -> Value {
    let mut out = config.clone();
    let named = config.get("model_type").and_then(Value::as_str);
    let defaults = class_defaults(named.unwrap_or_default());
    if let Some(fields) = out.as_object_mut() {
        for (name, value) in defaults {
            if !hf.requires(name) && !hf.gives(name, |n| config.get(n).is_some()) {
                fields.entry(name).or_insert(read(value));
            }
        }
    }
    out
}

/// Reads a value of the table of defaults, which is JSON.
fn read(value: &RawValue) -> Value {
    serde_json::from_str(value.get()).unwrap_or_default()
}

/// Compares a configuration with the scenario's model.
pub(crate) fn check(
    path: &Path,
    config: &Value,
    m: &Model,
    seq_len: u64,
) -> Result<(), TrainError> {
    let hf = type_in(config, m)
        .or_else(|| type_of(m))
        .ok_or_else(|| no_type(m))?;
    let ours = serde_json::to_value(m).map_err(|e| TrainError::format(path, e.to_string()))?;
    let config = with_class_defaults(config, hf);
    let mut d = Differences::new(&config, m, &ours);
    d.word("model_type", &[name_in_files(hf)]);
    for field in hf.all_fields() {
        d.field(field, seq_len);
    }
    d.rope_scaling();
    if d.all.is_empty() {
        return Ok(());
    }
    Err(TrainError::OtherModel {
        path: path.to_owned(),
        differences: d.all,
    })
}

/// Returns the value of a key in a file that does not have it.
fn absent(key: &str, m: &Model) -> Value {
    let defaults = &m.family.spec().defaults;
    match key {
        "kv_heads" => m.heads.into(),
        "head_dim" => (m.hidden / m.heads).into(),
        "ffn" => (defaults.ffn)(m.hidden).into(),
        "tie_embeddings" => defaults.tie_embeddings.into(),
        "bias" => serde_json::to_value(defaults.bias).unwrap_or_default(),
        "max_seq_len" => (defaults.max_seq_len)(None).into(),
        "norm_eps" => 1e-5.into(),
        "rope_theta" => 1e4.into(),
        key => serde_json::to_value(ModelOptions::default()).unwrap_or_default()[key].clone(),
    }
}
