//! Judges memory.

use super::{Subject, place, program};
use crate::gate::baseline::Baseline;
use crate::gate::facts::{Facts, Measured, MemoryFacts};
use crate::gate::finding::{Class, Finding, Status};
use crate::gate::limits::{Limits, percent};
use crate::gate::metric::FITS;
use shardlab_plan::config::GatePreset;
use shardlab_plan::units::{Bytes, count};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of parts of a change that are listed.
const MAX_NAMED: usize = 3;

fn signed(from: u64, to: u64) -> String {
    let sign = if to >= from { '+' } else { '-' };
    format!("{sign}{}", Bytes(to.abs_diff(from)))
}

/// Formats two sizes. If they differ but would look equal, both are exact.
fn both(a: u64, b: u64) -> (String, String) {
    let (x, y) = (Bytes(a).to_string(), Bytes(b).to_string());
    if x == y && a != b {
        return (format!("{} B", count(a)), format!("{} B", count(b)));
    }
    (x, y)
}

/// Judges the predicted peaks.
pub(super) fn predicted(baseline: &Baseline, now: &Facts, limits: &Limits) -> Vec<Finding> {
    let why = |more: bool| {
        let changes = program::buffers(baseline, now, more);
        let left = changes.len().saturating_sub(MAX_NAMED);
        let mut text = changes[..changes.len() - left].join(", ");
        if left > 0 {
            text.push_str(&format!(" and {left} other sizes"));
        }
        text
    };
    peaks(
        baseline,
        "memory",
        ["allocated", "reserved", "device"],
        &baseline.facts.memory,
        &now.memory,
        limits,
        &why,
    )
}

/// Judges whether the step fits the device; `None` if the device's capacity is unknown. With the
/// preset `budget`, the step has to fit. With `strict`, it has to fit only if it fit before; a step
/// that did not is reported, and a step that fits on both sides is not mentioned.
pub(super) fn fits(baseline: &Baseline, now: &Facts, limits: &Limits) -> Option<Finding> {
    let capacity = now.memory.capacity?;
    let (before, after) = (baseline.facts.memory.device, now.memory.device);
    let strict = limits.preset == GatePreset::Strict;
    let status = match (before <= capacity, after <= capacity) {
        (_, true) if strict => return None,
        (_, true) => Status::Pass,
        (false, false) if strict => Status::Skipped,
        (_, false) => Status::Regression,
    };
    let subject = Subject {
        class: Class::Memory,
        metric: FITS,
        limit: format!("≤ {}", Bytes(capacity)),
        place: place(None, baseline.place("memory", "device"), limits),
    };
    let message = match after.checked_sub(capacity) {
        Some(over) if over > 0 => format!(
            "needs {}, the device has {}: {} too much",
            Bytes(after),
            Bytes(capacity),
            Bytes(over)
        ),
        _ => format!("{} to spare", Bytes(capacity - after)),
    };
    let word = |n: u64| if n <= capacity { "yes" } else { "no" };
    Some(subject.finding(
        status,
        word(before).to_owned(),
        word(after).to_owned(),
        message,
    ))
}

/// Judges the measured peaks.
pub(super) fn measured(
    baseline: &Baseline,
    before: &Measured,
    after: &Measured,
    limits: &Limits,
) -> Vec<Finding> {
    let (Some(before), Some(after)) = (&before.memory, &after.memory) else {
        return Vec::new();
    };
    let names = [
        "allocated, measured",
        "reserved, measured",
        "device, measured",
    ];
    peaks(
        baseline,
        "measured.memory",
        names,
        before,
        after,
        limits,
        &|_| String::new(),
    )
}

fn peaks(
    baseline: &Baseline,
    section: &str,
    names: [&str; 3],
    old: &MemoryFacts,
    new: &MemoryFacts,
    limits: &Limits,
    why: &dyn Fn(bool) -> String,
) -> Vec<Finding> {
    let rows = [
        (
            names[0],
            "allocated",
            old.allocated,
            new.allocated,
            &limits.allocated,
        ),
        (
            names[1],
            "reserved",
            old.reserved,
            new.reserved,
            &limits.reserved,
        ),
        (names[2], "device", old.device, new.device, &limits.device),
    ];
    let mut explained = false;
    rows.into_iter()
        .map(|(name, key, a, b, limit)| {
            let subject = Subject::limited(
                Class::Memory,
                name,
                limit,
                baseline.place(section, key),
                limits,
            );
            let status = status(a, b, limit.value);
            let mut message = String::new();
            if a != b {
                message = format!("{} ({})", signed(a, b), relative(a, b));
            }
            if status.fails() {
                if key == "allocated" {
                    let parts = composition(old, new);
                    if !parts.is_empty() {
                        message.push_str(&format!(": {parts}"));
                    }
                    if old.at == new.at {
                        message.push_str(&format!("; peak in {}", new.at));
                    } else {
                        message.push_str(&format!("; peak moved from {} to {}", old.at, new.at));
                    }
                }
                // The explanation is given once, because the other peaks differ for the same
                // reason.
                if !std::mem::replace(&mut explained, true) {
                    let why = why(b > a);
                    if !why.is_empty() {
                        message.push_str(&format!("; {why}"));
                    }
                }
            }
            let (a, b) = both(a, b);
            subject.finding(status, a, b, message)
        })
        .collect()
}

fn status(old: u64, new: u64, limit: f64) -> Status {
    // Exact limits compare integers, since f64 cannot represent every byte count beyond 2^53.
    if limit == 0.0 {
        return match new.cmp(&old) {
            std::cmp::Ordering::Equal => Status::Pass,
            std::cmp::Ordering::Greater => Status::Regression,
            std::cmp::Ordering::Less => Status::Improvement,
        };
    }
    let (a, b) = (old as f64, new as f64);
    if b > a * (1.0 + limit) {
        Status::Regression
    } else if b < a * (1.0 - limit) {
        Status::Improvement
    } else {
        Status::Pass
    }
}

/// Formats a relative change: `+1.25 %`.
pub(super) fn relative(old: u64, new: u64) -> String {
    if old == 0 {
        return "from nothing".to_owned();
    }
    let change = (new as f64 - old as f64) / old as f64;
    let text = percent(change);
    if change >= 0.0 {
        format!("+{text}")
    } else {
        text
    }
}

/// Describes how the composition of the peak changed: by role or, if the roles are unchanged, by
/// unit.
fn composition(old: &MemoryFacts, new: &MemoryFacts) -> String {
    let parts = |a: &BTreeMap<String, u64>, b: &BTreeMap<String, u64>| {
        let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        let value = |m: &BTreeMap<String, u64>, k: &str| m.get(k).copied().unwrap_or(0);
        let mut all: Vec<(&String, u64, u64)> = keys
            .into_iter()
            .map(|k| (k, value(a, k), value(b, k)))
            .filter(|(_, x, y)| x != y)
            .collect();
        all.sort_by_key(|(_, x, y)| std::cmp::Reverse(x.abs_diff(*y)));
        let words: Vec<String> = all
            .iter()
            .take(MAX_NAMED)
            .map(|(k, x, y)| format!("{k} {}", signed(*x, *y)))
            .collect();
        words.join(", ")
    };
    parts(&old.by_role, &new.by_role)
}

#[cfg(test)]
mod tests {
    use super::super::short;
    use super::*;

    #[test]
    fn bytes_are_compared_exactly_unless_a_tolerance_is_given() {
        let big = 1u64 << 60;
        assert_eq!(status(big, big + 1, 0.0), Status::Regression);
        assert_eq!(status(big, big - 1, 0.0), Status::Improvement);
        assert_eq!(status(big, big, 0.0), Status::Pass);
        assert_eq!(status(1000, 1010, 0.01), Status::Pass);
        assert_eq!(status(1000, 1011, 0.01), Status::Regression);
        assert_eq!(status(1000, 989, 0.01), Status::Improvement);
        assert_eq!(status(0, 1, 0.01), Status::Regression);
    }

    #[test]
    fn numbers_are_count() {
        assert_eq!(signed(10, 7), "-3 B");
        assert_eq!(short(448 << 20), "448 MiB");
        assert_eq!(
            both(1 << 30, 2 << 30),
            ("1.00 GiB".to_owned(), "2.00 GiB".to_owned())
        );
        let alike = ("1,073,741,824 B".to_owned(), "1,073,741,825 B".to_owned());
        assert_eq!(both(1 << 30, (1 << 30) + 1), alike);
    }
}
