//! Decides whether two sets of samples differ, by how much, and whether there are enough samples to
//! decide.
//!
//! The verdict compares the interval of the ratio of medians with a threshold. Rank tests and t
//! tests are second opinions: they are shown with the verdict, but do not affect it. Randomness
//! comes from a fixed ChaCha stream, so equal inputs have equal verdicts.
//!
//! Steps of one run are not independent of each other (clocks drift, other jobs come and go). If a
//! side has several runs, pass one median per run; otherwise resample blocks ([`Options::block`]).

mod bootstrap;
mod power;
mod rank;
mod welch;

pub use bootstrap::{Interval, ratio_of_medians};
pub use power::{detectable, power};
pub use rank::{Magnitude, RankTest, cliffs_delta, mann_whitney};
pub use welch::{WelchTest, hedges_g, welch};

use crate::tolerance::Tolerance;
use serde::Serialize;
use shardlab_plan::units::{signed, thousands};

/// Number of measurements of each side that a verdict needs, as in the gate. Intervals of fewer are
/// too narrow.
pub const MIN_SAMPLES: usize = 3;

/// Options of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Options {
    /// Smallest relative change of measurements that matters, for example 0.02.
    pub threshold: f64,
    /// Relative difference up to which two predictions count as equal.
    pub tolerance: Tolerance,
    /// Confidence level of intervals; its complement is the significance of tests.
    pub level: f64,
    /// Number of bootstrap resamples.
    pub resamples: u32,
    /// Number of consecutive samples that are drawn together; 1 draws each separately.
    pub block: usize,
    /// Seed of the resampling.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threshold: 0.02,
            tolerance: Tolerance::DEFAULT,
            level: 0.95,
            resamples: 10_000,
            block: 1,
            seed: 0,
        }
    }
}

impl Options {
    /// Returns the block length for step times of a single run: the cube root of their number, so
    /// that blocks grow with the series, but slower. A series has at least two blocks: resamples of
    /// a single one are all equal.
    #[must_use]
    pub fn block_of(samples: usize) -> usize {
        let length = (samples as f64).cbrt().ceil() as usize;
        length.min(samples / 2).max(1)
    }
}

/// Why samples cannot be compared.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StatsError {
    /// A side has no samples.
    #[error("{0} has no samples")]
    Empty(&'static str),
    /// A sample is not a positive finite number.
    #[error("sample {index} of {side} is {value}; a positive number is expected")]
    Sample {
        /// Side.
        side: &'static str,
        /// Position.
        index: usize,
        /// Value.
        value: f64,
    },
    /// An option is out of range.
    #[error("{0}")]
    Options(&'static str),
}

/// Samples of one side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Samples<'a> {
    /// An exact number: a prediction.
    Exact(f64),
    /// Measurements in order of time.
    Measured(&'a [f64]),
}

impl<'a> Samples<'a> {
    fn as_slice(&'a self) -> &'a [f64] {
        match self {
            Self::Exact(x) => std::slice::from_ref(x),
            Self::Measured(all) => all,
        }
    }

    /// Returns the measurements if there are at least two, as tests require.
    fn measured(self) -> Option<&'a [f64]> {
        match self {
            Self::Measured(all) if all.len() >= 2 => Some(all),
            _ => None,
        }
    }
}

/// Result of a comparison in which smaller values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Larger by more than the threshold.
    Regressed,
    /// Smaller by more than the threshold.
    Improved,
    /// Within the threshold.
    Equal,
    /// There are too few samples for a decision.
    Inconclusive,
}

impl Verdict {
    /// Returns the name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Regressed => "regressed",
            Self::Improved => "improved",
            Self::Equal => "equal",
            Self::Inconclusive => "inconclusive",
        }
    }
}

/// A comparison of samples of B with samples of A.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Number of samples of A and B.
    pub n: [usize; 2],
    /// Medians of A and B.
    pub medians: [f64; 2],
    /// Means of A and B.
    pub means: [f64; 2],
    /// Ratio of the medians, B to A, with its interval. For two exact numbers the interval is the
    /// ratio itself.
    pub ratio: Interval,
    /// Second opinion by ranks, if both sides are measured.
    pub mann_whitney: Option<RankTest>,
    /// Second opinion by means, if both sides are measured and have any spread.
    pub welch: Option<WelchTest>,
    /// Share of pairs in which B is larger minus the share in which it is smaller, -1 to 1.
    pub cliffs_delta: f64,
    /// Size of Cliff's delta, as a word.
    pub magnitude: Magnitude,
    /// Standardised difference of the means (Hedges' g), if there is any spread.
    pub hedges_g: Option<f64>,
    /// Probability that Welch's test detects a change of [`Options::threshold`], given this spread
    /// and these numbers of samples.
    pub power: Option<f64>,
    /// Smallest relative change that the test detects with a probability of 80 %.
    pub detectable: Option<f64>,
    /// Verdict.
    pub verdict: Verdict,
    /// Options of the comparison.
    pub options: Options,
    /// Whether a side has fewer measurements than a verdict needs.
    #[serde(skip)]
    pub has_few: bool,
}

/// Compares B with A.
///
/// # Errors
/// Fails if a side has no samples, a sample is not positive, or an option is out of range.
pub fn compare(
    a: Samples<'_>,
    b: Samples<'_>,
    options: &Options,
) -> Result<Comparison, StatsError> {
    check(options)?;
    let (x, y) = (a.as_slice(), b.as_slice());
    checked("A", x)?;
    checked("B", y)?;
    let tested = a.measured().zip(b.measured());
    let ratio = ratio_of_medians(x, y, options);
    let delta = cliffs_delta(x, y);
    let mut c = Comparison {
        n: [x.len(), y.len()],
        medians: [median(x), median(y)],
        means: [mean(x), mean(y)],
        mann_whitney: tested.map(|(x, y)| mann_whitney(x, y)),
        welch: tested.and_then(|(x, y)| welch(x, y)),
        cliffs_delta: delta,
        magnitude: Magnitude::of(delta),
        hedges_g: tested.and_then(|(x, y)| hedges_g(x, y)),
        power: tested.and_then(|(x, y)| power(x, y, options)),
        detectable: tested.and_then(|(x, y)| detectable(x, y, options)),
        verdict: Verdict::Inconclusive,
        ratio,
        options: *options,
        has_few: [a, b]
            .iter()
            .any(|s| matches!(s, Samples::Measured(all) if all.len() < MIN_SAMPLES)),
    };
    if let (Samples::Exact(x), Samples::Exact(y)) = (a, b) {
        c.verdict = exact(x, y, options.tolerance);
    } else if !c.has_few {
        c.verdict = verdict(&c.ratio, options.threshold);
    }
    Ok(c)
}

fn exact(a: f64, b: f64, tolerance: Tolerance) -> Verdict {
    if tolerance.less(a, b) {
        Verdict::Regressed
    } else if tolerance.less(b, a) {
        Verdict::Improved
    } else {
        Verdict::Equal
    }
}

fn verdict(ratio: &Interval, threshold: f64) -> Verdict {
    let (above, below) = (1.0 + threshold, 1.0 - threshold);
    if ratio.low > above {
        Verdict::Regressed
    } else if ratio.high < below {
        Verdict::Improved
    } else if ratio.low >= below && ratio.high <= above {
        Verdict::Equal
    } else {
        Verdict::Inconclusive
    }
}

fn check(options: &Options) -> Result<(), StatsError> {
    let unit = |x: f64| x > 0.0 && x < 1.0;
    if !(options.threshold >= 0.0 && options.threshold < 1.0) {
        return Err(StatsError::Options("the threshold is not in [0, 1)"));
    }
    if !unit(options.level) {
        return Err(StatsError::Options("the level is not between 0 and 1"));
    }
    if options.resamples == 0 || options.block == 0 {
        return Err(StatsError::Options("resamples and block are at least 1"));
    }
    Ok(())
}

fn checked(side: &'static str, all: &[f64]) -> Result<(), StatsError> {
    if all.is_empty() {
        return Err(StatsError::Empty(side));
    }
    match all.iter().position(|x| !(x.is_finite() && *x > 0.0)) {
        Some(index) => Err(StatsError::Sample {
            side,
            index,
            value: all[index],
        }),
        None => Ok(()),
    }
}

/// Returns the median; NaN if there are no values.
#[must_use]
pub fn median(all: &[f64]) -> f64 {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    bootstrap::median_of_sorted(&sorted)
}

/// Returns the mean; NaN if there are no values.
#[must_use]
pub fn mean(all: &[f64]) -> f64 {
    all.iter().sum::<f64>() / all.len() as f64
}

/// Returns the variance (divided by `n - 1`); NaN for fewer than two values.
#[must_use]
pub fn variance(all: &[f64]) -> f64 {
    let mean = mean(all);
    all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (all.len() as f64 - 1.0)
}

/// Adjusts p-values for multiple tests (Benjamini and Hochberg). Among the results with at most
/// `q`, the expected share of false discoveries is at most `q`.
#[must_use]
pub fn adjusted(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
    let mut out = vec![1.0; p.len()];
    let mut least = 1.0f64;
    for (i, &at) in order.iter().enumerate() {
        let rank = p.len() - i;
        least = least.min(p[at] * p.len() as f64 / rank as f64);
        out[at] = least;
    }
    out
}

impl Comparison {
    /// Returns the verdict as a word. A prediction is never an improvement over a measurement.
    #[must_use]
    pub const fn word(&self, is_prediction: bool) -> &'static str {
        match self.verdict {
            Verdict::Improved if is_prediction => "shorter",
            Verdict::Regressed if is_prediction => "longer",
            other => other.name(),
        }
    }

    /// Returns the relative change of the median, for example -0.03.
    #[must_use]
    pub fn change(&self) -> f64 {
        self.ratio.estimate - 1.0
    }

    /// Returns the verdict on two step times as one or two sentences; `a` and `b` are the names of
    /// the runs.
    #[must_use]
    pub fn sentence(&self, a: &str, b: &str) -> String {
        let percent = |x: f64| format!("{:.1} %", 100.0 * x.abs());
        let threshold = percent(self.options.threshold);
        let change = self.change();
        let relative = |x: f64| format!("{} %", signed(100.0 * x, 1));
        let exact = self.n == [1, 1] && self.verdict != Verdict::Inconclusive;
        let interval = if exact {
            String::new()
        } else {
            format!(
                " ({:.0} % interval {} to {})",
                100.0 * self.ratio.level,
                relative(self.ratio.low - 1.0),
                relative(self.ratio.high - 1.0)
            )
        };
        match self.verdict {
            Verdict::Regressed | Verdict::Improved => {
                let direction = if change < 0.0 { "faster" } else { "slower" };
                let [from, to] = self.medians.map(|ms| thousands(ms, 2));
                format!(
                    "{b} is {} {direction}: {from} ms → {to} ms{interval}.",
                    percent(change)
                )
            }
            Verdict::Equal if exact && change == 0.0 => {
                format!("{a} and {b} have the same step time.")
            }
            Verdict::Equal => {
                let within = match exact {
                    true => self.options.tolerance.to_string(),
                    false => threshold,
                };
                let direction = if change < 0.0 { "faster" } else { "slower" };
                format!(
                    "{b} is {} {direction} than {a}, a difference within the tolerance of {within}{interval}.",
                    percent(change)
                )
            }
            Verdict::Inconclusive if self.has_few => format!(
                "Inconclusive: {MIN_SAMPLES} or more measurements on each side decide ({a} has {}, {b} {}). The medians differ by {}.",
                self.n[0],
                self.n[1],
                relative(change)
            ),
            Verdict::Inconclusive => {
                let need = self.detectable.map_or_else(String::new, |d| {
                    format!(
                        " These samples would show a change of {} with a probability of 80 %.",
                        percent(d)
                    )
                });
                format!(
                    "Inconclusive: it is unclear whether {b} differs from {a} by more than {threshold}: {}{interval}.{need}",
                    relative(change)
                )
            }
        }
    }
}
