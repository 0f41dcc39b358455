//! Errors of importing.

use std::io;
use std::path::{Path, PathBuf};

/// A file that cannot be imported. All errors except [`ImportError::Io`] are bad input.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The content does not have the expected format.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// File.
        path: PathBuf,
        /// What is wrong, where, and what was expected.
        reason: String,
    },
    /// The files do not belong together, or an argument names none.
    #[error("{0}")]
    Arguments(String),
}

impl ImportError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn invalid(path: &Path, reason: impl Into<String>) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }
}
