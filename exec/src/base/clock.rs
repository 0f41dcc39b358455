//! Clock of waits with a time limit, which tests replace by one that they control.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) enum Clock {
    /// The system's monotonic clock.
    #[default]
    System,
    /// A clock that stands still, except that a wait advances it by its limit and returns at once.
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

    /// Waits for a notification, for `limit` at most.
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
