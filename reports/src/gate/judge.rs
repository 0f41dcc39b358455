//! Compares facts with a baseline.

mod budget;
mod convergence;
mod memory;
mod program;
mod seeds;
mod time;

use super::baseline::Baseline;
use super::facts::Facts;
use super::finding::{Class, Finding, Status, Verdict};
use super::limits::{Limit, Limits, Place};
use super::metric::{self, BASELINE};
use shardlab_plan::config::GatePreset;
use shardlab_plan::units::Bytes;

/// Formats a size without trailing zeros: `448 MiB`.
fn short(bytes: u64) -> String {
    Bytes(bytes)
        .to_string()
        .replace(".00 ", " ")
        .replace(".0 ", " ")
}

/// The subject of a comparison: a [`Finding`] without its outcome.
struct Subject<'a> {
    class: Class,
    metric: &'a str,
    limit: String,
    place: Option<Place>,
}

impl<'a> Subject<'a> {
    /// Creates the subject for a number with a relative limit. An annotation points at the user's
    /// limit if there is one, or else at the baseline's value, or else at the scenario.
    fn limited(
        class: Class,
        metric: &'a str,
        limit: &Limit,
        otherwise: Option<Place>,
        limits: &Limits,
    ) -> Self {
        Self {
            class,
            metric,
            limit: limit.relative(limits.preset),
            place: place(limit.place.as_ref(), otherwise, limits),
        }
    }

    fn finding(self, status: Status, baseline: String, now: String, message: String) -> Finding {
        Finding {
            class: self.class,
            metric: self.metric.to_owned(),
            status,
            baseline,
            now,
            limit: self.limit,
            message,
            detail: String::new(),
            place: self.place,
        }
    }
}

fn place(limit: Option<&Place>, otherwise: Option<Place>, limits: &Limits) -> Option<Place> {
    limit
        .cloned()
        .or(otherwise)
        .or_else(|| limits.scenario.clone())
}

/// Compares a scenario's facts with its baseline.
///
/// Measured runs are judged if both sides have them. If only one side has them, this is reported
/// and does not fail.
#[must_use]
pub fn judge(baseline: &Baseline, now: &Facts, limits: &Limits) -> Verdict {
    let old = &baseline.facts;
    let mut findings = Vec::new();
    let options = program::options(baseline, now, limits);
    let known = options.is_some();
    findings.extend(options);
    findings.push(program::judge(baseline, now, limits));
    findings.push(program::checks(baseline, now, limits));
    findings.extend(memory::predicted(baseline, now, limits));
    findings.extend(memory::fits(baseline, now, limits));
    findings.push(time::predicted(baseline, now, limits));
    findings.extend(budget::judge(now, limits));
    match (&old.measured, &now.measured) {
        (Some(before), Some(after)) => {
            findings.extend(memory::measured(baseline, before, after, limits));
            findings.extend(convergence::judge(baseline, before, after, now, limits));
        }
        (None, None) => {}
        (before, _) => {
            let (has, lacks) = if before.is_some() {
                (
                    "the baseline has",
                    "this call has none: give --run, or leave out --no-exec",
                )
            } else {
                ("this call has", "the baseline has none: bless it again")
            };
            findings.push(Finding {
                class: Class::Convergence,
                metric: "loss curve".to_owned(),
                status: Status::Skipped,
                baseline: String::new(),
                now: String::new(),
                limit: String::new(),
                message: format!("{has} measured runs, {lacks}"),
                detail: String::new(),
                place: limits.scenario.clone(),
            });
        }
    }
    if old.set != now.set && !known {
        let words = |set: &[String]| match set {
            [] => "no overrides".to_owned(),
            set => set.join(" "),
        };
        findings.push(Finding {
            class: Class::Program,
            metric: "overrides".to_owned(),
            status: Status::Skipped,
            baseline: words(&old.set),
            now: words(&now.set),
            limit: String::new(),
            message: "the baseline was made with other overrides".to_owned(),
            detail: String::new(),
            place: baseline.place("", "set"),
        });
    }
    if limits.preset == GatePreset::Budget {
        // An improvement is not a failure.
        for f in &mut findings {
            if f.status == Status::Improvement {
                f.status = Status::Pass;
            }
        }
    }
    let change = program::change(baseline, now, limits);
    Verdict::new(&now.scenario, limits.preset, change, findings).resting_on(now.basis.clone())
}

/// Returns the verdict on a scenario whose baseline is not available, for the given reason. `fault`
/// is the place of the error if the baseline's file is invalid. Since nothing was compared, the
/// gate fails.
#[must_use]
pub fn missing(now: Facts, limits: &Limits, reason: &str, fault: Option<Place>) -> Verdict {
    by_itself(now, limits, |_| Finding {
        place: fault.or_else(|| limits.scenario.clone()),
        ..no_baseline(Status::NoBaseline, String::new(), limits, reason)
    })
}

/// Returns the verdict on a scenario without a counterpart, for the given reason.
#[must_use]
pub fn alone(now: Facts, limits: &Limits, reason: &str) -> Verdict {
    by_itself(now, limits, |now| {
        let digest = now.program.digest.clone();
        no_baseline(Status::Skipped, digest, limits, reason)
    })
}

/// Judges everything that needs no baseline: proofs, budgets, and that losses are finite. Adds the
/// finding that there is no baseline.
fn by_itself(now: Facts, limits: &Limits, none: impl FnOnce(&Facts) -> Finding) -> Verdict {
    let itself = Baseline::of(now);
    let mut findings = judge(&itself, &itself.facts, limits).findings;
    findings.retain(|f| {
        f.class == Class::Checks || metric::stands_alone(&f.metric) && f.status != Status::Skipped
    });
    for f in &mut findings {
        f.baseline.clear();
    }
    findings.push(none(&itself.facts));
    Verdict::new(&itself.facts.scenario, limits.preset, None, findings)
        .resting_on(itself.facts.basis.clone())
}

fn no_baseline(status: Status, now: String, limits: &Limits, reason: &str) -> Finding {
    Finding {
        class: Class::Program,
        metric: BASELINE.to_owned(),
        status,
        baseline: "none".to_owned(),
        now,
        limit: String::new(),
        message: reason.to_owned(),
        detail: String::new(),
        place: limits.scenario.clone(),
    }
}

#[cfg(test)]
mod tests;
