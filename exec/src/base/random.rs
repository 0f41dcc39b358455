//! Random numbers by position: any value of a named sequence can be computed without the values
//! before it.
//!
//! Every sequence is a ChaCha8 key stream whose key is the BLAKE3 hash of the seed and the name.
//! Values do not depend on the machine, the number of ranks, or the order of requests.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A named sequence.
#[derive(Clone, Debug)]
pub(crate) struct Sequence(ChaCha8Rng);

impl Sequence {
    /// Creates the sequence for a name and a seed.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        Self(ChaCha8Rng::from_seed(*hasher.finalize().as_bytes()))
    }

    /// Seeks to the `word`-th 32-bit word.
    pub(crate) fn seek(&mut self, word: u64) {
        self.0.set_word_pos(u128::from(word));
    }

    /// Returns the next word.
    pub(crate) fn word(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// Returns a value that is uniform in [0, 1). Uses one word.
    pub(crate) fn uniform(&mut self) -> f64 {
        f64::from(self.word()) / 4_294_967_296.0
    }

    /// Returns a standard normal value. Uses two words (Box-Muller, the cosine branch).
    pub(crate) fn normal(&mut self) -> f64 {
        // In (0, 1], so that the logarithm is finite.
        let u = (f64::from(self.word()) + 1.0) / 4_294_967_296.0;
        let v = self.uniform();
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_do_not_depend_on_the_way_there() {
        let mut a = Sequence::new(7, "x");
        let all: Vec<u32> = (0..200).map(|_| a.word()).collect();
        for start in [0usize, 1, 17, 63, 64, 150] {
            a.seek(start as u64);
            assert!(all[start..].iter().all(|w| a.word() == *w), "{start}");
        }
        let mut other = Sequence::new(7, "y");
        assert_ne!(all[0], other.word());
    }

    #[test]
    fn moments_of_the_normal() {
        let mut s = Sequence::new(1, "n");
        let n = 20_000;
        let xs: Vec<f64> = (0..n).map(|_| s.normal()).collect();
        let mean = xs.iter().sum::<f64>() / f64::from(n);
        let var = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(n);
        // Five standard errors: 5 / sqrt(n) and 5 sqrt(2 / n).
        assert!(mean.abs() < 0.036, "{mean}");
        assert!((var - 1.0).abs() < 0.05, "{var}");
    }
}
