//! Suggestions for a module pattern without a match.

use crate::ir::{Module, ModuleKind};
use crate::names::nearest;

/// Returns the end of a message about a pattern that matches no module: the nearest module, or the
/// modules that exist instead.
///
/// Modules are written as in patterns, for all blocks at once (`layers.*.mlp`). They are compared
/// with the pattern if they have the same shape: the same number of components, with numbers and
/// stars in the same places.
pub(super) fn hint(pattern: &str, modules: &[Module]) -> String {
    let all = families(modules);
    let alike: Vec<&Vec<&str>> = all.iter().filter(|m| same_shape(m, pattern)).collect();
    let numbered = pattern.split('.').any(is_index);
    let meant = match alike.as_slice() {
        // There is only one candidate, whatever its name.
        [only] if numbered => Some(*only),
        several => {
            // Common components would hide how much the others differ.
            let wanted: Vec<&str> = pattern.split('.').collect();
            let common = several
                .iter()
                .map(|m| m.iter().zip(&wanted).take_while(|(a, b)| a == b).count());
            let common = common.max().unwrap_or(0);
            let rest: Vec<String> = several
                .iter()
                .map(|m| filled(&m[common..], &wanted[common..]))
                .collect();
            let near = nearest(&wanted[common..].join("."), rest.iter().map(String::as_str));
            near.and_then(|near| rest.iter().position(|r| r == near))
                .map(|i| several[i])
        }
    };
    if let Some(meant) = meant {
        let wanted: Vec<&str> = pattern.split('.').collect();
        let kept = filled(meant, &wanted);
        // The numbers in the pattern may be wrong.
        let meant = if kept == pattern {
            meant.join(".")
        } else {
            kept
        };
        return format!("did you mean `{meant}`?");
    }
    let listed: Vec<String> = if alike.is_empty() || !numbered {
        let top = |m: &&Vec<&str>| m.iter().filter(|c| **c != "*").count() == 1;
        all.iter().filter(top).map(|m| m.join(".")).collect()
    } else {
        alike.iter().map(|m| m.join(".")).collect()
    };
    format!("modules: {}", listed.join(", "))
}

/// Returns the path components of all modules to which patterns can apply, with numbers as `*`,
/// without duplicates.
fn families(modules: &[Module]) -> Vec<Vec<&str>> {
    let mut all: Vec<Vec<&str>> = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for module in modules {
        // The root is always a unit.
        if module.path.is_empty() || !has_place_for_parameters(module) {
            continue;
        }
        let parts: Vec<&str> = module
            .path
            .split('.')
            .map(|c| if is_index(c) { "*" } else { c })
            .collect();
        if seen.insert(parts.clone()) {
            all.push(parts);
        }
    }
    all
}

/// Returns whether a module can have parameters to shard or freeze. A loss has none.
pub(super) fn has_place_for_parameters(module: &Module) -> bool {
    module.kind != ModuleKind::Loss
}

/// Returns whether a component is the number of a block.
fn is_index(component: &str) -> bool {
    component.contains('*') || component.bytes().all(|b| b.is_ascii_digit())
}

fn same_shape(module: &[&str], pattern: &str) -> bool {
    let components: Vec<&str> = pattern.split('.').collect();
    let pairs = module.iter().zip(&components);
    module.len() == components.len() && pairs.into_iter().all(|(m, c)| is_index(m) == is_index(c))
}

/// Returns the module with the numbers of the pattern.
fn filled(module: &[&str], wanted: &[&str]) -> String {
    let pairs = module.iter().zip(wanted);
    let parts: Vec<&str> = pairs
        .map(|(m, w)| if is_index(m) { *w } else { *m })
        .collect();
    parts.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules() -> Vec<Module> {
        let paths = [
            ("", ModuleKind::Root),
            ("tok_embeddings", ModuleKind::Embedding),
            ("layers.0", ModuleKind::Block),
            ("layers.0.attention", ModuleKind::Attention),
            ("layers.0.mlp", ModuleKind::Mlp),
            ("layers.1", ModuleKind::Block),
            ("layers.1.attention", ModuleKind::Attention),
            ("layers.1.mlp", ModuleKind::Mlp),
            ("norm", ModuleKind::Norm),
            ("output", ModuleKind::Head),
            ("loss", ModuleKind::Loss),
        ];
        paths
            .map(|(path, kind)| Module {
                path: path.into(),
                parent: None,
                kind,
            })
            .into()
    }

    #[test]
    fn a_pattern_is_compared_with_what_has_its_shape() {
        let top = "modules: tok_embeddings, layers.*, norm, output";
        for (pattern, expected) in [
            // These are the only modules with a name followed by a number, whatever their name.
            ("blocks.*", "did you mean `layers.*`?"),
            ("h.0", "did you mean `layers.0`?"),
            ("layer.1*", "did you mean `layers.1*`?"),
            // The name is right, the number is not.
            ("layers.99", "did you mean `layers.*`?"),
            ("layers.*.atention", "did you mean `layers.*.attention`?"),
            // `mlp` is as many edits away as `attention` from both candidates.
            ("layers.*.attn", "modules: layers.*.attention, layers.*.mlp"),
            ("embeddings", "did you mean `tok_embeddings`?"),
            ("nothing", top),
            ("transformer.h.*", top),
        ] {
            assert_eq!(hint(pattern, &modules()), expected, "{pattern}");
        }
    }
}
