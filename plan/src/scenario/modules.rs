//! Patterns over the modules of the scenario's model: `units`, `frozen`, `ignored_params`,
//! `recompute_layers` and `exclude`.

use super::error::ScenarioError;
use super::keys::Key;
use super::merge::Document;
use super::value::Value;
use crate::config::pattern::{glob, unit_pattern};
use crate::config::{IgnoredParams, Scenario};
use crate::ir::Module;
use crate::models;
use crate::shard::{
    ShardError, check_excluded, check_frozen, check_ignored, check_recomputed, check_unit,
};

/// Refuses patterns that are none, or match no module of the model.
pub(crate) fn check(s: &Scenario, d: &Document) -> Result<(), ScenarioError> {
    let keys = [
        Key::Units,
        Key::Frozen,
        Key::IgnoredParams,
        Key::RecomputeLayers,
        Key::CompileExclude,
    ];
    let lists = keys.map(|key| d.value(key).and_then(Value::array));
    let lists = lists.map(Option::unwrap_or_default);
    if lists.iter().all(|list| list.is_empty()) {
        return Ok(());
    }
    let [units, frozen, ignored, recomputed, excluded] = lists;
    let modules = models::declare(s, s.model.layers).tree.modules;
    each(units, d, &modules, |text, modules| {
        check_unit(&unit_pattern(text)?, modules).map_err(Fault::Module)
    })?;
    each(frozen, d, &modules, |text, modules| {
        glob(text)?;
        check_frozen(&[text.to_owned()], modules).map_err(Fault::Module)
    })?;
    each(ignored, d, &modules, |text, modules| {
        glob(text)?;
        let ignored = IgnoredParams::Patterns(vec![text.to_owned()]);
        check_ignored(&ignored, modules).map_err(Fault::Module)
    })?;
    each(recomputed, d, &modules, |text, modules| {
        glob(text)?;
        check_recomputed(text, modules).map_err(Fault::Module)
    })?;
    each(excluded, d, &modules, |text, modules| {
        glob(text)?;
        check_excluded(text, modules).map_err(Fault::Module)
    })
}

/// What can be wrong with a pattern.
enum Fault {
    Form(String),
    Module(ShardError),
}

impl From<String> for Fault {
    fn from(message: String) -> Self {
        Self::Form(message)
    }
}

fn each(
    patterns: &[Value],
    d: &Document,
    modules: &[Module],
    check: impl Fn(&str, &[Module]) -> Result<(), Fault>,
) -> Result<(), ScenarioError> {
    patterns.iter().try_for_each(|pattern| {
        check(pattern.str().unwrap_or_default(), modules).map_err(|fault| match fault {
            Fault::Module(ShardError::NoSuchModule {
                what,
                pattern: named,
                hint,
            }) => {
                let message = format!("{what} pattern `{named}` matches no module");
                d.error(pattern.origin, message).with_help(hint)
            }
            Fault::Module(ShardError::NoSuchBlock {
                pattern: named,
                hint,
            }) => {
                let message = format!("recompute_layers pattern `{named}` matches no block");
                d.error(pattern.origin, message).with_help(hint)
            }
            Fault::Module(other) => d.error(pattern.origin, other.to_string()),
            Fault::Form(message) => d.error(pattern.origin, message),
        })
    })
}
