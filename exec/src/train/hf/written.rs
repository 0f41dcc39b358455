//! The `config.json` of a trained model.
//!
//! A model that came from a file gets that file, with the fields that the scenario changed: other
//! fields, such as the numbers of special tokens, are not ours to choose. Without a file, all
//! fields of its type are written. In both cases, the result must read as the model.

use super::config::{Differences, check, no_type, type_in, type_of};
use super::origin::Origin;
use crate::train::TrainError;
use serde_json::{Map, Value, json};
use shardlab_plan::config::{Model, PositionEmbedding, RopeScaling};
use shardlab_plan::models::{
    Computed, Field, HfType, Meaning, ROPE_SCALING_FIELDS, ROPE_SCALING_PLACES, SCALED_BY_CLASS,
    name_in_files,
};
use std::path::Path;

const ORIGINAL: &str = "original_max_position_embeddings";

/// Returns the configuration of a model, given the file that it came from.
///
/// # Errors
/// [`TrainError::NoNames`] if no file describes the model.
pub(crate) fn of(m: &Model, origin: Option<&Origin>) -> Result<Value, TrainError> {
    let ours = serde_json::to_value(m).unwrap_or_default();
    let source = origin.and_then(|o| Some((type_in(&o.config, m)?, o.config.as_object()?)));
    let (hf, config) = match source {
        Some((hf, source)) => (hf, changed(source, hf, m, &ours)),
        None => {
            let hf = type_of(m).ok_or_else(|| no_type(m))?;
            (hf, fresh(hf, m, &ours))
        }
    };
    let config = Value::Object(finished(config, hf, m));
    check(Path::new("config.json"), &config, m, 0).map_err(|e| match e {
        TrainError::OtherModel { differences, .. } => TrainError::NoNames {
            why: format!(
                "no `config.json` of type {} has exactly these options: in the nearest, {}",
                name_in_files(hf),
                differences.join(", ")
            ),
        },
        other => other,
    })?;
    Ok(config)
}

/// Returns all fields of a type.
fn fresh(hf: &HfType, m: &Model, ours: &Value) -> Map<String, Value> {
    let mut config = Map::new();
    config.insert("architectures".to_owned(), Value::Null);
    config.insert("model_type".to_owned(), json!(name_in_files(hf)));
    for field in hf.all_fields() {
        if let Some(value) = value_of(field, m, ours) {
            put(&mut config, field.names[0], value);
        }
    }
    put_scaling(&mut config, hf, m);
    config
}

/// Returns the fields of a file, with those of the model where the file says something else.
fn changed(
    source: &Map<String, Value>,
    hf: &HfType,
    m: &Model,
    ours: &Value,
) -> Map<String, Value> {
    let mut config = source.clone();
    let file = Value::Object(source.clone());
    let differs = |compare: &dyn Fn(&mut Differences<'_>)| {
        let mut found = Differences::new(&file, m, ours);
        compare(&mut found);
        !found.all.is_empty()
    };
    let is_count = |f: &Field| matches!(f.meaning, Meaning::Required("layers"));
    let mut counts = hf.all_fields().filter(|f| is_count(f));
    let layers = counts.find_map(|f| first(source, f.names)?.as_u64());
    let other_layers = layers.filter(|n| *n != u64::from(m.layers));
    for field in hf.all_fields() {
        let computed = match field.meaning {
            Meaning::Computed(_, computed) => Some(computed),
            _ => None,
        };
        if let Some((layers, computed)) = other_layers.zip(computed) {
            drop_lists(&mut config, field, computed, layers);
        }
        let is_other = match field.meaning {
            Meaning::Positions => has_other_positions(source, field, m),
            _ => differs(&|d| d.field(field, 0)),
        };
        let is_list = other_layers.is_some() && computed.is_some();
        let value = value_of(field, m, ours).filter(|_| is_other || is_list);
        if let Some(value) = value {
            let mut present = field.names.iter().filter(|n| at(source, n).is_some());
            put(
                &mut config,
                present.next().unwrap_or(&field.names[0]),
                value,
            );
        }
    }
    if differs(&|d| d.rope_scaling()) {
        drop_scaling(&mut config);
        put_scaling(&mut config, hf, m);
    }
    config
}

/// Returns whether a file has another number of positions, where it matters: a longer limit than
/// the scenario's is that of the model if no weights depend on it.
fn has_other_positions(source: &Map<String, Value>, field: &Field, m: &Model) -> bool {
    let is_table = m.options.positions.position_embedding == PositionEmbedding::Learned;
    let theirs = first(source, field.names).and_then(Value::as_u64);
    theirs.is_some_and(|n| n < m.max_seq_len || is_table && n != m.max_seq_len)
}

/// Removes lists with one entry for each of a former number of layers.
fn drop_lists(config: &mut Map<String, Value>, field: &Field, computed: Computed, layers: u64) {
    for name in field.names.iter().chain(computed.also) {
        let of_layers = |list: &Vec<Value>| list.len() as u64 == layers;
        let list = config.get(*name).and_then(Value::as_array);
        if list.is_some_and(of_layers) {
            config.remove(*name);
        }
    }
}

/// Writes what is the same whatever a file says: the class, and that weights are in float32. The
/// numbers of tokens that the vocabulary lacks are removed where transformers refuses them.
fn finished(mut config: Map<String, Value>, hf: &HfType, m: &Model) -> Map<String, Value> {
    config.insert("architectures".to_owned(), json!([hf.architecture]));
    let dtype = match config.contains_key("dtype") {
        true => "dtype",
        false => "torch_dtype",
    };
    config.insert(dtype.to_owned(), "float32".into());
    config.remove("quantization_config");
    let padding = config.get("pad_token_id").and_then(Value::as_u64);
    if padding.is_some_and(|token| token >= m.vocab) {
        config.insert("pad_token_id".to_owned(), Value::Null);
    }
    config
}

/// Returns what a field says of a model; `None` to leave it out.
fn value_of(field: &Field, m: &Model, ours: &Value) -> Option<Value> {
    Some(match field.meaning {
        Meaning::Required(key)
        | Meaning::Optional(key)
        | Meaning::Default(key, _)
        | Meaning::Nullable(key, _) => ours[key].clone(),
        Meaning::Choice(key, words) => {
            let theirs = words.iter().find(|(_, word)| ours[key] == *word);
            theirs.unwrap_or(&words[0]).0.into()
        }
        Meaning::Computed(_, computed) => (computed.write)(ours)?,
        Meaning::Positions => ours["max_seq_len"].clone(),
        Meaning::HasBias(part, _) => part.within(m.bias).into(),
        Meaning::Word(words) => words[0].into(),
        Meaning::On => true.into(),
        Meaning::Off => false.into(),
        Meaning::Unset => Value::Null,
        Meaning::Padding(of_class) if of_class < m.vocab => return None,
        Meaning::Padding(_) => Value::Null,
        Meaning::Dropout => 0.0.into(),
    })
}

/// Returns the first of these fields that is there and not null.
fn first<'c>(config: &'c Map<String, Value>, names: &[&str]) -> Option<&'c Value> {
    let mut found = names.iter().filter_map(|name| at(config, name));
    found.find(|value| !value.is_null())
}

/// Returns a field that is there. A dot in the name leads into an object.
fn at<'c>(config: &'c Map<String, Value>, name: &str) -> Option<&'c Value> {
    match name.split_once('.') {
        None => config.get(name),
        Some((object, name)) => at(config.get(object)?.as_object()?, name),
    }
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
/// is theirs alone. Where the class scales by default, it must be said that nothing does.
fn put_scaling(config: &mut Map<String, Value>, hf: &HfType, m: &Model) {
    let Some(scaling) = &m.options.positions.rope_scaling else {
        if SCALED_BY_CLASS.contains(&hf.model_type) {
            put_into_place(config, json!({"rope_type": "default"}));
        }
        return;
    };
    put_into_place(config, fields_of(scaling));
    if let Some(original) = original(scaling) {
        // The class of Phi-3 expects a field of its own.
        config.insert(ORIGINAL.to_owned(), original);
    }
}

/// Returns the number of positions before scaling. The classes expect an integer.
fn original(scaling: &RopeScaling) -> Option<Value> {
    let positions = scaling.original_max_position_embeddings?;
    Some(Value::from(positions as u64))
}

fn fields_of(scaling: &RopeScaling) -> Value {
    let mut fields = serde_json::to_value(scaling).unwrap_or_default();
    if let Some(original) = original(scaling) {
        fields[ORIGINAL] = original;
    }
    fields
}

fn put_into_place(config: &mut Map<String, Value>, fields: Value) {
    let Value::Object(fields) = fields else {
        return;
    };
    let parameters = config.get_mut("rope_parameters");
    let parameters = parameters.and_then(Value::as_object_mut);
    let place = parameters.and_then(|all| match all.contains_key("full_attention") {
        true => all.get_mut("full_attention")?.as_object_mut(),
        false => all.contains_key("rope_theta").then_some(all),
    });
    match place {
        Some(place) => place.extend(fields),
        None => put(config, "rope_scaling", fields.into()),
    }
}

/// Removes what scales rotary frequencies, and keeps their bases.
fn drop_scaling(config: &mut Map<String, Value>) {
    config.remove(ORIGINAL);
    for place in ROPE_SCALING_PLACES {
        let pointer = format!("/{}", place.replace('.', "/"));
        let mut whole = Value::Object(std::mem::take(config));
        if let Some(Value::Object(inner)) = whole.pointer_mut(&pointer) {
            for name in ROPE_SCALING_FIELDS.iter().chain(&["type", "rope_type"]) {
                inner.remove(*name);
            }
            if place != "rope_scaling" && !inner.contains_key("full_attention") {
                inner.insert("rope_type".to_owned(), "default".into());
            }
        }
        if let Value::Object(same) = whole {
            *config = same;
        }
    }
    config.remove("rope_scaling");
}
