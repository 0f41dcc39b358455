//! What can be wrong with a store.

use crate::files::is_bad_path;
use std::io;
use std::path::{Path, PathBuf};

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file or folder cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No run, or more than one, is meant.
    #[error("no run `{text}` in {}: {help}", dir.display())]
    Unknown {
        /// What was asked for.
        text: String,
        /// Where.
        dir: PathBuf,
        /// What there is.
        help: String,
    },
    /// A name that no run has.
    #[error("no run in {} has the name `{name}`{help}", dir.display())]
    NoName {
        /// What was asked for.
        name: String,
        /// Where.
        dir: PathBuf,
        /// A name near to it, or nothing.
        help: String,
    },
    /// A name that cannot be given.
    #[error(
        "`{0}` cannot be a name: up to 64 letters, digits, `-`, `_` and `.` are expected, unlike an id and unlike `last`"
    )]
    Name(String),
}

impl StoreError {
    pub(super) fn io(path: &Path, error: io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            error,
        }
    }

    pub(super) fn invalid(path: &Path, reason: impl ToString) -> Self {
        Self::Invalid {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    /// Whether the user's input is at fault: a wrong name or path rather than, for example, a full
    /// disk.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Io { error, .. } => is_bad_path(error),
            _ => true,
        }
    }

    /// The reason without the path, with the file's name where it is one of several.
    #[must_use]
    pub fn reason(&self) -> String {
        let file = |path: &Path| {
            path.file_name()
                .map(|n| n.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        match self {
            Self::Io { path, error } => format!("{}: {error}", file(path)),
            Self::Invalid { path, reason } => format!("{}: {reason}", file(path)),
            other => other.to_string(),
        }
    }
}
