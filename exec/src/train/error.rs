//! Why training cannot begin or go on.

use super::data::DataError;
use super::layout::LayoutError;
use crate::engine::ExecError;
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
    #[error("{}: not the scenario's model: {}", path.display(), differences.join("; "))]
    OtherModel {
        /// Configuration.
        path: PathBuf,
        /// What differs.
        differences: Vec<String>,
    },
    /// The model, or its whole family, has no published names.
    #[error(
        "this model cannot be written as a Hugging Face model: only gpt2 and llama without bias can (with qk_norm as Qwen3)"
    )]
    NoNames,
    /// The data do not suit.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The program's state cannot be mapped.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The weights to begin with cannot be used.
    #[error(transparent)]
    Init(Box<Self>),
    /// The scenario cannot be planned.
    #[error("{0}")]
    Plan(String),
    /// There is no checkpoint of this step.
    #[error("{}: there is no such checkpoint; existing ones: {}", path.display(), list(steps))]
    NoCheckpoint {
        /// Where it would be.
        path: PathBuf,
        /// Steps that have one.
        steps: Vec<u64>,
    },
    /// A loss is no number.
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
        /// Loss.
        loss: f32,
        /// Parameters that are no numbers any more.
        params: Vec<String>,
    },
    /// The processes of the run did not come together.
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
    /// Whether the user's input is at fault, rather than the run.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        matches!(
            self,
            Self::Init(_)
                | Self::NoNames
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
