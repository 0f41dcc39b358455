//! The power of Welch's test for a change of a given size.

use super::welch::standard_error;
use super::{Options, mean};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};
use statrs::function::gamma::ln_gamma;

/// Probability that counts as sufficient.
const MIN_POWER: f64 = 0.8;
/// Number of intervals of the integral over the estimated spread.
const PIECES: u32 = 60;

/// Returns the probability that Welch's test at `1 - level` detects a change of the mean of A by
/// `threshold`; `None` if the spread cannot be estimated.
#[must_use]
pub fn power(a: &[f64], b: &[f64], options: &Options) -> Option<f64> {
    let (error, df) = standard_error(a, b)?;
    Some(noncentral(
        df,
        options.threshold * mean(a) / error,
        1.0 - options.level,
    ))
}

/// Returns the smallest relative change that Welch's test detects with a probability of 80 %;
/// `None` if the spread cannot be estimated.
#[must_use]
pub fn detectable(a: &[f64], b: &[f64], options: &Options) -> Option<f64> {
    let (error, df) = standard_error(a, b)?;
    let significance = 1.0 - options.level;
    let mut high = 1.0;
    while noncentral(df, high, significance) < MIN_POWER {
        high *= 2.0;
        if high > 1e9 {
            return None;
        }
    }
    let mut low = 0.0;
    for _ in 0..30 {
        let middle = f64::midpoint(low, high);
        if noncentral(df, middle, significance) < MIN_POWER {
            low = middle;
        } else {
            high = middle;
        }
    }
    Some(high * error / mean(a))
}

/// Returns the probability that a t value with these degrees of freedom and noncentrality exceeds
/// the two-sided critical value. This is the normal probability given the estimated spread `s`,
/// integrated over `s`, which follows a chi distribution divided by the square root of `df`.
fn noncentral(df: f64, shift: f64, significance: f64) -> f64 {
    let (Ok(student), Ok(normal)) = (StudentsT::new(0.0, 1.0, df), Normal::new(0.0, 1.0)) else {
        return f64::NAN;
    };
    let critical = student.inverse_cdf(1.0 - significance / 2.0);
    let seen = |s: f64| normal.sf(critical * s - shift) + normal.cdf(-critical * s - shift);
    // Log density of s.
    let constant = std::f64::consts::LN_2 + df / 2.0 * (df / 2.0).ln() - ln_gamma(df / 2.0);
    let density = |s: f64| {
        if s <= 0.0 {
            return 0.0;
        }
        (constant + (df - 1.0) * s.ln() - df * s * s / 2.0).exp()
    };
    // Ten standard deviations (about 1 / sqrt(2 df)) around 1 cover the whole distribution. With
    // few degrees of freedom it extends further down.
    let reach = 10.0 / (2.0 * df).sqrt();
    let (from, to) = ((1.0 - reach).max(0.0), 1.0 + reach);
    let step = (to - from) / f64::from(2 * PIECES);
    // Simpson's rule, normalized by the integral of the density, so that its error cancels.
    let (mut sum, mut mass) = (0.0, 0.0);
    for i in 0..=2 * PIECES {
        let s = from + step * f64::from(i);
        let weight = match i {
            0 => 1.0,
            i if i == 2 * PIECES => 1.0,
            i if i % 2 == 1 => 4.0,
            _ => 2.0,
        };
        let d = weight * density(s);
        mass += d;
        sum += d * seen(s);
    }
    sum / mass
}

#[cfg(test)]
mod tests {
    use super::noncentral;

    /// scipy 1.17.1:
    /// `t = stats.t.ppf(.975, df); stats.nct.sf(t, df, nc) + stats.nct.cdf(-t, df, nc)`.
    #[test]
    fn power_agrees_with_the_noncentral_t_distribution() {
        let known = [
            (8.0, 2.5, 0.593_078_093_263_712_4),
            (5.3, 1.0, 0.131_835_767_622_777_24),
            (30.0, 3.0, 0.827_099_928_467_341_6),
            (2.0, 4.0, 0.564_514_289_260_038),
        ];
        for (df, shift, expected) in known {
            let got = noncentral(df, shift, 0.05);
            assert!((got - expected).abs() < 1e-5, "{df} {shift}: {got}");
        }
    }
}
