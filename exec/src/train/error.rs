//! Why training cannot begin or go on.

use super::data::DataError;
use super::layout::LayoutError;
use std::path::{Path, PathBuf};

/// Why training cannot begin or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A file or folder cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {what}", path.display())]
    Format {
        /// Path.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Weights or states that are asked for are not there.
    #[error("{}: missing {}", path.display(), names.join(", "))]
    Missing {
        /// Where they were looked for.
        path: PathBuf,
        /// All of them.
        names: Vec<String>,
    },
    /// The model's configuration differs from the scenario's.
    #[error("{}: it is another model: {}", path.display(), differences.join("; "))]
    OtherModel {
        /// Configuration.
        path: PathBuf,
        /// What differs.
        differences: Vec<String>,
    },
    /// The family has no published names.
    #[error("models of this family have no Hugging Face form; it is for llama and gpt2")]
    NoNames,
    /// The data do not suit.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The program's state cannot be mapped.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The engine failed.
    #[error("{0}")]
    Engine(String),
}

impl TrainError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |error| Self::Io {
            path: path.to_owned(),
            error,
        }
    }

    pub(crate) fn format(path: &Path, what: impl Into<String>) -> Self {
        Self::Format {
            path: path.to_owned(),
            what: what.into(),
        }
    }
}
