//! Welch's t test with Student's distribution, and the standardized difference.

use super::{mean, variance};
use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

/// Result of Welch's two-sided test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WelchTest {
    /// Difference of the means, B - A, divided by its standard error.
    pub t: f64,
    /// Degrees of freedom (Welch and Satterthwaite).
    pub df: f64,
    /// Probability of a t that is at least this far from 0, if the means are equal.
    pub p: f64,
}

/// Returns the standard error of the difference of means and its degrees of freedom; `None` if a
/// side has fewer than two samples or there is no spread.
pub(super) fn standard_error(a: &[f64], b: &[f64]) -> Option<(f64, f64)> {
    if a.len() < 2 || b.len() < 2 {
        return None;
    }
    let (n, m) = (a.len() as f64, b.len() as f64);
    let (va, vb) = (variance(a) / n, variance(b) / m);
    let total = va + vb;
    if !(total.is_finite() && total > 0.0) {
        return None;
    }
    let df = total.powi(2) / (va.powi(2) / (n - 1.0) + vb.powi(2) / (m - 1.0));
    df.is_finite().then_some((total.sqrt(), df))
}

/// Runs Welch's test of `b` against `a`; `None` if the spread cannot be estimated.
#[must_use]
pub fn welch(a: &[f64], b: &[f64]) -> Option<WelchTest> {
    let (error, df) = standard_error(a, b)?;
    let t = (mean(b) - mean(a)) / error;
    let student = StudentsT::new(0.0, 1.0, df).ok()?;
    Some(WelchTest {
        t,
        df,
        p: (2.0 * student.sf(t.abs())).min(1.0),
    })
}

/// Returns the difference of the means divided by the pooled standard deviation, corrected for
/// small samples; `None` if the spread cannot be estimated.
#[must_use]
pub fn hedges_g(a: &[f64], b: &[f64]) -> Option<f64> {
    standard_error(a, b)?;
    let (n, m) = (a.len() as f64, b.len() as f64);
    let pooled = ((n - 1.0) * variance(a) + (m - 1.0) * variance(b)) / (n + m - 2.0);
    let correction = 1.0 - 3.0 / (4.0 * (n + m) - 9.0);
    Some((mean(b) - mean(a)) / pooled.sqrt() * correction)
}
