//! Detects `SIGSTOP`/`SIGCONT` (Ctrl-Z and `fg`, a debugger), so that suspended time does not count
//! for heartbeats or timeouts.

use std::time::{Duration, Instant};

/// Longest pause between two clock readings for a loop that has to notice a suspension.
pub(crate) const MAX_POLL: Duration = Duration::from_millis(500);

/// Returns how often a loop with a time limit should read the clock.
#[cfg(feature = "cuda")]
pub(crate) fn poll_period(limit: Duration) -> Duration {
    (limit / 8).clamp(Duration::from_millis(1), MAX_POLL)
}

/// If readings are further apart than this, the process was suspended between them. The watchdog's
/// limit may be as short as this.
const SUSPENDED: Duration = Duration::from_secs(1);

/// Returns the approximate time for which the process was suspended between two readings that are
/// `apart` from each other; zero if it was not.
pub(crate) fn suspended(apart: Duration) -> Duration {
    if apart > SUSPENDED {
        apart
    } else {
        Duration::ZERO
    }
}

/// Measures the time since the last progress, without the time for which the process was suspended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdleTime {
    since: Instant,
    read: Instant,
}

impl IdleTime {
    /// Starts measuring.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            since: now,
            read: now,
        }
    }

    /// Records progress at an instant.
    pub(crate) fn progressed(&mut self, at: Instant) {
        self.since = self.since.max(at);
    }

    /// Returns the time since the last progress. Must be called more than once per second.
    pub(crate) fn read(&mut self, now: Instant) -> Duration {
        let suspended = suspended(now.saturating_duration_since(self.read));
        self.read = now;
        // Progress after the suspension needs no correction.
        self.since = (self.since + suspended).min(now);
        now.saturating_duration_since(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn suspended_time_is_not_idle_time() {
        let start = Instant::now();
        let mut idle = IdleTime::new(start);
        let mut read = |at: f64, progressed: f64| {
            idle.progressed(start + SECOND.mul_f64(progressed));
            idle.read(start + SECOND.mul_f64(at)).as_secs_f64()
        };
        assert_eq!(read(0.5, 0.0), 0.5);
        assert_eq!(read(1.5, 0.0), 1.5, "late, as on a busy machine");
        // Suspended for about 60 s.
        assert_eq!(read(62.0, 0.0), 1.5);
        assert_eq!(read(62.5, 0.0), 2.0);
        // Progress: the suspension before it no longer matters.
        assert_eq!(read(63.0, 62.75), 0.25);
        // Progress between the end of a suspension and the next reading.
        assert_eq!(read(80.0, 79.75), 0.0);
        assert_eq!(read(80.5, 79.75), 0.5);
    }
}
