//! Expresses the units of a trace as patterns over the modules of shardlab's model families.

use crate::facts::{Facts, Found, Reshard, UnitFacts};
use std::collections::BTreeMap;

/// Modules outside of the blocks, named as in the llama and gpt2 families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Embedding,
    Positions,
    Norm,
    Head,
}

/// Returns `fsdp.units`: `"block"` or a list of patterns.
pub(super) fn patterns(facts: &Facts) -> Option<Found<String>> {
    let blocks: Vec<&UnitFacts> = facts.units.iter().filter(|u| is_block(&u.name)).collect();
    let others: Vec<&UnitFacts> = facts
        .units
        .iter()
        .filter(|u| !is_block(&u.name) && u.name != crate::attribute::ROOT)
        .collect();
    let seen: Vec<&str> = facts.units.iter().map(|u| u.name.as_str()).collect();
    let because = format!("units in the trace: {}", ranges(&seen));
    if blocks.is_empty() && others.is_empty() {
        let root = facts.units.iter().any(|u| u.name == crate::attribute::ROOT);
        return root.then(|| Found::new("\"root\"".to_owned(), because));
    }
    if others.is_empty() {
        return Some(Found::new("\"block\"".to_owned(), because));
    }
    let kept_counts = !matches!(
        facts.reshard.as_ref().map(|r| r.value),
        Some(Reshard::Never | Reshard::ButLast)
    );
    let mut patterns = Vec::new();
    if !blocks.is_empty() {
        patterns.push("\"layers.*\"".to_owned());
    }
    for unit in others {
        let parts = parts(unit, facts);
        if parts.is_empty() {
            continue;
        }
        let mut names: Vec<&str> = parts.iter().map(|p| name(*p)).collect();
        names.dedup();
        let keep = if kept_counts && unit.gathered > 0 && !unit.regathered {
            "=keep"
        } else {
            ""
        };
        let pattern = format!("\"{}{keep}\"", names.join("+"));
        // Families have one module for both embeddings.
        if !patterns.contains(&pattern) {
            patterns.push(pattern);
        }
    }
    Some(Found::new(format!("[{}]", patterns.join(", ")), because))
}

fn is_block(name: &str) -> bool {
    crate::facts::is_block(name)
}

/// Returns the parts of a unit outside of the blocks, from the shapes of its parameters. The unit's
/// name decides if an embedding and a head have the same shape.
fn parts(unit: &UnitFacts, facts: &Facts) -> Vec<Part> {
    let m = &facts.model;
    let vocab = m.vocab.as_ref().map(|v| v.value);
    let tables = unit
        .parameters
        .iter()
        .filter(|p| p.len() == 2 && p.first().copied() == vocab)
        .count();
    let positions = unit
        .parameters
        .iter()
        .any(|p| p.len() == 2 && p.first().copied() != vocab);
    let norm = unit.parameters.iter().any(|p| p.len() == 1);
    let lower = unit.name.to_ascii_lowercase();
    let embeds = ["emb", "tok", "wte"].iter().any(|w| lower.contains(w));
    let order = facts.units.iter().position(|u| u.name == unit.name);
    let first_block = facts.units.iter().position(|u| is_block(&u.name));
    // Forward uses the embedding before the first block, and the head after the last.
    let before = matches!((order, first_block), (Some(o), Some(b)) if o < b);
    let mut parts = Vec::new();
    if unit.parameters.is_empty() {
        // Without shapes, the names decide.
        if embeds || before {
            parts.push(Part::Embedding);
        }
        if lower.contains("norm") || lower.contains("ln_f") {
            parts.push(Part::Norm);
        }
        if ["head", "out"].iter().any(|w| lower.contains(w)) {
            parts.push(Part::Head);
        }
        return parts;
    }
    if tables > 0 && (before || embeds) {
        parts.push(Part::Embedding);
    }
    if positions {
        parts.push(Part::Positions);
    }
    if norm {
        parts.push(Part::Norm);
    }
    if tables > 1 || tables == 1 && !parts.contains(&Part::Embedding) {
        parts.push(Part::Head);
    }
    parts
}

/// Returns the module of shardlab's families that contains a part.
const fn name(part: Part) -> &'static str {
    match part {
        Part::Embedding | Part::Positions => "tok_embeddings",
        Part::Norm => "norm",
        Part::Head => "output",
    }
}

/// Returns the names of a trace's units in shardlab's model families, as far as they are known.
#[must_use]
pub fn family_names(facts: &Facts) -> BTreeMap<String, String> {
    let others = facts
        .units
        .iter()
        .filter(|u| !is_block(&u.name) && u.name != crate::attribute::ROOT);
    let named = others.filter_map(|unit| {
        let mut names: Vec<&str> = parts(unit, facts).iter().map(|p| name(*p)).collect();
        names.dedup();
        (!names.is_empty()).then(|| (unit.name.clone(), names.join("+")))
    });
    named.collect()
}

/// Joins consecutive names: `layers.0 to layers.3, root`.
pub(super) fn ranges(names: &[&str]) -> String {
    shardlab_plan::record::awaited_units(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Model;

    fn unit(name: &str, parameters: &[&[u64]], regathered: bool) -> UnitFacts {
        UnitFacts {
            name: name.into(),
            parameters: parameters.iter().map(|p| p.to_vec()).collect(),
            gathered: 1,
            regathered,
        }
    }

    fn facts(units: Vec<UnitFacts>) -> Facts {
        Facts {
            units,
            model: Model {
                vocab: Some(Found::new(50, "")),
                ..Model::default()
            },
            reshard: Some(Found::new(Reshard::Always, "")),
            ..Facts::default()
        }
    }

    /// Megatron-FSDP gathers the tables of tokens and of positions apart.
    #[test]
    fn both_embeddings_are_one_module() {
        let units = vec![
            unit("tok_embeddings", &[&[50, 8]], true),
            unit("pos_embeddings1", &[&[16, 8]], true),
            unit("layers.0", &[&[8, 8]], true),
        ];
        let found = patterns(&facts(units)).unwrap().value;
        assert_eq!(found, "[\"layers.*\", \"tok_embeddings\"]");
    }

    #[test]
    fn units_become_patterns() {
        let found = |units| patterns(&facts(units)).map(|f| f.value);
        assert_eq!(found(vec![]), None);
        assert_eq!(
            found(vec![unit("root", &[&[50, 8]], false)]).unwrap(),
            "\"root\""
        );
        let block = || unit("layers.0", &[&[8, 8]], true);
        assert_eq!(
            found(vec![unit("root", &[&[50, 8]], false), block()]).unwrap(),
            "\"block\""
        );
        let split = vec![
            unit("tok", &[&[50, 8]], true),
            block(),
            unit("norm+out", &[&[8], &[50, 8]], false),
        ];
        assert_eq!(
            found(split).unwrap(),
            "[\"layers.*\", \"tok_embeddings\", \"norm+output=keep\"]"
        );
    }
}
