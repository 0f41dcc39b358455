//! Integer time with fractional rates, so that progress never drifts.
//!
//! The work of a task is its isolated duration in picoseconds. It progresses at a rate of at most
//! one, a multiple of 1/[`ONE`]. Remaining work is kept in picoseconds times [`ONE`], so that
//! elapsed time times rate is exact.

/// Full rate.
pub(crate) const ONE: u32 = 1 << 12;

/// Time of an event that never happens.
pub(crate) const NEVER: u64 = u64::MAX;

/// Longest task: 1,000 seconds. The limit keeps remaining work far below the 64-bit limit.
pub(crate) const MAX_TASK: u64 = 1_000_000_000_000_000;

/// Work in progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// Remaining work in picoseconds times [`ONE`], at `since`.
    remaining: u64,
    since: u64,
    rate: u32,
    /// Time at which it ends if the rate does not change.
    pub(crate) end: u64,
}

impl Progress {
    /// No work in progress.
    pub(crate) const NONE: Self = Self {
        remaining: 0,
        since: 0,
        rate: 0,
        end: NEVER,
    };

    /// Starts `work` picoseconds of work at full rate. `work` is at most [`MAX_TASK`].
    pub(crate) fn start(work: u64, now: u64) -> Self {
        Self {
            remaining: work * u64::from(ONE),
            since: now,
            rate: ONE,
            end: now + work,
        }
    }

    /// Changes the rate at `now`, which must not be after `end`. A rate of zero stops the work.
    pub(crate) fn set_rate(&mut self, rate: u32, now: u64) {
        if rate == self.rate {
            return;
        }
        self.remaining = self
            .remaining
            .saturating_sub((now - self.since) * u64::from(self.rate));
        self.since = now;
        self.rate = rate;
        self.end = if rate == 0 {
            NEVER
        } else {
            now + self.remaining.div_ceil(u64::from(rate))
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn half_rate_takes_twice_as_long() {
        let mut p = Progress::start(1_000, 0);
        assert_eq!(p.end, 1_000);
        p.set_rate(ONE / 2, 400);
        assert_eq!(p.end, 400 + 1_200);
        p.set_rate(ONE, 600);
        assert_eq!(p.end, 600 + 500);
        p.set_rate(0, 700);
        assert_eq!(p.end, NEVER);
        p.set_rate(ONE, 900);
        assert_eq!(p.end, 900 + 400);
    }

    proptest! {
        /// Checks that the work done equals the given work to the picosecond, for any changes of
        /// rate.
        #[test]
        fn work_is_conserved(work in 1u64..MAX_TASK, changes in proptest::collection::vec((1u32..=ONE, 0u64..1_000_000_000), 0..50)) {
            let mut p = Progress::start(work, 5);
            let (mut now, mut rate, mut done) = (5u64, u64::from(ONE), 0u128);
            for (next, dt) in changes {
                let at = (now + dt).min(p.end);
                done += u128::from(at - now) * u128::from(rate);
                now = at;
                if now == p.end { break; }
                p.set_rate(next, now);
                rate = u64::from(next);
            }
            done += u128::from(p.end - now) * u128::from(rate);
            let want = u128::from(work) * u128::from(ONE);
            prop_assert!(done >= want && done < want + u128::from(ONE));
        }
    }
}
