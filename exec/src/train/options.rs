//! Options of a run, and what its observer sees.

use super::data::Tokens;
use crate::engine::{ExecOptions, RankTimes};
use std::path::PathBuf;
use std::time::Duration;

/// Where a run with checkpoints starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// From the newest intact checkpoint, or from the beginning if there is none.
    #[default]
    Auto,
    /// From the beginning.
    Never,
    /// From this step's checkpoint.
    Step(u64),
}

/// Checkpoints of a run.
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// Folder.
    pub dir: PathBuf,
    /// Number of steps between saves, in addition to the last step; 0 saves only after the last
    /// step.
    pub every: u64,
    /// Number of checkpoints to keep.
    pub keep: usize,
    /// Where to start.
    pub resume: Resume,
}

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Total number of steps, including those before a resumption; by default the scenario's.
    pub steps: Option<u64>,
    /// Seed of weights and data; by default that of the resumed run, or 0.
    pub seed: Option<u64>,
    /// Hugging Face folder of the initial weights.
    pub init: Option<PathBuf>,
    /// PEFT folder of the initial adapters; by default they start as PEFT's do.
    pub adapter: Option<PathBuf>,
    /// Folder for the final weights in Hugging Face format; for the adapters in PEFT's format if
    /// there are any.
    pub export: Option<PathBuf>,
    /// Tokens; by default those of the file that `train.document_lengths` names, or a synthetic
    /// language.
    pub tokens: Option<Tokens>,
    /// Checkpoints.
    pub checkpoints: Option<CheckpointOptions>,
    /// Do not compute gradient norms that the scenario does not request: they are reported as NaN.
    pub skip_grad_norms: bool,
    /// The engine's options.
    pub exec: ExecOptions,
}

/// A finished step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of steps done.
    pub step: u64,
    /// Total number of steps of the run.
    pub steps: u64,
    /// Loss: the mean over data-parallel ranks and micro-batches.
    pub loss: f64,
    /// Global gradient norm before clipping, unless the run skips it
    /// ([`RunOptions::skip_grad_norms`]).
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Duration of the step.
    pub time: Duration,
    /// Tokens (or samples) per rank.
    pub tokens: u64,
}

/// Norms of a parameter after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamNorm {
    /// Name: that of the published model, if there is one.
    pub name: String,
    /// Norm of the weights after their update.
    pub weight: f64,
    /// Norm of the gradient that was reduced over ranks, before clipping. `None` if the parameter
    /// is not trained, or if its gradient exists only within the optimizer's kernel or within a
    /// captured step.
    pub gradient: Option<f64>,
}

/// What to do after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Continue.
    Continue,
    /// End the run after this step, in good order.
    Stop,
}

/// State of a run before its first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunStart {
    /// Number of ranks.
    pub ranks: u32,
    /// Name of a rank's device.
    pub device: String,
    /// Number of steps that were done before this process.
    pub resumed_from: u64,
    /// Total number of steps of the run.
    pub steps: u64,
}

/// Watches a run.
pub trait Observer {
    /// Called when devices and weights are ready, before the first step.
    fn begun(&mut self, _begun: &RunStart) {}

    /// Called with the results of all ranks of the step that is reported next.
    fn ranks(&mut self, _ranks: &[RankTimes]) {}

    /// Called after a step; returns whether to continue.
    fn step(&mut self, _report: &StepReport) -> Flow {
        Flow::Continue
    }

    /// Called after a validation, with the number of steps done.
    fn validation(&mut self, _step: u64, _loss: f64) {}

    /// Called with the norms of all parameters after a step, with the number of steps done.
    fn param_norms(&mut self, _step: u64, _norms: &[ParamNorm]) {}

    /// Called with a note for the user.
    fn note(&mut self, _text: &str) {}
}

/// Ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;
impl Observer for NoObserver {}
