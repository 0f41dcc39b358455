//! Judges predicted time. It is deterministic, so one number is enough.

use super::Subject;
use crate::gate::baseline::Baseline;
use crate::gate::facts::Facts;
use crate::gate::finding::{Class, Finding, Status};
use crate::gate::limits::Limits;
use shardlab_plan::units::thousands;
use std::collections::BTreeSet;

/// Maximum number of causes that are listed.
const MAX_NAMED: usize = 3;

pub(super) fn predicted(baseline: &Baseline, now: &Facts, limits: &Limits) -> Finding {
    let (old, new) = (&baseline.facts.time, &now.time);
    let (a, b, limit) = (
        old.step_ps as f64,
        new.step_ps as f64,
        limits.step_time.value,
    );
    let status = if b > a * (1.0 + limit) {
        Status::Regression
    } else if b < a * (1.0 - limit) {
        Status::Improvement
    } else {
        Status::Pass
    };
    let mut message = String::new();
    if old.step_ps != new.step_ps {
        message = format!(
            "{} ({})",
            signed_ms(b - a),
            super::memory::relative(old.step_ps, new.step_ps)
        );
    }
    if status.fails() {
        let mut parts = Vec::new();
        let causes: BTreeSet<&String> =
            old.exposed_ps.keys().chain(new.exposed_ps.keys()).collect();
        let exposed = |m: &std::collections::BTreeMap<String, u64>, k: &str| {
            m.get(k).copied().unwrap_or(0) as f64
        };
        let mut all: Vec<(&String, f64)> = causes
            .into_iter()
            .map(|k| (k, exposed(&new.exposed_ps, k) - exposed(&old.exposed_ps, k)))
            .filter(|(_, d)| d.abs() >= 1e-3 * (b - a).abs())
            .collect();
        let idle: f64 = all.iter().map(|(_, d)| d).sum();
        all.sort_by(|x, y| y.1.abs().total_cmp(&x.1.abs()));
        let busy = (b - a) - idle;
        if busy.abs() >= 1e-3 * (b - a).abs() {
            parts.push(format!("compute {}", signed_ms(busy)));
        }
        for (cause, d) in all.iter().take(MAX_NAMED) {
            parts.push(format!("exposed by {cause} {}", signed_ms(*d)));
        }
        if !parts.is_empty() {
            message.push_str(&format!(": {}", parts.join(", ")));
        }
    }
    let subject = Subject::limited(
        Class::Time,
        "step, predicted",
        &limits.step_time,
        baseline.place("time", "step_ps"),
        limits,
    );
    let (mut before, mut after) = (ms(a), ms(b));
    if before == after && old.step_ps != new.step_ps {
        (before, after) = (format!("{:.9} ms", a / 1e9), format!("{:.9} ms", b / 1e9));
    }
    subject.finding(status, before, after, message)
}

/// Formats picoseconds as milliseconds with a suitable number of digits.
pub(super) fn ms(ps: f64) -> String {
    let ms = ps / 1e9;
    if ms.abs() >= 1.0 {
        format!("{} ms", thousands(ms, 2))
    } else {
        format!("{ms:.4} ms")
    }
}

fn signed_ms(ps: f64) -> String {
    let sign = if ps < 0.0 { "" } else { "+" };
    format!("{sign}{}", ms(ps))
}
