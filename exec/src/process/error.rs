//! Errors of the process group.

/// Reason why the processes of a run could not communicate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// A process did not arrive in time. The message names it.
    #[error("{0}")]
    Timeout(String),
    /// A process failed or died. The message names it and the cause.
    #[error("{0}")]
    Failed(String),
}
