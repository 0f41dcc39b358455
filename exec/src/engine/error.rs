//! Errors of a session.

use crate::device::Failure;
use std::fmt::Write as _;

/// Why a session could not be made or a step not be performed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// The program asks for something that no device can do.
    #[error("the program cannot be executed: {0}")]
    Program(String),
    /// Inputs or accesses to buffers that do not fit the program.
    #[error("{0}")]
    Input(String),
    /// Threads or memory of the device.
    #[error("device: {0}")]
    Device(String),
    /// The processes of the run did not come together.
    #[error(transparent)]
    Peers(crate::process::PeerError),
    /// A rank failed; every rank has stopped.
    #[error("{}", failed(.first, .ranks))]
    Failed {
        /// The first failure.
        first: Box<Failure>,
        /// What each rank says, by rank: its own failure, or that it was stopped by the first one.
        ranks: Vec<String>,
    },
}

fn failed(first: &Failure, ranks: &[String]) -> String {
    let mut text = first.to_string();
    for (rank, line) in ranks.iter().enumerate() {
        let _ = write!(text, "\n  rank {rank}: {line}");
    }
    text
}

impl ExecError {
    /// From everything that was reported, the first failure first.
    pub(crate) fn from_failures(failures: Vec<Failure>, world: u32) -> Self {
        let Some(first) = failures.first().cloned() else {
            return Self::Device("a rank stopped without a reason".to_owned());
        };
        let ranks = (0..world)
            .map(|r| {
                failures.iter().find(|f| f.rank == r).map_or_else(
                    || format!("stopped because rank {} failed", first.rank),
                    ToString::to_string,
                )
            })
            .collect();
        Self::Failed {
            first: Box::new(first),
            ranks,
        }
    }

    /// The first failure of a step.
    #[must_use]
    pub fn first(&self) -> Option<&Failure> {
        match self {
            Self::Failed { first, .. } => Some(first),
            _ => None,
        }
    }
}
