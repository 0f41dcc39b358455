//! Rank-based tests and effect sizes, which assume no distribution of times.

use serde::Serialize;
use statrs::stats_tests::Alternative;
use statrs::stats_tests::mannwhitneyu::{MannWhitneyUMethod, mannwhitneyu};

/// Maximum number of samples of both sides for the exact distribution.
const EXACT_UP_TO: usize = 40;

/// Result of the two-sided Mann-Whitney U test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankTest {
    /// Number of pairs in which B is larger; ties count half.
    pub u: f64,
    /// Probability of a U that is at least this far from its mean, if both sides have the same
    /// distribution.
    pub p: f64,
    /// Whether `p` is exact: for few samples without ties. Otherwise it is the normal approximation
    /// with corrections for continuity and ties.
    pub exact: bool,
}

/// Tests `b` against `a` with Mann-Whitney U. Both sides need samples, without NaN.
#[must_use]
pub fn mann_whitney(a: &[f64], b: &[f64]) -> RankTest {
    let method = MannWhitneyUMethod::AsymptoticInclContinuityCorrection;
    // The function rejects NaN and empty inputs. It returns NaN if all values are equal, which
    // indicates no difference.
    let (u, p) = mannwhitneyu(b, a, method, Alternative::TwoSided)
        .unwrap_or((a.len() as f64 * b.len() as f64 / 2.0, 1.0));
    let p = if p.is_nan() { 1.0 } else { p };
    let mut all: Vec<f64> = a.iter().chain(b).copied().collect();
    all.sort_by(f64::total_cmp);
    let ties = all.windows(2).any(|w| w[0] == w[1]);
    if ties || all.len() > EXACT_UP_TO || a.is_empty() || b.is_empty() {
        return RankTest { u, p, exact: false };
    }
    RankTest {
        u,
        p: exact_p(u as usize, a.len(), b.len()),
        exact: true,
    }
}

/// Returns the two-sided p-value, computed from the number of orders with each U.
///
/// statrs has an exact method too, but version 0.19.1 returns the other tail unless the first
/// sample is the larger one, and it enumerates all combinations.
fn exact_p(u: usize, n: usize, m: usize) -> f64 {
    // ways[k][u]: number of orders of k values of one side among i of the other with this U. Each
    // iteration adds one value of the other side.
    let most = n * m;
    let mut ways = vec![vec![0.0f64; most + 1]; n + 1];
    for row in &mut ways {
        row[0] = 1.0;
    }
    for i in 1..=m {
        let mut next = vec![vec![0.0f64; most + 1]; n + 1];
        next[0][0] = 1.0;
        for k in 1..=n {
            let (before, row) = next.split_at_mut(k);
            for (u, ways_here) in row[0].iter_mut().enumerate().take(k * i + 1) {
                // The largest value belongs to the first side (it precedes no value of the other, U
                // stays the same) or to the other side (it exceeds all k).
                let first = before[k - 1][u];
                let other = u.checked_sub(k).map_or(0.0, |u| ways[k][u]);
                *ways_here = first + other;
            }
        }
        ways = next;
    }
    let all: f64 = ways[n].iter().sum();
    let extreme = u.max(most - u);
    let tail: f64 = ways[n][extreme..].iter().sum();
    (2.0 * tail / all).min(1.0)
}

/// Returns the share of pairs in which a sample of `b` is larger than one of `a`, minus the share
/// in which it is smaller.
#[must_use]
pub fn cliffs_delta(a: &[f64], b: &[f64]) -> f64 {
    let mut sorted = a.to_vec();
    sorted.sort_by(f64::total_cmp);
    let sum: i64 = b
        .iter()
        .map(|x| {
            let smaller = sorted.partition_point(|y| y < x);
            let not_larger = sorted.partition_point(|y| y <= x);
            smaller as i64 - (sorted.len() - not_larger) as i64
        })
        .sum();
    sum as f64 / (a.len() as f64 * b.len() as f64)
}

/// Cliff's delta as a word, with the usual limits 0.147, 0.33 and 0.474 (Romano et al. 2006).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Magnitude {
    /// Negligible effect.
    Negligible,
    /// Small.
    Small,
    /// Medium.
    Medium,
    /// Large.
    Large,
}

impl Magnitude {
    /// Returns the word for a delta.
    #[must_use]
    pub fn of(delta: f64) -> Self {
        match delta.abs() {
            d if d < 0.147 => Self::Negligible,
            d if d < 0.33 => Self::Small,
            d if d < 0.474 => Self::Medium,
            _ => Self::Large,
        }
    }

    /// Returns the name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Negligible => "negligible",
            Self::Small => "small",
            Self::Medium => "medium",
            Self::Large => "large",
        }
    }
}
