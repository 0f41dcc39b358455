//! The state of the dashboard. It changes only in [`super::update`]; drawing reads it.

use super::compare::CompareView;
use super::confirm::Question;
use super::event::{Effect, JobId, RankNow, Runs, Setup, Task};
use super::export::Export;
use super::fit::FitView;
use super::gate::GateView;
use super::help::Help;
use super::keys::Place;
use super::prompt::Prompt;
use super::runs::RunsView;
use super::scenarios::{Pane, Scenarios, Source};
use super::state::Saved;
use super::sweep::SweepView;
use super::theme::Theme;
use super::timeline::Timeline;
use super::train::Training;
use super::whatif::{Ask, WhatIfView};
use super::whole::Whole;
use ratatui::layout::{Position, Rect};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

/// A view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Scenarios, their options, and the prediction.
    Scenarios,
    /// The timeline of a step.
    Timeline,
    /// Live training.
    Train,
    /// A sweep.
    Sweep,
    /// Runs of this session and of the store.
    Runs,
    /// A comparison.
    Compare,
    /// A gate.
    Gate,
    /// What changes would do.
    WhatIf,
    /// Whether the scenario fits, and what takes up the memory.
    Fit,
    /// The best settings.
    Tune,
}

impl View {
    /// All views, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::Scenarios,
        Self::Timeline,
        Self::Train,
        Self::Sweep,
        Self::Runs,
        Self::Compare,
        Self::Gate,
        Self::WhatIf,
        Self::Fit,
        Self::Tune,
    ];

    /// Returns the name of the view.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scenarios => "Scenarios",
            Self::Timeline => "Timeline",
            Self::Train => "Train",
            Self::Sweep => "Sweep",
            Self::Runs => "Runs",
            Self::Compare => "Compare",
            Self::Gate => "Gate",
            Self::WhatIf => "What-if",
            Self::Fit => "Fit",
            Self::Tune => "Tune",
        }
    }
}

/// Meaning of a message, which determines its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// For information.
    Plain,
    /// Something was done.
    Good,
    /// Something went wrong.
    Bad,
}

/// A line for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Text.
    pub text: String,
    /// Tone.
    pub tone: Tone,
    /// When it was shown.
    pub since: Duration,
}

/// Purpose of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The timeline.
    Simulate,
    /// A training.
    Train,
    /// A sweep.
    Sweep,
    /// The list of stored runs.
    Store,
    /// Opening a saved run.
    Open,
    /// Opening a saved run to mark it.
    Mark,
    /// Saving a run.
    Keep,
    /// Naming a saved run.
    Name,
    /// Removing a saved run.
    Remove,
    /// Writing a scenario file.
    Export,
    /// A comparison.
    Compare,
    /// A gate.
    Gate,
    /// Writing a baseline.
    Bless,
    /// Predicting changes.
    Explain,
    /// Judging whether a scenario fits.
    Fit,
    /// Searching for the best settings.
    Tune,
}

impl Purpose {
    /// Returns a word for the status line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Simulate => "simulating",
            Self::Train => "training",
            Self::Sweep => "sweeping",
            Self::Store => "listing the store",
            Self::Open | Self::Mark => "opening",
            Self::Keep => "keeping",
            Self::Name => "naming",
            Self::Remove => "removing",
            Self::Export => "writing",
            Self::Compare => "comparing",
            Self::Gate => "gating",
            Self::Bless => "blessing",
            Self::Explain => "explaining",
            Self::Fit => "predicting",
            Self::Tune => "tuning",
        }
    }
}

/// A running job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Purpose.
    pub purpose: Purpose,
    /// What it works on.
    pub of: String,
    /// Start time.
    pub since: Duration,
    /// Whether the job was asked to end.
    pub cancelled: bool,
}

/// Meaning of a click at a place on the screen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Hit {
    /// A tab.
    Tab(View),
    /// A row of the scenario list.
    Scenario(usize),
    /// A row of the options.
    Option(usize),
    /// A row of the sweep.
    Point(usize),
    /// A row of the runs.
    Run(usize),
    /// A change of the what-if or the tune view.
    Change(Ask, usize),
    /// A lane of the timeline, by row. The column determines the time.
    Lane(usize),
    /// The rest of the timeline, where only the column matters.
    Time,
}

/// The state of the dashboard.
pub struct App {
    /// Columns and rows of the terminal.
    pub size: (u16, u16),
    /// Time since the start, as of the last tick.
    pub now: Duration,
    /// Colours and glyphs.
    pub theme: Theme,
    /// Whether the mouse is reported.
    pub mouse: bool,
    /// The current view.
    pub view: View,
    /// State of the scenario list and its options.
    pub scenarios: Scenarios,
    /// State of the timeline.
    pub timeline: Timeline,
    /// State of the training.
    pub train: Training,
    /// State of the sweep.
    pub sweep: SweepView,
    /// State of the runs.
    pub runs: RunsView,
    /// State of the comparison.
    pub compare: CompareView,
    /// State of the gate.
    pub gate: GateView,
    /// State of the what-if view.
    pub whatif: WhatIfView,
    /// State of the fit view.
    pub fit: FitView,
    /// State of the tune view.
    pub tune: WhatIfView,
    /// The full text on the selected scenario or the training, if it is shown.
    pub whole: Option<Whole>,
    /// The help, if it is shown.
    pub help: Option<Help>,
    /// The line that is being typed.
    pub prompt: Option<Prompt>,
    /// The question that waits for an answer.
    pub question: Option<Question>,
    /// The scenario file that is being written.
    pub export: Option<Export>,
    /// Whether to save trainings in the store.
    pub keep: bool,
    /// The message at the bottom.
    pub notice: Option<Notice>,
    /// Running jobs.
    pub jobs: BTreeMap<JobId, Job>,
    next_job: JobId,
    /// Clickable places in the last drawing.
    pub(crate) hits: RefCell<Vec<(Rect, Hit)>>,
    /// Position at which the cursor of the edited value was drawn.
    pub(crate) text_cursor: Cell<Option<Position>>,
}

impl App {
    /// Creates a dashboard over scenarios. Also returns the effects to run at the start.
    #[must_use]
    pub fn new(sources: Vec<Source>, theme: Theme, saved: &Saved) -> (Self, Vec<Effect>) {
        let mut app = Self {
            size: (80, 24),
            now: Duration::ZERO,
            theme,
            mouse: saved.mouse,
            view: View::Scenarios,
            scenarios: Scenarios::new(sources),
            timeline: Timeline::default(),
            train: Training::default(),
            sweep: SweepView::default(),
            runs: RunsView::default(),
            compare: CompareView::default(),
            gate: GateView::default(),
            whatif: WhatIfView::default(),
            fit: FitView::default(),
            tune: WhatIfView::default(),
            whole: None,
            help: None,
            prompt: None,
            question: None,
            export: None,
            keep: false,
            notice: None,
            jobs: BTreeMap::new(),
            next_job: 1,
            hits: RefCell::default(),
            text_cursor: Cell::new(None),
        };
        app.restore(saved);
        let mut effects = app.predict();
        effects.push(Effect::Survey(app.scenarios.survey()));
        effects.extend(app.start(Task::ListStore));
        (app, effects)
    }

    fn restore(&mut self, saved: &Saved) {
        self.scenarios.restore(saved);
        self.sweep.sort = saved.sweep_sort;
        self.sweep.reversed = saved.sweep_reversed;
        self.sweep.axes.clone_from(&saved.axes);
        self.timeline.critical = saved.critical;
    }

    /// Returns the state to keep for the next session.
    #[must_use]
    pub fn save(&self) -> Saved {
        Saved {
            theme: Some(self.theme.name.text().to_owned()),
            mouse: self.mouse,
            scenario: self.scenarios.current().map(|s| s.key.clone()),
            overrides: self.scenarios.overrides.clone(),
            filter: self.scenarios.filter.clone(),
            with_tests: self.scenarios.with_tests,
            sweep_sort: self.sweep.sort,
            sweep_reversed: self.sweep.reversed,
            axes: self.sweep.axes.clone(),
            critical: self.timeline.critical,
        }
    }

    /// Returns the place that receives keys.
    #[must_use]
    pub fn place(&self) -> Place {
        if self.prompt.is_some() {
            return Place::Typing;
        }
        if self.help.is_some() {
            return Place::Help;
        }
        if self.question.is_some() {
            return Place::Confirm;
        }
        if self.whole.is_some() {
            return Place::Whole;
        }
        match self.view {
            View::Scenarios => match self.scenarios.pane {
                Pane::List => Place::Scenarios,
                Pane::Options => Place::Options,
            },
            View::Timeline => Place::Timeline,
            View::Train => Place::Training,
            View::Sweep => Place::Sweep,
            View::Runs => Place::Runs,
            View::Compare => Place::Compare,
            View::Gate => Place::Gate,
            View::WhatIf => Place::WhatIf,
            View::Fit => Place::Fit,
            View::Tune => Place::Tune,
        }
    }

    /// Returns the state of the view that shows the answer.
    #[must_use]
    pub const fn proposals(&self, of: Ask) -> &WhatIfView {
        match of {
            Ask::Changes => &self.whatif,
            Ask::Best => &self.tune,
        }
    }

    pub(super) const fn proposals_mut(&mut self, of: Ask) -> &mut WhatIfView {
        match of {
            Ask::Changes => &mut self.whatif,
            Ask::Best => &mut self.tune,
        }
    }

    /// Shows a message.
    pub fn say(&mut self, tone: Tone, text: impl Into<String>) {
        self.notice = Some(Notice {
            text: text.into(),
            tone,
            since: self.now,
        });
    }

    /// Requests the prediction of the selected scenario with its changes and the text being typed.
    pub fn predict(&mut self) -> Vec<Effect> {
        let edited = self.prompt.as_ref().and_then(Prompt::edited);
        let setup = self.scenarios.setup_with(edited);
        // A pending prediction may be for another scenario, so its ticket becomes invalid.
        self.scenarios.ticket += 1;
        self.scenarios.pending = setup.is_some();
        let Some(setup) = setup else {
            return Vec::new();
        };
        vec![Effect::Predict {
            ticket: self.scenarios.ticket,
            setup,
        }]
    }

    /// Returns the selected scenario with its changes.
    #[must_use]
    pub fn setup(&self) -> Option<Setup> {
        self.scenarios.setup_with(None)
    }

    /// Like [`Self::setup`], but shows a message if no scenario is selected.
    pub(super) fn wanted(&mut self) -> Option<Setup> {
        let setup = self.setup();
        if setup.is_none() {
            let text = "no scenario is selected: Esc in view 1 shows all";
            self.say(Tone::Plain, text);
        }
        setup
    }

    /// Starts a job. Only one job per purpose runs at a time: the previous one is cancelled, unless
    /// the jobs work on different things.
    pub fn start(&mut self, task: Task) -> Vec<Effect> {
        let (purpose, of) = match &task {
            Task::Simulate(setup) => (Purpose::Simulate, setup.name()),
            Task::Train { setup, .. } => (Purpose::Train, setup.name()),
            Task::Sweep { setup, .. } => (Purpose::Sweep, setup.name()),
            Task::ListStore => (Purpose::Store, String::new()),
            Task::Open { id, mark: false } => (Purpose::Open, id.clone()),
            Task::Open { id, mark: true } => (Purpose::Mark, id.clone()),
            Task::Keep(number, _) => (Purpose::Keep, format!("#{number}")),
            Task::Name { id, .. } => (Purpose::Name, id.clone()),
            Task::Export(e) => (Purpose::Export, e.path.display().to_string()),
            Task::Remove(id) => (Purpose::Remove, id.clone()),
            Task::Compare(Runs(runs)) => (Purpose::Compare, format!("{} runs", runs.len())),
            Task::Gate(setup, _) => (Purpose::Gate, setup.name()),
            Task::Bless(judged) => (Purpose::Bless, judged.facts.scenario.clone()),
            Task::Explain(setup) => (Purpose::Explain, setup.name()),
            Task::Fit { setup, .. } => (Purpose::Fit, setup.name()),
            Task::Tune(setup) => (Purpose::Tune, setup.name()),
        };
        let mut effects = match purpose {
            Purpose::Open
            | Purpose::Mark
            | Purpose::Keep
            | Purpose::Name
            | Purpose::Remove
            | Purpose::Export
            | Purpose::Bless => Vec::new(),
            other => self.cancel(other),
        };
        let id = self.next_job;
        self.next_job += 1;
        self.jobs.insert(
            id,
            Job {
                purpose,
                of,
                since: self.now,
                cancelled: false,
            },
        );
        effects.push(Effect::Start(id, task));
        effects
    }

    /// Asks all jobs with this purpose to end.
    pub(crate) fn cancel(&mut self, purpose: Purpose) -> Vec<Effect> {
        self.jobs
            .iter_mut()
            .filter(|(_, j)| j.purpose == purpose && !j.cancelled)
            .map(|(id, job)| {
                job.cancelled = true;
                Effect::Cancel(*id)
            })
            .collect()
    }

    /// Returns the newest job with this purpose that has not been asked to end.
    #[must_use]
    pub fn running(&self, purpose: Purpose) -> Option<(JobId, &Job)> {
        let mut all = self.jobs.iter().rev();
        all.find(|(_, j)| j.purpose == purpose && !j.cancelled)
            .map(|(id, job)| (*id, job))
    }

    /// Returns the newest job with this purpose, even if it has been asked to end.
    #[must_use]
    pub fn job(&self, purpose: Purpose) -> Option<&Job> {
        self.jobs.values().rfind(|j| j.purpose == purpose)
    }

    /// Returns the clickable place under the mouse.
    pub(crate) fn hit(&self, column: u16, row: u16) -> Option<(Rect, Hit)> {
        let hits = self.hits.borrow();
        // The place that was drawn last is on top.
        hits.iter()
            .rev()
            .find(|(area, _)| area.contains((column, row).into()))
            .copied()
    }

    /// Returns the ranks of the training as last reported.
    #[must_use]
    pub fn ranks(&self) -> &[RankNow] {
        &self.train.ranks
    }
}
