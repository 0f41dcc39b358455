//! Why a query has no answer.

use polars::error::PolarsError;
use std::io;
use std::path::PathBuf;

/// Why a query has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// There is no such column.
    #[error("there is no column `{name}`{help}")]
    Column {
        /// The requested name.
        name: String,
        /// The closest names, in words; empty if none is close.
        help: String,
    },
    /// A column does not hold numbers.
    #[error("`{0}` holds no numbers")]
    NoNumbers(String),
    /// A column is requested twice.
    #[error("`{0}` is requested twice")]
    Twice(String),
    /// No rows are left.
    #[error("{0}")]
    Empty(String),
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    Unread {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: io::Error,
    },
    /// A file cannot be written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: io::Error,
    },
    /// polars returned an error.
    #[error("{}{error}", path.as_ref().map_or(String::new(), |p| format!("{}: ", p.display())))]
    Polars {
        /// The file, if one is at fault.
        path: Option<PathBuf>,
        /// Reason.
        error: PolarsError,
    },
}

impl From<PolarsError> for FrameError {
    fn from(error: PolarsError) -> Self {
        Self::Polars { path: None, error }
    }
}
