//! Checkpoints of `torch.distributed.checkpoint`: a folder with a pickled `.metadata`, which lists
//! the chunks of every tensor, and `.distcp` files with the chunks as archives of `torch.save`.
//!
//! - [`export()`] writes a checkpoint of `exec` as PyTorch does for a model that FSDP2 has sharded
//!   over several ranks: `model.NAME` and `optimizer.state.NAME.exp_avg`, with the names of
//!   Transformers.
//! - [`import()`] reads such a folder as a checkpoint of `exec`, for any ranks and meshes that
//!   wrote it.
//!
//! Nothing in a folder is executed: pickles are read as data, and unknown classes are rejected. The
//! format is that of PyTorch 2.15 (`torch/distributed/checkpoint/metadata.py`, `filesystem.py`).

mod archive;
mod export;
mod import;
mod metadata;

pub use export::export;
pub use import::{Imported, import};

use shardlab_exec::train::TrainError;
use shardlab_import::pickle::PickleError;
use std::path::{Path, PathBuf};

/// Reason why a folder cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DcpError {
    /// A file or folder cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path of the file or folder.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// A pickle cannot be read.
    #[error("{}: {error}", path.display())]
    Pickle {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        error: PickleError,
    },
    /// A file is invalid, or does not belong to this model.
    #[error("{}: {what}", path.display())]
    Format {
        /// Path of the file or folder.
        path: PathBuf,
        /// Description of the problem.
        what: String,
    },
    /// An error of a checkpoint of `exec`.
    #[error(transparent)]
    Train(#[from] TrainError),
}

impl DcpError {
    fn io(path: &Path) -> impl Fn(std::io::Error) -> Self {
        |error| Self::Io {
            path: path.to_owned(),
            error,
        }
    }

    fn format(path: &Path, what: impl Into<String>) -> Self {
        Self::Format {
            path: path.to_owned(),
            what: what.into(),
        }
    }
}

#[cfg(test)]
mod tests;
