//! Calls of NCCL in which ranks wait for one another, and which know no time of their own: making communicators, and making memory
//! known to all of them. Where one does not return, no rank would ever say so.

use crate::stopped::{Idle, period};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// So many times the watchdog's time, which is meant for steps: hosts open their connections one by one, and torch gives its start ten
/// minutes where this gives ten times a minute.
const TIMES: u32 = 10;

/// What to do about a call that does not return.
#[derive(Clone)]
pub(super) struct Patience {
    limit: Duration,
    /// Ends the run, with the words.
    late: Arc<dyn Fn(String) + Send + Sync>,
}

impl Patience {
    /// For the watchdog's time; `late` is called from another thread.
    pub(super) fn new(timeout: Duration, late: Arc<dyn Fn(String) + Send + Sync>) -> Self {
        Self {
            limit: timeout.saturating_mul(TIMES),
            late,
        }
    }

    /// Makes the call. If it takes too long, the run is told once that NCCL `has not` done what it was to do.
    pub(super) fn with<T>(&self, has_not: &str, call: impl FnOnce() -> T) -> T {
        let period = period(self.limit);
        let (done, ended) = channel::<()>();
        let watch = move || {
            let mut idle = Idle::new(Instant::now());
            while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                if idle.look(Instant::now()) >= self.limit {
                    (self.late)(format!(
                        "NCCL has not {has_not} within {:.1?}; NCCL_DEBUG=INFO shows what it waits for",
                        self.limit
                    ));
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            // Without a thread nobody looks at the time.
            let _ = std::thread::Builder::new()
                .name("patience".to_owned())
                .spawn_scoped(scope, watch);
            let made = call();
            drop(done);
            made
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    const SHORT: Duration = Duration::from_millis(5);

    fn told(timeout: Duration) -> (Patience, Arc<Mutex<Vec<String>>>) {
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let to = Arc::clone(&told);
        let late = Arc::new(move |words| to.lock().unwrap().push(words));
        (Patience::new(timeout, late), told)
    }

    #[test]
    fn a_call_that_takes_too_long_is_told_once_and_goes_on() {
        let (patience, told) = told(SHORT);
        let begin = Instant::now();
        let made = patience.with("joined the ranks of `a`", || {
            while told.lock().unwrap().is_empty() {
                assert!(begin.elapsed() < Duration::from_secs(20));
                std::thread::sleep(SHORT);
            }
            std::thread::sleep(TIMES * SHORT);
            7
        });
        assert_eq!(made, 7);
        assert!(begin.elapsed() >= TIMES * SHORT);
        let words = "NCCL has not joined the ranks of `a` within 50.0ms; NCCL_DEBUG=INFO shows what it waits for";
        assert_eq!(*told.lock().unwrap(), [words]);
    }

    #[test]
    fn a_call_in_time_ends_the_watch_at_once() {
        let (patience, told) = told(Duration::from_secs(60));
        let begin = Instant::now();
        assert_eq!(patience.with("come", || 7), 7);
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(told.lock().unwrap().is_empty());
    }
}
