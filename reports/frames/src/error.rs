//! Why a question has no answer.

use polars::error::PolarsError;
use std::io;
use std::path::PathBuf;

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// There is no such column.
    #[error("there is no column `{name}`{help}")]
    Column {
        /// What was asked for.
        name: String,
        /// The nearest, in words; empty where nothing is near.
        help: String,
    },
    /// A column holds no numbers.
    #[error("`{0}` holds no numbers")]
    NoNumbers(String),
    /// A column is asked for twice.
    #[error("`{0}` is asked for twice")]
    Twice(String),
    /// No row is left to ask about.
    #[error("{0}")]
    Empty(String),
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    Unread {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file cannot be written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// polars refuses.
    #[error("{}{error}", path.as_ref().map_or(String::new(), |p| format!("{}: ", p.display())))]
    Polars {
        /// The file, if one is at fault.
        path: Option<PathBuf>,
        /// Why.
        error: PolarsError,
    },
}

impl From<PolarsError> for FrameError {
    fn from(error: PolarsError) -> Self {
        Self::Polars { path: None, error }
    }
}
