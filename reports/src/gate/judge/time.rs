//! Predicted time: deterministic, so one number is enough.

use super::Subject;
use crate::gate::baseline::Baseline;
use crate::gate::facts::Facts;
use crate::gate::finding::{Class, Finding, Status};
use crate::gate::limits::Limits;
use std::collections::BTreeSet;

/// Causes that are named.
const NAMED: usize = 3;

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
            "{:+.4} ms ({})",
            (b - a) / 1e9,
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
            parts.push(format!("compute stream busy {:+.4} ms", busy / 1e9));
        }
        for (cause, d) in all.iter().take(NAMED) {
            parts.push(format!("exposed by {cause} {:+.4} ms", d / 1e9));
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
    let ms = |ps: u64| format!("{:.4} ms", ps as f64 / 1e9);
    subject.finding(status, ms(old.step_ps), ms(new.step_ps), message)
}
