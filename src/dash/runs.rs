//! Runs of this session and of the store.

use super::app::{App, Purpose, Tone, View};
use super::confirm::Question;
use super::cursor::Cursor;
use super::event::{Effect, Runs, StoredRun, Task};
use super::fields;
use super::judge;
use super::keys::Command;
use super::lanes::Lanes;
use super::names::changes;
use super::prompt::{Asks, Prompt};
use super::query::{Fields, Query, rank};
use super::timeline::Timeline;
use shardlab_plan::units::Bytes;
use shardlab_reports::RunView;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// A run of this session, or an opened one.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The run.
    pub lanes: Arc<Lanes>,
    /// Id in the store, if it was opened from there.
    pub stored: Option<String>,
    /// Number in this session, starting at 1.
    pub number: u32,
}

impl Kept {
    /// Returns the name in this session: `#2`.
    #[must_use]
    pub fn called(&self) -> String {
        format!("#{}", self.number)
    }

    /// Returns the name in lists and titles: `#2 exec llama-tiny`.
    #[must_use]
    pub fn label(&self) -> String {
        let view = &self.lanes.view;
        format!("#{} {} {}", self.number, view.kind(), view.scenario.name)
    }
}

/// State of the runs view.
#[derive(Debug, Default)]
pub struct RunsView {
    /// Open runs, in order.
    pub kept: Vec<Kept>,
    /// Runs of the store, newest first.
    pub stored: Vec<StoredRun>,
    /// Keys of all their fields. They are collected when the runs are listed, because there may be
    /// thousands of runs, and filters need the keys on every keystroke.
    pub stored_keys: BTreeSet<String>,
    /// Reason why the store cannot be read.
    pub store_error: Option<String>,
    /// Selected row.
    pub cursor: Cursor,
    /// Filter.
    pub filter: String,
    /// Numbers of the marked runs, in order of marking.
    pub marked: Vec<u32>,
    /// Index into [`COLUMNS`] of the column to sort by.
    pub sort: usize,
    /// Whether the order is reversed.
    pub reversed: bool,
    /// Id of the saved run that is being named or removed.
    pub subject: Option<String>,
}

/// A row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// An open run.
    Kept(usize),
    /// A run of the store.
    Stored(usize),
}

/// Columns that the list can be sorted by, with the field of a [`Listed`] that each shows. The
/// first is the default order: open runs, then those of the store, newest first.
pub const COLUMNS: [(&str, &str); 7] = [
    ("run", ""),
    ("kind", "kind"),
    ("scenario", "scenario"),
    ("saved", "created"),
    ("step ms", "step"),
    ("alloc", "alloc"),
    ("loss", "loss"),
];

/// Fields in addition to those of the store and the options.
pub const FIELDS: [&str; 3] = ["step", "alloc", "loss"];

/// A run as shown by the list.
#[derive(Clone, Copy, Debug)]
pub enum Listed<'a> {
    /// An open run.
    Kept(&'a Kept),
    /// A run in the store.
    Stored(&'a StoredRun),
}

impl Listed<'_> {
    /// Returns the name of the run in the list: its number in this session, its name, or the end of
    /// its id.
    #[must_use]
    pub fn called(self) -> String {
        match self {
            Self::Kept(k) => k.called(),
            Self::Stored(s) => match &s.name {
                Some(name) => name.clone(),
                None => s.tail().to_owned(),
            },
        }
    }

    /// Returns the median step time, milliseconds.
    #[must_use]
    pub fn step_ms(self) -> f64 {
        match self {
            Self::Kept(k) => k.lanes.view.step_ms(),
            Self::Stored(s) => s.step_ms,
        }
    }

    /// Returns the peak of allocated bytes.
    #[must_use]
    pub fn allocated(self) -> Bytes {
        match self {
            Self::Kept(k) => k.lanes.view.run.memory.peak_allocated,
            Self::Stored(s) => Bytes(s.allocated),
        }
    }

    /// Returns the last loss.
    #[must_use]
    pub fn loss(self) -> Option<f64> {
        match self {
            Self::Kept(k) => k.lanes.view.run.losses.last().copied(),
            Self::Stored(s) => s.loss,
        }
    }

    /// Returns the changes to its scenario, without sections.
    #[must_use]
    pub fn changes(self) -> String {
        match self {
            Self::Kept(k) => changes(&k.lanes.view.scenario.overrides),
            Self::Stored(s) => s.changes.clone(),
        }
    }

    /// Returns the id in the store, if it is in one.
    #[must_use]
    pub fn id(self) -> Option<String> {
        match self {
            Self::Kept(k) => k.stored.clone(),
            Self::Stored(s) => Some(s.id.clone()),
        }
    }
}

impl Fields for Listed<'_> {
    fn text(&self) -> String {
        let field = |name| self.field(name).unwrap_or_default();
        let (kind, scenario, id) = (field("kind"), field("scenario"), field("id"));
        format!(
            "{} {id} {kind} {scenario} {}",
            self.called(),
            self.changes()
        )
    }

    fn field(&self, name: &str) -> Option<String> {
        match name {
            "step" => Some(self.step_ms().to_string()),
            "alloc" => Some(self.allocated().gib().to_string()),
            "loss" => self.loss().map(|l| l.to_string()),
            "id" => self.id(),
            _ => fields::find(name, |key| match self {
                Self::Kept(k) => k.lanes.view.field(key),
                Self::Stored(s) => s.fields.get(key).cloned(),
            }),
        }
    }
}

impl RunsView {
    /// Returns the rows that pass the filter: open runs, newest first, then those of the store.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let query = Query::parse(&self.filter);
        let mut rows = self.all();
        rows.retain(|r| query.keeps(&self.of(*r)));
        if let Some((_, field)) = self.sort.checked_sub(1).and(COLUMNS.get(self.sort)) {
            // Runs without a value come last.
            let key = |r: &Row| match self.of(*r).field(field) {
                Some(text) => (false, rank(&text)),
                None => (true, rank("")),
            };
            rows.sort_by_cached_key(key);
        }
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// Returns all rows in the order of the list: open runs, newest first, then those of the store
    /// that are not open.
    #[must_use]
    pub fn all(&self) -> Vec<Row> {
        let opened = |id: &str| self.kept.iter().any(|k| k.stored.as_deref() == Some(id));
        let kept = (0..self.kept.len()).rev().map(Row::Kept);
        let stored = (0..self.stored.len()).filter(|&i| !opened(&self.stored[i].id));
        kept.chain(stored.map(Row::Stored)).collect()
    }

    /// Returns the run of a row.
    #[must_use]
    pub fn of(&self, row: Row) -> Listed<'_> {
        match row {
            Row::Kept(i) => Listed::Kept(&self.kept[i]),
            Row::Stored(i) => Listed::Stored(&self.stored[i]),
        }
    }

    /// Returns all runs, open and saved.
    pub(super) fn listed(&self) -> impl Iterator<Item = Listed<'_>> {
        self.all().into_iter().map(|r| self.of(r))
    }

    /// Returns the store's entry of a run, open or not, if it has one.
    #[must_use]
    pub fn stored(&self, run: Listed<'_>) -> Option<&StoredRun> {
        let id = run.id()?;
        self.stored.iter().find(|s| s.id == id)
    }

    /// Replaces the list of saved runs.
    pub(super) fn list(&mut self, stored: Vec<StoredRun>) {
        // Most runs have the same keys, so only one copy of each key is made.
        let keys: HashSet<&String> = stored.iter().flat_map(|s| s.fields.keys()).collect();
        self.stored_keys = keys.into_iter().cloned().collect();
        self.stored = stored;
    }

    /// Removes the run with this id from the list. Its keys remain known until the store is listed
    /// again.
    pub(super) fn forget(&mut self, id: &str) {
        self.stored.retain(|s| s.id != id);
        for kept in &mut self.kept {
            kept.stored.take_if(|s| s == id);
        }
        let len = self.rows().len();
        self.cursor.clamp(len);
    }

    /// Adds an open run and returns its number.
    pub(super) fn keep(&mut self, lanes: Arc<Lanes>, stored: Option<String>) -> u32 {
        let number = self.kept.last().map_or(1, |k| k.number + 1);
        self.kept.push(Kept {
            lanes,
            stored,
            number,
        });
        number
    }

    /// Returns an open run by its number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Kept> {
        self.kept.iter().find(|k| k.number == number)
    }

    /// Returns the runs to compare, base first: the marked ones, or the last two.
    #[must_use]
    pub(crate) fn to_compare(&self) -> Vec<(String, Arc<RunView>)> {
        let view = |k: &Kept| (k.called(), Arc::clone(&k.lanes.view));
        if self.marked.len() >= 2 {
            return self
                .marked
                .iter()
                .filter_map(|n| self.get(*n))
                .map(view)
                .collect();
        }
        let last = self.kept.len().saturating_sub(2);
        self.kept[last..].iter().map(view).collect()
    }

    /// Shows the first two marked runs, or the last two, above each other.
    pub(super) fn pair_marked(&self, timeline: &mut Timeline) {
        let numbers: Vec<u32> = if self.marked.len() >= 2 {
            self.marked.clone()
        } else {
            self.kept
                .iter()
                .rev()
                .take(2)
                .rev()
                .map(|k| k.number)
                .collect()
        };
        if let [a, b, ..] = numbers[..]
            && let (Some(a), Some(b)) = (self.get(a), self.get(b))
        {
            timeline.open(Arc::clone(&a.lanes));
            timeline.other = Some(Arc::clone(&b.lanes));
        }
    }

    /// Returns the newest run of the other kind with the same program: the prediction of a
    /// measurement, or the reverse.
    #[must_use]
    pub fn counterpart(&self, lanes: &Lanes) -> Option<Arc<Lanes>> {
        let measured = lanes.view.run.kind.is_measured();
        let fits = |k: &&Kept| {
            k.lanes.view.run.kind.is_measured() != measured
                && k.lanes.view.program.digest == lanes.view.program.digest
        };
        self.kept
            .iter()
            .rev()
            .find(fits)
            .map(|k| Arc::clone(&k.lanes))
    }
}

/// Handles a command in the runs view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    let rows = app.runs.rows();
    let selected = rows.get(app.runs.cursor.at).copied();
    match command {
        Command::Enter => match selected {
            Some(Row::Kept(i)) => {
                let lanes = Arc::clone(&app.runs.kept[i].lanes);
                show(app, lanes);
            }
            Some(Row::Stored(i)) => {
                let id = app.runs.stored[i].id.clone();
                return app.start(Task::Open { id, mark: false });
            }
            None => {}
        },
        Command::Mark => match selected {
            Some(Row::Kept(i)) => {
                let number = app.runs.kept[i].number;
                let marked = &mut app.runs.marked;
                match marked.iter().position(|n| *n == number) {
                    Some(at) => {
                        marked.remove(at);
                    }
                    None => marked.push(number),
                }
                app.runs.cursor.go(Command::Down, rows.len());
            }
            Some(Row::Stored(i)) => {
                // Only open runs can be compared.
                let id = app.runs.stored[i].id.clone();
                return app.start(Task::Open { id, mark: true });
            }
            None => {}
        },
        Command::Compare => return super::compare::compare(app),
        Command::Filter => {
            let text = app.runs.filter.clone();
            app.prompt = Some(Prompt::replacing(Asks::FilterRuns, text));
            return super::update::filter(app, Asks::FilterRuns, "");
        }
        Command::Back => app.runs.filter.clear(),
        Command::Keep => {
            if let Some(Row::Kept(i)) = selected {
                let number = app.runs.kept[i].number;
                return keep(app, number);
            }
        }
        Command::Sort => app.runs.sort = (app.runs.sort + 1) % COLUMNS.len(),
        Command::SortBack => app.runs.sort = (app.runs.sort + COLUMNS.len() - 1) % COLUMNS.len(),
        Command::Reverse => app.runs.reversed = !app.runs.reversed,
        Command::Name | Command::Remove => {
            let Some(row) = selected else {
                return Vec::new();
            };
            let run = app.runs.of(row);
            let Some(id) = run.id() else {
                let text = format!("{} is not in the store; K saves it", run.called());
                app.say(Tone::Plain, text);
                return Vec::new();
            };
            let stored = app.runs.stored(run);
            let name = stored.and_then(|s| s.name.clone());
            if command == Command::Remove
                && let (Some(stored), Some(name)) = (stored, &name)
            {
                let spared = judge::spared(stored.tail(), name);
                let text = format!("{spared}; e and an empty line remove the name");
                app.say(Tone::Plain, text);
                return Vec::new();
            }
            app.runs.subject = Some(id);
            if command == Command::Remove {
                app.question = Some(Question::Remove);
            } else {
                app.prompt = Some(Prompt::new(Asks::RunName, name.unwrap_or_default()));
            }
        }
        Command::Reload => return app.start(Task::ListStore),
        other => {
            app.runs.cursor.go(other, rows.len());
        }
    }
    Vec::new()
}

/// Accepts a name for a saved run from the prompt. An empty name removes the current one.
pub(super) fn named(app: &mut App, text: &str, before: &str) -> Vec<Effect> {
    let name = text.trim();
    match app.runs.subject.take() {
        Some(id) if name != before => {
            let name = (!name.is_empty()).then(|| name.to_owned());
            app.start(Task::Name { id, name })
        }
        _ => Vec::new(),
    }
}

/// Saves a run in the store unless it is already there.
pub(super) fn keep(app: &mut App, number: u32) -> Vec<Effect> {
    let Some(kept) = app.runs.get(number) else {
        return Vec::new();
    };
    if let Some(id) = &kept.stored {
        let text = format!("{} is already in the store, as {id}", kept.label());
        app.say(Tone::Plain, text);
        return Vec::new();
    }
    let run = Arc::clone(&kept.lanes.view);
    let of = kept.called();
    let mut jobs = app.jobs.values();
    if jobs.any(|j| j.purpose == Purpose::Keep && j.of == of) {
        return Vec::new();
    }
    app.start(Task::Keep(number, Runs(vec![(of, run)])))
}

/// Shows the timeline of a run with its counterpart below it.
pub(super) fn show(app: &mut App, lanes: Arc<Lanes>) {
    let other = app.runs.counterpart(&lanes);
    // The prediction is above the measurement.
    let (first, second) = match (lanes.view.run.kind.is_measured(), other) {
        (true, Some(sim)) => (sim, Some(lanes)),
        (_, other) => (lanes, other),
    };
    app.timeline.open(first);
    app.timeline.other = second;
    app.view = View::Timeline;
}

/// Adds a run that was made or opened, and returns its number. A run that is already open keeps its
/// number.
pub(super) fn arrived(
    app: &mut App,
    lanes: Arc<Lanes>,
    stored: Option<String>,
    shown: bool,
) -> u32 {
    let mut kept = app.runs.kept.iter();
    let known = kept.find(|k| stored.is_some() && k.stored == stored);
    let number = match known {
        Some(known) => known.number,
        None => app.runs.keep(Arc::clone(&lanes), stored),
    };
    let label = app.runs.get(number).map(Kept::label).unwrap_or_default();
    if shown {
        show(app, lanes);
    }
    app.say(
        Tone::Good,
        format!("{label} finished (press 5 for all runs)"),
    );
    number
}

/// Records that a run has been saved under this id, and lists the store again.
pub(super) fn saved(app: &mut App, number: u32, id: String) -> Vec<Effect> {
    app.say(Tone::Good, format!("run #{number} saved as {id}"));
    if let Some(kept) = app.runs.kept.iter_mut().find(|k| k.number == number) {
        kept.stored = Some(id);
    }
    app.start(Task::ListStore)
}
