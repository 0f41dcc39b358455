//! Errors of the process group.

/// Why the processes of a run could not communicate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// A process did not arrive in time; the message names it.
    #[error("{0}")]
    Timeout(String),
    /// A process failed or died; the message says which and why.
    #[error("{0}")]
    Failed(String),
}
