//! Scaling of rotary frequencies in files of transformers.

use super::hf::Fields;
use crate::config::RopeType;
use serde_json::{Map, Value};

/// Kinds that change no frequencies of text; the last one is mlc's word for GPT-J's pairs.
pub(crate) const PLAIN: [&str; 3] = ["default", "mrope", "gptj"];

/// Types whose classes scale rotary frequencies unless the file says that they do not.
pub const SCALED_BY_CLASS: [&str; 2] = ["cwm", "gpt_oss"];

/// Where a file has the scaling; transformers 5 writes the last two.
pub const PLACES: [&str; 3] = [
    "rope_scaling",
    "rope_parameters.full_attention",
    "rope_parameters",
];

/// Fields that the key takes, in addition to the kind.
pub const FIELDS: [&str; 12] = [
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
];

/// Returns the key `rope_scaling` of a file; `None` without scaling.
///
/// # Errors
/// If the kind is not known.
pub fn rope_scaling(file: Fields<'_>) -> Result<Option<Value>, String> {
    let found = PLACES.iter().find_map(|name| match file(name)? {
        Value::Object(given) => Some((*name, given)),
        _ => None,
    });
    let Some((name, given)) = found else {
        return Ok(None);
    };
    let word = given.get("rope_type").or_else(|| given.get("type"));
    let Some(word) = word.and_then(Value::as_str).filter(|w| !PLAIN.contains(w)) else {
        return Ok(None);
    };
    // Some dimensions are rotated by 0, which costs as much. `exec` refuses these types.
    let types = ["gemma4_text", "gemma4_unified_text", "lfm3"];
    let known = file("model_type").is_some_and(|name| types.iter().any(|of| name == *of));
    if word == "proportional" && known {
        return Ok(None);
    }
    let word = if word == "su" { "longrope" } else { word };
    if !RopeType::WORDS.contains(&word) {
        let want = RopeType::WORDS.join(" | ");
        return Err(format!(
            "the type of `{name}` must be default | {want}, not {word:?}"
        ));
    }
    let mut scaling = Map::from_iter([("rope_type".to_owned(), Value::from(word))]);
    for field in FIELDS {
        if let Some(value) = given.get(field).filter(|v| !v.is_null()) {
            scaling.insert(field.to_owned(), value.clone());
        }
    }
    complete(&mut scaling, word, file);
    Ok(Some(scaling.into()))
}

/// Adds what types of transformers store elsewhere or derive from other fields.
fn complete(scaling: &mut Map<String, Value>, word: &str, file: Fields<'_>) {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let number = |name: &str| file(name).and_then(|v| v.as_f64());
    let longest = number("max_position_embeddings");
    let own = scaling.get(ORIGINAL).and_then(Value::as_f64);
    let original = own.or_else(|| number(ORIGINAL)).or(longest);
    if let Some(original) = original.filter(|_| word == "longrope" || word == "yarn") {
        scaling.insert(ORIGINAL.to_owned(), original.into());
        let factor = longest.map(|longest| longest / original);
        if let Some(factor) = factor.filter(|_| word == "longrope") {
            scaling.entry("factor").or_insert_with(|| factor.into());
        }
    }
}
