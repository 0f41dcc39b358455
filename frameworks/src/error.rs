//! Errors of reading configurations.

use shardlab_plan::scenario::Position;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A place in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// File as the user named it.
    pub file: String,
    /// Line and column.
    pub at: Position,
}

/// As `file:line:column`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.at.line, self.at.column)
    }
}

/// An error about a configuration that cannot be read. All of these errors are invalid input.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// I/O error.
        source: io::Error,
    },
    /// A location in a file has an error.
    #[error("{place}: {message}")]
    At {
        /// Location of the error.
        place: Place,
        /// What is wrong, and what was expected.
        message: String,
    },
    /// A file as a whole has an error.
    #[error("{file}: {message}")]
    File {
        /// File as the user named it.
        file: String,
        /// What is wrong, and what was expected.
        message: String,
    },
    /// The files do not provide something that is needed.
    #[error("{0}")]
    Missing(String),
}

impl ConfigError {
    pub(crate) fn at(file: &str, at: Position, message: impl Into<String>) -> Self {
        Self::At {
            place: Place {
                file: file.to_owned(),
                at,
            },
            message: message.into(),
        }
    }

    pub(crate) fn place(place: &Place, message: impl Into<String>) -> Self {
        Self::At {
            place: place.clone(),
            message: message.into(),
        }
    }

    pub(crate) fn file(path: &Path, message: impl Into<String>) -> Self {
        Self::File {
            file: path.display().to_string(),
            message: message.into(),
        }
    }
}
