//! Time limit for NCCL calls in which ranks wait for each other without a timeout: creating
//! communicators, and registering memory on all of them.

use crate::base::suspend::{IdleTime, poll_period};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Multiple of `--timeout` that NCCL initialization may take (default: 10 × 60 s; PyTorch: 10 min).
const MULTIPLE: u32 = 10;

/// Limit of a call, and the action when it is exceeded.
#[derive(Clone)]
pub(in crate::device::cuda) struct InitTimeout {
    limit: Duration,
    /// Ends the run with a message.
    late: Arc<dyn Fn(String) + Send + Sync>,
}

impl InitTimeout {
    /// Creates the limit from the watchdog's time. `late` is called from another thread.
    pub(in crate::device::cuda) fn new(
        timeout: Duration,
        late: Arc<dyn Fn(String) + Send + Sync>,
    ) -> Self {
        Self {
            limit: timeout.saturating_mul(MULTIPLE),
            late,
        }
    }

    /// Makes a call. If the call takes too long, reports once that NCCL `has not` completed it.
    pub(in crate::device::cuda) fn with<T>(&self, has_not: &str, call: impl FnOnce() -> T) -> T {
        let period = poll_period(self.limit);
        let (done, ended) = channel::<()>();
        let watch = move || {
            let mut idle = IdleTime::new(Instant::now());
            while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                if idle.read(Instant::now()) >= self.limit {
                    (self.late)(format!(
                        "NCCL has not {has_not} within {:.1?}; NCCL_DEBUG=INFO shows what it waits for",
                        self.limit
                    ));
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            // Without a thread, the time is not limited.
            let _ = std::thread::Builder::new()
                .name("init timeout".to_owned())
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
    use std::sync::mpsc::Receiver;

    const SHORT: Duration = Duration::from_millis(5);

    fn reporting(timeout: Duration) -> (InitTimeout, Receiver<String>) {
        let (sender, reports) = channel();
        // The test may have ended.
        let late = Arc::new(move |message| drop(sender.send(message)));
        (InitTimeout::new(timeout, late), reports)
    }

    #[test]
    fn a_call_that_takes_too_long_is_reported_once_and_continues() {
        let (timeout, reports) = reporting(SHORT);
        let begin = Instant::now();
        let made = timeout.with("joined the ranks of `a`", || {
            let report = reports.recv().unwrap();
            assert!(begin.elapsed() >= MULTIPLE * SHORT);
            std::thread::sleep(MULTIPLE * SHORT);
            report
        });
        assert_eq!(
            made,
            "NCCL has not joined the ranks of `a` within 50.0ms; NCCL_DEBUG=INFO shows what it waits for"
        );
        drop(timeout);
        assert_eq!(reports.iter().count(), 0);
    }

    #[test]
    fn a_call_in_time_is_not_reported() {
        let (timeout, reports) = reporting(Duration::from_secs(60));
        assert_eq!(timeout.with("come", || 7), 7);
        drop(timeout);
        // The thread has ended with the call. Otherwise it would report after ten minutes.
        assert_eq!(reports.iter().count(), 0);
    }
}
