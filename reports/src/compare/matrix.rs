//! A matrix of several runs: options and metrics, with marks for the best values and for the Pareto
//! front of time and memory.

use super::comparable::Comparable;
use super::ties::{self, Point};
use crate::tolerance::Tolerance;
use crate::view::{Difference, RunView, ScenarioView, differences};
use serde::Serialize;
use shardlab_plan::ir::ParameterCount;
use shardlab_plan::record::float;
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::{ByteUnit, Bytes, signed, thousands};

/// Unit of a metric. It determines how values are shown, and when they rank runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Time of a step or a part of it, milliseconds.
    StepTime,
    /// Tokens (or the model's batch unit) per second and GPU.
    Throughput,
    /// Percent.
    Percent,
    /// Memory, GiB; shown in a unit that suits all runs.
    Memory,
    /// A plain number.
    Count,
    /// A loss.
    Loss,
}

impl Unit {
    /// Returns the number of decimals to show.
    pub(crate) const fn decimals(self) -> usize {
        match self {
            Self::Throughput | Self::Count => 0,
            Self::Percent => 1,
            Self::StepTime | Self::Memory => 2,
            Self::Loss => 4,
        }
    }

    /// Returns whether a run's value competes. Values of runs that do not fit never compete; step
    /// times compete only if all steps do the same work.
    #[must_use]
    pub fn counts(self, fits: Option<bool>, same_tokens: bool) -> bool {
        fits != Some(false) && (self != Self::StepTime || same_tokens)
    }
}

/// A number that is compared across runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metric {
    /// Name with unit, as in JSON.
    pub name: &'static str,
    /// Title of a column.
    pub title: &'static str,
    /// Unit of the values.
    #[serde(skip)]
    pub unit: Unit,
    /// Whether smaller is better.
    pub smaller_is_better: bool,
    /// Number of decimals to show.
    pub decimals: usize,
    /// Value of each run; NaN if a run has none.
    #[serde(with = "float::list")]
    pub values: Vec<f64>,
}

impl Metric {
    /// Returns whether the second of two runs is better than the first; `None` if they tie or one
    /// has no value.
    #[must_use]
    pub fn improves(&self, tolerance: Tolerance) -> Option<bool> {
        let &[a, b] = self.values.as_slice() else {
            return None;
        };
        let (less, more) = (tolerance.less(b, a), tolerance.less(a, b));
        (less || more).then_some(less == self.smaller_is_better)
    }

    /// Returns the unit in which memory is shown, common to all runs.
    fn byte_unit(&self) -> Option<ByteUnit> {
        let known = self.values.iter().filter(|v| !v.is_nan());
        (self.unit == Unit::Memory)
            .then(|| ByteUnit::common(known.map(|v| Bytes((v * GIB) as u64))))
    }

    /// Returns a value in the unit in which it is shown, and its decimals.
    fn shown(&self, value: f64) -> (f64, usize) {
        match self.byte_unit() {
            Some(unit) => (value * unit.count(Bytes(1 << 30)), unit.decimals()),
            None => (value, self.decimals),
        }
    }

    /// Returns the title with its unit.
    #[must_use]
    pub fn heading(&self) -> String {
        match self.byte_unit() {
            Some(unit) => self.title.replace("GiB", unit.name()),
            None => self.title.to_owned(),
        }
    }

    /// Formats the value of a run.
    #[must_use]
    pub fn show(&self, run: usize) -> String {
        match self.values.get(run).map(|v| self.shown(*v)) {
            Some((v, decimals)) => thousands(v, decimals),
            None => "-".into(),
        }
    }

    /// Formats the difference between the second run and the first; `None` if one has no value.
    #[must_use]
    pub fn change(&self) -> Option<String> {
        let &[a, b] = self.values.as_slice() else {
            return None;
        };
        let (by, decimals) = self.shown(b - a);
        (!by.is_nan()).then(|| signed(by, decimals))
    }
}

const GIB: f64 = (1u64 << 30) as f64;

/// Returns bytes in GiB; NaN if they were not recorded.
fn gib(bytes: Option<Bytes>) -> f64 {
    bytes.map_or(f64::NAN, |b| b.0 as f64 / GIB)
}

/// Name, title, unit, whether smaller is better, and the value of a run.
type Column = (&'static str, &'static str, Unit, bool, fn(&RunView) -> f64);

const COLUMNS: [Column; 10] = [
    ("step_ms", "step ms", Unit::StepTime, true, RunView::step_ms),
    (
        "tokens_per_s_per_gpu",
        BatchUnit::Tokens.column(),
        Unit::Throughput,
        false,
        RunView::tokens_per_s,
    ),
    ("mfu_percent", "MFU %", Unit::Percent, false, |v| {
        match v.run.mfu {
            0.0 => f64::NAN,
            mfu => 100.0 * mfu,
        }
    }),
    ("exposed_ms", "exposed ms", Unit::StepTime, true, |v| {
        let known = v.is_recorded() || !v.run.exposed.is_empty();
        if known { v.exposed_ms() } else { f64::NAN }
    }),
    ("host_ms", "host ms", Unit::StepTime, true, |v| {
        match v.run.host.ms() {
            0.0 => f64::NAN,
            ms => ms,
        }
    }),
    ("allocated_gib", "alloc GiB", Unit::Memory, true, |v| {
        gib(v.run.memory.allocated())
    }),
    ("reserved_gib", "resv GiB", Unit::Memory, true, |v| {
        gib(v.run.memory.reserved())
    }),
    ("device_gib", "device GiB", Unit::Memory, true, |v| {
        gib(v.run.memory.device())
    }),
    ("allocator_retries", "retries", Unit::Count, true, |v| {
        f64::from(v.run.memory.retries)
    }),
    ("final_loss", "loss", Unit::Loss, true, |v| {
        v.run.losses.last().copied().unwrap_or(f64::NAN)
    }),
];

/// Returns the main numbers of some runs. Metrics that no run has are left out, and so are retries
/// if there are none.
pub(super) fn metrics(runs: &[&RunView]) -> Vec<Metric> {
    let counted_in = RunView::counted_in(runs.iter().copied());
    COLUMNS
        .iter()
        .map(|(name, title, unit, smaller_is_better, of)| Metric {
            name,
            title: match unit {
                Unit::Throughput => counted_in.column(),
                _ => title,
            },
            unit: *unit,
            smaller_is_better: *smaller_is_better,
            decimals: unit.decimals(),
            values: runs.iter().map(|run| of(run)).collect(),
        })
        .filter(|m| m.values.iter().any(|v| !v.is_nan()))
        .filter(|m| m.name != "allocator_retries" || m.values.iter().any(|v| *v > 0.0))
        .collect()
}

/// One run of a matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Name in this comparison.
    pub label: String,
    /// Scenario.
    pub scenario: String,
    /// `sim` or `exec`.
    pub kind: &'static str,
    /// Numbers of parameters, unless they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<ParameterCount>,
    /// Whether the run fits the device, if known.
    pub fits: Option<bool>,
    /// Whether the run is on the Pareto front of time per token and reserved memory, among the runs
    /// that fit. See [`ties::front`].
    pub on_front: bool,
}

/// Several runs, side by side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Matrix {
    /// The runs.
    pub rows: Vec<Row>,
    /// Whether they can be compared, and why. If the runs cannot be ranked, no run is the best and
    /// the front is empty.
    pub comparable: Comparable,
    /// Options that differ between runs, with their values.
    pub options: Vec<Difference>,
    /// Metrics.
    pub metrics: Vec<Metric>,
    /// Whether steps have the same number of tokens in all runs. If not, step times do not rank the
    /// runs.
    #[serde(skip)]
    pub same_tokens: bool,
    /// Unit of the batches.
    #[serde(skip)]
    pub counted_in: BatchUnit,
    /// Values closer than this count as equal.
    #[serde(skip)]
    pub tolerance: Tolerance,
    /// Values of each run that decide between tied runs.
    #[serde(skip)]
    points: Vec<Point>,
}

impl Matrix {
    /// Returns which run has the best value of a metric among those that fit. Among tied values,
    /// the run with the least reserved memory is the best, then the one with the fewest options
    /// that differ from the defaults. No run is marked if all values tie, or if the runs cannot be
    /// ranked.
    #[must_use]
    pub fn best(&self, metric: &Metric) -> Vec<bool> {
        if !self.comparable.ranks() {
            return vec![false; self.rows.len()];
        }
        let tolerance = match metric.unit {
            Unit::Memory => self.tolerance.of_memory(),
            _ => self.tolerance,
        };
        let points: Vec<Point> = self
            .rows
            .iter()
            .zip(&self.points)
            .zip(&metric.values)
            .map(|((row, point), &value)| Point {
                time: match (
                    metric.unit.counts(row.fits, self.same_tokens),
                    metric.smaller_is_better,
                ) {
                    (false, _) => f64::NAN,
                    (true, true) => value,
                    (true, false) => 1.0 / value,
                },
                ..*point
            })
            .collect();
        let times = || points.iter().map(|p| p.time).filter(|t| !t.is_nan());
        let least = times().fold(f64::INFINITY, f64::min);
        if !times().any(|t| tolerance.less(least, t)) {
            return vec![false; points.len()];
        }
        let Some(best) = ties::best(&points, tolerance).map(|i| points[i]) else {
            return vec![false; points.len()];
        };
        // All runs that cannot be distinguished from the best one are marked.
        let equal = |p: &Point| p.ties(&best, tolerance) && p.changes == best.changes;
        points.iter().map(equal).collect()
    }

    /// Builds the matrix of some named runs. The default tolerance depends on the bases of the
    /// runs: see [`Tolerance::of_bases`].
    #[must_use]
    pub fn new(runs: &[(&str, &RunView)], tolerance: Option<Tolerance>) -> Self {
        let views: Vec<&RunView> = runs.iter().map(|(_, v)| *v).collect();
        let tolerance = tolerance
            .unwrap_or_else(|| Tolerance::of_bases(views.iter().map(|v| v.run.basis.as_ref())));
        let scenarios: Vec<&ScenarioView> = views.iter().map(|v| &v.scenario).collect();
        // Memory only decides if all runs have a record of it.
        let remembered = views.iter().all(|v| v.run.memory.is_recorded());
        let points: Vec<Point> = views
            .iter()
            .map(|v| Point {
                // Time per token makes runs with different batches comparable.
                time: v.step_ms() / v.run.tokens.max(1) as f64,
                memory: match remembered {
                    true => v.run.memory.peak_reserved.0 as f64,
                    false => 0.0,
                },
                changes: v.scenario.changes(),
            })
            .collect();
        let comparable = Comparable::new(&views);
        let competing: Vec<Point> = views
            .iter()
            .zip(&points)
            .map(
                |(v, point)| match comparable.ranks() && v.fits() != Some(false) {
                    true => *point,
                    false => Point::OUT,
                },
            )
            .collect();
        let mut front = ties::front(&competing, tolerance);
        if let Some(kept) = front.iter().position(|on| *on)
            && !competing
                .iter()
                .any(|p| competing[kept].differs(p, tolerance))
        {
            // No two runs can be distinguished.
            front = vec![competing.len() == 1; competing.len()];
        }
        Self {
            rows: runs
                .iter()
                .zip(front)
                .map(|((label, view), on_front)| Row {
                    label: (*label).to_owned(),
                    scenario: view.scenario.name.clone(),
                    kind: view.kind(),
                    parameters: view.program.parameter_count,
                    fits: view.fits(),
                    on_front,
                })
                .collect(),
            comparable,
            options: differences(&scenarios),
            metrics: metrics(&views),
            same_tokens: RunView::have_same_tokens(views.iter().copied()),
            counted_in: RunView::counted_in(views.iter().copied()),
            tolerance,
            points,
        }
    }
}
