//! What comes in, and what is asked for: the only ways between the dashboard's state and the world.

use super::export::Export;
use super::glance::{Brief, Glance};
use super::lanes::Lanes;
use super::state::Saved;
use ratatui::crossterm::event::{KeyEvent, MouseEvent};
use shardlab_plan::scenario::BatchUnit;
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
    /// The terminal has another size: columns, rows.
    Resize(u16, u16),
    /// Time since the dashboard began.
    Tick(Duration),
    /// Work in the background reports.
    Message(Message),
}

/// A job's number; they are not used again.
pub type JobId = u32;

/// A report from the background.
#[derive(Clone, Debug)]
pub enum Message {
    /// The prediction that was asked for with this ticket.
    Predicted {
        /// Ticket.
        ticket: u64,
        /// The scenario without changes.
        base: Option<Arc<Glance>>,
        /// The scenario with them, or why it cannot be.
        now: Result<Arc<Glance>, String>,
    },
    /// The numbers of a scenario.
    Surveyed(Setup, Result<Brief, String>),
    /// A job reports.
    Job(JobId, News),
}

/// What a job has to say.
#[derive(Clone, Debug)]
pub enum News {
    /// Something the user should know.
    Note(String),
    /// A run is there.
    Run(Arc<Lanes>),
    /// A training needs more memory than there is: why it was not started.
    TooLarge(String),
    /// A training begins, of so many steps.
    RunStart(u64),
    /// What it trains on, in words that stand behind "on".
    On(String),
    /// Everything is set up: its first step begins.
    Stepping,
    /// Its run, which is in the store under this id.
    Trained(Arc<Lanes>, String),
    /// A training step is done.
    Step(StepNews),
    /// A validation after so many steps is done.
    Validation(u64, f64),
    /// Where the ranks are now.
    Ranks(Vec<RankNow>),
    /// How many points a sweep has, and the keys of its axes.
    Axes(Vec<String>, usize),
    /// A point of a sweep: its number, its settings, its numbers or why there are none.
    Point(usize, Vec<String>, Result<Brief, String>),
    /// Runs of the store.
    Stored(Vec<StoredRun>),
    /// The run of this number is in the store now, under this id.
    Kept(u32, String),
    /// A scenario file is not written: there is such a file.
    Exists,
    /// The run of this id is in the store no more.
    Removed(String),
    /// A comparison.
    Compared(Arc<super::tables::Page>),
    /// A gate's verdict, and what it was made of.
    Gated(Arc<super::tables::Page>, Arc<Judged>),
    /// It is done.
    Done,
    /// It was cancelled.
    Cancelled,
    /// It failed.
    Failed(String),
}

/// A finished training step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepNews {
    /// Steps done.
    pub step: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Loss.
    pub loss: f64,
    /// Gradient norm, where the run tells any.
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// How long it took.
    pub time: Duration,
    /// Tokens (or what the model's batches are counted in) of one rank.
    pub tokens: u64,
    /// What the batches are counted in.
    pub counted_in: BatchUnit,
    /// By rank: how long its part took and its memory peak.
    pub ranks: Vec<RankStep>,
}

/// A rank's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankStep {
    /// Begin to end.
    pub time: Duration,
    /// Part of it in which the host issued.
    pub host: Duration,
    /// Peak of allocated bytes.
    pub allocated: u64,
    /// Peak of reserved bytes.
    pub reserved: u64,
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankNow {
    /// Instruction in words: phase, unit.
    pub at: String,
    /// Share of the step's instructions issued, in percent.
    pub percent: u8,
    /// Allocated bytes.
    pub allocated: u64,
}

/// A run in the store.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRun {
    /// Its id.
    pub id: String,
    /// Scenario.
    pub scenario: String,
    /// `sim` or `exec`.
    pub kind: String,
    /// When it was made: `YYYY-MM-DDTHH:MM:SSZ`.
    pub made: String,
    /// Median step, milliseconds.
    pub step_ms: f64,
    /// Peak of allocated bytes.
    pub allocated: u64,
    /// Last loss.
    pub loss: Option<f64>,
    /// Changes to its scenario, without sections.
    pub changes: String,
    /// The name that stands for its id.
    pub name: Option<String>,
    /// Its fields, options and facts of the environment, by key.
    pub fields: BTreeMap<String, String>,
}

/// Characters of an id that tell it from others.
const TAIL: usize = 6;

impl StoredRun {
    /// The end of its id, which tells it from others.
    #[must_use]
    pub fn tail(&self) -> &str {
        &self.id[self.id.len().saturating_sub(TAIL)..]
    }
}

/// What a job does.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Simulate.
    Simulate(Setup),
    /// Train on this machine.
    Train {
        /// What.
        setup: Setup,
        /// Steps, if not the scenario's.
        steps: Option<u64>,
        /// Even if it needs more memory than there is.
        anyway: bool,
        /// On the CPU, whatever the scenario's hardware is.
        on_cpu: bool,
    },
    /// Predict all combinations.
    Sweep {
        /// What.
        setup: Setup,
        /// Further axes, `section.key=[v1, v2]`.
        axes: Vec<String>,
    },
    /// List the store.
    ListStore,
    /// Open a stored run.
    Open {
        /// Its id.
        id: String,
        /// To be marked instead of shown.
        mark: bool,
    },
    /// Keep a run, of this number, in the store.
    Keep(u32, Runs),
    /// Give a stored run a name in place of the one that it has.
    Name {
        /// Its id.
        id: String,
        /// The name; without one it has none any more.
        name: Option<String>,
    },
    /// Write a scenario with its changes as a file.
    Export(Export),
    /// Remove a stored run.
    Remove(String),
    /// Compare runs; the first is the base.
    Compare(Runs),
    /// Gate a scenario with the baselines of a folder.
    Gate(Setup, PathBuf),
    /// Make what a gate found the baseline.
    Bless(Arc<Judged>),
}

/// What a gate has found: it can become the baseline.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Facts of the scenario as it is now.
    pub facts: Facts,
    /// Its limits.
    pub limits: Limits,
    /// Where its baseline lies, or would lie.
    pub path: PathBuf,
    /// Whether there is one.
    pub exists: bool,
    /// What a new baseline would change, a sentence each.
    pub changes: Vec<String>,
}

/// Runs, each with what this session calls it: `#2`.
#[derive(Clone, Debug)]
pub struct Runs(pub Vec<(String, Arc<RunView>)>);

impl PartialEq for Runs {
    /// The same runs, not equal ones.
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
    /// File, or name of a shipped one.
    pub path: PathBuf,
    /// `section.key=VALUE`.
    pub overrides: Vec<String>,
}

impl Setup {
    /// Name of the scenario: its file's without `.toml`. Other dots are part of it, as in
    /// `llama3.2-1b-4xh200`.
    #[must_use]
    pub fn name(&self) -> String {
        let file = self.path.file_name().unwrap_or_default();
        let file = file.to_string_lossy();
        file.strip_suffix(".toml").unwrap_or(&file).to_owned()
    }
}

/// Something the state asks the world for.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Predict; only the newest ticket matters.
    Predict {
        /// Ticket.
        ticket: u64,
        /// What.
        setup: Setup,
    },
    /// Predict these in the background, one after another.
    Survey(Vec<Setup>),
    /// Start a job.
    Start(JobId, Task),
    /// End a job as soon as it can be.
    Cancel(JobId),
    /// Turn mouse reports on or off.
    Mouse(bool),
    /// Give the terminal to the shell until it goes on.
    Suspend,
    /// Keep this for the next time.
    Save(Saved),
    /// Put a text into the terminal's clipboard.
    Copy(String),
    /// Leave.
    Quit,
}
