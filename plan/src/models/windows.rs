//! Fields of transformers that determine the positions that each layer attends to.

use super::hf::{Computed, Field, Fields, Given, Meaning, field};
use serde_json::{Value, json};

/// The sliding window of classes that use one only if it is there.
pub(super) const WINDOW: Field = field(&["sliding_window"], Meaning::Optional("sliding_window"));

/// The sliding window of classes that use one of 4096 positions unless it is null.
pub(super) const WINDOW_4096: Field = field(
    &["sliding_window"],
    Meaning::Nullable("sliding_window", Given::Int(4096)),
);

/// The sliding window of classes that use it only if `use_sliding_window` says so.
pub(super) const ASKED_WINDOW: Field = field(
    &["sliding_window"],
    Meaning::Computed(
        "sliding_window",
        Computed {
            also: &["use_sliding_window", "max_window_layers"],
            read: |file| {
                let asked = file("use_sliding_window") == Some(true.into());
                Ok(file("sliding_window").filter(|_| asked && slides_anywhere(file)))
            },
            write: |model| Some(model["sliding_window"].clone()),
        },
    ),
);

/// Whether the window is used.
pub(super) const USES_WINDOW: Field = field(
    &["use_sliding_window"],
    Meaning::Computed(
        "layer_types",
        Computed {
            also: &[],
            read: asked_layers,
            write: |model| Some((!model["sliding_window"].is_null()).into()),
        },
    ),
);

/// Which layers use it. Without the list, classes take the first layers for others.
pub(super) const ASKED_LAYERS: Field = field(
    &["layer_types"],
    Meaning::Computed(
        "layer_types",
        Computed {
            also: &[],
            read: asked_layers,
            write: |model| {
                let used = !model["sliding_window"].is_null();
                all_types(model).filter(|_| used).map(Value::Array)
            },
        },
    ),
);

fn asked_layers(file: Fields<'_>) -> Result<Option<Value>, String> {
    let asked = file("use_sliding_window") == Some(true.into());
    if !asked || file("sliding_window").is_none() || !slides_anywhere(file) {
        return Ok(None);
    }
    let from = first_sliding(file);
    types(file, true, &|layer| match layer < from {
        true => FULL,
        false => SLIDING,
    })
}

/// Layer types of classes in which every `N`-th layer sees all positions.
pub(super) const fn every<const N: u64>() -> Field {
    layer_types(|file| {
        let n = ["sliding_window_pattern", "_sliding_window_pattern"];
        let n = n.iter().find_map(|name| file(name)?.as_u64()).unwrap_or(N);
        types(file, true, &|layer| match (layer + 1) % n.max(1) {
            0 => FULL,
            _ => SLIDING,
        })
    })
}

/// As [`every`], where the layers that see all positions have no rotary embedding if there is a
/// window.
pub(super) const fn every_without_rope<const N: u64>() -> Field {
    layer_types(|file| {
        let n = file("sliding_window_pattern").and_then(|n| n.as_u64());
        let n = n.unwrap_or(N).max(1);
        if file("sliding_window").is_none() {
            return Ok(None);
        }
        let found = types(file, true, &|layer| match (layer + 1) % n {
            0 => FULL,
            _ => SLIDING,
        })?;
        Ok(found.map(|types| without_rope(&types)))
    })
}

/// Layer types of classes in which all layers have the window, if there is one, unless the file
/// lists others.
pub(super) const LISTED: Field =
    layer_types(|file| types(file, file("sliding_window").is_some(), &|_| SLIDING));

/// As [`LISTED`], where all layers see all positions.
pub(super) const ALL_FULL: Field = layer_types(|file| types(file, true, &|_| FULL));

/// As [`LISTED`], where the first of four layers sees all positions.
pub(super) const FIRST_OF_FOUR: Field = layer_types(|file| {
    types(file, true, &|layer| match layer % 4 {
        0 => FULL,
        _ => SLIDING,
    })
});

/// As [`LISTED`], where `no_rope_layers` marks the layers that have a rotary embedding with 1.
pub(super) const ROPE_LAYERS: Field = layer_types(rope_layers);

/// The marks of [`ROPE_LAYERS`].
pub(super) const ROPE_MARKS: Field = field(
    &["no_rope_layers"],
    Meaning::Computed(
        "layer_types",
        Computed {
            also: &["no_rope_layer_interval"],
            read: rope_layers,
            write: |model| Some(marks(&all_types(model)?)),
        },
    ),
);

fn rope_layers(file: Fields<'_>) -> Result<Option<Value>, String> {
    let interval = file("no_rope_layer_interval").and_then(|n| n.as_u64());
    let interval = interval.unwrap_or(4).max(1);
    let marks = file("no_rope_layers");
    types(file, false, &|layer| {
        let mark = marks.as_ref().and_then(|m| m.get(layer as usize)?.as_u64());
        match mark.unwrap_or((layer + 1) % interval) {
            0 => NO_ROPE,
            _ => FULL,
        }
    })
}

/// Returns a 1 for each layer with a rotary embedding, and a 0 for each of the others.
fn marks(types: &[Value]) -> Value {
    let mark = |kind: &Value| json!(u64::from(kind != NO_ROPE));
    types.iter().map(mark).collect()
}

/// Layer types of Llama 4: layers that `no_rope_layers` marks with 1 have a rotary embedding, and
/// see one chunk unless the file lists another type.
pub(super) const CHUNKED_LAYERS: Field = layer_types(chunked_layers);

/// The marks of [`CHUNKED_LAYERS`].
pub(super) const CHUNKED_MARKS: Field = field(
    &["no_rope_layers"],
    Meaning::Computed(
        "layer_types",
        Computed {
            also: &["no_rope_layer_interval"],
            read: chunked_layers,
            write: |model| Some(marks(&all_types(model)?)),
        },
    ),
);

fn chunked_layers(file: Fields<'_>) -> Result<Option<Value>, String> {
    let interval = file("no_rope_layer_interval").and_then(|n| n.as_u64());
    let interval = interval.unwrap_or(4).max(1);
    let (marks, listed) = (file("no_rope_layers"), file("layer_types"));
    let word = |layer: u64| {
        let of = |list: &Option<Value>| list.as_ref()?.get(layer as usize).cloned();
        let mark = of(&marks).and_then(|mark| mark.as_u64());
        let rotates = mark.unwrap_or((layer + 1) % interval) != 0;
        let kind = of(&listed);
        let kind = kind.as_ref().and_then(Value::as_str);
        match kind.unwrap_or(if rotates { CHUNKED } else { FULL }) {
            FULL => Ok(if rotates { FULL } else { NO_ROPE }),
            CHUNKED if rotates => Ok(CHUNKED),
            CHUNKED => Err(format!(
                "layer {layer} sees one chunk without a rotary embedding (`no_rope_layers`), which is not planned"
            )),
            other => Err(format!(
                "layer {layer} is of type \"{other}\"; known are {FULL} and {CHUNKED}"
            )),
        }
    };
    let all: Vec<&str> = (0..layers(file)).map(word).collect::<Result<_, _>>()?;
    Ok(Some(repeated(&all)))
}

/// Layers with softmax attention that sees all positions.
pub(crate) const FULL: &str = "full_attention";
/// Layers with a sliding window.
pub(crate) const SLIDING: &str = "sliding_attention";
/// Layers that see all positions, without a rotary embedding.
pub(crate) const NO_ROPE: &str = "full_attention_no_rope";
const CHUNKED: &str = "chunked_attention";

const fn layer_types(read: fn(Fields<'_>) -> Result<Option<Value>, String>) -> Field {
    field(
        &["layer_types"],
        Meaning::Computed(
            "layer_types",
            Computed {
                also: &[
                    "sliding_window_pattern",
                    "no_rope_layers",
                    "no_rope_layer_interval",
                    "max_window_layers",
                ],
                read,
                write: |model| {
                    let types = all_types(model)?;
                    // Classes with chunks need a size.
                    let unchunked = model["attention_chunk"].is_null();
                    let full = |t: &Value| t == NO_ROPE || unchunked && t == CHUNKED;
                    let of_file = |t: &Value| if full(t) { json!(FULL) } else { t.clone() };
                    Some(types.iter().map(of_file).collect())
                },
            },
        ),
    )
}

/// Returns the types of all layers of a model, by key. If it lists none, all layers have the window
/// or the chunk, or see all positions. Classes have lists of their own by default, so all types are
/// written.
pub(super) fn all_types(model: &Value) -> Option<Vec<Value>> {
    let layers = model["layers"].as_u64()? as usize;
    let same = match (&model["sliding_window"], &model["attention_chunk"]) {
        (Value::Null, Value::Null) => FULL,
        (Value::Null, _) => CHUNKED,
        _ => SLIDING,
    };
    let types = model["layer_types"].as_array().filter(|t| !t.is_empty());
    let types = types.cloned().unwrap_or_else(|| vec![same.into()]);
    Some(types.into_iter().cycle().take(layers).collect())
}

/// Layers of a model at most, as in its key.
pub(super) const MOST_LAYERS: u64 = 4096;

pub(super) fn layers(file: Fields<'_>) -> u64 {
    let names = ["num_hidden_layers", "n_layer", "num_layers"];
    let found = names.iter().find_map(|name| file(name)?.as_u64());
    found.unwrap_or(1).clamp(1, MOST_LAYERS)
}

/// Returns the first layer with a window in Qwen's classes.
fn first_sliding(file: Fields<'_>) -> u64 {
    let from = file("max_window_layers").and_then(|n| n.as_u64());
    from.unwrap_or(28)
}

fn slides_anywhere(file: Fields<'_>) -> bool {
    file("layer_types").is_some() || first_sliding(file) < layers(file)
}

/// Returns the layer types of a file, listed or by a rule, as the shortest list that gives them
/// when it is repeated; none if all layers are the same and the window alone says which.
fn types(
    file: Fields<'_>,
    windowed: bool,
    rule: &dyn Fn(u64) -> &'static str,
) -> Result<Option<Value>, String> {
    let listed = file("layer_types").and_then(|list| list.as_array().cloned());
    let word = |layer: u64| -> Result<&'static str, String> {
        let listed = listed.as_ref().and_then(|list| list.get(layer as usize));
        match listed.and_then(Value::as_str) {
            None => Ok(rule(layer)),
            Some(SLIDING) => Ok(SLIDING),
            // The rule knows about rotary embeddings, which the list does not say.
            Some(FULL) if rule(layer) == NO_ROPE => Ok(NO_ROPE),
            Some(FULL) => Ok(FULL),
            Some(other) => Err(format!(
                "layer {layer} is of type \"{other}\"; known are {FULL} and {SLIDING}"
            )),
        }
    };
    let all: Vec<&str> = (0..layers(file)).map(word).collect::<Result<_, _>>()?;
    let plain = if windowed { SLIDING } else { FULL };
    if all.iter().all(|t| *t == plain) {
        return Ok(None);
    }
    Ok(Some(repeated(&all)))
}

/// Returns the shortest list that gives this one when it is repeated.
pub(super) fn repeated(all: &[&str]) -> Value {
    let repeats = |n: &usize| all.iter().zip(&all[*n..]).all(|(a, b)| a == b);
    let period = (1..all.len()).find(repeats).unwrap_or(all.len());
    all[..period].into()
}

fn without_rope(types: &Value) -> Value {
    let types = types.as_array().into_iter().flatten();
    types
        .map(|t| if t == FULL { json!(NO_ROPE) } else { t.clone() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(field: &Field, file: &Value) -> Value {
        let Meaning::Computed(_, computed) = field.meaning else {
            panic!("the field is computed");
        };
        let get = |name: &str| file.get(name).cloned().filter(|v| !v.is_null());
        (computed.read)(&get).unwrap().unwrap_or_default()
    }

    /// Chunks without a rotary embedding have no layer type.
    #[test]
    fn chunks_are_rotated() {
        let file = json!({"num_hidden_layers": 2, "no_rope_layers": [1, 0], "layer_types": [CHUNKED, CHUNKED]});
        let get = |name: &str| file.get(name).cloned();
        let e = chunked_layers(&get).unwrap_err();
        assert!(e.contains("layer 1 sees one chunk without"), "{e}");
    }

    /// Files name the mask of each layer, and mark those with a rotary embedding.
    #[test]
    fn chunks_are_written_as_masks_and_marks() {
        let mut model =
            json!({"layers": 4, "attention_chunk": 64, "layer_types": [CHUNKED, NO_ROPE]});
        let write = |field: &Field, model: &Value| match field.meaning {
            Meaning::Computed(_, computed) => (computed.write)(model).unwrap(),
            _ => panic!("the field is computed"),
        };
        let masks = json!([CHUNKED, FULL, CHUNKED, FULL]);
        assert_eq!(write(&CHUNKED_LAYERS, &model), masks);
        assert_eq!(write(&CHUNKED_MARKS, &model), json!([1, 0, 1, 0]));
        model["attention_chunk"] = Value::Null;
        assert_eq!(
            write(&CHUNKED_LAYERS, &model),
            json!([FULL, FULL, FULL, FULL])
        );
    }

    #[test]
    fn patterns_are_the_shortest_lists() {
        let gemma3 = json!({"num_hidden_layers": 26, "sliding_window": 512});
        let found = read(&every::<6>(), &gemma3);
        assert_eq!(found.as_array().unwrap().len(), 6);
        assert_eq!((&found[4], &found[5]), (&json!(SLIDING), &json!(FULL)));
        let listed = json!({"num_hidden_layers": 3, "sliding_window": 8, "layer_types": [FULL, SLIDING, FULL]});
        assert_eq!(read(&every::<6>(), &listed), json!([FULL, SLIDING]));
        let all = json!({"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, SLIDING]});
        assert_eq!(read(&every::<6>(), &all), Value::Null);
        let smollm = json!({"num_hidden_layers": 8});
        assert_eq!(
            read(&ROPE_LAYERS, &smollm),
            json!([FULL, FULL, FULL, NO_ROPE])
        );
        let cohere = json!({"num_hidden_layers": 8, "sliding_window": 8});
        let llama4 = json!({"num_hidden_layers": 8});
        let expected = json!([CHUNKED, CHUNKED, CHUNKED, NO_ROPE]);
        assert_eq!(read(&CHUNKED_LAYERS, &llama4), expected);
        let marked = json!({"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "layer_types": [FULL, FULL, CHUNKED]});
        let found = read(&CHUNKED_LAYERS, &marked);
        assert_eq!(found, json!([FULL, NO_ROPE, CHUNKED]));
        assert_eq!(read(&CHUNKED_MARKS, &marked), found);
        let found = read(&every_without_rope::<4>(), &cohere);
        assert_eq!(found, json!([SLIDING, SLIDING, SLIDING, NO_ROPE]));
        let qwen = json!({"num_hidden_layers": 4, "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3});
        assert_eq!(
            read(&USES_WINDOW, &qwen),
            json!([FULL, FULL, FULL, SLIDING])
        );
        let off = json!({"num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 3});
        assert_eq!(read(&USES_WINDOW, &off), Value::Null);
        assert_eq!(read(&ASKED_WINDOW, &off), Value::Null);
    }
}
