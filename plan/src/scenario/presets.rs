//! Presets: models (and, for the toys, batch shapes) by name.

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::Document;

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        /// Accepted values of `model.preset`.
        pub(crate) const PRESETS: &[&str] = &[$($name,)* "none"];

        static TEXTS: &[(&str, &str)] = &[
            $((concat!("preset ", $name), include_str!(concat!("../../../scenarios/models/", $name, ".toml")))),*
        ];
    };
}

presets![
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "llama3.2-1b",
    "llama3.2-3b",
    "llama2-7b",
    "gpt2",
    "toy-linear",
    "toy-cnn",
    "toy-transformer",
];

/// Fills what the scenario does not say from its preset, and returns the preset's name.
pub(crate) fn fill(document: &mut Document) -> Result<Option<String>, ScenarioError> {
    let Some(name) = document
        .value(Key::Preset)
        .and_then(|v| v.str())
        .map(str::to_owned)
    else {
        return Ok(None);
    };
    let index = PRESETS.iter().position(|p| *p == name);
    let Some((source, text)) = index.and_then(|i| TEXTS.get(i)) else {
        return Ok(None);
    };
    let asked = document
        .value(Key::Family)
        .and_then(|v| v.str())
        .map(str::to_owned);
    let family = document.absorb_preset(source, text)?;
    match (asked, family) {
        (Some(asked), Some(family)) if asked != family => Err(document
            .conflict(
                &[Key::Family, Key::Preset],
                format!("preset `{name}` is of family {family}, not {asked}"),
            )
            .with_help("drop one of the two, or say preset = \"none\"")),
        _ => Ok(Some(name)),
    }
}
