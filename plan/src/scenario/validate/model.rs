//! Rules for `[model]`.

use super::Checked;
use crate::config::Scenario;
use crate::scenario::keys::{Key, families};
use crate::scenario::merge::Document;

/// Refuses keys of `[model]` that do not apply to the family: silence would hide a mistake.
pub(super) fn unused_keys(s: &Scenario, d: &Document) -> Checked {
    let family = s.model.family;
    for key in Key::of_section("model").filter(|key| d.says(*key)) {
        let of = families(key.info());
        if of.is_empty() || of.contains(&family.name()) {
            continue;
        }
        let message = format!(
            "`{}` does not apply to family {}",
            key.path(),
            family.name()
        );
        return Err(d
            .conflict(&[key], message)
            .with_help(format!("it belongs to {}", of.join(", "))));
    }
    Ok(())
}

/// Refuses shapes that do not fit together, and what the family refuses.
pub(super) fn check(s: &Scenario, d: &Document) -> Checked {
    let m = &s.model;
    if !m.heads.is_multiple_of(m.kv_heads) {
        let message = format!(
            "`heads` ({}) is not divisible by `kv_heads` ({})",
            m.heads, m.kv_heads
        );
        return Err(d.conflict(&[Key::KvHeads, Key::Heads], message));
    }
    (m.family.spec().check)(m).map_err(|c| {
        let keys: Vec<Key> = c
            .keys
            .iter()
            .filter_map(|k| Key::find("model", k))
            .collect();
        let error = d.conflict(&keys, c.message);
        match c.help {
            Some(help) => error.with_help(help),
            None => error,
        }
    })
}
