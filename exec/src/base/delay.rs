//! Random sleeps, which vary the order in which streams and ranks run.

use super::options::DelaySpec;
use shardlab_plan::random::SplitMix64;
use std::time::Duration;

/// The sequence of sleeps of one thread.
#[derive(Clone, Debug)]
pub(crate) struct Delays {
    spec: DelaySpec,
    random: SplitMix64,
}

impl Delays {
    /// Creates the sequence of a stream of a rank.
    pub(crate) fn new(spec: DelaySpec, rank: u32, stream: u32) -> Self {
        let mut delays = Self {
            spec,
            random: SplitMix64(spec.seed ^ (u64::from(rank) << 40) ^ (u64::from(stream) << 32)),
        };
        delays.random.draw();
        delays
    }

    /// Draws the next sleep; `None` means no sleep.
    pub(crate) fn draw(&mut self) -> Option<Duration> {
        let unit = |x: u64| (x >> 11) as f64 / (1u64 << 53) as f64;
        let (a, b) = (self.random.draw(), self.random.draw());
        (unit(a) < self.spec.probability).then(|| self.spec.max.mul_f64(unit(b)))
    }

    /// Draws the next sleep and sleeps.
    pub(crate) fn maybe_sleep(&mut self) {
        if let Some(time) = self.draw() {
            std::thread::sleep(time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_probability_and_differ_by_stream() {
        let spec = DelaySpec {
            seed: 5,
            probability: 0.25,
            max: Duration::from_micros(100),
        };
        let draws = |stream| {
            let mut d = Delays::new(spec, 1, stream);
            (0..4000).map(|_| d.draw()).collect::<Vec<_>>()
        };
        let one = draws(0);
        let slept: Vec<Duration> = one.iter().flatten().copied().collect();
        // 4000 draws of 1/4: 1000 with a standard deviation of 27.
        assert!((850..1150).contains(&slept.len()), "{}", slept.len());
        assert!(slept.iter().all(|t| *t <= spec.max));
        assert!(slept.iter().max() > Some(&Duration::from_micros(90)));
        assert_eq!(one, draws(0));
        assert_ne!(one, draws(1));
    }
}
