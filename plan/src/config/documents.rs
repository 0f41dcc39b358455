//! `train.document_lengths`.

use crate::ir::{Documents, MAX_DOCUMENTS};
use serde::{Deserialize, Serialize};

/// Lengths of the documents that sequences are packed from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum DocumentLengths {
    /// Given lengths, repeated until the sequence is full.
    Listed(Documents),
    /// Lengths drawn from a distribution.
    Distributed(LengthDistribution),
}

/// A log-normal distribution of document lengths, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LengthDistribution {
    /// Mean; 0 if it is missing, which is rejected.
    #[serde(default)]
    pub mean: u64,
    /// Standard deviation.
    #[serde(default)]
    pub std: f64,
}

impl DocumentLengths {
    /// Each sequence is one document.
    pub const NONE: Self = Self::Listed(Documents::NONE);

    /// Returns the documents in sequences of `seq` positions. This is [`Documents::NONE`] if the
    /// first document fills a sequence, or if a distribution's mean is more than 2/3 of a sequence.
    #[must_use]
    pub fn in_sequence(self, seq: u64) -> Documents {
        match self {
            Self::Listed(documents) => documents.in_sequence(seq),
            Self::Distributed(lengths) => lengths.in_sequence(seq),
        }
    }
}

impl LengthDistribution {
    /// Returns the number of documents after which lengths repeat, in sequences of `seq` positions:
    /// as many as fill a sequence, at most [`MAX_DOCUMENTS`].
    #[must_use]
    pub fn period(self, seq: u64) -> u64 {
        let filling = (2 * seq + self.mean) / (2 * self.mean);
        filling.clamp(1, MAX_DOCUMENTS as u64)
    }

    /// Returns the largest possible standard deviation of the lengths in one period, in which one
    /// document has all tokens.
    #[must_use]
    pub fn largest_std(self, seq: u64) -> f64 {
        self.mean as f64 * (self.period(seq) as f64 - 1.0).sqrt()
    }

    /// Returns the documents in sequences of `seq` positions. The lengths are evenly spaced
    /// quantiles of a log-normal distribution, with exactly the requested mean and standard
    /// deviation. The time of attention depends on the mean square of lengths, so it matches the
    /// distribution.
    fn in_sequence(self, seq: u64) -> Documents {
        let n = self.period(seq);
        if n == 1 {
            return Documents::NONE;
        }
        let lengths = spread(n as usize, self.std / self.mean as f64);
        let tokens = |share: f64| ((share * self.mean as f64).round() as u64).max(1);
        let mut order: Vec<u8> = (0..n as u8).collect();
        // Long and short documents alternate, because the end of a sequence cuts off the last
        // period.
        order.sort_unstable_by_key(|i| i.reverse_bits());
        let given: Vec<u64> = order
            .iter()
            .map(|&i| tokens(lengths[usize::from(i)]))
            .collect();
        Documents::new(&given)
            .expect("there are at most 16, of at least one token")
            .in_sequence(seq)
    }
}

/// Returns `n` lengths with mean 1 in ascending order. Their logarithms are normal quantiles times
/// a factor, chosen such that the standard deviation is `std`, or the largest one that `n` lengths
/// can have.
fn spread(n: usize, std: f64) -> Vec<f64> {
    let quantiles: Vec<f64> = (0..n)
        .map(|i| quantile((i as f64 + 0.5) / n as f64))
        .collect();
    let lengths = |factor: f64| {
        let raw: Vec<f64> = quantiles.iter().map(|z| (factor * z).exp()).collect();
        let mean = raw.iter().sum::<f64>() / n as f64;
        raw.iter().map(|x| x / mean).collect::<Vec<_>>()
    };
    let variance = |factor| {
        lengths(factor)
            .iter()
            .map(|x| (x - 1.0).powi(2))
            .sum::<f64>()
            / n as f64
    };
    let factor = bisect(0.0, 100.0, |factor| variance(factor) < std * std);
    lengths(factor)
}

/// Returns the normal quantile of a probability.
fn quantile(p: f64) -> f64 {
    let below = |z: f64| 0.5 * libm::erfc(-z / std::f64::consts::SQRT_2);
    bisect(-9.0, 9.0, |z| below(z) < p)
}

/// Returns the point between `low` and `high` where a condition stops holding. It holds at `low`.
fn bisect(mut low: f64, mut high: f64, holds: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(mean: u64, std: f64) -> LengthDistribution {
        LengthDistribution { mean, std }
    }

    #[test]
    fn lengths_have_the_mean_and_the_deviation_of_the_distribution() {
        for (mean, std, seq) in [(512, 512.0, 8192), (1200, 900.0, 16384), (100, 250.0, 4096)] {
            let documents = of(mean, std).in_sequence(seq);
            let lengths: Vec<f64> = documents.lengths().map(|n| n as f64).collect();
            let n = lengths.len() as f64;
            let found = lengths.iter().sum::<f64>() / n;
            let squares = lengths.iter().map(|x| (x - found).powi(2)).sum::<f64>() / n;
            assert!((found / mean as f64 - 1.0).abs() < 0.01, "{found} {mean}");
            assert!(
                (squares.sqrt() / std - 1.0).abs() < 0.01,
                "{} {std}",
                squares.sqrt()
            );
        }
    }

    /// In a normal distribution, 84.13 % of values are less than one standard deviation above the
    /// mean.
    #[test]
    fn quantiles_are_those_of_a_table() {
        for (p, z) in [(0.5, 0.0), (0.841_344_746, 1.0), (0.025, -1.959_963_985)] {
            assert!((quantile(p) - z).abs() < 1e-6, "{p}");
        }
    }

    #[test]
    fn documents_without_deviation_have_one_length() {
        let documents = of(1000, 1e-9).in_sequence(8000);
        assert_eq!(documents.lengths().collect::<Vec<_>>(), [1000; 8]);
        assert!(of(6000, 10.0).in_sequence(8192).is_none());
    }

    /// In a period of 4 documents, the deviation is largest if one document has all tokens.
    #[test]
    fn the_largest_deviation() {
        assert_eq!(of(1000, 1.0).period(4000), 4);
        let all_in_one = [0.0f64, 0.0, 0.0, 4000.0];
        let squares = all_in_one.iter().map(|x| (x - 1000.0).powi(2)).sum::<f64>() / 4.0;
        assert_eq!(of(1000, 1.0).largest_std(4000), squares.sqrt());
    }
}
