//! Noticing that this process was stopped and goes on (Ctrl-Z and `fg`, a debugger): nobody else's silence follows from the
//! time between, and no patience ends by it.

use std::time::{Duration, Instant};

/// Longest pause between two looks at the clock of those who want to notice.
pub(crate) const LOOK: Duration = Duration::from_millis(500);
/// Between two looks of those who give up after so long.
#[cfg(feature = "cuda")]
pub(crate) fn period(limit: Duration) -> Duration {
    (limit / 8).clamp(Duration::from_millis(1), LOOK)
}

/// Looks that are further apart than this are so because the process was stopped between them. The watchdog's time may be as
/// short as this.
const STOPPED: Duration = Duration::from_secs(1);

/// How long the process was stopped between two looks that are so far apart: about as long, or not at all.
pub(crate) fn stopped(apart: Duration) -> Duration {
    if apart > STOPPED {
        apart
    } else {
        Duration::ZERO
    }
}

/// For how long nothing has moved, less the time in which the process was stopped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    since: Instant,
    looked: Instant,
}

impl Idle {
    /// From now on.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            since: now,
            looked: now,
        }
    }

    /// Something moved.
    pub(crate) fn moved(&mut self, at: Instant) {
        self.since = self.since.max(at);
    }

    /// For how long nothing has moved. To be asked more often than every second.
    pub(crate) fn look(&mut self, now: Instant) -> Duration {
        let stopped = stopped(now.saturating_duration_since(self.looked));
        self.looked = now;
        // What moved after the stop needs no more.
        self.since = (self.since + stopped).min(now);
        now.saturating_duration_since(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_time_of_a_stop_is_no_idle_time() {
        let start = Instant::now();
        let mut idle = Idle::new(start);
        let mut look = |at: f64, moved: f64| {
            idle.moved(start + SECOND.mul_f64(moved));
            idle.look(start + SECOND.mul_f64(at)).as_secs_f64()
        };
        assert_eq!(look(0.5, 0.0), 0.5);
        assert_eq!(look(1.5, 0.0), 1.5, "late, as on a busy machine");
        // Stopped for some 60 s.
        assert_eq!(look(62.0, 0.0), 1.5);
        assert_eq!(look(62.5, 0.0), 2.0);
        // It moved: the stop before it counts for nothing.
        assert_eq!(look(63.0, 62.75), 0.25);
        // What moved between the end of a stop and the next look.
        assert_eq!(look(80.0, 79.75), 0.0);
        assert_eq!(look(80.5, 79.75), 0.5);
    }
}
