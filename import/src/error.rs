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
    /// An argument that does not name a file.
    #[error("{argument}: {reason}")]
    NoFile {
        /// The argument.
        argument: String,
        /// Why it does not name a file, and what to write instead.
        reason: String,
    },
    /// No file is given.
    #[error("no trace is given")]
    NoTrace,
    /// Files that do not belong together: they are of different jobs or steps, or of the same rank.
    #[error("{0}")]
    Apart(String),
}

impl ImportError {
    /// Returns the error for a failed read. Data that a decompressor cannot read is bad input.
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
        match source.kind() {
            InvalidData | InvalidInput | UnexpectedEof => Self::invalid(
                path,
                format!("cannot be decompressed ({source}): it was cut off or is damaged"),
            ),
            _ => Self::Io {
                path: path.to_owned(),
                source,
            },
        }
    }

    pub(crate) fn invalid(path: &Path, reason: impl Into<String>) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }
}
