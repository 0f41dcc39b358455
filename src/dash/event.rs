//! Events and effects, which are the only interface between the dashboard's state and the outside.

use super::export::Export;
use super::glance::{Brief, Glance};
use super::lanes::Lanes;
use super::state::Saved;
use super::whatif::Explained;
use ratatui::crossterm::event::{KeyEvent, MouseEvent};
use shardlab_exec::train::ParamNorm;
use shardlab_plan::Scenario;
use shardlab_plan::scenario::{self, BatchUnit, ScenarioError};
use shardlab_reports::RunView;
use shardlab_reports::gate::{Facts, Limits};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A key.
    Key(KeyEvent),
    /// The mouse.
    Mouse(MouseEvent),
    /// The terminal was resized: columns, rows.
    Resize(u16, u16),
    /// Time since the dashboard started.
    Tick(Duration),
    /// Background work reports something.
    Message(Message),
}

/// Number of a job. Numbers are never reused.
pub(crate) type JobId = u32;

/// A report from a background thread.
#[derive(Clone, Debug)]
pub enum Message {
    /// The prediction requested with this ticket is ready.
    Predicted {
        /// Ticket.
        ticket: u64,
        /// The scenario without changes.
        base: Option<Arc<Glance>>,
        /// The scenario with its changes, or the reason why it is invalid.
        now: Result<Arc<Glance>, String>,
    },
    /// The numbers of a scenario are ready.
    Surveyed(Setup, Result<Brief, String>),
    /// A job reports something.
    Job(JobId, News),
}

/// A report of a job.
#[derive(Clone, Debug)]
pub enum News {
    /// A message for the user.
    Note(String),
    /// A run is ready.
    Run(Arc<Lanes>),
    /// A training was not started because it needs more memory than available; holds the reason.
    TooLarge(String),
    /// A training with this number of steps starts.
    RunStart(u64),
    /// The device that it trains on, as a phrase after "on".
    On(String),
    /// Setup is complete, and the first step begins.
    Stepping,
    /// The run of a training, saved in the store under this id.
    Trained(Arc<Lanes>, String),
    /// A training step is done.
    Step(StepNews),
    /// A validation is done: the number of steps before it, and its loss.
    Validation(u64, f64),
    /// Norms of all parameters, with the number of steps done.
    ParamNorms(u64, Vec<ParamNorm>),
    /// Current progress of the ranks.
    Ranks(Vec<RankNow>),
    /// The keys of the axes of a sweep, and its number of points.
    Axes(Vec<String>, usize),
    /// A point of a sweep: its index, its settings, and its numbers or the reason why there are
    /// none.
    Point(usize, Vec<String>, Result<Brief, String>),
    /// The runs of the store.
    Stored(Vec<StoredRun>),
    /// The run with this number has been saved under this id.
    Kept(u32, String),
    /// A scenario file was not written because it exists.
    Exists,
    /// The run with this id has been removed from the store.
    Removed(String),
    /// A comparison.
    Compared(Arc<super::tables::Page>),
    /// The verdict of a gate, and the facts that it judged.
    Gated(Arc<super::tables::Page>, Arc<Judged>),
    /// The effects of changes, or the best settings.
    Explained(Arc<Explained>),
    /// Progress of the search for the best settings, in words.
    Searched(String),
    /// Whether a scenario fits.
    Fitted(Setup, Arc<super::tables::Page>),
    /// The job is done.
    Done,
    /// The job was cancelled.
    Cancelled,
    /// The job failed.
    Failed(String),
}

/// A finished training step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepNews {
    /// Number of steps done.
    pub step: u64,
    /// Number of steps of the run.
    pub steps: u64,
    /// Loss.
    pub loss: f64,
    /// Gradient norm, if the run reports one.
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Step time.
    pub time: Duration,
    /// Tokens per rank, or the number of items in the model's batch unit.
    pub tokens: u64,
    /// Unit of the batches.
    pub counted_in: BatchUnit,
    /// Time and memory peak of each rank.
    pub ranks: Vec<RankStep>,
}

/// A rank's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankStep {
    /// Duration from start to end.
    pub time: Duration,
    /// Time in which the host issued instructions; part of `time`.
    pub host: Duration,
    /// Peak of allocated bytes.
    pub allocated: u64,
    /// Peak of reserved bytes.
    pub reserved: u64,
}

/// Progress of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankNow {
    /// Current instruction in words: phase and unit.
    pub at: String,
    /// Share of the step's instructions issued, in percent.
    pub percent: u8,
    /// Allocated bytes.
    pub allocated: u64,
}

/// A run of the store.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRun {
    /// Id.
    pub id: String,
    /// Scenario.
    pub scenario: String,
    /// `sim` or `exec`.
    pub kind: String,
    /// Time of saving: `YYYY-MM-DDTHH:MM:SSZ`.
    pub made: String,
    /// Median step time, milliseconds.
    pub step_ms: f64,
    /// Peak of allocated bytes.
    pub allocated: u64,
    /// Last loss.
    pub loss: Option<f64>,
    /// Changes to its scenario, without sections.
    pub changes: String,
    /// A name of the run, if it has one.
    pub name: Option<String>,
    /// Fields, options and facts of the environment, by key.
    pub fields: BTreeMap<String, String>,
}

/// Number of characters at the end of an id that distinguish it from others.
const TAIL: usize = 6;

impl StoredRun {
    /// Returns the end of the id, which distinguishes it from others.
    #[must_use]
    pub fn tail(&self) -> &str {
        &self.id[self.id.len().saturating_sub(TAIL)..]
    }
}

/// The work of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Simulate.
    Simulate(Setup),
    /// Train on this machine.
    Train {
        /// Scenario.
        setup: Setup,
        /// Number of steps, if it is not the scenario's.
        steps: Option<u64>,
        /// Whether to train even if it needs more memory than available.
        anyway: bool,
        /// Whether to train on the CPU, even if the scenario's hardware is different.
        on_cpu: bool,
    },
    /// Predict all combinations.
    Sweep {
        /// Scenario.
        setup: Setup,
        /// Additional axes, `section.key=[v1, v2]`.
        axes: Vec<String>,
    },
    /// List the store.
    ListStore,
    /// Open a saved run.
    Open {
        /// Id.
        id: String,
        /// Whether to mark it instead of showing it.
        mark: bool,
    },
    /// Save the run with this number in the store.
    Keep(u32, Runs),
    /// Gives a saved run a name, which replaces its current one.
    Name {
        /// Id.
        id: String,
        /// The new name; `None` removes the current one.
        name: Option<String>,
    },
    /// Write a scenario with its changes to a file.
    Export(Export),
    /// Remove a saved run.
    Remove(String),
    /// Compare runs; the first is the base.
    Compare(Runs),
    /// Gate a scenario with the baselines in a folder.
    Gate(Setup, PathBuf),
    /// Make the result of a gate the baseline.
    Bless(Arc<Judged>),
    /// Predict the effects of changes.
    Explain(Setup),
    /// Judge whether a scenario fits.
    Fit {
        /// Scenario.
        setup: Setup,
        /// How the keys of its configuration were read, if it is the job of a framework.
        keys: Option<Arc<super::tables::Table>>,
    },
    /// Search for the best settings.
    Tune(Setup),
}

/// Result of a gate, which can become the baseline.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Current facts of the scenario.
    pub facts: Facts,
    /// Limits of the scenario.
    pub limits: Limits,
    /// Path of the baseline, existing or not.
    pub path: PathBuf,
    /// Whether the baseline exists.
    pub exists: bool,
    /// Changes that a new baseline would make, one sentence each.
    pub changes: Vec<String>,
}

/// Runs, each with its name in this session, such as `#2`.
#[derive(Clone, Debug)]
pub struct Runs(pub Vec<(String, Arc<RunView>)>);

impl PartialEq for Runs {
    /// Compares identity, not content.
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len()
            && self
                .0
                .iter()
                .zip(&other.0)
                .all(|((_, a), (_, b))| Arc::ptr_eq(a, b))
    }
}

/// A scenario with changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// File, or name of a shipped scenario.
    pub path: PathBuf,
    /// Changes, `section.key=VALUE`.
    pub overrides: Vec<String>,
}

impl Setup {
    /// Loads the scenario with its changes and further overrides.
    ///
    /// # Errors
    /// As [`scenario::load`].
    pub fn load(&self, more: &[String]) -> Result<Scenario, ScenarioError> {
        scenario::load(&self.path, &[&self.overrides[..], more].concat())
    }

    /// Returns the name of the scenario: its file name without `.toml`. Other dots belong to the
    /// name, as in `llama3.2-1b-4xh200`.
    #[must_use]
    pub fn name(&self) -> String {
        let file = self.path.file_name().unwrap_or_default();
        let file = file.to_string_lossy();
        file.strip_suffix(".toml").unwrap_or(&file).to_owned()
    }
}

/// A request of the state to the outside.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Predict. Only the newest ticket matters.
    Predict {
        /// Ticket.
        ticket: u64,
        /// Scenario.
        setup: Setup,
    },
    /// Predict these scenarios in the background, one after another.
    Survey(Vec<Setup>),
    /// Start a job.
    Start(JobId, Task),
    /// End a job as soon as possible.
    Cancel(JobId),
    /// Turn mouse reports on or off.
    Mouse(bool),
    /// Return the terminal to the shell until the process is resumed.
    Suspend,
    /// Save this state for the next session.
    Save(Saved),
    /// Copy a text to the clipboard of the terminal.
    Copy(String),
    /// Quit.
    Quit,
}
