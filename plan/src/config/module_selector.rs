//! Modules by their paths, as `target_modules` and `exclude_modules` of PEFT select them.

use super::expression::Expression;
use super::pattern::matches;
use serde::Serialize;

/// Which modules a key selects, written in the form of scenario files.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ModuleSelector {
    /// Modules that one of these globs matches.
    Patterns(Vec<String>),
    /// Modules whose path an expression matches.
    Expression(Expression),
}

/// Selects no module.
impl Default for ModuleSelector {
    fn default() -> Self {
        Self::Patterns(Vec::new())
    }
}

impl ModuleSelector {
    /// Returns whether it selects no module of any model.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether it selects the module with these paths (in this project and in Hugging
    /// Face's code).
    #[must_use]
    pub fn has(&self, paths: [&str; 2]) -> bool {
        match self {
            Self::Patterns(globs) => globs.iter().any(|glob| targets(glob, paths)),
            Self::Expression(expression) => paths.iter().any(|path| expression.matches(path)),
        }
    }

    /// Returns whether it lists one of the paths in full.
    pub(super) fn lists(&self, paths: [&str; 2]) -> bool {
        match self {
            Self::Patterns(globs) => globs.iter().any(|glob| paths.contains(&glob.as_str())),
            Self::Expression(_) => false,
        }
    }
}

/// Returns whether a glob selects a layer: it matches the last components of either path, as PEFT
/// compares names (`key == target or key.endswith("." + target)`).
fn targets(glob: &str, paths: [&str; 2]) -> bool {
    paths.iter().any(|path| {
        let ends = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
        ends.chain([*path]).any(|end| matches(glob, end))
    })
}

/// Returns whether a glob selects a module for `modules_to_save`: either path ends with it, as PEFT
/// compares names (`key.endswith(name)`), so `norm` also matches `input_layernorm`.
pub(crate) fn saves(glob: &str, paths: [&str; 2]) -> bool {
    targets(&format!("*{glob}"), paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_the_end_of_either_path() {
        let q = ["layers.3.attention.q", "model.layers.3.self_attn.q_proj"];
        for glob in [
            "q",
            "q_proj",
            "*_proj",
            "attention.q",
            "self_attn.*",
            "layers.*.attention.q",
            "layers.3.attention.*",
            "model.layers.*.self_attn.q_proj",
        ] {
            assert!(targets(glob, q), "{glob}");
        }
        for glob in [
            "proj",
            "attention",
            "layers.4.attention.q",
            "k_proj",
            "layers.*",
        ] {
            assert!(!targets(glob, q), "{glob}");
        }
    }
}
