//! Judges several seeds: tests final losses instead of comparing single curves.

use super::{Subject, place};
use crate::gate::baseline::Baseline;
use crate::gate::facts::{Curve, Measured};
use crate::gate::finding::{Class, Finding, Status};
use crate::gate::limits::{Limits, percent};
use crate::stats::{mean, variance, welch};
use statrs::distribution::{ContinuousCDF, StudentsT};
use std::collections::BTreeSet;

/// Accepted probability of a false alarm.
const SIGNIFICANCE: f64 = 0.05;
/// Share of the last steps whose mean is a run's final loss.
const TAIL: f64 = 0.1;

/// Reports seeds that only one side has and whose curves therefore cannot be compared. A missing
/// seed fails, because its curve is not judged.
pub(super) fn unmatched(
    baseline: &Baseline,
    before: &Measured,
    after: &Measured,
    limits: &Limits,
) -> Option<Finding> {
    let seeds = |m: &Measured| m.curves.iter().map(|c| c.seed).collect::<BTreeSet<u64>>();
    let (a, b) = (seeds(before), seeds(after));
    let (status, message) = if !a.is_subset(&b) {
        let message = format!("seed {} was not run", words(a.difference(&b)));
        (Status::Changed, message)
    } else if a != b {
        let message = format!(
            "the baseline has no seed {}: bless it again",
            words(b.difference(&a))
        );
        (Status::Skipped, message)
    } else {
        return None;
    };
    let subject = Subject {
        class: Class::Convergence,
        metric: "seeds",
        limit: String::new(),
        place: place(None, baseline.place("measured.curves", "seed"), limits),
    };
    Some(subject.finding(status, words(&a), words(&b), message))
}

fn words<'a>(seeds: impl IntoIterator<Item = &'a u64>) -> String {
    let seeds: Vec<String> = seeds.into_iter().map(u64::to_string).collect();
    seeds.join(", ")
}

/// Returns a run's final loss: the mean of the last tenth of its steps, which has less noise than
/// the last step.
fn tail(curve: &Curve) -> f64 {
    let n = curve.losses.len();
    let last = ((TAIL * n as f64).ceil() as usize).clamp(1, n.max(1));
    mean(&curve.losses[n.saturating_sub(last)..])
}

/// Result of testing whether the new mean is higher.
struct Test {
    name: &'static str,
    /// One-sided p-value.
    p: f64,
    /// Difference of means that the test would detect with a probability of about 80 %.
    detectable: f64,
}

/// Runs a test paired by seed, in which everything that both sides share (initial weights, data)
/// cancels out.
fn paired(pairs: &[(f64, f64)]) -> Option<Test> {
    let d: Vec<f64> = pairs.iter().map(|(a, b)| b - a).collect();
    let n = d.len() as f64;
    let error = (variance(&d) / n).sqrt();
    let df = n - 1.0;
    let student = StudentsT::new(0.0, 1.0, df).ok()?;
    let p = if error == 0.0 {
        // Without spread, the difference is exact.
        if mean(&d) > 0.0 { 0.0 } else { 1.0 }
    } else {
        student.sf(mean(&d) / error)
    };
    let both = student.inverse_cdf(1.0 - SIGNIFICANCE) + student.inverse_cdf(0.8);
    Some(Test {
        name: "paired t test",
        p,
        detectable: both * error,
    })
}

fn unpaired(a: &[f64], b: &[f64]) -> Option<Test> {
    let w = welch(a, b)?;
    let student = StudentsT::new(0.0, 1.0, w.df).ok()?;
    let error = ((mean(b) - mean(a)) / w.t).abs();
    let both = student.inverse_cdf(1.0 - SIGNIFICANCE) + student.inverse_cdf(0.8);
    Some(Test {
        name: "Welch's t test",
        p: student.sf(w.t),
        detectable: both * error,
    })
}

pub(super) fn final_losses(
    baseline: &Baseline,
    before: &Measured,
    after: &Measured,
    limits: &Limits,
) -> Finding {
    let all = |m: &Measured| m.curves.iter().map(tail).collect::<Vec<f64>>();
    let (a, b) = (all(before), all(after));
    let pairs: Vec<(f64, f64)> = before
        .curves
        .iter()
        .filter_map(|x| {
            let y = after.curves.iter().find(|y| y.seed == x.seed)?;
            Some((tail(x), tail(y)))
        })
        .collect();
    let subject = Subject {
        class: Class::Convergence,
        metric: "final loss over seeds",
        limit: format!(
            "≤ +{}, p ≥ {SIGNIFICANCE}",
            percent(limits.final_loss.value)
        ),
        place: place(
            limits.final_loss.place.as_ref(),
            baseline.place("measured.curves", "losses"),
            limits,
        ),
    };
    let means = |x: &[f64]| format!("mean {:.6} of {}", mean(x), x.len());
    let test = if pairs.len() == a.len() && pairs.len() == b.len() {
        paired(&pairs)
    } else {
        unpaired(&a, &b)
    };
    let difference = mean(&b) - mean(&a);
    let base = mean(&a).abs();
    let Some(test) = test.filter(|_| difference.is_finite()) else {
        let message = "the final losses cannot be tested".to_owned();
        return subject.finding(Status::Regression, means(&a), means(&b), message);
    };
    let beyond = difference > limits.final_loss.value * base;
    let status = match (beyond, test.p < SIGNIFICANCE) {
        (true, true) => Status::Regression,
        (true, false) => Status::Inconclusive,
        (false, _) => Status::Pass,
    };
    let message = format!(
        "{:+.6} ({:+.3} %), {} p = {:.4}; {} seeds would show a difference of {} four times in five",
        difference,
        100.0 * difference / base,
        test.name,
        test.p,
        a.len().min(b.len()),
        percent(test.detectable / base)
    );
    subject.finding(status, means(&a), means(&b), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Student's distribution with 4 degrees of freedom has a closed form: F(t) = 1/2 + 3/8 t/s (1
    /// - t²/(12 s²)), s² = 1 + t²/4.
    #[test]
    fn the_paired_test_agrees_with_the_closed_form() {
        let a = [2.31, 2.28, 2.35, 2.30, 2.33];
        let b = [2.33, 2.29, 2.38, 2.31, 2.36];
        let pairs: Vec<(f64, f64)> = a.into_iter().zip(b).collect();
        let t = paired(&pairs).unwrap();
        // Differences 0.02 0.01 0.03 0.01 0.03: mean 0.02, sd 0.01, t = 4.4721 at 4 degrees of
        // freedom.
        assert!((t.p - 0.005_528).abs() < 1e-5, "{}", t.p);
    }

    #[test]
    fn the_final_loss_is_the_mean_of_the_last_tenth() {
        let curve = |n: usize| Curve {
            seed: 0,
            losses: (0..n).map(|i| i as f64).collect(),
            grad_norms: vec![],
            ended: None,
        };
        assert_eq!(tail(&curve(20)), 18.5);
        assert_eq!(tail(&curve(3)), 2.0);
        assert!(tail(&curve(0)).is_nan());
    }
}
