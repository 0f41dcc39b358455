//! What changes to the selected scenario would do, and where its time and memory go: what
//! `shardlab explain` knows. A change is applied to the options with one key.

use super::app::{App, Purpose, Tone, View};
use super::cursor::Cursor;
use super::event::{Effect, Setup, Task};
use super::keys::{self, Command, Place};
use super::scenarios::Changes;
use super::tables::Table;
use super::whole::Whole;
use crate::analysis::whatif::Effect as Outcome;
use shardlab_plan::record::Basis;
use std::sync::Arc;

/// Why a change is listed. Groups are listed in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// The smallest changes that make the scenario fit.
    Fits,
    /// Faster steps.
    Faster,
    /// Less memory.
    Smaller,
    /// Helps, but trains with another batch size or precision.
    OtherTraining,
    /// No gain in time or memory.
    NoGain,
    /// Part of another engine than that of the policy.
    OtherEngine,
    /// No effect.
    Same,
    /// Impossible for this scenario.
    Impossible,
}

impl Group {
    /// Returns the heading.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Fits => "smallest changes that fit",
            Self::Faster => "faster",
            Self::Smaller => "less memory",
            Self::OtherTraining => "with another batch size or precision",
            Self::NoGain => "slower, or more memory",
            Self::OtherEngine => "not settable with this policy",
            Self::Same => "no effect",
            Self::Impossible => "impossible",
        }
    }

    /// Returns whether its changes help.
    #[must_use]
    pub fn helps(self) -> bool {
        self <= Self::OtherTraining
    }
}

/// A change and its effect.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// Why it is listed.
    pub group: Group,
    /// Name of the change.
    pub label: String,
    /// Overrides, in the syntax of `--set`.
    pub overrides: Vec<String>,
    /// Effect, or why it is impossible.
    pub outcome: Result<Outcome, String>,
}

/// What `explain` found out about a scenario.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The scenario with its changes.
    pub setup: Setup,
    /// The verdict in one line, and whether it is good.
    pub verdict: (Tone, String),
    /// Why.
    pub why: String,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Numbers of the scenario as it is.
    pub base: Outcome,
    /// What they rest on.
    pub basis: Option<Basis>,
    /// Changes by group; within a group, best first.
    pub proposals: Vec<Proposal>,
    /// Where time and memory go.
    pub tables: Vec<Table>,
}

/// State of the what-if view.
#[derive(Debug, Default)]
pub struct WhatIfView {
    /// The scenario that was asked about last.
    asked: Option<Setup>,
    /// What was found out last.
    pub found: Option<Arc<Explained>>,
    /// Why nothing could be found out.
    pub error: Option<String>,
    /// Selected change among those shown.
    pub cursor: Cursor,
    /// Whether changes that do not help are shown, too.
    pub all: bool,
    /// Changes that were applied: the key of the scenario, and its earlier changes.
    undo: Vec<(String, Changes)>,
}

impl WhatIfView {
    /// Stores what was found out.
    pub(super) fn arrived(&mut self, found: Arc<Explained>) {
        let same = |old: &Arc<Explained>| old.setup == found.setup;
        if !self.found.as_ref().is_some_and(same) {
            self.cursor.at = 0;
        }
        self.found = Some(found);
        self.error = None;
        let len = self.rows().len();
        self.cursor.clamp(len);
    }

    /// Returns the shown changes.
    #[must_use]
    pub fn rows(&self) -> Vec<&Proposal> {
        let all = self.found.iter().flat_map(|f| &f.proposals);
        all.filter(|p| self.all || p.group.helps()).collect()
    }

    /// Returns the selected change.
    #[must_use]
    pub fn selected(&self) -> Option<&Proposal> {
        self.rows().get(self.cursor.at).copied()
    }
}

/// Shows the view, and predicts changes if those shown are of another scenario.
pub(super) fn open(app: &mut App) -> Vec<Effect> {
    app.view = View::WhatIf;
    let setup = app.setup();
    let is_pending = app.running(Purpose::Explain).is_some() && app.whatif.asked == setup;
    let is_shown = app.whatif.found.as_ref().map(|f| &f.setup) == setup.as_ref();
    if setup.is_none() || is_pending || is_shown {
        return Vec::new();
    }
    explain(app)
}

/// Handles a command in the view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    match command {
        Command::Enter => apply(app),
        Command::Undo => undo(app),
        Command::All => {
            app.whatif.all = !app.whatif.all;
            let len = app.whatif.rows().len();
            app.whatif.cursor.clamp(len);
            Vec::new()
        }
        Command::ShowAll => {
            app.whole = Some(Whole::default());
            Vec::new()
        }
        Command::WhatIf => explain(app),
        Command::Simulate => super::scenarios::simulate(app),
        Command::Copy => {
            let setup = app.setup();
            super::export::copy(app, setup)
        }
        Command::Back => app.cancel(Purpose::Explain),
        other => {
            let len = app.whatif.rows().len();
            app.whatif.cursor.go(other, len);
            Vec::new()
        }
    }
}

/// Predicts changes to the selected scenario.
fn explain(app: &mut App) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    app.whatif.error = None;
    app.whatif.asked = Some(setup.clone());
    app.start(Task::Explain(setup))
}

/// Applies the selected change to the options, and predicts changes to the result.
fn apply(app: &mut App) -> Vec<Effect> {
    let Some(proposal) = app.whatif.selected().cloned() else {
        return Vec::new();
    };
    let is_current = app.whatif.found.as_ref().map(|f| &f.setup) == app.setup().as_ref();
    if !is_current {
        let key = keys::first(Place::WhatIf, Command::WhatIf);
        let text = format!("the scenario has changed since: {key} predicts again");
        app.say(Tone::Plain, text);
        return Vec::new();
    }
    if let Err(reason) = &proposal.outcome {
        app.say(Tone::Bad, format!("impossible: {reason}"));
        return Vec::new();
    }
    let Some(key) = app.scenarios.current().map(|s| s.key.clone()) else {
        return Vec::new();
    };
    let before = app.scenarios.changes().cloned().unwrap_or_default();
    app.whatif.undo.push((key, before));
    let settings = proposal.overrides.iter().filter_map(|set| {
        let (key, value) = set.split_once('=')?;
        Some((key.to_owned(), value.to_owned()))
    });
    app.scenarios.set_all(settings.collect::<Vec<_>>());
    let undo = keys::first(Place::WhatIf, Command::Undo);
    let text = format!("applied {}; {undo} undoes it", proposal.overrides.join(" "));
    app.say(Tone::Good, text);
    predict(app)
}

/// Undoes the change that was applied last to the selected scenario.
fn undo(app: &mut App) -> Vec<Effect> {
    let current = app.scenarios.current().map(|s| s.key.clone());
    let last = app
        .whatif
        .undo
        .pop_if(|(key, _)| Some(&*key) == current.as_ref());
    let Some((key, before)) = last else {
        app.say(Tone::Plain, "nothing to undo");
        return Vec::new();
    };
    match before.is_empty() {
        true => app.scenarios.overrides.remove(&key),
        false => app.scenarios.overrides.insert(key, before),
    };
    app.say(Tone::Good, "undone");
    predict(app)
}

/// Predicts the scenario and changes to it.
fn predict(app: &mut App) -> Vec<Effect> {
    app.scenarios.refused = None;
    let mut effects = app.predict();
    effects.extend(explain(app));
    effects
}
