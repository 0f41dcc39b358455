//! Errors of training.

use super::data::DataError;
use super::layout::LayoutError;
use crate::engine::ExecError;
use std::path::{Path, PathBuf};

/// Why training could not start or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A file or folder cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path of the file or folder.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// A file is invalid.
    #[error("{}: {what}", path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        what: String,
    },
    /// Requested weights or states are missing.
    #[error("{}: missing {}", path.display(), names.join(", "))]
    Missing {
        /// Where they were searched.
        path: PathBuf,
        /// Names of all missing ones.
        names: Vec<String>,
    },
    /// The model's configuration differs from the scenario's.
    #[error("{}: not the scenario's model: {}", path.display(), differences.join("; "))]
    OtherModel {
        /// Configuration.
        path: PathBuf,
        /// Differences.
        differences: Vec<String>,
    },
    /// The model or its family has no published names.
    #[error("this model has no Hugging Face form: {why}")]
    NoNames {
        /// What no file can say.
        why: String,
    },
    /// The data do not fit the model.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The program's state cannot be mapped.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The initial weights cannot be used.
    #[error(transparent)]
    Init(Box<Self>),
    /// A folder of adapters for a model without any.
    #[error("{}: the scenario has no adapters (lora.r)", path.display())]
    NoAdapters {
        /// The folder.
        path: PathBuf,
    },
    /// A checkpoint's adapters belong to another model.
    #[error(
        "the checkpoint's adapters were trained on a model whose weights have norm {theirs:.9}, not {ours:.9}: start \
         from the same weights (--init, --seed)"
    )]
    OtherBase {
        /// Norm of the weights in the checkpoint's run.
        theirs: f64,
        /// Norm of this run's.
        ours: f64,
    },
    /// The scenario cannot be planned.
    #[error("{0}")]
    Plan(String),
    /// There is no checkpoint of the requested step.
    #[error("{}: there is no such checkpoint; existing ones: {}", path.display(), list(steps))]
    NoCheckpoint {
        /// Path of the checkpoint.
        path: PathBuf,
        /// Steps that have a checkpoint.
        steps: Vec<u64>,
    },
    /// A loss is not a number.
    #[error(
        "step {step}: the loss of micro-batch {micro_batch} on rank {rank} is {loss}{}",
        bad(params)
    )]
    Diverged {
        /// Step, from 0.
        step: u64,
        /// Rank.
        rank: usize,
        /// Micro-batch.
        micro_batch: usize,
        /// Value of the loss.
        loss: f32,
        /// Parameters that are not numbers either.
        params: Vec<String>,
    },
    /// The processes of the run could not communicate.
    #[error(transparent)]
    Peers(#[from] crate::process::PeerError),
    /// A process sent less state than its ranks have.
    #[error("a process has a different state layout than rank 0: it runs a different program")]
    OtherLayout,
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] ExecError),
}

impl TrainError {
    /// Returns whether the user's input is at fault, not the run.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        matches!(
            self,
            Self::Init(_)
                | Self::NoNames { .. }
                | Self::NoAdapters { .. }
                | Self::OtherBase { .. }
                | Self::Data(_)
                | Self::Plan(_)
                | Self::NoCheckpoint { .. }
        )
    }

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

pub(super) fn list(steps: &[u64]) -> String {
    if steps.is_empty() {
        return "none".to_owned();
    }
    let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
    steps.join(", ")
}

fn bad(params: &[String]) -> String {
    match params {
        [] => String::new(),
        [first, rest @ ..] => format!("; not finite: {first} and {} more parameters", rest.len()),
    }
}
