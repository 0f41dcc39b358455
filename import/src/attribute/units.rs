//! Units: groups of parameters that are gathered together. They are identified by name if the trace
//! contains names, otherwise by order and size.

use std::collections::HashMap;

/// Name of the unit that contains everything outside of the other units.
pub const ROOT: &str = "root";

/// Parts of module names that wrappers add.
const WRAPPERS: [&str; 4] = [
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "module",
];

/// Units by index, in order of first use. The first is the root.
#[derive(Clone, Debug)]
pub struct Units {
    names: Vec<String>,
    known: HashMap<String, u32>,
    root_modules: String,
}

impl Default for Units {
    fn default() -> Self {
        let mut units = Self {
            names: Vec::new(),
            known: HashMap::new(),
            root_modules: String::new(),
        };
        units.id("");
        units
    }
}

impl Units {
    /// Index of the root.
    pub const ROOT: u32 = 0;

    /// Returns the index of a unit by the name that FSDP2 gives it.
    pub(super) fn id(&mut self, name: &str) -> u32 {
        if let Some(&id) = self.known.get(name) {
            return id;
        }
        let id = self.names.len() as u32;
        self.known.insert(name.to_owned(), id);
        let plain = normalize(name);
        // Two spellings of one name refer to the same unit.
        if let Some(same) = self.names.iter().position(|n| *n == plain) {
            self.known.insert(name.to_owned(), same as u32);
            return same as u32;
        }
        self.names.push(plain);
        id
    }

    /// Makes a unit the root: references to it by name refer to the root from now on.
    pub(super) fn rename_to_root(&mut self, unit: u32) {
        for id in self.known.values_mut().filter(|id| **id == unit) {
            *id = Self::ROOT;
        }
        self.root_modules = self.names[unit as usize].clone();
        // The index stays in use, so that other indices do not change.
        self.names[unit as usize].clear();
    }

    /// Returns the names by index. The name of a unit that became the root is empty.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

/// Returns the modules of a unit that became the root.
pub(super) fn root_modules(units: &Units) -> String {
    units.root_modules.clone()
}

/// Removes what wrappers add to module names, and joins several modules by `+`, as in scenario
/// files.
#[must_use]
pub fn normalize(name: &str) -> String {
    let modules = name.split(", ").map(|module| {
        let parts = module.trim().split('.');
        parts
            .filter(|part| !WRAPPERS.contains(part))
            .collect::<Vec<_>>()
            .join(".")
    });
    let modules: Vec<String> = modules.filter(|m| !m.is_empty()).collect();
    if modules.is_empty() {
        return ROOT.to_owned();
    }
    modules.join("+")
}

/// Removes the prefix that all modules of all units share up to the part that numbers them:
/// `model.layers.0` becomes `layers.0`. Modules without that prefix (`lm_head`) keep their names.
pub(super) fn strip_common(units: &mut Units) {
    let prefix = common_prefix(&units.names);
    for name in &mut units.names {
        *name = without(name, &prefix);
    }
}

/// Returns the part before the list of blocks in the names of all numbered modules, including its
/// dot; empty if they differ.
pub(crate) fn common_prefix(names: &[String]) -> String {
    let blocks = |name: &String| {
        let mut parts: Vec<&str> = name.split('.').collect();
        let at = parts
            .iter()
            .position(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))?;
        parts.truncate(at.checked_sub(1)?);
        Some(parts.join("."))
    };
    let mut prefixes = names.iter().filter_map(blocks);
    match prefixes.next() {
        Some(prefix) if !prefix.is_empty() && prefixes.all(|p| p == prefix) => format!("{prefix}."),
        _ => String::new(),
    }
}

/// Returns a unit's name with a prefix removed from its modules.
pub(crate) fn without(name: &str, prefix: &str) -> String {
    let modules = name.split('+');
    let short: Vec<&str> = modules
        .map(|m| m.strip_prefix(prefix).unwrap_or(m))
        .collect();
    short.join("+")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrappers_are_dropped() {
        for (name, expected) in [
            ("", "root"),
            ("layers.0", "layers.0"),
            (
                "module._orig_mod.layers.0._checkpoint_wrapped_module",
                "layers.0",
            ),
            ("norm, out", "norm+out"),
            ("_orig_mod", "root"),
        ] {
            assert_eq!(normalize(name), expected);
        }
    }

    #[test]
    fn one_unit_has_one_index() {
        let mut units = Units::default();
        let a = units.id("model.layers.0");
        assert_eq!(units.id("model.layers.0._orig_mod"), a);
        assert_eq!(units.id(""), Units::ROOT);
        let joined = units.id("model.embed_tokens, model.norm, lm_head");
        strip_common(&mut units);
        assert_eq!(units.names()[a as usize], "layers.0");
        assert_eq!(units.names()[joined as usize], "embed_tokens+norm+lm_head");
        assert_eq!(units.names()[0], "root");
    }
}
