//! The sweep: a table that grows as points are predicted.

use super::app::{App, Purpose, Tone, View};
use super::cursor::Cursor;
use super::event::{Effect, Setup, Task};
use super::export;
use super::glance::{Brief, Named};
use super::keys::Command;
use super::options;
use super::prompt::{Asks, Prompt};
use super::query::{Query, rank};
use crate::analysis::pareto;
use crate::cli::option_of;
use shardlab_plan::scenario::{BatchUnit, check_axis};
use std::cell::RefCell;

/// Columns after the axes, with the field of a [`Brief`] that each is sorted by.
pub const COLUMNS: [(&str, &str); 8] = [
    ("step ms", "step"),
    (BatchUnit::Tokens.column(), "tokens"),
    ("MFU %", "mfu"),
    ("exposed", "exposed"),
    ("alloc GiB", "alloc"),
    ("resv GiB", "resv"),
    ("dev GiB", "device"),
    ("fits", "fits"),
];

/// A point.
#[derive(Clone, Debug)]
pub struct Point {
    /// Index in the order of the axes.
    pub index: usize,
    /// Value on each axis.
    pub settings: Vec<String>,
    /// Numbers, or the reason why there are none.
    pub result: Result<Brief, String>,
}

/// State of the sweep view.
#[derive(Debug, Default)]
pub struct SweepView {
    /// Scenario of the sweep.
    pub setup: Option<Setup>,
    /// Axes that were added in the dashboard, `section.key=[v1, v2]`.
    pub axes: Vec<String>,
    /// Keys of all axes of the current sweep.
    pub keys: Vec<String>,
    /// Number of points.
    pub total: usize,
    /// Points that have been predicted, with their index.
    pub points: Vec<Point>,
    /// Selected row.
    pub cursor: Cursor,
    /// Filter.
    pub filter: String,
    /// Column to sort by: 0 is the order of the axes, followed by the axes and [`COLUMNS`].
    pub sort: usize,
    /// Whether the order is reversed.
    pub reversed: bool,
    /// Whether to show only the Pareto front.
    pub front_only: bool,
    /// Reason why the sweep is impossible.
    pub error: Option<String>,
    /// Columns that fit in the last drawing, numbered like [`Self::sort`].
    pub(super) drawn: RefCell<Vec<usize>>,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index into the predicted points.
    pub point: usize,
    /// Whether the point is on the Pareto front of time and memory.
    pub front: bool,
}

impl SweepView {
    /// Returns the number of sortable columns.
    #[must_use]
    pub fn columns(&self) -> usize {
        1 + self.keys.len() + COLUMNS.len()
    }

    /// Returns the visible sort column after or before the current one.
    fn next_sort(&self, forward: bool) -> usize {
        let drawn = self.drawn.borrow();
        let all = if drawn.is_empty() {
            (0..self.columns()).collect()
        } else {
            let mut all = vec![0];
            all.extend(drawn.iter());
            all
        };
        // The current column may be hidden if the terminal has become narrower.
        let after = all.iter().find(|c| **c > self.sort).unwrap_or(&all[0]);
        let before = all.iter().rfind(|c| **c < self.sort);
        let before = before.or(all.last()).unwrap_or(after);
        *if forward { after } else { before }
    }

    /// Returns the unit of the points' batches.
    #[must_use]
    pub fn counted_in(&self) -> BatchUnit {
        let briefs = self.points.iter().filter_map(|p| p.result.as_ref().ok());
        BatchUnit::common(briefs.map(|b| b.counted_in))
    }

    /// Returns the title of a column of [`COLUMNS`].
    #[must_use]
    pub fn title(&self, column: usize) -> &'static str {
        match COLUMNS[column] {
            (_, "tokens") => self.counted_in().column(),
            (title, _) => title,
        }
    }

    /// Returns whether each point is on the front of step time (per token) and reserved memory,
    /// among those that fit.
    fn front(&self) -> Vec<bool> {
        let points: Vec<pareto::Point> = self
            .points
            .iter()
            .map(|p| match &p.result {
                Ok(b) if b.fits != "no" => pareto::Point {
                    // Time per token allows points with different batches to share a front.
                    time: 1.0 / b.tokens_per_s,
                    memory: b.reserved.0 as f64,
                    changes: 0,
                },
                _ => pareto::Point::OUT,
            })
            .collect();
        let bases = self.points.iter().filter_map(|p| p.result.as_ref().ok());
        pareto::front(
            &points,
            pareto::Tolerance::of_bases(bases.map(|b| b.basis.as_deref())),
        )
    }

    /// Returns the rows to show.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let query = Query::parse(&self.filter);
        let front = self.front();
        let mut rows: Vec<Row> = (0..self.points.len())
            .map(|point| Row {
                point,
                front: front[point],
            })
            .filter(|r| !self.front_only || r.front)
            .filter(|r| self.keeps(&query, *r))
            .collect();
        if let Some(column) = self.sort.checked_sub(1) {
            // Each sort key is computed only once, because tables with thousands of rows are sorted
            // for every frame.
            rows.sort_by_cached_key(|r| self.sort_key(&self.points[r.point], column));
        }
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// Returns the value of an axis, given its key or the end of its key.
    fn setting(&self, point: &Point, field: &str) -> Option<String> {
        let named = |key: &str| key == field || option_of(key) == field;
        let at = self.keys.iter().position(|k| named(k))?;
        point.settings.get(at).cloned()
    }

    /// Returns a field of a point for filters, except the front.
    pub(super) fn field(&self, point: &Point, name: &str) -> Option<String> {
        let brief = || point.result.as_ref().ok()?.field(name);
        self.setting(point, name).or_else(brief)
    }

    fn keeps(&self, query: &Query, row: Row) -> bool {
        let point = &self.points[row.point];
        query.keeps(&Named {
            text: point.settings.join(" "),
            brief: point.result.as_ref().ok(),
            more: &|field| match field {
                "front" => Some(if row.front { "yes" } else { "no" }.to_owned()),
                field => self.setting(point, field),
            },
        })
    }

    /// Returns a sort key. Failed points come last; numbers come before text, by size.
    fn sort_key(&self, point: &Point, column: usize) -> (u8, u64, String) {
        let text = match column.checked_sub(self.keys.len()) {
            None => point.settings.get(column).cloned(),
            Some(c) => match &point.result {
                Ok(brief) => COLUMNS.get(c).and_then(|(_, field)| brief.field(field)),
                Err(_) => return (2, 0, String::new()),
            },
        }
        .unwrap_or_default();
        rank(&text)
    }

    pub(super) fn point(
        &mut self,
        index: usize,
        settings: Vec<String>,
        result: Result<Brief, String>,
    ) {
        let at = self.points.partition_point(|p| p.index < index);
        self.points.insert(
            at,
            Point {
                index,
                settings,
                result,
            },
        );
    }
}

/// Handles a command in the sweep view.
pub(super) fn command(app: &mut App, command: Command) -> Vec<Effect> {
    let s = &mut app.sweep;
    match command {
        Command::Sweep => return run(app),
        Command::Add => app.prompt = Some(Prompt::new(Asks::Axis, "")),
        Command::Remove => {
            if let Some(axis) = s.axes.pop() {
                app.say(Tone::Plain, format!("removed {axis}; w sweeps again"));
            }
        }
        Command::Sort => s.sort = s.next_sort(true),
        Command::SortBack => s.sort = s.next_sort(false),
        Command::Reverse => s.reversed = !s.reversed,
        Command::Front => s.front_only = !s.front_only,
        Command::Filter => {
            let text = s.filter.clone();
            app.prompt = Some(Prompt::replacing(Asks::FilterSweep, text));
            return super::update::filter(app, Asks::FilterSweep, "");
        }
        Command::Back => {
            if app.running(Purpose::Sweep).is_some() {
                return app.cancel(Purpose::Sweep);
            }
            app.sweep.filter.clear();
        }
        Command::Enter => return apply(app),
        Command::Copy => {
            let setup = selected(app);
            return export::copy(app, setup);
        }
        Command::Write => {
            let setup = selected(app);
            export::ask(app, setup);
        }
        other => {
            let len = s.rows().len();
            s.cursor.go(other, len);
        }
    }
    Vec::new()
}

/// Sweeps the selected scenario.
pub(super) fn run(app: &mut App) -> Vec<Effect> {
    let Some(setup) = app.wanted() else {
        return Vec::new();
    };
    app.view = View::Sweep;
    let s = &mut app.sweep;
    s.setup = Some(setup.clone());
    s.error = None;
    s.points.clear();
    s.keys.clear();
    s.total = 0;
    s.cursor.at = 0;
    let axes = s.axes.clone();
    app.start(Task::Sweep { setup, axes })
}

/// Turns the selected option into an axis over the values that the editor offers.
pub(super) fn add_option(app: &mut App) {
    let Some(option) = app.scenarios.option() else {
        return;
    };
    let info = options::all()[option];
    let path = options::path(info);
    let literal = |v: &String| {
        let plain =
            v.parse::<f64>().is_ok() || v == "true" || v == "false" || v.starts_with(['[', '{']);
        if plain { v.clone() } else { format!("{v:?}") }
    };
    const MAX_CHOICES: usize = 5;
    let values: Vec<String> = options::candidates(info, app.scenarios.value(option))
        .iter()
        .filter(|v| !v.starts_with('{'))
        .take(MAX_CHOICES)
        .map(literal)
        .collect();
    app.prompt = Some(Prompt::new(
        Asks::Axis,
        format!("{path}=[{}]", values.join(", ")),
    ));
}

/// Accepts an axis from the prompt.
///
/// # Errors
/// Returns the message of `shardlab sweep` for an invalid axis.
pub(super) fn accept(app: &mut App, text: &str) -> Result<(), String> {
    let key = |axis: &str| axis.split('=').next().unwrap_or_default().trim().to_owned();
    let text = text.trim();
    if text.is_empty() {
        return Ok(());
    }
    check_axis(text).map_err(|e| e.to_string())?;
    app.sweep.axes.retain(|a| key(a) != key(text));
    app.sweep.axes.push(text.to_owned());
    app.say(
        Tone::Plain,
        match app.sweep.axes.len() {
            1 => "1 axis added; press w to run".to_owned(),
            n => format!("{n} axes added; press w to run"),
        },
    );
    Ok(())
}

/// Returns the scenario at the selected point.
fn selected(app: &App) -> Option<Setup> {
    let rows = app.sweep.rows();
    let point = &app.sweep.points[rows.get(app.sweep.cursor.at)?.point];
    let setup = app.sweep.setup.clone()?;
    let axes = app.sweep.keys.iter().zip(&point.settings);
    // The value of an axis overrides an earlier change.
    let own = |set: &String| {
        !app.sweep
            .keys
            .iter()
            .any(|k| set.split('=').next() == Some(k))
    };
    let overrides = setup.overrides.iter().filter(|s| own(s)).cloned();
    Some(Setup {
        overrides: overrides
            .chain(axes.map(|(k, v)| format!("{k}={v}")))
            .collect(),
        path: setup.path,
    })
}

/// Applies the settings of the selected point to the options of the scenario.
fn apply(app: &mut App) -> Vec<Effect> {
    let rows = app.sweep.rows();
    let (Some(row), Some(setup)) = (rows.get(app.sweep.cursor.at), app.sweep.setup.clone()) else {
        return Vec::new();
    };
    let point = &app.sweep.points[row.point];
    if let Err(reason) = &point.result {
        let text = format!("that point is not possible: {reason}");
        app.say(Tone::Bad, text);
        return Vec::new();
    }
    let settings: Vec<(String, String)> = app
        .sweep
        .keys
        .iter()
        .cloned()
        .zip(point.settings.iter().cloned())
        .collect();
    let source = app.scenarios.sources.iter().find(|s| s.path == setup.path);
    let Some(key) = source.map(|s| s.key.clone()) else {
        return Vec::new();
    };
    app.scenarios.filter.clear();
    app.scenarios.select(&key);
    app.scenarios.set_all(settings);
    app.view = View::Scenarios;
    app.scenarios.pane = super::scenarios::Pane::Options;
    app.say(Tone::Good, "settings taken over");
    super::scenarios::selected(app)
}
