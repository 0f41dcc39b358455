//! `config.json`.

use crate::train::TrainError;
use serde_json::{Map, Value, json};
use shardlab_plan::config::{Model, ModelOptions, RopeScaling};
use shardlab_plan::models::{
    CLASS_DEFAULTS, HfType, Meaning, changes_training, name_in_files, rope_scaling,
};
use std::path::Path;

/// Returns the type of transformers that describes a model; `None` if there is none.
fn type_of(m: &Model) -> Option<&'static HfType> {
    m.family.spec().hf.iter().find(|hf| hf.describes(m))
}

/// Returns why no type of transformers describes a model: what keeps it from being of the type that
/// comes nearest, and from which other values one would.
fn no_type(m: &Model) -> TrainError {
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

/// Writes a value into a configuration. A dot in the name leads into an object.
fn put(config: &mut Map<String, Value>, name: &str, value: Value) {
    match name.split_once('.') {
        None => {
            config.insert(name.to_owned(), value);
        }
        Some((object, name)) => {
            let inner = config.entry(object).or_insert_with(|| json!({}));
            if let Value::Object(inner) = inner {
                put(inner, name, value);
            }
        }
    }
}

/// Writes what scales rotary frequencies: next to the base of layers that see all positions, if it
/// is theirs alone.
fn put_scaling(config: &mut Map<String, Value>, scaling: &RopeScaling) {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let Ok(Value::Object(mut fields)) = serde_json::to_value(scaling) else {
        return;
    };
    if let Some(original) = scaling.original_max_position_embeddings {
        // The classes expect an integer, and that of Phi-3 a field of its own.
        let original = Value::from(original as u64);
        fields.insert(ORIGINAL.to_owned(), original.clone());
        config.insert(ORIGINAL.to_owned(), original);
    }
    let of_full = config.get_mut("rope_parameters");
    let of_full = of_full.and_then(|all| all.get_mut("full_attention")?.as_object_mut());
    match of_full {
        Some(full) => full.extend(fields),
        None => put(config, "rope_scaling", fields.into()),
    }
}

/// Returns the configuration of a model.
///
/// # Errors
/// [`TrainError::NoNames`] if no file describes the model.
pub(crate) fn of(m: &Model) -> Result<Value, TrainError> {
    let hf = type_of(m).ok_or_else(|| no_type(m))?;
    let ours = serde_json::to_value(m).unwrap_or_default();
    let mut config = Map::new();
    config.insert("architectures".to_owned(), json!([hf.architecture]));
    config.insert("model_type".to_owned(), json!(name_in_files(hf)));
    for field in hf.all_fields() {
        let value = match field.meaning {
            Meaning::Required(key)
            | Meaning::Optional(key)
            | Meaning::Default(key, _)
            | Meaning::Nullable(key, _) => ours[key].clone(),
            Meaning::Choice(key, words) => {
                let theirs = words.iter().find(|(_, word)| ours[key] == *word);
                theirs.unwrap_or(&words[0]).0.into()
            }
            Meaning::Computed(_, computed) => match (computed.write)(&ours) {
                Some(value) => value,
                None => continue,
            },
            Meaning::Positions => ours["max_seq_len"].clone(),
            Meaning::HasBias(part, _) => part.within(m.bias).into(),
            Meaning::Word(words) => words[0].into(),
            Meaning::On => true.into(),
            Meaning::Off => false.into(),
            Meaning::Dropout => 0.0.into(),
        };
        put(&mut config, field.names[0], value);
    }
    if let Some(scaling) = &m.options.rope_scaling {
        put_scaling(&mut config, scaling);
    }
    config.insert("torch_dtype".to_owned(), "float32".into());
    Ok(config.into())
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
    let own = CLASS_DEFAULTS
        .iter()
        .find(|(name, _)| text.get("model_type").is_some_and(|given| given == name));
    let own = own.and_then(|(_, json)| serde_json::from_str(json).ok());
    for (name, value) in own.unwrap_or_else(Map::new) {
        text.entry(name).or_insert(value);
    }
    (text.into(), prefix)
}

/// Collects differences.
struct Differences<'a> {
    config: &'a Value,
    all: Vec<String>,
}

impl Differences<'_> {
    /// Returns the value of a field that is present and not null. A dot leads into an object.
    fn get(&self, name: &str) -> Option<&Value> {
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
        // Configurations and scenarios both contain decimal literals, so equal settings parse to
        // equal numbers.
        if theirs.as_f64().is_some_and(|n| Some(n) == ours.as_f64()) || theirs == ours {
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
    fn rope_scaling(&mut self, ours: Option<&RopeScaling>) {
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
    let mut hf = type_of(m).ok_or_else(|| no_type(m))?;
    // Several types may describe the model.
    let types = m.family.spec().hf.iter().filter(|t| t.describes(m));
    for t in types.filter(|t| config["model_type"] == name_in_files(t)) {
        hf = t;
    }
    let ours = serde_json::to_value(m).map_err(|e| TrainError::format(path, e.to_string()))?;
    d.word("model_type", &[name_in_files(hf)]);
    for field in hf.all_fields() {
        let name = field.names[0];
        match field.meaning {
            Meaning::Required(key) => d.same(field.names, key, &Value::Null, &ours[key]),
            Meaning::Optional(key) => {
                let default = absent(key, m);
                d.same(field.names, key, &default, &ours[key]);
            }
            Meaning::Default(key, given) => d.same(field.names, key, &given.into(), &ours[key]),
            Meaning::Nullable(key, given) => {
                let default = match config.get(name) {
                    None => given.into(),
                    Some(_) => absent(key, m),
                };
                d.same(field.names, key, &default, &ours[key]);
            }
            Meaning::Choice(key, words) => {
                let found = field.names.iter().find_map(|n| d.get(n));
                let theirs = found.map_or(Some(words[0].0), Value::as_str);
                let word = words.iter().find(|(word, _)| Some(*word) == theirs);
                let ours = ours[key].as_str().unwrap_or(words[0].1);
                match word {
                    Some((_, word)) => d.equal(name, key, &(*word).into(), &ours.into()),
                    None => d.word(name, &words.iter().map(|(w, _)| *w).collect::<Vec<_>>()),
                }
            }
            Meaning::Computed(key, _) if changes_training(key) => {}
            Meaning::Computed(key, computed) => {
                let read = (computed.read)(&|name| d.get(name).cloned());
                match read {
                    Ok(found) => {
                        let theirs = found.unwrap_or_else(|| absent(key, m));
                        let name = if name.is_empty() { key } else { name };
                        d.equal(name, key, &theirs, &ours[key]);
                    }
                    Err(what) => d.all.push(what),
                }
            }
            Meaning::Positions => {
                let longest = field.names.iter().find_map(|n| d.get(n)?.as_u64());
                if let Some(longest) = longest.filter(|n| *n < seq_len) {
                    d.all
                        .push(format!("`{name}` is {longest}, train.seq_len {seq_len}"));
                }
            }
            Meaning::HasBias(part, default) => {
                let on = part.within(m.bias).into();
                d.same(field.names, "bias", &default.into(), &on);
            }
            Meaning::Word(words) => d.word(name, words),
            Meaning::On => d.on(name),
            Meaning::Off => d.off(name, "this model does not have it"),
            Meaning::Dropout => {}
        }
    }
    d.rope_scaling(m.options.rope_scaling.as_ref());
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
