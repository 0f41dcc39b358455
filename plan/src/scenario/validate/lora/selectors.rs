//! Rules for `target_modules` and `exclude_modules`.

use super::{Checked, Paths, hint, no_match};
use crate::config::pattern::glob;
use crate::config::{Expression, ModuleSelector};
use crate::models::declare::Tree;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::Value;

/// Help for expressions that match nothing.
const WHOLE_PATHS: &str = r"an expression matches whole paths, for example '.*\.(q_proj|v_proj)'; a list has names, for example ['q_proj', 'v_proj']";

/// Refuses targets that are no linear layers.
pub(super) fn target_modules(d: &Document, linears: &Paths<'_>) -> Checked {
    if d.value(Key::LoraTargets).and_then(Value::str) == Some("all-linear") {
        return Ok(());
    }
    let help = format!("{WHOLE_PATHS}; all-linear stands for all linear layers");
    check(d, Key::LoraTargets, ("linear layer", linears), &help)
}

/// Refuses names of no module. Modules that are no targets, such as the output projection, may be
/// named.
pub(super) fn exclude_modules(d: &Document, tree: &Tree) -> Checked {
    let base = tree.params.iter().filter(|p| !p.is_adapter());
    let modules: Vec<[&str; 2]> = base.flat_map(|p| tree.paths(p)).collect();
    check(d, Key::ExcludeModules, ("module", &modules), WHOLE_PATHS)
}

/// Refuses globs and expressions that match none of these modules.
fn check(d: &Document, key: Key, of: (&str, &Paths<'_>), whole_paths: &str) -> Checked {
    let Some(given) = d.value(key) else {
        return Ok(());
    };
    let (what, modules) = of;
    let name = key.info().key;
    let patterns = given.array();
    for item in patterns.unwrap_or(std::slice::from_ref(given)) {
        let text = item.str().unwrap_or_default();
        let selector = match patterns {
            Some(_) => glob(text).map(|()| ModuleSelector::Patterns(vec![text.to_owned()])),
            None => Expression::of_path(text).map(ModuleSelector::Expression),
        };
        let selector = selector.map_err(|message| d.error(item.origin, message))?;
        if modules.iter().any(|paths| selector.has(*paths)) {
            continue;
        }
        let (kind, help) = match selector {
            ModuleSelector::Patterns(_) => ("pattern", hint(text, (&format!("{what}s"), modules))),
            ModuleSelector::Expression(_) => ("expression", whole_paths.to_owned()),
        };
        let message = format!("{name} {kind} `{text}` matches no {what}");
        return Err(no_match(d, item.origin, message).with_help(help));
    }
    Ok(())
}
