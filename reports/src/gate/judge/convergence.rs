//! Judges loss curves and gradient norms.

use super::{Subject, place, seeds};
use crate::gate::baseline::Baseline;
use crate::gate::facts::{Curve, Facts, Measured};
use crate::gate::finding::{Class, Finding, Status};
use crate::gate::limits::{Limits, Place, percent};
use crate::gate::metric::FINITE;
use shardlab_plan::config::GatePreset;

/// Minimum number of seeds for testing final losses instead of comparing single curves.
const MIN_SEEDS: usize = 3;

pub(super) fn judge(
    baseline: &Baseline,
    before: &Measured,
    after: &Measured,
    now: &Facts,
    limits: &Limits,
) -> Vec<Finding> {
    let mut findings = vec![finite(baseline, after, limits)];
    let many = before.curves.len().min(after.curves.len()) >= MIN_SEEDS;
    if many {
        findings.push(seeds::final_losses(baseline, before, after, limits));
    } else {
        findings.extend(seeds::unmatched(baseline, before, after, limits));
    }
    // One curve per common seed is compared. With enough seeds, only gradient norms are compared
    // this way, because they have little noise.
    let pairs: Vec<(&Curve, &Curve)> = before
        .curves
        .iter()
        .filter_map(|a| Some((a, after.curves.iter().find(|b| b.seed == a.seed)?)))
        .collect();
    for (a, b) in pairs {
        let name = |metric: &str| match before.curves.len() {
            1 => metric.to_owned(),
            _ => format!("{metric}, seed {}", a.seed),
        };
        if !many {
            findings.push(band(baseline, &name("loss curve"), a, b, limits));
            findings.push(area(baseline, &name("area between losses"), a, b, limits));
            findings.push(last(baseline, &name("final loss"), a, b, limits));
        }
        findings.push(norms(baseline, &name("gradient norm"), a, b, now, limits));
    }
    findings
}

fn at(baseline: &Baseline, key: &str, limit: Option<&Place>, limits: &Limits) -> Option<Place> {
    place(limit, baseline.place("measured.curves", key), limits)
}

/// Checks for NaN, infinity and an early end, independent of the baseline.
fn finite(baseline: &Baseline, after: &Measured, limits: &Limits) -> Finding {
    let fault = after.curves.iter().find_map(|c| {
        let of = |what: &str, all: &[f64]| {
            let i = all.iter().position(|x| !x.is_finite())?;
            Some(format!(
                "seed {}: the {what} of step {} is {}",
                c.seed,
                i + 1,
                all[i]
            ))
        };
        c.ended
            .as_ref()
            .map(|why| format!("seed {}: {why}", c.seed))
            .or_else(|| of("loss", &c.losses))
            .or_else(|| of("gradient norm", &c.grad_norms))
            .or_else(|| {
                c.losses
                    .is_empty()
                    .then(|| format!("seed {}: there are no losses", c.seed))
            })
    });
    let steps: usize = after.curves.iter().map(|c| c.losses.len()).sum();
    Finding {
        class: Class::Convergence,
        metric: FINITE.to_owned(),
        status: if fault.is_some() {
            Status::Regression
        } else {
            Status::Pass
        },
        baseline: String::new(),
        now: format!("{steps} steps"),
        limit: "no NaN".to_owned(),
        message: fault.unwrap_or_default(),
        detail: String::new(),
        place: at(baseline, "losses", None, limits),
    }
}

/// Steps, counted from 0, at which two series differ by more than allowed. Messages count from 1,
/// like training output.
struct Misses {
    first: usize,
    worst: usize,
    count: usize,
    /// Whether the new value is lower at all of them.
    lower: bool,
}

fn misses(a: &[f64], b: &[f64], allowed: impl Fn(f64) -> f64) -> Option<Misses> {
    let mut found: Option<Misses> = None;
    let mut most = -1.0;
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        let off = (y - x).abs();
        // NaN on one side exceeds every limit.
        let within = off <= allowed(*x) || x.to_bits() == y.to_bits();
        if within {
            continue;
        }
        let size = if off.is_finite() { off } else { f64::INFINITY };
        let m = found.get_or_insert(Misses {
            first: i,
            worst: i,
            count: 0,
            lower: true,
        });
        m.count += 1;
        m.lower &= y < x;
        if size > most {
            most = size;
            m.worst = i;
        }
    }
    found
}

fn identical(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}

fn band(baseline: &Baseline, metric: &str, a: &Curve, b: &Curve, limits: &Limits) -> Finding {
    let (relative, absolute) = (limits.loss.value, limits.loss_absolute.value);
    let limit = match (relative == 0.0, absolute == 0.0) {
        (true, true) => "bit-exact".to_owned(),
        (false, true) => format!("±{}", percent(relative)),
        (true, false) => format!("±{absolute}"),
        (false, false) => format!("±({} + {absolute})", percent(relative)),
    };
    let given = limits
        .loss
        .place
        .as_ref()
        .or(limits.loss_absolute.place.as_ref());
    let subject = Subject {
        class: Class::Convergence,
        metric,
        limit,
        place: at(baseline, "losses", given, limits),
    };
    let (x, y) = (&a.losses, &b.losses);
    let steps = |n: usize| format!("{n} steps");
    if x.len() != y.len() {
        let message = format!("{} steps instead of {}", y.len(), x.len());
        return subject.finding(Status::Changed, steps(x.len()), steps(y.len()), message);
    }
    let (status, message) = match misses(x, y, |r| absolute + relative * r.abs()) {
        None if identical(x, y) => (Status::Pass, "bitwise identical".to_owned()),
        None => (Status::Pass, String::new()),
        Some(m) => (
            if m.lower {
                Status::Improvement
            } else {
                Status::Regression
            },
            format!(
                "outside at {} of {} steps, first at step {}; furthest at step {}: {:.6} instead of {:.6} ({:+.3} %)",
                m.count,
                x.len(),
                m.first + 1,
                m.worst + 1,
                y[m.worst],
                x[m.worst],
                100.0 * (y[m.worst] / x[m.worst] - 1.0)
            ),
        ),
    };
    subject.finding(status, steps(x.len()), steps(y.len()), message)
}

fn area(baseline: &Baseline, metric: &str, a: &Curve, b: &Curve, limits: &Limits) -> Finding {
    let under: f64 = a.losses.iter().map(|x| x.abs()).sum();
    let between: f64 = a
        .losses
        .iter()
        .zip(&b.losses)
        .map(|(x, y)| (y - x).abs())
        .sum();
    let share = if between == 0.0 { 0.0 } else { between / under };
    let within = share <= limits.loss_area.value;
    let subject = Subject {
        class: Class::Convergence,
        metric,
        limit: format!("≤ {}", percent(limits.loss_area.value)),
        place: at(baseline, "losses", limits.loss_area.place.as_ref(), limits),
    };
    let message = if within {
        String::new()
    } else {
        format!(
            "the curves differ by {} of the area under the baseline, on average by {:.6} per step",
            percent(share),
            between / a.losses.len().max(1) as f64
        )
    };
    let lower = a.losses.iter().zip(&b.losses).all(|(x, y)| y <= x);
    let status = match (within, lower) {
        (true, _) => Status::Pass,
        (false, true) => Status::Improvement,
        (false, false) => Status::Regression,
    };
    subject.finding(status, String::new(), percent(share), message)
}

fn last(baseline: &Baseline, metric: &str, a: &Curve, b: &Curve, limits: &Limits) -> Finding {
    let end = |c: &Curve| c.losses.last().copied().unwrap_or(f64::NAN);
    let (x, y) = (end(a), end(b));
    let worse = y - x;
    // This form of the comparison fails for NaN.
    let within = worse <= limits.final_loss.value * x.abs();
    let subject = Subject {
        class: Class::Convergence,
        metric,
        limit: format!("≤ +{}", percent(limits.final_loss.value)),
        place: at(baseline, "losses", limits.final_loss.place.as_ref(), limits),
    };
    if a.losses.len() != b.losses.len() {
        let message = "the runs have different numbers of steps".to_owned();
        return subject.finding(
            Status::Skipped,
            format!("{x:.6}"),
            format!("{y:.6}"),
            message,
        );
    }
    let message = if within {
        String::new()
    } else {
        format!("{:+.6} ({:+.3} %)", worse, 100.0 * worse / x.abs())
    };
    let status = if within {
        Status::Pass
    } else {
        Status::Regression
    };
    subject.finding(status, format!("{x:.6}"), format!("{y:.6}"), message)
}

fn norms(
    baseline: &Baseline,
    metric: &str,
    a: &Curve,
    b: &Curve,
    now: &Facts,
    limits: &Limits,
) -> Finding {
    let limit = &limits.grad_norm;
    let subject = Subject {
        class: Class::Convergence,
        metric,
        limit: if limit.value == 0.0 {
            "bit-exact".to_owned()
        } else {
            limit.relative(GatePreset::Strict)
        },
        place: at(baseline, "grad_norms", limit.place.as_ref(), limits),
    };
    let (x, y) = (&a.grad_norms, &b.grad_norms);
    let mean = |v: &[f64]| match v.len() {
        0 => "none".to_owned(),
        n => format!("mean {:.5}", v.iter().sum::<f64>() / n as f64),
    };
    let (status, message) = if x.len() != y.len() {
        (
            Status::Changed,
            format!("{} steps instead of {}", y.len(), x.len()),
        )
    } else {
        match misses(x, y, |r| limit.value * r.abs()) {
            None if identical(x, y) => (Status::Pass, "bitwise identical".to_owned()),
            None => (Status::Pass, String::new()),
            Some(m) => {
                let first = y[m.first] / x[m.first];
                let mut text = format!(
                    "outside at {} of {} steps, first at step {}: {:.5} instead of {:.5}, {first:.4} times",
                    m.count,
                    x.len(),
                    m.first + 1,
                    y[m.first],
                    x[m.first]
                );
                text.push_str(&scale(first, now.world_size));
                (Status::Regression, text)
            }
        }
    };
    subject.finding(status, mean(x), mean(y), message)
}

/// Explains a factor that equals the world size or its inverse, which has a common cause. Only the
/// first differing step is reliable, because later steps start from different weights.
fn scale(ratio: f64, world: u32) -> String {
    let world = f64::from(world);
    let near = |x: f64| (ratio / x - 1.0).abs() < 0.02;
    if world < 2.0 || !(near(world) || near(1.0 / world)) {
        return String::new();
    }
    let sum = if near(world) {
        "a sum where a mean belongs"
    } else {
        "a mean taken twice"
    };
    format!(": off by the world size ({world}), {sum}")
}
