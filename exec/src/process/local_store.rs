//! Store of a process without peers, in which its rank threads exchange data.

use super::error::PeerError;
use super::force_exit::{ExitHook, ForceExit, first_failure};
use crate::base::abort::{Abort, lock};
use crate::base::divergence::LocalProgress;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Minimum time for which rank threads wait for each other. One of them may be compiling or
/// autotuning kernels, and the watchdog's time is meant for steps.
const MIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Period of the check whether the session has failed.
const POLL_PERIOD: Duration = Duration::from_millis(200);

/// See the module documentation.
#[derive(Debug)]
pub(super) struct LocalStore {
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    changed: Condvar,
    exit: Arc<ForceExit>,
}

impl LocalStore {
    /// Creates a store whose process is forced to exit `after` the first failure.
    pub(super) fn new(after: Duration) -> Self {
        Self {
            values: Mutex::default(),
            changed: Condvar::new(),
            exit: ForceExit::new(after),
        }
    }

    /// Sets the hook that ends the process; see [`ForceExit`].
    pub(super) fn set_exit_hook(&self, hook: ExitHook) {
        self.exit.set_hook(hook);
    }

    /// Watches a session. Its failure ends waits and starts the timer of the forced exit.
    pub(super) fn watch(&self, abort: &Arc<Abort>, progress: Weak<LocalProgress>) {
        self.exit.watch(abort, progress);
    }

    /// Stores `data` under `key`.
    pub(super) fn put(&self, key: &str, data: Vec<u8>) {
        lock(&self.values).insert(key.to_owned(), data);
        self.changed.notify_all();
    }

    /// Waits for the data of `key`.
    ///
    /// # Errors
    /// Returns [`PeerError`] if the session fails or nothing is stored in time.
    pub(super) fn get(&self, key: &str) -> Result<Vec<u8>, PeerError> {
        let abort = self.exit.abort();
        let timeout = abort
            .as_ref()
            .map_or(MIN_TIMEOUT, |a| a.timeout().max(MIN_TIMEOUT));
        let end = Instant::now() + timeout;
        let mut values = lock(&self.values);
        loop {
            if let Some(data) = values.get(key) {
                return Ok(data.clone());
            }
            if let Some(abort) = &abort
                && abort.aborted()
            {
                return Err(PeerError::Failed(first_failure(abort)));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(PeerError::Timeout(format!(
                    "no rank published `{key}` within {timeout:.1?}"
                )));
            }
            values = self
                .changed
                .wait_timeout(values, left.min(POLL_PERIOD))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::failure::{Failure, FailureKind};

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_failure_ends_the_waits_of_rank_threads() {
        let (store, abort) = (LocalStore::new(LONG), Arc::new(Abort::new(LONG)));
        store.watch(&abort, Weak::new());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| store.get("a choice of rank 0's"));
            std::thread::sleep(SHORT);
            abort.fail(Failure {
                kind: FailureKind::Injected,
                rank: 1,
                stream: None,
                instr: None,
                text: String::new(),
                message: "as asked for".to_owned(),
            });
            let error = waiting.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("as asked for"), "{error}");
        });
        store.put("another", vec![7]);
        assert_eq!(store.get("another"), Ok(vec![7]));
    }
}
