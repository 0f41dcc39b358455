//! Bootstrap interval of the ratio of medians.

use super::Options;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

/// Maximum number of samples drawn by all resamples together, so that long series take at most a
/// tenth of a second. Beyond it the number of resamples is lower, but at least [`MIN_RESAMPLES`].
const BUDGET: usize = 5_000_000;
/// Minimum number of resamples, if that many are requested.
const MIN_RESAMPLES: usize = 1_000;

/// An estimate with an interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Estimate.
    pub estimate: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Confidence level.
    pub level: f64,
}

/// Returns the ratio of the median of `b` to the median of `a`, with its percentile interval. Both
/// sides need samples, and all samples must be positive.
///
/// A side with one sample, or with equal samples, adds no spread.
#[must_use]
pub fn ratio_of_medians(a: &[f64], b: &[f64], options: &Options) -> Interval {
    let (mut a, mut b) = (Side::new(a, options.block), Side::new(b, options.block));
    let estimate = b.median / a.median;
    let exact = Interval {
        estimate,
        low: estimate,
        high: estimate,
        level: options.level,
    };
    if a.constant && b.constant {
        return exact;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
    let affordable = BUDGET / (a.samples.len() + b.samples.len());
    let resamples = (options.resamples as usize).min(affordable.max(MIN_RESAMPLES));
    let mut ratios: Vec<f64> = (0..resamples)
        .map(|_| {
            let denominator = a.draw(&mut rng);
            b.draw(&mut rng) / denominator
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let tail = (1.0 - options.level) / 2.0;
    Interval {
        low: quantile(&ratios, tail),
        high: quantile(&ratios, 1.0 - tail),
        ..exact
    }
}

struct Side<'a> {
    samples: &'a [f64],
    block: usize,
    median: f64,
    constant: bool,
    buffer: Vec<f64>,
}

impl<'a> Side<'a> {
    fn new(samples: &'a [f64], block: usize) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self {
            samples,
            // Resamples of a single block are all equal.
            block: block.clamp(1, (samples.len() / 2).max(1)),
            median: median_of_sorted(&sorted),
            constant: sorted.first() == sorted.last(),
            buffer: sorted,
        }
    }

    /// Returns the median of a resample. Blocks wrap around, so that all samples are drawn equally
    /// often.
    fn draw(&mut self, rng: &mut ChaCha8Rng) -> f64 {
        if self.constant {
            return self.median;
        }
        let n = self.samples.len();
        let mut at = 0;
        while at < n {
            let start = below(rng, n);
            for i in 0..self.block.min(n - at) {
                self.buffer[at + i] = self.samples[(start + i) % n];
            }
            at += self.block;
        }
        median_of(&mut self.buffer)
    }
}

/// Returns a uniform number in `0..n`, by multiplication. The bias of at most `n` in 2^64 is
/// negligible.
fn below(rng: &mut ChaCha8Rng, n: usize) -> usize {
    ((u128::from(rng.next_u64()) * n as u128) >> 64) as usize
}

/// Returns the smallest value that is at least as large as a share `q` of the values.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let n = sorted.len();
    // A rank that differs from a whole number only by rounding is that whole number.
    let rank = (q * n as f64 - 1e-9).ceil() as usize;
    sorted[rank.clamp(1, n) - 1]
}

/// Returns the median of values in any order, and reorders them; NaN if there are none.
fn median_of(all: &mut [f64]) -> f64 {
    let n = all.len();
    if n == 0 {
        return f64::NAN;
    }
    let (below, &mut upper, _) = all.select_nth_unstable_by(n / 2, f64::total_cmp);
    if n % 2 == 1 {
        return upper;
    }
    let lower = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    f64::midpoint(lower, upper)
}

pub(super) fn median_of_sorted(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 0 => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        n => sorted[n / 2],
    }
}
