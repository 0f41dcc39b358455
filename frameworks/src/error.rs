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

/// A configuration that cannot be read. All of these are bad input.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// Something in a file is wrong.
    #[error("{place}: {message}")]
    At {
        /// Where.
        place: Place,
        /// What is wrong, and what was expected.
        message: String,
    },
    /// Something about a file as a whole.
    #[error("{file}: {message}")]
    File {
        /// File as the user named it.
        file: String,
        /// What is wrong, and what was expected.
        message: String,
    },
    /// Something that the files do not say.
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
