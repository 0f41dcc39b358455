//! Where the processes of a run meet, and how the store that they meet at behaves.

use std::time::Duration;

/// Where to look for the store, and as which process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// Host of the store.
    pub host: String,
    /// Ports to try, in order: another server may occupy the first ones.
    pub ports: Vec<u16>,
    /// Index of this process.
    pub process: u32,
    /// Number of processes.
    pub processes: u32,
    /// Name that distinguishes runs.
    pub run: String,
    /// How long to look for the store.
    pub timeout: Duration,
}

/// How a store behaves.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Number of processes of the run.
    pub processes: u32,
    /// Name that distinguishes runs that use the same port.
    pub run: String,
    /// How long a process may be missing from a gather without making progress.
    pub timeout: Duration,
    /// How long a process may be silent, or the store towards it. Heartbeats are sent several times
    /// per second, and the store answers each.
    pub silence: Duration,
    /// How long after its connection has ended a process counts as lost. The launcher may report a
    /// more precise cause meanwhile.
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
