//! The scenario list, the option editor and the prediction next to them.

use super::app::{App, Tone, View};
use super::cursor::Cursor;
use super::event::{Effect, Setup, Task};
use super::glance::{Brief, Glance, Named};
use super::keys::{self, Command, Place};
use super::line::Line;
use super::options;
use super::prompt::{Asks, Prompt};
use super::query::{Query, unfinished};
use super::state::Saved;
use super::tables::Table;
use super::whatif::Ask;
use super::whole::Whole;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// A scenario that can be selected.
#[derive(Clone, Debug)]
pub struct Source {
    /// Name.
    pub name: String,
    /// File, or the name of a shipped scenario.
    pub path: PathBuf,
    /// Unique key: the full path of a file, or the name of a shipped scenario.
    pub key: String,
    /// Description.
    pub about: String,
    /// Its numbers without changes, once they are known.
    pub brief: Option<Result<Brief, String>>,
    /// Whether it is for tests and benchmarks rather than an example.
    pub is_test: bool,
    /// The job that it was read from, unless it is a scenario file.
    pub job: Option<FrameworkJob>,
}

/// The job of a framework.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameworkJob {
    /// Words of the command `shardlab fit` for it.
    pub words: Vec<String>,
    /// How the keys of its configuration were read.
    pub keys: Arc<Table>,
}

impl Source {
    /// Creates a scenario without numbers.
    #[must_use]
    pub fn new(name: String, path: PathBuf, about: String) -> Self {
        // Like in the loader, a path that is not a file is the name of a shipped scenario.
        let key = std::fs::canonicalize(&path)
            .map_or_else(|_| name.clone(), |p| p.to_string_lossy().into_owned());
        Self {
            name,
            path,
            key,
            about,
            brief: None,
            is_test: false,
            job: None,
        }
    }

    /// Marks it as being for tests and benchmarks.
    #[must_use]
    pub(crate) fn for_tests(self, is_test: bool) -> Self {
        Self { is_test, ..self }
    }
}

/// Quality of a match between a name and the words of a search, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Match {
    Exact,
    Prefix,
    Within,
    /// Only the description matches, or the search has no words.
    Elsewhere,
}

impl Match {
    fn of(name: &str, search: &str) -> Self {
        let (name, search) = (name.to_lowercase(), search.to_lowercase());
        let plain = |w: &&str| !w.starts_with('!') && unfinished(w).is_none();
        let words: Vec<&str> = search.split_whitespace().filter(plain).collect();
        match words.join(" ").as_str() {
            "" => Self::Elsewhere,
            all if name == all => Self::Exact,
            all if name.starts_with(all) => Self::Prefix,
            _ if words.iter().all(|w| name.contains(w)) => Self::Within,
            _ => Self::Elsewhere,
        }
    }
}

/// The pane that receives keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    /// The list.
    #[default]
    List,
    /// The options.
    Options,
}

/// Changes of options, by key.
pub type Changes = BTreeMap<String, String>;

/// Invalid values. They are shown next to their options, but have no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The rejected values, by key.
    pub values: Changes,
    /// Why they are invalid.
    pub reason: String,
}

/// State of the scenario view.
#[derive(Debug, Default)]
pub struct Scenarios {
    /// All scenarios.
    pub sources: Vec<Source>,
    /// Selected row among those that pass the filter.
    pub cursor: Cursor,
    /// Filter.
    pub filter: String,
    /// Whether scenarios for tests and benchmarks are listed. A search always finds them.
    pub with_tests: bool,
    /// The pane that receives keys.
    pub pane: Pane,
    /// Selected option among those that match the search.
    pub option: Cursor,
    /// Search among the options.
    pub option_filter: String,
    /// Changes by [`Source::key`], then by option.
    pub overrides: BTreeMap<String, Changes>,
    /// Numbers of scenarios with their changes, by [`Source::key`].
    changed: BTreeMap<String, Result<Brief, String>>,
    /// The selected scenario. It stays in the list until another one is selected, even if its
    /// numbers no longer pass the filter.
    held: Option<String>,
    /// The last changes that could be predicted, with the key of their scenario. They are restored
    /// when later changes are invalid.
    proven: Option<(String, Changes)>,
    /// The last typed or set value, if it is invalid.
    pub refused: Option<Refused>,
    /// The selected scenario without changes.
    pub base: Option<Arc<Glance>>,
    /// The selected scenario with its changes, in the last valid state.
    pub glance: Option<Arc<Glance>>,
    /// Reason why the scenario is invalid, if it is not a change of an option.
    pub error: Option<String>,
    /// Ticket of the newest requested prediction.
    pub ticket: u64,
    /// Whether that prediction is still pending.
    pub pending: bool,
    /// The scenario that was selected when filtering started. It is selected again as soon as it
    /// passes the filter.
    pub(super) anchor: Option<String>,
}

impl Scenarios {
    pub(super) fn new(sources: Vec<Source>) -> Self {
        Self {
            sources,
            ..Self::default()
        }
    }

    pub(super) fn restore(&mut self, saved: &Saved) {
        self.overrides.clone_from(&saved.overrides);
        self.filter.clone_from(&saved.filter);
        self.with_tests = saved.with_tests;
        let key = saved.scenario.as_deref().unwrap_or_default();
        if !self.select(key) {
            self.filter.clear();
            self.select(key);
        }
        self.hold();
    }

    /// Keeps the selected scenario in the list.
    fn hold(&mut self) {
        self.held = self.current().map(|s| s.key.clone());
        if let Some(key) = self.held.clone() {
            // If the previous one has left the list, rows have moved.
            self.select(&key);
        }
    }

    /// Returns the current numbers of a scenario, with its changes if these have been predicted.
    #[must_use]
    pub(crate) fn brief<'a>(&'a self, source: &'a Source) -> Option<&'a Result<Brief, String>> {
        let changes = self.overrides.get(&source.key).filter(|c| !c.is_empty());
        let changed = changes.and_then(|_| self.changed.get(&source.key));
        changed.or(source.brief.as_ref())
    }

    /// Stores the numbers of a scenario.
    pub(super) fn surveyed(&mut self, setup: &Setup, brief: &Result<Brief, String>) {
        for source in self.sources.iter_mut().filter(|s| s.path == setup.path) {
            let none = Changes::new();
            let changes = self.overrides.get(&source.key).unwrap_or(&none);
            if setup.overrides.is_empty() {
                source.brief = Some(brief.clone());
            } else if setup.overrides == settings(changes) {
                self.changed.insert(source.key.clone(), brief.clone());
            }
        }
    }

    /// Stores the numbers of the selected scenario. Without changes, they equal those of the
    /// survey.
    pub(super) fn predicted(&mut self, brief: &Result<Brief, String>) {
        let setup = self.setup_with(None).filter(|s| !s.overrides.is_empty());
        if let Some(setup) = setup {
            self.surveyed(&setup, brief);
        }
    }

    /// Returns the scenarios to predict at the start: all without changes, then those with changes.
    pub(super) fn survey(&self) -> Vec<Setup> {
        let own = self.sources.iter().map(|s| Setup {
            path: s.path.clone(),
            overrides: Vec::new(),
        });
        let changed = self.sources.iter().filter_map(|s| {
            let changes = self.overrides.get(&s.key).filter(|c| !c.is_empty())?;
            Some(Setup {
                path: s.path.clone(),
                overrides: settings(changes),
            })
        });
        own.chain(changed).collect()
    }

    /// Selects the scenario with this [`Source::key`], if it passes the filter.
    pub fn select(&mut self, key: &str) -> bool {
        let row = self.rows().iter().position(|&i| self.sources[i].key == key);
        self.cursor.at = row.unwrap_or(0);
        row.is_some()
    }

    /// Returns the indices of the scenarios that pass the filter.
    #[must_use]
    pub fn rows(&self) -> Vec<usize> {
        let query = Query::parse(&self.filter);
        let keeps = |s: &Source| {
            query.keeps(&Named {
                text: format!("{} {}", s.name, s.about),
                brief: self.brief(s).and_then(|b| b.as_ref().ok()),
                more: &|field| (field == "name").then(|| s.name.clone()),
            })
        };
        let listed = |s: &Source| self.with_tests || !s.is_test || !self.filter.is_empty();
        let mut rows: Vec<usize> = (0..self.sources.len())
            .filter(|&i| {
                let source = &self.sources[i];
                self.held.as_ref() == Some(&source.key) || (listed(source) && keeps(source))
            })
            .collect();
        // Matching names come first, and examples before tests.
        rows.sort_by_key(|&i| {
            let source = &self.sources[i];
            (Match::of(&source.name, &self.filter), source.is_test)
        });
        rows
    }

    /// Returns the number of scenarios that are not listed because they are for tests.
    #[must_use]
    pub fn hidden(&self) -> usize {
        let tests = self.sources.iter().filter(|s| s.is_test).count();
        match self.with_tests || !self.filter.is_empty() {
            true => 0,
            false => tests,
        }
    }

    /// Returns the selected scenario.
    #[must_use]
    pub fn current(&self) -> Option<&Source> {
        let rows = self.rows();
        rows.get(self.cursor.at).map(|&i| &self.sources[i])
    }

    /// Returns the changes of the selected scenario.
    #[must_use]
    pub fn changes(&self) -> Option<&Changes> {
        self.overrides
            .get(&self.current()?.key)
            .filter(|c| !c.is_empty())
    }

    /// Returns the selected scenario with its changes, one of which may be replaced by `edited`.
    pub(super) fn setup_with(&self, edited: Option<(usize, &str)>) -> Option<Setup> {
        let source = self.current()?;
        let mut changes = self.changes().cloned().unwrap_or_default();
        if let Some((option, text)) = edited {
            let path = options::path(options::all()[option]);
            match text.trim() {
                // Accepting an empty text undoes the change.
                "" => changes.remove(&path),
                text => changes.insert(path, text.to_owned()),
            };
        }
        Some(Setup {
            path: source.path.clone(),
            overrides: settings(&changes),
        })
    }

    /// Returns the options that match the search, as indices into [`options::all`].
    #[must_use]
    pub(crate) fn option_rows(&self) -> Vec<usize> {
        let words = self.option_filter.to_lowercase();
        let words: Vec<&str> = words.split_whitespace().collect();
        let changed = |path: &String| self.changes().is_some_and(|c| c.contains_key(path));
        (0..options::all().len())
            .filter(|&i| {
                let info = options::all()[i];
                let path = options::path(info);
                let text = format!("{path} {}", info.doc).to_lowercase();
                words.iter().all(|w| match *w {
                    "changed" => changed(&path),
                    w => text.contains(w),
                })
            })
            .collect()
    }

    /// Returns the selected option.
    #[must_use]
    pub fn option(&self) -> Option<usize> {
        self.option_rows().get(self.option.at).copied()
    }

    /// Returns the value of an option: the changed one, or the scenario's.
    #[must_use]
    pub fn value(&self, option: usize) -> Option<&str> {
        let path = options::path(options::all()[option]);
        let changed = self.changes().and_then(|c| c.get(&path));
        changed
            .or_else(|| self.glance.as_ref()?.values.get(option)?.as_ref())
            .map(String::as_str)
    }

    /// Returns the value of an option without changes.
    #[must_use]
    pub(crate) fn base_value(&self, option: usize) -> Option<&str> {
        self.base.as_ref()?.values.get(option)?.as_deref()
    }

    /// Returns the rejected value of an option.
    #[must_use]
    pub(crate) fn refused_value(&self, option: usize) -> Option<&str> {
        let values = &self.refused.as_ref()?.values;
        let value = values.get(&options::path(options::all()[option]));
        value.map(String::as_str)
    }

    /// Records that the scenario is valid in its current state.
    pub(super) fn prove(&mut self) {
        let changes = self.changes().cloned().unwrap_or_default();
        self.proven = self.current().map(|s| (s.key.clone(), changes));
    }

    /// Returns whether the selected scenario has been predicted with any set of changes, possibly
    /// none.
    pub(super) fn is_proven(&self) -> bool {
        let proven = self.proven.as_ref().map(|(key, _)| key);
        proven.is_some() && proven == self.current().map(|s| &s.key)
    }

    /// Restores the last valid changes after an invalid one. Returns whether there are any.
    pub(super) fn fall_back(&mut self, reason: &str) -> bool {
        let proven = self.proven.clone().filter(|_| self.is_proven());
        let now = self.changes().cloned().unwrap_or_default();
        let Some((key, good)) = proven.filter(|(_, good)| *good != now) else {
            return false;
        };
        let mut values = Changes::new();
        for (at, info) in options::all().iter().enumerate() {
            let path = options::path(info);
            if now.get(&path) != good.get(&path) {
                let own = || self.base_value(at).unwrap_or(info.default).to_owned();
                values.insert(path.clone(), now.get(&path).cloned().unwrap_or_else(own));
            }
        }
        if good.is_empty() {
            self.overrides.remove(&key);
        } else {
            self.overrides.insert(key, good);
        }
        let reason = reason.to_owned();
        self.refused = Some(Refused { values, reason });
        true
    }

    /// Changes an option, or undoes the change if the value equals the scenario's.
    fn set(&mut self, option: usize, value: Option<String>) {
        let Some(key) = self.current().map(|s| s.key.clone()) else {
            return;
        };
        let path = options::path(options::all()[option]);
        let same = value.as_deref() == self.base_value(option);
        self.refused = None;
        let changes = self.overrides.entry(key.clone()).or_default();
        match value {
            Some(value) if !same => {
                changes.insert(path, value);
            }
            _ => {
                changes.remove(&path);
            }
        }
        if changes.is_empty() {
            self.overrides.remove(&key);
        }
    }

    /// Adds changes, replacing earlier ones of the same keys.
    pub(super) fn set_all(&mut self, settings: impl IntoIterator<Item = (String, String)>) {
        let Some(key) = self.current().map(|s| s.key.clone()) else {
            return;
        };
        self.overrides.entry(key).or_default().extend(settings);
    }
}

/// Formats changes in the syntax of `--set`.
fn settings(changes: &Changes) -> Vec<String> {
    changes.iter().map(|(k, v)| format!("{k}={v}")).collect()
}

/// Handles a command in the scenario list or the option editor.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    let options_have_keys = app.scenarios.pane == Pane::Options;
    match command {
        Command::Switch => {
            app.scenarios.pane = match app.scenarios.pane {
                Pane::List => Pane::Options,
                Pane::Options => Pane::List,
            };
        }
        Command::Simulate => return simulate(app),
        Command::Train => return super::train::train(app, false),
        Command::TrainOnCpu => return super::train::train(app, true),
        Command::Sweep => return super::sweep::run(app),
        Command::Gate => return super::gate::gate(app),
        Command::Copy => {
            let setup = app.setup();
            return super::export::copy(app, setup);
        }
        Command::Write => {
            let setup = app.setup();
            super::export::ask(app, setup);
        }
        Command::Filter => {
            let (asks, text) = if options_have_keys {
                (Asks::FilterOptions, app.scenarios.option_filter.clone())
            } else {
                (Asks::FilterScenarios, app.scenarios.filter.clone())
            };
            app.prompt = Some(Prompt::replacing(asks, text));
            app.scenarios.anchor = app.scenarios.current().map(|c| c.key.clone());
            return super::update::filter(app, asks, "");
        }
        // A rejected value is discarded first.
        Command::Back if app.scenarios.refused.take().is_some() => {}
        Command::Back if options_have_keys => app.scenarios.pane = Pane::List,
        Command::Back => return clear(app),
        Command::ResetAll => {
            app.scenarios.refused = None;
            // Without changes, the scenario is shown as its file defines it, even if that is
            // invalid.
            app.scenarios.proven = None;
            if let Some(key) = app.scenarios.current().map(|s| s.key.clone()) {
                app.scenarios.overrides.remove(&key);
            }
            return app.predict();
        }
        Command::Enter => edit(app),
        Command::ShowAll => app.whole = Some(Whole::default()),
        Command::Tests => return show_tests(app),
        Command::WhatIf => return super::whatif::open(app),
        Command::Fit => return super::fit::open(app),
        Command::Tune => return super::whatif::ask(app, Ask::Best),
        Command::Add => super::sweep::add_option(app),
        Command::Reset => {
            if let Some(option) = app.scenarios.option() {
                app.scenarios.set(option, None);
                return app.predict();
            }
        }
        Command::Left | Command::Right if options_have_keys => {
            return step(app, command == Command::Right);
        }
        other if options_have_keys => {
            let len = app.scenarios.option_rows().len();
            app.scenarios.option.go(other, len);
        }
        other => {
            let before = app.scenarios.cursor.at;
            let len = app.scenarios.rows().len();
            if app.scenarios.cursor.go(other, len) && app.scenarios.cursor.at != before {
                return selected(app);
            }
        }
    }
    Vec::new()
}

/// Shows a message if a requested scenario has changes from the last session, because its file
/// alone would not explain the shown values.
pub(super) fn tell_kept(app: &mut App) {
    let Some(n) = app.scenarios.changes().map(BTreeMap::len) else {
        return;
    };
    let changes = if n == 1 { "change" } else { "changes" };
    let key = keys::first(Place::Scenarios, Command::ResetAll);
    let pronoun = if n == 1 { "it" } else { "them" };
    let text = format!("{n} {changes} from last time; {key} takes {pronoun} back");
    app.say(Tone::Plain, text);
}

/// Handles the selection of another scenario.
pub(super) fn selected(app: &mut App) -> Vec<Effect> {
    app.scenarios.hold();
    app.scenarios.base = None;
    app.scenarios.glance = None;
    app.scenarios.error = None;
    app.scenarios.refused = None;
    app.predict()
}

/// Lists the scenarios for tests, or hides them. The selected scenario stays selected.
fn show_tests(app: &mut App) -> Vec<Effect> {
    let s = &mut app.scenarios;
    let key = s.current().map(|c| c.key.clone());
    s.with_tests = !s.with_tests;
    if let Some(key) = key {
        s.select(&key);
    }
    Vec::new()
}

fn clear(app: &mut App) -> Vec<Effect> {
    let s = &mut app.scenarios;
    if s.filter.is_empty() {
        return Vec::new();
    }
    let key = s.current().map(|c| c.key.clone());
    s.filter.clear();
    if !key.is_some_and(|k| s.select(&k)) {
        return selected(app);
    }
    Vec::new()
}

/// Handles a new filter for the list. The previously selected scenario is selected again as soon as
/// it passes the filter.
pub(super) fn filter(app: &mut App, text: &str) -> Vec<Effect> {
    let s = &mut app.scenarios;
    let before = s.current().map(|c| c.key.clone());
    s.filter = text.to_owned();
    // While the user is typing, only the filter decides.
    s.held = None;
    let best = s
        .rows()
        .first()
        .map(|&i| Match::of(&s.sources[i].name, text));
    let stays = [s.anchor.clone(), before.clone()]
        .into_iter()
        .flatten()
        .any(|key| s.select(&key) && s.current().map(|c| Match::of(&c.name, text)) == best);
    if !stays {
        s.cursor.at = 0;
    }
    s.hold();
    if s.held == before {
        return Vec::new();
    }
    selected(app)
}

fn edit(app: &mut App) {
    let Some(option) = app.scenarios.option() else {
        return;
    };
    let value = app.scenarios.value(option).unwrap_or_default().to_owned();
    let mut prompt = Prompt::new(Asks::Option(option), value);
    // All values are offered until something is typed.
    prompt.completions = options::candidates(options::all()[option], Some(&prompt.before));
    // A rejected value is more often corrected than replaced.
    if let Some(refused) = app.scenarios.refused_value(option) {
        prompt.line = Line::new(refused);
    }
    app.prompt = Some(prompt);
}

/// Accepts the edited value.
pub(super) fn accept(app: &mut App, option: usize, text: &str) -> Vec<Effect> {
    let text = text.trim();
    // The value is known to be invalid, so the previous value stays in effect and the text stays
    // next to it.
    if app.scenarios.refused_value(option) == Some(text) {
        return app.predict();
    }
    let value = (!text.is_empty()).then(|| text.to_owned());
    app.scenarios.set(option, value);
    app.predict()
}

/// Steps to the previous or the next value.
fn step(app: &mut App, forward: bool) -> Vec<Effect> {
    let Some(option) = app.scenarios.option() else {
        return Vec::new();
    };
    let info = options::all()[option];
    // Stepping continues from the rejected value and skips invalid ones.
    let from = app.scenarios.refused_value(option);
    let from = from.or_else(|| app.scenarios.value(option));
    let Some(next) = options::neighbour(info, from, forward) else {
        return Vec::new();
    };
    app.scenarios.set(option, Some(next));
    app.predict()
}

/// Simulates the selected scenario and shows the timeline.
pub(super) fn simulate(app: &mut App) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    app.view = View::Timeline;
    app.start(Task::Simulate(setup))
}
