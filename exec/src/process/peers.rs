//! What the processes of a run tell one another.

use crate::device::abort::{Abort, lock};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Why processes did not come together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// Somebody did not come in time; says who.
    #[error("{0}")]
    Timeout(String),
    /// A process failed or is gone; says which and why.
    #[error("{0}")]
    Failed(String),
}

/// The processes of a run, as one of them sees them. A process alone is its own and only peer: its rank threads meet here
/// as those of several processes do.
#[derive(Debug)]
pub struct Peers {
    local: Mutex<BTreeMap<String, Vec<u8>>>,
    changed: Condvar,
    sessions: AtomicU32,
    timeout: Duration,
}

impl Peers {
    /// One process.
    #[must_use]
    pub fn alone() -> Self {
        Self {
            local: Mutex::default(),
            changed: Condvar::new(),
            sessions: AtomicU32::new(0),
            timeout: Duration::from_secs(60),
        }
    }

    /// Number of this process.
    #[must_use]
    pub fn process(&self) -> u32 {
        0
    }

    /// How many processes there are.
    #[must_use]
    pub fn processes(&self) -> u32 {
        1
    }

    /// Numbers sessions: processes open the same ones in the same order.
    pub(crate) fn next_session(&self) -> u32 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// Leaves `data` under `key` for whoever asks. A key is used once in a run.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn put(&self, key: &str, data: Vec<u8>) -> Result<(), PeerError> {
        lock(&self.local).insert(key.to_owned(), data);
        self.changed.notify_all();
        Ok(())
    }

    /// What somebody leaves under `key`; waits for it.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn get(&self, key: &str) -> Result<Vec<u8>, PeerError> {
        let end = Instant::now() + self.timeout;
        let mut held = lock(&self.local);
        loop {
            if let Some(data) = held.get(key) {
                return Ok(data.clone());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(PeerError::Timeout(format!(
                    "nobody has left `{key}` after {:.1?}",
                    self.timeout
                )));
            }
            held = self
                .changed
                .wait_timeout(held, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Everybody's data, by process. Every process calls it equally often with each name.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn all_gather(&self, _name: &str, data: Vec<u8>) -> Result<Vec<Vec<u8>>, PeerError> {
        Ok(vec![data])
    }

    /// Likewise, and nobody is given up for being late: as long as the others live, they are waited for (files).
    ///
    /// # Errors
    /// [`PeerError::Failed`].
    pub fn all_gather_patiently(
        &self,
        _name: &str,
        data: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, PeerError> {
        Ok(vec![data])
    }

    /// Everybody's data, by process, for the process that leads; nothing for the others.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn gather(&self, _name: &str, data: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, PeerError> {
        Ok(Some(vec![data]))
    }

    /// The data of the process that leads, which is waited for as long as it lives.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn broadcast(&self, _name: &str, data: Vec<u8>) -> Result<Vec<u8>, PeerError> {
        Ok(data)
    }

    /// From now on a failure of another process ends the waits of this one's ranks.
    pub fn watch(&self, _abort: &Arc<Abort>) {}

    /// Tells every other process that this one cannot go on, and why.
    pub fn fail(&self, _cause: &str) {}
}
