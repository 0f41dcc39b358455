//! Scenario files: format, validation with positions, overrides, sweeps, presets, JSON Schema.
//!
//! ```text
//! extends chain ─▶ file ─▶ --set ─▶ sweep axis      later wins, key by key; each value keeps its place
//!        preset fills what is left ─▶ typed values with derived defaults ─▶ combinations checked
//! ```

mod batch;
mod check;
mod documents;
mod error;
mod huggingface;
mod keys;
mod limits;
mod load;
mod merge;
mod model_files;
mod modules;
mod moe;
mod placements;
mod presets;
mod read;
mod reference;
mod schema;
mod setting;
mod shipped;
mod source;
mod spellings;
mod sweep;
mod validate;
pub(crate) mod value;

#[cfg(test)]
mod tests;

pub use crate::names::nearest;
pub use batch::BatchUnit;
pub use error::{Position, ScenarioError, ScenarioErrorKind};
pub use huggingface::is_config;
pub use keys::{Accept, HARDWARE, KeyInfo, Need, SECTIONS, json_path_of, key_of, keys};
pub use load::{is_stdin, text};
pub use reference::reference;
pub use schema::schema;
pub use shipped::{find_shipped, is_example, shipped};
pub use sweep::{Axis, Sweep, SweepPoint, check_axis, load_sweep, sweep_of};
pub use value::parse_bytes;

use crate::config::Scenario;
use std::collections::BTreeMap;
use std::path::Path;

/// Loads a scenario file. A bare name that is not a file means the shipped scenario of that name,
/// and `-` standard input.
///
/// `overrides` are `section.key=VALUE`; later ones win over earlier ones and over the file. `VALUE`
/// is TOML; anything else is taken as a string.
///
/// # Errors
/// A file that cannot be read, a syntax error, an unknown key, a value of the wrong form, or a
/// combination that cannot be; always the first fault.
pub fn load(path: &Path, overrides: &[String]) -> Result<Scenario, ScenarioError> {
    read::scenario(load::document(path, overrides)?)
}

/// Loads a text that is to be written to `path`, as [`load`] would from there. So a cycle of
/// `extends` is found before the file is replaced.
///
/// # Errors
/// As [`load`].
pub fn load_to_be(path: &Path, text: &str) -> Result<Scenario, ScenarioError> {
    read::scenario(load::document_to_be(path, text)?)
}

/// Returns where each key of a scenario was written, by path (`gate.loss`): the file along
/// `extends`, or `--set KEY=VALUE`, and the position there. Presets and defaults have no place.
///
/// # Errors
/// As [`load`], without the check of combinations.
pub fn places(
    path: &Path,
    overrides: &[String],
) -> Result<BTreeMap<String, (String, Position)>, ScenarioError> {
    Ok(load::document(path, overrides)?.places())
}

/// Returns what the model's `config.json` says that no key expresses, one sentence each: fields
/// that are not used, quantization, numbers that JSON does not have.
///
/// # Errors
/// As [`load`], without the check of combinations.
pub fn model_notes(path: &Path, overrides: &[String]) -> Result<Vec<String>, ScenarioError> {
    let mut document = load::document(path, overrides)?;
    presets::fill(&mut document)?;
    Ok(document.notes)
}

/// Returns what [`model_notes`] does, of a scenario in a text, as [`parse`] reads it.
///
/// # Errors
/// As [`parse`], without the check of combinations.
pub fn model_notes_of_text(
    name: &str,
    text: &str,
    overrides: &[String],
) -> Result<Vec<String>, ScenarioError> {
    let mut document = load::document_of_text(name, text, overrides)?;
    presets::fill(&mut document)?;
    Ok(document.notes)
}

/// Loads a scenario from a text. `name` is the scenario's name (or `NAME.toml`), which errors show;
/// `extends` is refused.
///
/// # Errors
/// As [`load`].
pub fn parse(name: &str, text: &str, overrides: &[String]) -> Result<Scenario, ScenarioError> {
    read::scenario(load::document_of_text(name, text, overrides)?)
}
