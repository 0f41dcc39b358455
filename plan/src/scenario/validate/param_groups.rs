//! Rules for the optimizer's parameter groups.

use super::Checked;
use crate::config::pattern::{glob, part_of};
use crate::config::{MAX_PARAM_GROUPS, Scenario};
use crate::models;
use crate::names::nearest;
use crate::scenario::ScenarioErrorKind;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::Value;
use std::collections::BTreeSet;

pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let given = d.value(Key::ParamGroups).and_then(Value::array);
    let tables = given.unwrap_or_default();
    if tables.is_empty() {
        return Ok(());
    }
    let tree = models::declare(s, s.model.layers).tree;
    let trained = tree.params.iter().filter(|p| p.requires_grad);
    let names: Vec<String> = trained
        .flat_map(|p| std::iter::once(p.name.clone()).chain(p.hf_name()))
        .collect();
    for (table, group) in tables.iter().zip(&s.train.param_groups) {
        if group.params.is_empty() {
            let error = d.error(table.origin, "this parameter group has no `params`");
            return Err(error.with_help("for example params = [\"*norm*\", \"*.bias\"]"));
        }
        if group.weight_decay.is_none() && group.lr_scale == 1.0 {
            let message = "this parameter group has the settings of all others";
            let error = d.error(table.origin, message);
            return Err(error
                .of(ScenarioErrorKind::NoEffect)
                .with_help("set its weight_decay or its lr_scale, or leave it out"));
        }
        let entries = table.table().unwrap_or_default();
        let globs = entries.iter().find(|e| e.key == "params");
        let globs = globs.and_then(|e| e.value.array()).unwrap_or_default();
        for pattern in globs {
            let text = pattern.str().unwrap_or_default();
            glob(text).map_err(|message| d.error(pattern.origin, message))?;
            if !names.iter().any(|name| part_of(text, name)) {
                let message = format!("`{text}` matches no parameter that is trained");
                let error = d.error(pattern.origin, message);
                return Err(error.with_help(hint(text, &names, "parameters")));
            }
        }
    }
    let count = s.train.group_settings().len();
    if count > MAX_PARAM_GROUPS {
        let message = format!(
            "{count} different settings of parameter groups are more than {MAX_PARAM_GROUPS}"
        );
        let error = d.conflict(&[Key::ParamGroups, Key::DecayNormsAndBiases], message);
        return Err(error.with_help(
            "give groups with the same settings one table; with decay_norms_and_biases = false, \
             groups without a weight_decay of their own count twice",
        ));
    }
    Ok(())
}

/// Returns the component of a name that may be meant, or the first names of these `things`.
pub(super) fn hint(pattern: &str, names: &[String], things: &str) -> String {
    let wanted = pattern.trim_matches(['*', '.']);
    let last = wanted.rsplit('.').next().unwrap_or_default();
    let near = [wanted, last]
        .into_iter()
        .find_map(|part| near_part(part, names));
    match near {
        Some(near) => format!("did you mean `{near}`?"),
        None => {
            let first: Vec<&str> = names.iter().take(6).map(String::as_str).collect();
            format!("{things}: {}, …", first.join(", "))
        }
    }
}

/// Returns the consecutive components of some name that are most similar to `wanted` and as many.
fn near_part(wanted: &str, names: &[String]) -> Option<String> {
    let length = wanted.split('.').count();
    let mut parts: BTreeSet<String> = BTreeSet::new();
    for name in names {
        let components: Vec<&str> = name.split('.').collect();
        parts.extend(components.windows(length).map(|part| part.join(".")));
    }
    nearest(wanted, parts.iter().map(String::as_str)).map(str::to_owned)
}
