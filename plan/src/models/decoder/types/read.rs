//! Values of a file: integers, flags, and words of layers.

use crate::models::hf::Fields;
pub(super) use crate::models::windows::{FULL, NO_ROPE, SLIDING};
use crate::models::windows::{layers, repeated};
use serde_json::Value;

/// Layers with linear attention.
pub(super) const LINEAR: &str = "linear_attention";

/// Returns an integer of the file.
pub(super) fn integer(file: Fields<'_>, name: &str, default: u64) -> u64 {
    file(name).and_then(|n| n.as_u64()).unwrap_or(default)
}

/// Returns a flag of the file.
pub(super) fn flag(file: Fields<'_>, name: &str, default: bool) -> bool {
    file(name).and_then(|b| b.as_bool()).unwrap_or(default)
}

/// Returns a positive number of the file.
///
/// # Errors
/// If the field has any other value.
pub(super) fn size(file: Fields<'_>, name: &str, default: u64) -> Result<u64, String> {
    let Some(given) = file(name) else {
        return Ok(default);
    };
    let positive = given.as_u64().filter(|n| *n > 0);
    positive.ok_or_else(|| format!("`{name}` must be a positive number, not {given}"))
}

/// Returns a list of words of the file.
pub(super) fn words(file: Fields<'_>, name: &str) -> Option<Vec<String>> {
    let list = file(name)?.as_array()?.clone();
    let word = |v: Value| v.as_str().map(str::to_owned);
    list.into_iter().map(word).collect()
}

/// A list of the file with one word for each layer, which may be missing or too short.
pub(super) struct Listed(Option<Value>);

impl Listed {
    /// Returns the first list of these names.
    pub(super) fn of(file: Fields<'_>, names: &[&str]) -> Self {
        Self(names.iter().find_map(|name| file(name)))
    }

    /// Returns whether the file has no such list.
    pub(super) fn is_missing(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the word of a layer.
    pub(super) fn word(&self, layer: u64) -> Option<&str> {
        self.0.as_ref()?.get(layer as usize)?.as_str()
    }

    /// Returns whether a layer has this word; of layers that are not listed, what `rule` says.
    pub(super) fn is(&self, layer: u64, word: &str, rule: bool) -> bool {
        self.word(layer).map_or(rule, |own| own == word)
    }
}

/// Returns one word per layer of the file, as the shortest list that gives them.
pub(super) fn by_layer(
    file: Fields<'_>,
    word: impl Fn(u64) -> &'static str,
) -> Result<Option<Value>, String> {
    let all: Vec<&str> = (0..layers(file)).map(word).collect();
    Ok(Some(repeated(&all)))
}
