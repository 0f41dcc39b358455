//! Compares losses and gradient norms of two runs.

use serde::Serialize;
use shardlab_plan::record::float;

/// The two values of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Step, from 1.
    pub step: usize,
    /// Value in A.
    #[serde(with = "float")]
    pub a: f64,
    /// Value in B.
    #[serde(with = "float")]
    pub b: f64,
}

/// A pair of curves.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CurvePair {
    /// Number of steps of A and B.
    pub steps: [usize; 2],
    /// First step whose values are not bitwise identical.
    pub diverges: Option<Difference>,
    /// Step with the largest absolute difference. A step for which only one value is NaN counts as
    /// the largest.
    pub largest: Option<Difference>,
    /// Last common step.
    pub last: Difference,
    /// Mean of B - A over the common steps.
    #[serde(with = "float")]
    pub mean_difference: f64,
    /// A few steps from the first to the last, for a table.
    pub shown: Vec<Difference>,
}

/// Maximum length of [`CurvePair::shown`].
const MAX_SHOWN: usize = 10;

impl CurvePair {
    /// Compares the common steps of two curves; `None` if there are none.
    pub(super) fn new(a: &[f64], b: &[f64]) -> Option<Self> {
        let both: Vec<Difference> = a
            .iter()
            .zip(b)
            .enumerate()
            .map(|(i, (&a, &b))| Difference { step: i + 1, a, b })
            .collect();
        let last = *both.last()?;
        let distance = |d: &Difference| match (d.b - d.a).abs() {
            x if x.is_nan() && d.a.to_bits() == d.b.to_bits() => 0.0,
            x if x.is_nan() => f64::INFINITY,
            x => x,
        };
        let differing: Vec<&Difference> = both
            .iter()
            .filter(|d| d.a.to_bits() != d.b.to_bits())
            .collect();
        let largest = differing
            .iter()
            .max_by(|x, y| {
                distance(x)
                    .total_cmp(&distance(y))
                    .then(y.step.cmp(&x.step))
            })
            .map(|d| **d);
        let n = both.len();
        let count = n.min(MAX_SHOWN);
        let at = |i: usize| i * (n - 1) / (count - 1).max(1);
        Some(Self {
            steps: [a.len(), b.len()],
            diverges: differing.first().map(|d| **d),
            largest,
            last,
            mean_difference: both.iter().map(|d| d.b - d.a).sum::<f64>() / n as f64,
            shown: (0..count).map(|i| both[at(i)]).collect(),
        })
    }

    /// Describes the difference of a quantity such as `loss` in a sentence.
    #[must_use]
    pub fn sentence(&self, quantity: &str) -> String {
        let steps = self.steps[0].min(self.steps[1]);
        let (Some(first), Some(largest)) = (self.diverges, self.largest) else {
            return format!("The {quantity} is bitwise identical in all {steps} common steps.");
        };
        let relative = (largest.b - largest.a).abs() / largest.a.abs();
        format!(
            "The {quantity} differs from step {} on ({} vs. {}); the largest difference is in step {}: {} vs. {} ({:.2e} relative).",
            first.step, first.a, first.b, largest.step, largest.a, largest.b, relative
        )
    }
}
