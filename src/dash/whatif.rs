//! Changes to the selected scenario. One view shows the effects of single changes and the uses of
//! time and memory, as `shardlab explain` does; the other shows the best settings, as
//! `shardlab tune` does. One key applies a change to the options.

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

/// What a view requests for the selected scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// What changes would do.
    Changes,
    /// The best settings.
    Best,
}

impl Ask {
    /// Returns the view that shows the answer.
    #[must_use]
    pub const fn view(self) -> View {
        match self {
            Self::Changes => View::WhatIf,
            Self::Best => View::Tune,
        }
    }

    /// Returns the place of its keys.
    #[must_use]
    pub const fn place(self) -> Place {
        match self {
            Self::Changes => Place::WhatIf,
            Self::Best => Place::Tune,
        }
    }

    /// Returns the purpose of its jobs.
    #[must_use]
    pub(crate) const fn purpose(self) -> Purpose {
        match self {
            Self::Changes => Purpose::Explain,
            Self::Best => Purpose::Tune,
        }
    }

    /// Returns the command that requests it.
    #[must_use]
    pub const fn command(self) -> Command {
        match self {
            Self::Changes => Command::WhatIf,
            Self::Best => Command::Tune,
        }
    }
}

/// Reason why a change is listed. Groups are listed in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// The best settings.
    Best,
    /// The fewest changes that tie with the best settings.
    Simplest,
    /// Point on the Pareto front of throughput and memory.
    Front,
    /// The smallest changes that make the scenario fit.
    Fits,
    /// Faster steps.
    Faster,
    /// Less memory.
    Smaller,
    /// Helps, but trains with another batch size or precision.
    OtherTraining,
    /// Gains neither time nor memory.
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
            Self::Best => "best settings",
            Self::Simplest => "fewest changes that tie with them",
            Self::Front => "Pareto front of throughput and memory",
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
    /// Effect, or the reason why it is impossible.
    pub outcome: Result<Outcome, String>,
}

/// Result for a scenario.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The scenario with its changes.
    pub setup: Setup,
    /// The verdict as one line, and whether it is positive.
    pub verdict: (Tone, String),
    /// Why.
    pub why: String,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Numbers of the unchanged scenario.
    pub base: Outcome,
    /// Basis of the numbers.
    pub basis: Option<Basis>,
    /// Changes by group; within a group, best first.
    pub proposals: Vec<Proposal>,
    /// Where time and memory go.
    pub tables: Vec<Table>,
}

/// State of the what-if view, or of the tune view.
#[derive(Debug, Default)]
pub struct WhatIfView {
    /// The scenario of the last request.
    asked: Option<Setup>,
    /// The last result.
    pub found: Option<Arc<Explained>>,
    /// Progress of the search, in words.
    pub progress: Option<String>,
    /// The reason why there is no result.
    pub error: Option<String>,
    /// Selected change among those shown.
    pub cursor: Cursor,
    /// Whether changes that do not help are also shown.
    pub all: bool,
    /// Changes that were applied: the key of the scenario, and its changes before that.
    undo: Vec<(String, Changes)>,
}

impl WhatIfView {
    /// Stores a result.
    pub(super) fn arrived(&mut self, found: Arc<Explained>) {
        let same = |old: &Arc<Explained>| old.setup == found.setup;
        if !self.found.as_ref().is_some_and(same) {
            self.cursor.at = 0;
        }
        self.found = Some(found);
        self.error = None;
        self.progress = None;
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
    pub(crate) fn selected(&self) -> Option<&Proposal> {
        self.rows().get(self.cursor.at).copied()
    }
}

/// Shows the what-if view, and predicts changes if the shown ones are for another scenario.
pub(super) fn open(app: &mut App) -> Vec<Effect> {
    app.view = View::WhatIf;
    let setup = app.setup();
    let is_pending = app.running(Purpose::Explain).is_some() && app.whatif.asked == setup;
    let is_shown = app.whatif.found.as_ref().map(|f| &f.setup) == setup.as_ref();
    if setup.is_none() || is_pending || is_shown {
        return Vec::new();
    }
    ask(app, Ask::Changes)
}

/// Handles a command in a view.
pub(super) fn command(app: &mut App, of: Ask, command: Command) -> Vec<Effect> {
    match command {
        Command::Enter => apply(app, of),
        Command::Undo => undo(app, of),
        Command::All => {
            let state = app.proposals_mut(of);
            state.all = !state.all;
            let len = state.rows().len();
            state.cursor.clamp(len);
            Vec::new()
        }
        Command::ShowAll => {
            app.whole = Some(Whole::default());
            Vec::new()
        }
        other if other == of.command() => ask(app, of),
        Command::Simulate => super::scenarios::simulate(app),
        Command::Copy => {
            let setup = app.setup();
            super::export::copy(app, setup)
        }
        Command::Back => app.cancel(of.purpose()),
        other => {
            let state = app.proposals_mut(of);
            let len = state.rows().len();
            state.cursor.go(other, len);
            Vec::new()
        }
    }
}

/// Predicts changes to the selected scenario, or searches for its best settings.
pub(super) fn ask(app: &mut App, of: Ask) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    app.view = of.view();
    let state = app.proposals_mut(of);
    state.error = None;
    state.progress = None;
    state.asked = Some(setup.clone());
    app.start(match of {
        Ask::Changes => Task::Explain(setup),
        Ask::Best => Task::Tune(setup),
    })
}

/// Applies the selected change to the options, and predicts the result.
fn apply(app: &mut App, of: Ask) -> Vec<Effect> {
    let state = app.proposals(of);
    let Some(proposal) = state.selected().cloned() else {
        return Vec::new();
    };
    let is_current = state.found.as_ref().map(|f| &f.setup) == app.setup().as_ref();
    if !is_current {
        let again = keys::first(of.place(), of.command());
        let undo = keys::first(of.place(), Command::Undo);
        let text = match of {
            Ask::Changes => format!("the scenario has changed since: {again} predicts again"),
            Ask::Best => {
                format!(
                    "the scenario has changed since: {undo} undoes that, {again} searches again"
                )
            }
        };
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
    app.proposals_mut(of).undo.push((key, before));
    let settings = proposal.overrides.iter().filter_map(|set| {
        let (key, value) = set.split_once('=')?;
        Some((key.to_owned(), value.to_owned()))
    });
    app.scenarios.set_all(settings.collect::<Vec<_>>());
    let undo = keys::first(of.place(), Command::Undo);
    let text = format!("applied {}; {undo} undoes it", proposal.overrides.join(" "));
    app.say(Tone::Good, text);
    predict(app, of)
}

/// Undoes the change that was applied last to the selected scenario.
fn undo(app: &mut App, of: Ask) -> Vec<Effect> {
    let current = app.scenarios.current().map(|s| s.key.clone());
    let last = app
        .proposals_mut(of)
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
    predict(app, of)
}

/// Predicts the scenario and, in the what-if view, changes to it.
fn predict(app: &mut App, of: Ask) -> Vec<Effect> {
    app.scenarios.refused = None;
    let mut effects = app.predict();
    if of == Ask::Changes {
        effects.extend(ask(app, of));
    }
    effects
}
