//! `train.document_lengths`.

use super::TokenWidth;
use crate::ir::{Documents, MAX_DOCUMENTS};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Lengths of the documents that sequences are packed from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum DocumentLengths {
    /// Given lengths, repeated until the sequence is full.
    Listed(Documents),
    /// Lengths drawn from a distribution.
    Distributed(LengthDistribution),
    /// Lengths in a file of tokens.
    OfData(DataDocuments),
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

/// Documents in a file of tokens, each of which ends with a separator token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataDocuments {
    /// Path of the file, as written in the scenario.
    pub data: String,
    /// Path of the file, from the working directory.
    #[serde(skip)]
    pub path: PathBuf,
    /// How it stores tokens.
    pub dtype: TokenWidth,
    /// Last token of each document.
    pub eos_token_id: u32,
    /// Lengths of its documents, in sequences of `train.seq_len` tokens.
    #[serde(flatten)]
    pub lengths: MeasuredLengths,
}

/// Averages of the documents in the sequences of a dataset. The start and the end of a sequence cut
/// documents, and each part counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MeasuredLengths {
    /// Number of sequences that were read.
    pub sequences: u64,
    /// Mean length of a document, in tokens.
    pub mean: f64,
    /// Average over tokens of the length of the token's document: the sum of the squares of
    /// lengths, divided by their sum.
    pub token_mean: f64,
}

impl DocumentLengths {
    /// Each sequence is one document.
    pub const NONE: Self = Self::Listed(Documents::NONE);

    /// Returns the documents in sequences of `seq` positions. This is [`Documents::NONE`] if the
    /// first document fills a sequence, or if a distribution's mean is more than 2/3 of a sequence.
    #[must_use]
    pub(crate) fn in_sequence(&self, seq: u64) -> Documents {
        match self {
            Self::Listed(documents) => documents.in_sequence(seq),
            Self::Distributed(lengths) => lengths.in_sequence(seq),
            Self::OfData(documents) => documents.lengths.in_sequence(seq),
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
    pub(crate) fn largest_std(self, seq: u64) -> f64 {
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
        let tokens = |share: &f64| ((share * self.mean as f64).round() as u64).max(1);
        alternating(lengths.iter().map(tokens).collect()).in_sequence(seq)
    }
}

/// Corrections of a pattern's lengths, which are whole numbers.
const CORRECTIONS: usize = 8;

impl MeasuredLengths {
    /// Returns documents of sequences of `seq` positions for which attention costs as much as the
    /// average over the sequences of the data: the sum of the squares of lengths is the mean of
    /// that sum. There are as many documents as on average, if these are at most
    /// [`MAX_DOCUMENTS`]. Otherwise, as many lengths repeat, with the mean of the data unless it
    /// has documents that are too long for that.
    fn in_sequence(self, seq: u64) -> Documents {
        let (mean, wanted) = (self.mean, self.token_mean.min(seq as f64));
        if mean >= seq as f64 {
            return Documents::NONE;
        }
        let most = MAX_DOCUMENTS as f64;
        // The longest document of a period is a part of it, and its tokens count most.
        let period = (most * mean).max(3.0 * wanted);
        let repeats = (seq as f64 / period).ceil().max(1.0);
        let period = (seq as f64 / repeats).floor().max(1.0);
        let count = match repeats > 1.0 {
            true => most,
            false => (seq as f64 / mean).ceil().clamp(2.0, most),
        };
        let filled = |asked: f64| filling(period as u64, count.min(period) as usize, asked);
        let mut asked = wanted;
        let mut best = filled(asked);
        for _ in 0..CORRECTIONS {
            let pattern = filled(asked);
            let found = token_mean(pattern, seq);
            if (found - wanted).abs() < (token_mean(best, seq) - wanted).abs() {
                best = pattern;
            }
            asked = (asked * wanted / found).clamp(1.0, period);
        }
        best.in_sequence(seq)
    }
}

/// Returns the average over tokens of the length of the token's document, in sequences of `seq`
/// positions.
fn token_mean(documents: Documents, seq: u64) -> f64 {
    let lengths = documents.spans(seq).map(|d| (d.end - d.start) as f64);
    lengths.map(|n| n * n).sum::<f64>() / seq as f64
}

/// Returns `n` documents that have `period` tokens together, whose token mean is about this, or the
/// nearest possible one. The longest document has what rounding leaves.
fn filling(period: u64, n: usize, token_mean: f64) -> Documents {
    let mean = period as f64 / n as f64;
    let std = (token_mean / mean - 1.0).max(0.0).sqrt();
    let shares = spread(n, std);
    let others = shares[..n - 1].iter();
    let mut lengths: Vec<u64> = others
        .map(|share| ((share * mean).round() as u64).max(1))
        .collect();
    let rest = period.saturating_sub(lengths.iter().sum());
    lengths.push(rest.max(1));
    alternating(lengths)
}

/// Returns a pattern of ascending lengths in which long and short documents alternate, because the
/// end of a sequence cuts off the last period.
///
/// # Panics
/// Panics if there are more than [`MAX_DOCUMENTS`] lengths or if one is 0.
fn alternating(lengths: Vec<u64>) -> Documents {
    let mut order: Vec<(u8, u64)> = (0u8..).zip(lengths).collect();
    order.sort_unstable_by_key(|(i, _)| i.reverse_bits());
    let given: Vec<u64> = order.into_iter().map(|(_, length)| length).collect();
    Documents::new(&given).expect("there are at most 16, of at least one token")
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

    /// Averages the documents in sequences of `seq` tokens of a dataset with these lengths: sums
    /// over whole sequences, each of which cuts its first and last document.
    fn measured(seq: u64, length: impl Fn(u64) -> u64) -> MeasuredLengths {
        let (sequences, mut parts, mut squares, mut document) = (400, 0u64, 0u64, 0u64);
        let mut left = length(document);
        for _ in 0..sequences {
            let mut room = seq;
            while room > 0 {
                let part = left.min(room);
                (parts, squares) = (parts + 1, squares + part * part);
                (left, room) = (left - part, room - part);
                if left == 0 {
                    document += 1;
                    left = length(document);
                }
            }
        }
        let tokens = (sequences * seq) as f64;
        MeasuredLengths {
            sequences,
            mean: tokens / parts as f64,
            token_mean: squares as f64 / tokens,
        }
    }

    /// For documents of all kinds, also if most are short and most tokens in long ones.
    #[test]
    fn squares_are_those_of_the_data() {
        let mut random = crate::random::SplitMix64(7);
        let draws: Vec<f64> = (0..40_000)
            .map(|_| (random.draw() >> 11) as f64 / (1u64 << 53) as f64)
            .collect();
        let at = |i: u64| draws[i as usize % draws.len()];
        for seq in [2048, 8192, 32768] {
            let lognormal = |i| (600.0 * (1.2 * (at(i) * 6.0 - 3.0)).exp()) as u64 + 1;
            let few = |i| if at(i) < 0.02 { 3 * seq } else { 40 };
            let halves = |i| if at(i) < 0.5 { seq } else { seq / 64 };
            let long = |i| (5.0 * at(i) * seq as f64) as u64 + 1;
            let equal = |_| 700;
            let short = |i| 20 + (at(i) * 100.0) as u64;
            let kinds: [&dyn Fn(u64) -> u64; 6] =
                [&lognormal, &few, &halves, &long, &equal, &short];
            for (kind, length) in kinds.into_iter().enumerate() {
                let measured = measured(seq, length);
                let found = token_mean(measured.in_sequence(seq), seq);
                let error = found / measured.token_mean - 1.0;
                assert!(error.abs() < 0.01, "{kind} {seq}: {error} {measured:?}");
            }
        }
    }

    #[test]
    fn sequences_of_one_document_each() {
        let whole = measured(512, |_| 512);
        assert_eq!((whole.mean, whole.token_mean), (512.0, 512.0));
        assert!(whole.in_sequence(512).is_none());
        // Documents of 384 and 128 tokens in turn: each sequence has one of both.
        let pairs = measured(512, |i| if i % 2 == 0 { 384 } else { 128 });
        let mut lengths: Vec<u64> = pairs.in_sequence(512).lengths().collect();
        lengths.sort_unstable();
        assert_eq!(lengths, [128, 384]);
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
