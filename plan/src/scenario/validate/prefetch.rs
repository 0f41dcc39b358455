//! Rules for lists of units: units that other units prefetch, and units that reduce later.

use super::Checked;
use crate::config::pattern::{glob, matches};
use crate::config::{Scenario, Units};
use crate::ir::{Module, ModuleId, ModuleKind};
use crate::models;
use crate::names::nearest;
use crate::scenario::keys::Key;
use crate::scenario::merge::Document;
use crate::scenario::value::Value;
use crate::scenario::{ScenarioError, ScenarioErrorKind};
use crate::shard::{UnitSpec, assign_units};

/// Refuses lists without an effect, names that are no unit's, and units that come too early.
pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let given = d.value(Key::PrefetchLists).and_then(Value::array);
    let tables = given.unwrap_or_default();
    if tables.is_empty() {
        return Ok(());
    }
    let Some((modules, units)) = units(s) else {
        return Ok(());
    };
    for (table, list) in tables.iter().zip(&s.fsdp.prefetch_lists) {
        let fields = table.table().unwrap_or_default();
        let field = |name: &str| fields.iter().find(|e| e.key == name).map(|e| &e.value);
        let Some(unit) = field("unit") else {
            let error = d.error(
                table.origin,
                "this list of units has no `unit` that gathers them",
            );
            return Err(error.with_help("for example unit = \"layers.0\""));
        };
        let from = of_pattern(d, unit, &units)?;
        if list.forward.is_none() && list.backward.is_none() {
            let error = d.error(table.origin, "this table lists no units");
            return Err(error
                .of(ScenarioErrorKind::NoEffect)
                .with_help("give it forward or backward, or leave it out"));
        }
        for (name, backward) in [("forward", false), ("backward", true)] {
            let targets = field(name).and_then(|v| v.array()).unwrap_or_default();
            for target in targets {
                for to in of_pattern(d, target, &units)? {
                    let early = |u: &&&UnitSpec| !is_later(to, u, &modules, backward);
                    if let Some(unit) = from.iter().find(early) {
                        let message = format!(
                            "`{}` cannot be gathered ahead by `{}`: it is used before that in {name}",
                            to.name, unit.name
                        );
                        return Err(d.error(target.origin, message));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Refuses patterns of `no_sync_units` that match no unit.
pub(super) fn no_sync(s: &Scenario, d: &Document) -> Checked {
    let given = d.value(Key::NoSyncUnits).and_then(Value::array);
    let globs = given.unwrap_or_default();
    if globs.is_empty() {
        return Ok(());
    }
    let Some((_, units)) = units(s) else {
        return Ok(());
    };
    for glob in globs {
        of_pattern(d, glob, &units)?;
    }
    Ok(())
}

/// Refuses units with modules of several blocks if reentrant recompute runs each block's forward
/// within its backward: their hooks would gather a unit whose backward is partly over.
pub(super) fn reentrant(s: &Scenario, d: &Document) -> Checked {
    if !s.train.use_reentrant || !matches!(s.fsdp.units, Units::Patterns(_)) {
        return Ok(());
    }
    let Some((modules, units)) = units(s) else {
        return Ok(());
    };
    let block = |m: &ModuleId| {
        let above = std::iter::successors(Some(*m), |m| modules[m.index()].parent);
        let mut blocks = above.filter(|m| modules[m.index()].kind == ModuleKind::Block);
        blocks.next()
    };
    let joins = |u: &&UnitSpec| {
        let mut blocks = u.modules.iter().filter_map(block);
        let first = blocks.next();
        blocks.any(|b| Some(b) != first)
    };
    let Some(unit) = units.iter().find(joins) else {
        return Ok(());
    };
    let message = format!(
        "`use_reentrant` is not modeled with unit `{}`, which has modules of several blocks",
        unit.name
    );
    let keys = [Key::UseReentrant, Key::Units];
    let error = d.conflict(&keys, message);
    Err(error.with_help("give each block a unit of its own, or set train.use_reentrant = false"))
}

/// Returns the modules of a model and its units. `None` if something is wrong with the units, which
/// is reported where they are planned.
fn units(s: &Scenario) -> Option<(Vec<Module>, Vec<UnitSpec>)> {
    let modules = models::declare(s, s.model.layers).tree.modules;
    let units = assign_units(&s.fsdp.units, &modules).ok()?;
    Some((modules, units))
}

/// Returns the units that a pattern matches, at least one.
fn of_pattern<'u>(
    d: &Document,
    pattern: &Value,
    units: &'u [UnitSpec],
) -> Result<Vec<&'u UnitSpec>, ScenarioError> {
    let text = pattern.str().unwrap_or_default();
    glob(text).map_err(|message| d.error(pattern.origin, message))?;
    let found: Vec<&UnitSpec> = units.iter().filter(|u| matches(text, &u.name)).collect();
    if found.is_empty() {
        let names: Vec<&str> = units.iter().map(|u| u.name.as_str()).collect();
        let help = match nearest(text, names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("units: {}", first(&names)),
        };
        let error = d.error(pattern.origin, format!("`{text}` matches no unit"));
        return Err(error.with_help(help));
    }
    Ok(found)
}

/// Returns the first names, and whether there are more.
fn first(names: &[&str]) -> String {
    let more = if names.len() > 6 { ", …" } else { "" };
    let shown: Vec<&str> = names.iter().copied().take(6).collect();
    shown.join(", ") + more
}

/// Returns whether a unit is used after another one.
fn is_later(to: &UnitSpec, from: &UnitSpec, modules: &[Module], backward: bool) -> bool {
    let (to, from) = (to.modules[0], from.modules[0]);
    if !backward {
        return to > from;
    }
    let inside = |inner: &str, outer: &str| {
        outer.is_empty()
            || inner
                .strip_prefix(outer)
                .is_some_and(|r| r.starts_with('.'))
    };
    let [a, b] = [to, from].map(|m| modules[m.index()].path.as_str());
    // Backward enters a module before those inside it.
    to != from && (inside(a, b) || to < from && !inside(b, a))
}
