//! Errors of a store.

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
        /// Path.
        path: PathBuf,
        /// Reason.
        error: io::Error,
    },
    /// A file has invalid content.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// Path.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A text refers to no run or to more than one.
    #[error("no run `{text}` in {}: {help}", dir.display())]
    Unknown {
        /// The text.
        text: String,
        /// Folder of the store.
        dir: PathBuf,
        /// Valid alternatives.
        help: String,
    },
    /// No run has this name.
    #[error("no run in {} has the name `{name}`{help}", dir.display())]
    NoName {
        /// The name.
        name: String,
        /// Folder of the store.
        dir: PathBuf,
        /// A similar name, or empty.
        help: String,
    },
    /// A name is not allowed.
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

    /// Returns whether the user's input is the cause: for example a wrong name or path, but not a
    /// full disk.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Io { error, .. } => is_bad_path(error),
            _ => true,
        }
    }

    /// Returns the reason without the path of the folder. It includes the name of the file if there
    /// are several files.
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
