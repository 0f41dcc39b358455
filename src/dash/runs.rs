//! Runs: those of this session, and those of the store.

use super::app::{App, Purpose, Tone, View};
use super::cursor::Cursor;
use super::event::{Effect, Runs, StoredRun, Task};
use super::keys::Command;
use super::lanes::Lanes;
use super::prompt::{Asks, Prompt};
use super::query::{Fields, Query};
use super::timeline::Timeline;
use shardlab_plan::record::RunKind;
use shardlab_reports::RunView;
use std::sync::Arc;

/// A run of this session, or one that was opened.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The run.
    pub lanes: Arc<Lanes>,
    /// Its id in the store, where it came from there.
    pub stored: Option<String>,
    /// Its number in this session, from 1.
    pub number: u32,
}

impl Kept {
    /// What this session calls it: `#2`.
    #[must_use]
    pub fn called(&self) -> String {
        format!("#{}", self.number)
    }

    /// How lists and titles call it: `#2 exec llama-tiny`.
    #[must_use]
    pub fn label(&self) -> String {
        let view = &self.lanes.view;
        format!("#{} {} {}", self.number, view.kind(), view.scenario.name)
    }
}

/// State of the runs view.
#[derive(Debug, Default)]
pub struct RunsView {
    /// Runs at hand, in order.
    pub kept: Vec<Kept>,
    /// Runs of the store, newest first.
    pub stored: Vec<StoredRun>,
    /// Why the store cannot be read.
    pub store_error: Option<String>,
    /// Selected row.
    pub cursor: Cursor,
    /// Filter.
    pub filter: String,
    /// Numbers of the marked runs, in order of marking.
    pub marked: Vec<u32>,
}

/// A row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// A run at hand.
    Kept(usize),
    /// A run of the store.
    Stored(usize),
}

struct Item {
    text: String,
    kind: String,
    step_ms: f64,
    gib: f64,
    loss: Option<f64>,
}

impl Fields for Item {
    fn text(&self) -> String {
        self.text.clone()
    }

    fn field(&self, name: &str) -> Option<String> {
        match name {
            "kind" => Some(self.kind.clone()),
            "step" => Some(self.step_ms.to_string()),
            "alloc" => Some(self.gib.to_string()),
            "loss" => self.loss.map(|l| l.to_string()),
            _ => None,
        }
    }
}

fn of_view(view: &RunView) -> Item {
    Item {
        text: format!(
            "{} {} {}",
            view.scenario.name,
            view.kind(),
            view.scenario.overrides.join(" ")
        ),
        kind: view.kind().to_owned(),
        step_ms: view.step_ms(),
        gib: view.run.memory.peak_allocated.gib(),
        loss: view.run.losses.last().copied(),
    }
}

fn of_stored(run: &StoredRun) -> Item {
    Item {
        text: format!("{} {} {} {}", run.id, run.scenario, run.kind, run.changes),
        kind: run.kind.clone(),
        step_ms: run.step_ms,
        gib: run.allocated as f64 / (1u64 << 30) as f64,
        loss: run.loss,
    }
}

impl RunsView {
    /// Rows that the filter keeps: runs at hand, newest first, then the store's.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let query = Query::parse(&self.filter);
        let opened = |id: &str| self.kept.iter().any(|k| k.stored.as_deref() == Some(id));
        let kept = (0..self.kept.len())
            .rev()
            .filter(|&i| query.keeps(&of_view(&self.kept[i].lanes.view)))
            .map(Row::Kept);
        let stored = (0..self.stored.len())
            .filter(|&i| !opened(&self.stored[i].id) && query.keeps(&of_stored(&self.stored[i])))
            .map(Row::Stored);
        kept.chain(stored).collect()
    }

    /// Keeps a run.
    pub(super) fn keep(&mut self, lanes: Arc<Lanes>, stored: Option<String>) -> u32 {
        let number = self.kept.last().map_or(1, |k| k.number + 1);
        self.kept.push(Kept {
            lanes,
            stored,
            number,
        });
        number
    }

    /// A run at hand by its number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Kept> {
        self.kept.iter().find(|k| k.number == number)
    }

    /// The runs to compare: the marked ones, or the last two; the base first.
    #[must_use]
    pub fn to_compare(&self) -> Vec<(String, Arc<RunView>)> {
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

    /// Shows the first two marked runs, or the last two, one above the other.
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

    /// The newest run of the other kind and the same program: what was predicted for what was measured, or the reverse.
    #[must_use]
    pub fn counterpart(&self, lanes: &Lanes) -> Option<Arc<Lanes>> {
        let other = match lanes.view.run.kind {
            RunKind::Sim => RunKind::Exec,
            RunKind::Exec => RunKind::Sim,
        };
        let fits = |k: &&Kept| {
            k.lanes.view.run.kind == other
                && k.lanes.view.program.digest == lanes.view.program.digest
        };
        self.kept
            .iter()
            .rev()
            .find(fits)
            .map(|k| Arc::clone(&k.lanes))
    }
}

/// A key in the runs view.
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
                // A run has to be at hand to be compared.
                let id = app.runs.stored[i].id.clone();
                return app.start(Task::Open { id, mark: true });
            }
            None => {}
        },
        Command::Compare => return super::compare::compare(app),
        Command::Filter => {
            let text = app.runs.filter.clone();
            app.prompt = Some(Prompt::anew(Asks::FilterRuns, text));
            return super::update::filter(app, Asks::FilterRuns, "");
        }
        Command::Back => app.runs.filter.clear(),
        Command::Keep => {
            if let Some(Row::Kept(i)) = selected {
                let number = app.runs.kept[i].number;
                return keep(app, number);
            }
        }
        Command::Reload => return app.start(Task::ListStore),
        other => {
            app.runs.cursor.go(other, rows.len());
        }
    }
    Vec::new()
}

/// Keeps a run in the store, if it is not there yet.
pub(super) fn keep(app: &mut App, number: u32) -> Vec<Effect> {
    let Some(kept) = app.runs.get(number) else {
        return Vec::new();
    };
    if let Some(id) = &kept.stored {
        let text = format!("{} is in the store already, as {id}", kept.label());
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

/// Shows a run's timeline, with its counterpart below it.
pub(super) fn show(app: &mut App, lanes: Arc<Lanes>) {
    let other = app.runs.counterpart(&lanes);
    // What was predicted lies above what was measured.
    let (first, second) = match (lanes.view.run.kind, other) {
        (RunKind::Exec, Some(sim)) => (sim, Some(lanes)),
        (_, other) => (lanes, other),
    };
    app.timeline.open(first);
    app.timeline.other = second;
    app.view = View::Timeline;
}

/// A run has come; its number. One that is at hand already stays the one that it is.
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
        format!("{label} is there; view 5 lists all runs"),
    );
    number
}
