//! Many runs: options by metrics, the best of each marked, the front of time and memory.

use crate::view::{Difference, RunView, ScenarioView, differences};
use serde::Serialize;
use shardlab_plan::record::float;
use shardlab_plan::scenario::BatchUnit;
use shardlab_plan::units::{ByteUnit, Bytes, signed};

/// What a metric counts: how it is shown, and when it tells which run is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Time of a step or of a part of it, milliseconds.
    StepTime,
    /// What the batches are counted in, a second and GPU.
    Throughput,
    /// Percent.
    Percent,
    /// Memory, GiB; shown in the unit that suits all runs.
    Memory,
    /// A plain number.
    Count,
    /// A loss.
    Loss,
}

impl Unit {
    /// Decimals that are worth showing.
    pub(crate) const fn decimals(self) -> usize {
        match self {
            Self::Throughput | Self::Count => 0,
            Self::Percent => 1,
            Self::StepTime | Self::Memory => 2,
            Self::Loss => 4,
        }
    }

    /// Whether a run's value counts for the best of all: runs that do not fit never count, and times of steps tell which run is
    /// better only where all steps do the same work.
    #[must_use]
    pub fn counts(self, fits: Option<bool>, same_tokens: bool) -> bool {
        fits != Some(false) && (self != Self::StepTime || same_tokens)
    }
}

/// A number that runs are judged by.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metric {
    /// Name with its unit, as JSON has it.
    pub name: &'static str,
    /// Title of a column.
    pub title: &'static str,
    /// What the values count.
    #[serde(skip)]
    pub unit: Unit,
    /// Whether smaller is better.
    pub smaller_is_better: bool,
    /// Decimals that are worth showing.
    pub decimals: usize,
    /// Value in every run; NaN where a run has none.
    #[serde(with = "float::list")]
    pub values: Vec<f64>,
}

impl Metric {
    /// Runs with the best value: all that share it.
    #[must_use]
    pub fn best(&self) -> Vec<bool> {
        let sign = if self.smaller_is_better { 1.0 } else { -1.0 };
        let best = self
            .values
            .iter()
            .map(|v| v * sign)
            .filter(|v| !v.is_nan())
            .fold(f64::INFINITY, f64::min);
        self.values.iter().map(|v| v * sign == best).collect()
    }

    /// The unit that memory is shown in: one for all runs.
    fn byte_unit(&self) -> Option<ByteUnit> {
        let known = self.values.iter().filter(|v| !v.is_nan());
        (self.unit == Unit::Memory)
            .then(|| ByteUnit::common(known.map(|v| Bytes((v * GIB) as u64))))
    }

    /// How much a value is in the unit that it is shown in, and the decimals.
    fn shown(&self, value: f64) -> (f64, usize) {
        match self.byte_unit() {
            Some(unit) => (value * unit.count(Bytes(1 << 30)), unit.decimals()),
            None => (value, self.decimals),
        }
    }

    /// Title of what is shown, with its unit.
    #[must_use]
    pub fn heading(&self) -> String {
        match self.byte_unit() {
            Some(unit) => self.title.replace("GiB", unit.name()),
            None => self.title.to_owned(),
        }
    }

    /// A value as it is shown.
    #[must_use]
    pub fn show(&self, run: usize) -> String {
        match self.values.get(run).map(|v| self.shown(*v)) {
            Some((v, decimals)) if !v.is_nan() => format!("{v:.decimals$}"),
            _ => "-".into(),
        }
    }

    /// What the second of two runs has more than the first, as it is shown; none where one has no value.
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

/// Name, title, unit, whether smaller is better, and how it is had.
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
        v.run.memory.peak_allocated.0 as f64 / GIB
    }),
    ("reserved_gib", "resv GiB", Unit::Memory, true, |v| {
        v.run.memory.peak_reserved.0 as f64 / GIB
    }),
    ("device_gib", "device GiB", Unit::Memory, true, |v| {
        v.run.memory.peak_device.0 as f64 / GIB
    }),
    ("allocator_retries", "retries", Unit::Count, true, |v| {
        f64::from(v.run.memory.retries)
    }),
    ("final_loss", "loss", Unit::Loss, true, |v| {
        v.run.losses.last().copied().unwrap_or(f64::NAN)
    }),
];

/// The main numbers of some runs; those that none of them has are left out, and retries where there are none.
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
    /// Whether it fits the device, where that is known.
    pub fits: Option<bool>,
    /// Whether no other run that fits is at least as good in time for a token and in reserved memory, and better in one.
    pub on_front: bool,
}

/// Several runs side by side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Matrix {
    /// The runs.
    pub rows: Vec<Row>,
    /// Options that are not the same in all, with their values.
    pub options: Vec<Difference>,
    /// Metrics.
    pub metrics: Vec<Metric>,
    /// Whether steps have the same tokens in all: else their times do not tell which is better.
    #[serde(skip)]
    pub same_tokens: bool,
    /// What the batches are counted in.
    #[serde(skip)]
    pub counted_in: BatchUnit,
}

impl Matrix {
    /// Runs with the best value of a metric, among those that fit.
    #[must_use]
    pub fn best(&self, metric: &Metric) -> Vec<bool> {
        let mut among = metric.clone();
        for (value, row) in among.values.iter_mut().zip(&self.rows) {
            if !metric.unit.counts(row.fits, self.same_tokens) {
                *value = f64::NAN;
            }
        }
        among.best()
    }

    /// The matrix of some runs with their names.
    #[must_use]
    pub fn new(runs: &[(&str, &RunView)]) -> Self {
        let views: Vec<&RunView> = runs.iter().map(|(_, v)| *v).collect();
        let scenarios: Vec<&ScenarioView> = views.iter().map(|v| &v.scenario).collect();
        let points: Vec<(f64, f64)> = views
            .iter()
            .map(|v| match v.fits() {
                Some(false) => (f64::NAN, f64::NAN),
                // Time for one token, so that runs of different batches compare.
                _ => (
                    v.step_ms() / v.run.tokens.max(1) as f64,
                    v.run.memory.peak_reserved.0 as f64,
                ),
            })
            .collect();
        let front = front(&points);
        Self {
            rows: runs
                .iter()
                .zip(front)
                .map(|((label, view), on_front)| Row {
                    label: (*label).to_owned(),
                    scenario: view.scenario.name.clone(),
                    kind: view.kind(),
                    fits: view.fits(),
                    on_front,
                })
                .collect(),
            options: differences(&scenarios),
            metrics: metrics(&views),
            same_tokens: RunView::have_same_tokens(views.iter().copied()),
            counted_in: RunView::counted_in(views.iter().copied()),
        }
    }
}

/// For each point `(time, memory)` whether it is on the front: no other point is at least as good in both and better in
/// one. Of equal points all are on it. Points with a NaN are not.
#[must_use]
pub fn front(points: &[(f64, f64)]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..points.len())
        .filter(|&i| !points[i].0.is_nan() && !points[i].1.is_nan())
        .collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (points[a], points[b]);
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    });
    let mut on = vec![false; points.len()];
    let mut best: Option<(f64, f64)> = None;
    for i in order {
        let point = points[i];
        if best.is_none_or(|b| point.1 < b.1 || point == b) {
            on[i] = true;
            best = Some(point);
        }
    }
    on
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_has_exactly_the_undominated_points() {
        let points = [
            (3.0, 1.0),
            (1.0, 3.0),
            (2.0, 2.0),
            (2.0, 2.0),
            (2.0, 2.5),
            (3.0, 1.5),
            (f64::NAN, 0.0),
        ];
        let dominated = |i: usize| {
            points
                .iter()
                .any(|p| p.0 <= points[i].0 && p.1 <= points[i].1 && *p != points[i])
        };
        let on = front(&points);
        for (i, &on) in on.iter().enumerate().take(6) {
            assert_eq!(on, !dominated(i), "{i}");
        }
        assert!(!on[6]);
    }
}
