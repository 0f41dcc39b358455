//! Instruction counts, and their changes.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the increase from `a` to `b` by key, without zeros.
pub(crate) fn deltas<K: Ord + Clone>(
    a: &BTreeMap<K, u32>,
    b: &BTreeMap<K, u32>,
) -> BTreeMap<K, i64> {
    let mut out: BTreeMap<K, i64> = BTreeMap::new();
    for (k, n) in b {
        *out.entry(k.clone()).or_default() += i64::from(*n);
    }
    for (k, n) in a {
        *out.entry(k.clone()).or_default() -= i64::from(*n);
    }
    out.retain(|_, d| *d != 0);
    out
}

/// Describes how the instruction counts by section and kind changed:
/// `steady: +1 alloc, +1 free (771 to 773 instructions)`. Empty if they did not change.
pub(crate) fn changed_counts<S: Ord>(
    old: &BTreeMap<S, BTreeMap<String, u32>>,
    new: &BTreeMap<S, BTreeMap<String, u32>>,
    name: impl Fn(&S) -> &str,
) -> String {
    let mut parts = Vec::new();
    let sections: BTreeSet<&S> = old.keys().chain(new.keys()).collect();
    let none = BTreeMap::new();
    for section in sections {
        let (a, b) = (
            old.get(section).unwrap_or(&none),
            new.get(section).unwrap_or(&none),
        );
        let deltas = deltas(a, b);
        if deltas.is_empty() {
            continue;
        }
        let words: Vec<String> = deltas.iter().map(|(k, d)| format!("{d:+} {k}")).collect();
        let total = |m: &BTreeMap<String, u32>| m.values().map(|n| u64::from(*n)).sum::<u64>();
        parts.push(format!(
            "{}: {} ({} to {} instructions)",
            name(section),
            words.join(", "),
            total(a),
            total(b)
        ));
    }
    parts.join("; ")
}
