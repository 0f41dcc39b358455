//! Where the processes of a run meet, and how the store behaves there.

use std::time::Duration;

/// Where to look for the store, and as which process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// Host of the store.
    pub host: String,
    /// Ports to try, in order. Another server may occupy the first ones.
    pub ports: Vec<u16>,
    /// Index of this process.
    pub process: u32,
    /// Number of processes.
    pub processes: u32,
    /// Name that distinguishes runs.
    pub run: String,
    /// Time limit for finding the store.
    pub timeout: Duration,
}

/// How a store behaves.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Number of processes of the run.
    pub processes: u32,
    /// Name that distinguishes runs on the same port.
    pub run: String,
    /// Time for which a process may be missing from a gather without making progress.
    pub timeout: Duration,
    /// Time for which a process may be silent towards the store, or the store towards a process.
    /// Heartbeats are sent several times per second, and the store answers each of them.
    pub silence: Duration,
    /// Time after which a process counts as lost when its connection has ended. The launcher may
    /// report a more precise cause in the meantime.
    pub grace: Duration,
}

impl StoreOptions {
    /// Creates options for a run of `processes` processes.
    #[must_use]
    pub fn new(processes: u32, run: &str, timeout: Duration) -> Self {
        Self {
            processes,
            run: run.to_owned(),
            timeout,
            silence: timeout.max(Duration::from_secs(10)),
            grace: Duration::ZERO,
        }
    }
}
