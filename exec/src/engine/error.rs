//! Errors of a session.

use crate::device::Failure;
use std::fmt::Write as _;

/// Why a session could not be created or a step failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// The program cannot run on any device.
    #[error("the program cannot be executed: {0}")]
    Program(String),
    /// Inputs or accesses to buffers that do not fit the program.
    #[error("{0}")]
    Input(String),
    /// Threads or memory of the device are unavailable.
    #[error("device: {0}")]
    Device(String),
    /// The processes of the run could not communicate.
    #[error(transparent)]
    Peers(crate::process::PeerError),
    /// A rank failed; every rank has stopped.
    #[error("{}", failed(.first, .ranks))]
    Failed {
        /// The first failure.
        first: Box<Failure>,
        /// By rank: its own failure, or that it was stopped by the first one.
        ranks: Vec<String>,
    },
}

/// Formats the first failure, and a line for each rank that does not repeat it.
fn failed(first: &Failure, ranks: &[String]) -> String {
    let mut text = first.to_string();
    let cause = without_rank(&text, first.rank as usize).to_owned();
    for (rank, line) in ranks.iter().enumerate() {
        let line = match without_rank(line, rank) {
            same if same == cause => "as above",
            other => other,
        };
        let _ = write!(text, "\n  rank {rank}: {line}");
    }
    text
}

/// Returns a rank's message without the rank's number at its start.
fn without_rank(line: &str, rank: usize) -> &str {
    let rest = line.strip_prefix(&format!("rank {rank}"));
    let rest = rest.and_then(|r| r.strip_prefix(": ").or_else(|| r.strip_prefix(", ")));
    rest.unwrap_or(line)
}

impl ExecError {
    /// Creates the error from all failures, the first one first.
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

    /// Returns the first failure of a step.
    #[must_use]
    pub fn first(&self) -> Option<&Failure> {
        match self {
            Self::Failed { first, .. } => Some(first),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::FailureKind;

    #[test]
    fn a_failure_is_reported_once() {
        let failure = |rank, message: &str| Failure {
            kind: FailureKind::OutOfMemory,
            rank,
            stream: None,
            instr: None,
            text: String::new(),
            message: message.to_owned(),
        };
        let failures = vec![failure(1, "much"), failure(0, "much"), failure(2, "more")];
        let error = ExecError::from_failures(failures, 4);
        assert_eq!(
            error.to_string(),
            "rank 1: out of memory: much\n  rank 0: as above\n  rank 1: as above\n  rank 2: out of memory: more\n  \
             rank 3: stopped because rank 1 failed"
        );
    }
}
