//! `config.json`.

use crate::train::TrainError;
use serde_json::{Map, Value, json};
use shardlab_plan::config::{Model, ModelOptions};
use shardlab_plan::models::{HfType, Meaning};
use std::path::Path;

/// Returns the type of transformers that describes a model; `None` if there is none.
fn type_of(m: &Model) -> Option<&'static HfType> {
    m.family.spec().hf.iter().find(|hf| hf.describes(m))
}

/// Returns the configuration of a model; `None` for families without one.
pub(crate) fn of(m: &Model) -> Option<Value> {
    let hf = type_of(m)?;
    let ours = serde_json::to_value(m).ok()?;
    let mut config = Map::new();
    config.insert("architectures".to_owned(), json!([hf.architecture]));
    config.insert("model_type".to_owned(), json!(hf.model_type));
    for field in hf.fields {
        let value = match field.meaning {
            Meaning::Required(key) | Meaning::Optional(key) | Meaning::Default(key, _) => {
                ours[key].clone()
            }
            Meaning::Positions { .. } => ours["max_seq_len"].clone(),
            Meaning::HasBias => ours["bias"].clone(),
            Meaning::Word(words) => words[0].into(),
            Meaning::On => true.into(),
            Meaning::Slides | Meaning::Off => false.into(),
            Meaning::Dropout => 0.0.into(),
            Meaning::When(key, _, _) => ours[key].clone(),
            Meaning::Positive(key) => ours[key].as_f64().is_some_and(|x| x > 0.0).into(),
            Meaning::NoneOf => json!([]),
        };
        let name = field.names[0];
        match name.split_once('.') {
            None => {
                config.insert(name.to_owned(), value);
            }
            Some((object, name)) => {
                let inner = config.entry(object).or_insert_with(|| json!({}));
                inner[name] = value;
            }
        }
    }
    config.insert("torch_dtype".to_owned(), "float32".into());
    Some(config.into())
}

/// Collects differences.
struct Differences<'a> {
    config: &'a Value,
    all: Vec<String>,
}

impl Differences<'_> {
    /// Returns the value of a field that is present and not null. A dot leads into an object.
    fn get(&self, name: &str) -> Option<&Value> {
        let value = match name.split_once('.') {
            None => self.config.get(name),
            Some((object, name)) => self.config.get(object)?.get(name),
        };
        value.filter(|v| !v.is_null())
    }

    /// Compares a field with a key. `default` is its value if the field is absent.
    fn same(&mut self, names: &[&str], key: &str, default: &Value, ours: &Value) {
        let theirs = names.iter().find_map(|n| self.get(n)).unwrap_or(default);
        // Configurations and scenarios both contain decimal literals, so equal settings parse to
        // equal numbers.
        if theirs.as_f64().is_some_and(|n| Some(n) == ours.as_f64()) || theirs == ours {
            return;
        }
        let name = names[0];
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

    fn empty(&mut self, name: &str) {
        if let Some(list) = self.get(name).filter(|v| **v != json!([])) {
            let what = format!("`{name}` is {list}, but known is an empty list");
            self.all.push(what);
        }
    }

    /// Compares what scales the frequencies of rotary embeddings.
    fn rope_type(&mut self) {
        let names = ["rope_parameters", "rope_scaling"];
        let Some(rope) = names.into_iter().find_map(|n| self.get(n)) else {
            return;
        };
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        if let Some(kind) = kind.filter(|k| *k != "default") {
            let what = format!("`rope_type` is {kind}; known is \"default\"");
            self.all.push(what);
        }
    }
}

/// Compares a configuration with the scenario's model.
pub(crate) fn check(
    path: &Path,
    config: &Value,
    m: &Model,
    seq_len: u64,
) -> Result<(), TrainError> {
    let mut d = Differences {
        config,
        all: Vec::new(),
    };
    let mut hf = type_of(m).ok_or(TrainError::NoNames)?;
    // Several types may describe the model.
    let types = m.family.spec().hf.iter().filter(|t| t.describes(m));
    for t in types.filter(|t| config["model_type"] == t.model_type) {
        hf = t;
    }
    let ours = serde_json::to_value(m).map_err(|e| TrainError::format(path, e.to_string()))?;
    d.word("model_type", &[hf.model_type]);
    for field in hf.fields {
        let name = field.names[0];
        match field.meaning {
            Meaning::Required(key) => d.same(field.names, key, &Value::Null, &ours[key]),
            Meaning::Optional(key) => {
                let default = absent(key, m);
                d.same(field.names, key, &default, &ours[key]);
            }
            Meaning::Default(key, given) => d.same(field.names, key, &given.into(), &ours[key]),
            Meaning::Positions { .. } => {
                let longest = d.get(name).and_then(Value::as_u64);
                if let Some(longest) = longest.filter(|n| *n < seq_len) {
                    d.all
                        .push(format!("`{name}` is {longest}, train.seq_len {seq_len}"));
                }
            }
            Meaning::HasBias => d.same(field.names, "bias", &Value::Bool(false), &ours["bias"]),
            Meaning::Word(words) => d.word(name, words),
            Meaning::On => d.on(name),
            Meaning::Slides => d.off(name, "only full attention is supported"),
            Meaning::Off => d.off(name, "this model does not have it"),
            Meaning::NoneOf => d.empty(name),
            // Losses of routers change training, not the model.
            Meaning::Dropout | Meaning::When(..) | Meaning::Positive(_) => {}
        }
    }
    d.rope_type();
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
        "max_seq_len" => (defaults.max_seq_len)(None).into(),
        "norm_eps" => 1e-5.into(),
        "rope_theta" => 1e4.into(),
        key => serde_json::to_value(ModelOptions::default()).unwrap_or_default()[key].clone(),
    }
}
