//! The JSON Schema of scenario files, from the key table.

use super::keys::{Accept, KEYS, KeyInfo, SECTIONS};
use super::spellings;
use serde_json::{Map, Value, json};

/// Returns the JSON Schema (draft 2020-12) of scenario files, for editors that complete and check
/// TOML.
#[must_use]
pub fn schema() -> Value {
    let mut properties = Map::new();
    properties.insert(
        "extends".into(),
        json!({ "type": "string", "minLength": 1, "description": "Base scenario file, relative to this one; values of this file take precedence" }),
    );
    let mut nested = Map::new();
    let mut dotted = Map::new();
    for section in SECTIONS {
        let mut keys = Map::new();
        let mut axes = Map::new();
        for info in KEYS.iter().filter(|k| k.section == section) {
            keys.insert(info.key.into(), key_schema(info));
            axes.insert(info.key.into(), axis_schema(info));
            dotted.insert(format!("{section}.{}", info.key), axis_schema(info));
            for alias in info.aliases {
                keys.insert((*alias).into(), alias_schema(info));
                axes.insert((*alias).into(), axis_schema(info));
                dotted.insert(format!("{section}.{alias}"), axis_schema(info));
            }
        }
        properties.insert(section.into(), object(keys));
        nested.insert(section.into(), object(axes));
    }
    nested.extend(dotted);
    let mut sweep = object(nested);
    sweep["description"] =
        "Axes over any keys, each a list of values; a sweep predicts all combinations. Keys joined by commas vary together: \"mesh.dp_shard,mesh.dp_replicate\" = [[16, 1], [8, 2]]".into();
    let (path, values) = (
        r"[a-z]+\.[a-z_]+",
        json!({ "type": "array", "minItems": 2 }),
    );
    sweep["patternProperties"] = json!({
        (format!("^{path}(, ?{path})+$")): { "type": "array", "minItems": 1, "items": values }
    });
    properties.insert("sweep".into(), sweep);
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "shardlab scenario",
        "type": "object",
        "properties": properties,
        "additionalProperties": false,
    })
}

/// A number and a unit of bytes.
const SIZE: &str = "^[0-9][0-9_]*(\\.[0-9]+)? ?([kKMGT]?B|[KMGT]iB)$";

fn object(properties: Map<String, Value>) -> Value {
    json!({ "type": "object", "properties": properties, "additionalProperties": false })
}

fn key_schema(info: &KeyInfo) -> Value {
    let mut schema = forms(info.accepts);
    let mut description = described(info);
    match serde_json::from_str::<Value>(info.default) {
        Ok(default) => schema["default"] = default,
        Err(_) => {
            description = format!(
                "{description}. Default: {}",
                info.default.trim_matches(['(', ')'])
            )
        }
    }
    schema["description"] = description.into();
    schema
}

/// The meaning of a key, and where it has an effect.
fn described(info: &KeyInfo) -> String {
    let sentences = [vec![info.doc.to_owned()], info.applies()].concat();
    sentences.join(". ")
}

fn alias_schema(info: &KeyInfo) -> Value {
    let mut schema = forms(info.accepts);
    schema["description"] = format!("Another name of `{}`. {}", info.key, described(info)).into();
    schema
}

fn axis_schema(info: &KeyInfo) -> Value {
    json!({ "type": "array", "minItems": 1, "items": forms(info.accepts), "description": info.doc })
}

fn forms(accepts: &[Accept]) -> Value {
    match accepts {
        [one] => form(one),
        many => json!({ "anyOf": many.iter().map(form).collect::<Vec<_>>() }),
    }
}

fn form(accept: &Accept) -> Value {
    match *accept {
        Accept::Bool => json!({ "type": "boolean" }),
        Accept::Integer(a, b) => json!({ "type": "integer", "minimum": a, "maximum": b }),
        Accept::Number(a, b) if a == f64::MIN_POSITIVE => {
            json!({ "type": "number", "exclusiveMinimum": 0, "maximum": b })
        }
        Accept::Number(a, b) => json!({ "type": "number", "minimum": a, "maximum": b }),
        Accept::Bytes(a, b) => json!({ "anyOf": [
            { "type": "integer", "minimum": a, "maximum": b },
            { "type": "string", "pattern": SIZE },
        ] }),
        Accept::Size(..) => json!({ "type": "string", "pattern": SIZE }),
        Accept::Choice(names) => {
            let spelled = names.iter().flat_map(|name| spellings::of(name));
            let all: Vec<&str> = names.iter().copied().chain(spelled).collect();
            json!({ "type": "string", "enum": all })
        }
        Accept::Path(ending) => {
            json!({ "type": "string", "pattern": format!(".\\{ending}$") })
        }
        Accept::Text => json!({ "type": "string", "minLength": 1 }),
        Accept::List(of) => json!({ "type": "array", "minItems": 1, "items": form(of) }),
        Accept::Tuple(of, n) => {
            json!({ "type": "array", "minItems": n, "maxItems": n, "items": form(of) })
        }
        Accept::Short(of, n) => {
            json!({ "type": "array", "minItems": 1, "maxItems": n, "items": form(of) })
        }
        Accept::Empty => json!({ "type": "array", "maxItems": 0 }),
        Accept::Table(fields) => {
            let properties: Map<String, Value> =
                fields.iter().map(|(k, a)| ((*k).into(), form(a))).collect();
            let mut schema = object(properties);
            schema["minProperties"] = 1.into();
            schema
        }
        Accept::Map(of) => json!({ "type": "object", "additionalProperties": form(of) }),
    }
}
