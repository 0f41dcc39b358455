//! Clock for waits with a time limit. Tests replace it by one that they control.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) enum Clock {
    /// The system's monotonic clock.
    #[default]
    System,
    /// A clock that does not advance on its own. A wait advances it by its limit and returns
    /// immediately.
    #[cfg(test)]
    Manual(std::sync::Mutex<Instant>),
}

impl Clock {
    /// Creates a clock for tests; see [`Clock::Manual`].
    #[cfg(test)]
    pub(crate) fn manual() -> Self {
        Self::Manual(std::sync::Mutex::new(Instant::now()))
    }

    /// Returns the current time.
    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::System => Instant::now(),
            #[cfg(test)]
            Self::Manual(now) => *super::abort::lock(now),
        }
    }

    /// Waits for a notification, for at most `limit`.
    pub(crate) fn wait<'a, T>(
        &self,
        changed: &Condvar,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> MutexGuard<'a, T> {
        match self {
            Self::System => {
                changed
                    .wait_timeout(guard, limit)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
            #[cfg(test)]
            Self::Manual(now) => {
                *super::abort::lock(now) += limit;
                guard
            }
        }
    }
}
