//! Random durations from a seed, without floating-point drift.

use crate::clock::MAX_TASK;
use crate::price::Load;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Durations of one rank's kernels.
#[derive(Clone, Debug)]
pub(crate) struct Jitter {
    rng: ChaCha8Rng,
    /// Standard deviation in units of 1/65536.
    sigma: i64,
    /// Straggler factor in units of 1/65536.
    factor: u64,
}

const UNIT: i64 = 1 << 16;

impl Jitter {
    pub(crate) fn new(seed: u64, rank: u32, sigma: f64, factor: f64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(u64::from(rank));
        Self {
            rng,
            sigma: (sigma * UNIT as f64) as i64,
            factor: (factor * UNIT as f64) as u64,
        }
    }

    /// Returns the duration of a task that takes `work` on an undisturbed rank. Collectives have no
    /// jitter, because they wait for their ranks anyway.
    pub(crate) fn apply(&mut self, work: u64, load: Load) -> u64 {
        if load == Load::Collective {
            return work;
        }
        let mut scale = self.factor;
        if self.sigma > 0 {
            // The sum of twelve uniform numbers has variance one. It is close to normal within six
            // deviations, and exact in integers.
            let mut sum = -6 * UNIT;
            for _ in 0..3 {
                let bits = self.rng.next_u64();
                sum += (0..4)
                    .map(|i| ((bits >> (16 * i)) & 0xffff) as i64)
                    .sum::<i64>();
            }
            let deviation = (UNIT + sum * self.sigma / UNIT).max(UNIT / 10) as u64;
            scale = (scale * deviation) >> 16;
        }
        (((u128::from(work) * u128::from(scale)) >> 16) as u64).min(MAX_TASK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_deviation_are_as_asked() {
        let mut jitter = Jitter::new(7, 3, 0.05, 2.0);
        let n = 20_000;
        let x: Vec<f64> = (0..n)
            .map(|_| jitter.apply(1_000_000, Load::Compute) as f64 / 2e6)
            .collect();
        let mean = x.iter().sum::<f64>() / f64::from(n);
        let sd = (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n)).sqrt();
        assert!(
            (mean - 1.0).abs() < 0.002 && (sd - 0.05).abs() < 0.002,
            "{mean} {sd}"
        );
        assert_eq!(jitter.apply(77, Load::Collective), 77);
    }

    #[test]
    fn ranks_differ_and_seeds_repeat() {
        let draw = |seed, rank| Jitter::new(seed, rank, 0.1, 1.0).apply(1 << 40, Load::Memory);
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_ne!(draw(1, 0), draw(1, 1));
        assert_ne!(draw(1, 0), draw(2, 0));
    }
}
