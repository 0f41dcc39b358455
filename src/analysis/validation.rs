//! Compares predictions with measured runs.
//!
//! The table is a CSV file. The columns `scenario` and `overrides` (values for `--set`, separated
//! by `;`) are required. Any of the measured columns of [`Metric`] may follow; an empty cell means
//! that the value was not measured. `name` and `source` are optional, and so is `out_of_memory`: a
//! run with `true` ran out of memory and has no measured values.

mod null;
mod table;

pub use null::{Null, null_models};
pub use table::{Row, TableError, read};

use crate::predict::{Fit, PredictError, Prediction, Profiles, Residual, predict_light};
use rayon::prelude::*;
use serde::Serialize;
use shardlab_plan::program::SectionKind;
use shardlab_plan::record::Run;
use shardlab_plan::scenario;
use shardlab_plan::units::Bytes;
use std::path::{Path, PathBuf};

/// A measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Step time, milliseconds.
    StepMs,
    /// Peak of allocated memory of a steady step, MiB.
    PeakAllocatedMib,
    /// Peak of reserved memory, MiB.
    PeakReservedMib,
    /// Memory in use on the device, MiB.
    DeviceMib,
}

impl Metric {
    /// All metrics, in the order of the columns.
    pub const ALL: [Self; 4] = [
        Self::StepMs,
        Self::PeakAllocatedMib,
        Self::PeakReservedMib,
        Self::DeviceMib,
    ];

    /// Returns the name of the column, also used in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::StepMs => "step_ms",
            Self::PeakAllocatedMib => "peak_allocated_mib",
            Self::PeakReservedMib => "peak_reserved_mib",
            Self::DeviceMib => "device_mib",
        }
    }

    /// Returns the predicted value of the metric.
    #[must_use]
    pub fn predicted(self, p: &Prediction) -> f64 {
        match self {
            Self::StepMs => p.step_ms(),
            Self::PeakAllocatedMib => steady(&p.run, |s| s.peak_allocated).mib(),
            Self::PeakReservedMib => p.run.memory.peak_reserved.mib(),
            Self::DeviceMib => p.run.memory.peak_device.mib(),
        }
    }
}

/// Returns a value of the last steady step. Measured peaks exclude the first step.
fn steady(run: &Run, of: impl Fn(&shardlab_plan::record::StepRecord) -> Bytes) -> Bytes {
    run.steps
        .iter()
        .rfind(|s| s.section == SectionKind::Steady)
        .map_or(run.memory.peak_allocated, of)
}

/// A measured value and its prediction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// Predicted.
    pub predicted: f64,
    /// Measured.
    pub measured: f64,
    /// Error in percent of the measured value; positive if the prediction is too high.
    pub error_percent: f64,
}

impl Cell {
    fn new(predicted: f64, measured: f64) -> Self {
        Self {
            predicted,
            measured,
            error_percent: 100.0 * (predicted / measured - 1.0),
        }
    }
}

/// A row with its predictions. A metric that was not measured is `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// The row.
    pub row: Row,
    /// Cells in the order of [`Metric::ALL`].
    pub cells: [Option<Cell>; 4],
    /// Whether the run is predicted to fit.
    pub fit: Fit,
    /// Model FLOPs per rank and step.
    pub model_flops: f64,
    /// Peak rate of the GPU in the compute dtype, FLOP/s.
    pub peak_flops: f64,
    /// Tokens per rank and step.
    pub tokens: f64,
    /// The row in the form from which error bands of predictions are derived.
    pub residual: Residual,
}

/// Errors of one metric over all rows in which it was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Errors {
    /// Metric.
    pub metric: Metric,
    /// Number of rows.
    pub rows: u32,
    /// Mean of the absolute errors, percent.
    pub mean_abs_percent: f64,
    /// Mean of the signed errors, percent.
    pub mean_signed_percent: f64,
    /// The largest error by magnitude, percent.
    pub worst_percent: f64,
    /// Label of the row with that error.
    pub worst_row: String,
}

impl Compared {
    /// Returns whether the run is predicted to run out of memory if and only if it did.
    #[must_use]
    pub(crate) fn fits_as_measured(&self) -> bool {
        self.fit.is_ok() != self.row.out_of_memory
    }
}

/// Number of runs that ran out of memory, and how many of them were predicted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OutOfMemory {
    /// Number of runs that ran out of memory.
    pub measured: usize,
    /// Number of these that are predicted not to fit.
    pub predicted: usize,
    /// Number of runs that fit.
    pub ran: usize,
    /// Number of these that are predicted to fit.
    pub predicted_to_fit: usize,
}

/// Returns the number of correct predictions of whether a run fits; `None` if no run ran out of
/// memory.
#[must_use]
pub fn out_of_memory(rows: &[Compared]) -> Option<OutOfMemory> {
    let (failed, ran): (Vec<&Compared>, Vec<&Compared>) =
        rows.iter().partition(|r| r.row.out_of_memory);
    let right = |rows: &[&Compared]| rows.iter().filter(|r| r.fits_as_measured()).count();
    (!failed.is_empty()).then(|| OutOfMemory {
        measured: failed.len(),
        predicted: right(&failed),
        ran: ran.len(),
        predicted_to_fit: right(&ran),
    })
}

/// A row that cannot be predicted.
#[derive(Debug, thiserror::Error)]
#[error("{table}:{line}: {error}")]
pub struct RowError {
    /// Table.
    pub table: String,
    /// Line number, from 1.
    pub line: u64,
    /// Reason.
    pub error: Box<PredictError>,
}

/// Predicts every row on all cores and calls `done` after each.
///
/// # Errors
/// Returns the error of the first row, in table order, that cannot be predicted.
pub fn compare(
    table: &Path,
    rows: Vec<Row>,
    profiles: &Profiles,
    done: &(dyn Fn() + Sync),
) -> Result<Vec<Compared>, RowError> {
    rows.into_par_iter()
        .map(|row| {
            let predicted = scenario::load(&path_of(table, &row.scenario), &row.overrides)
                .map_err(PredictError::from)
                .and_then(|s| predict_light(&s, profiles));
            done();
            let p = predicted.map_err(|error| RowError {
                table: table.display().to_string(),
                line: row.line,
                error: Box::new(error),
            })?;
            let cell = |(m, measured): (Metric, Option<f64>)| {
                measured.map(|measured| Cell::new(m.predicted(&p), measured))
            };
            let [a, b, c, d] = Metric::ALL;
            let [w, x, y, z] = row.measured;
            let cells = [(a, w), (b, x), (c, y), (d, z)].map(cell);
            let [step, _, reserved, _] = cells.map(|c| c.map(|c| c.error_percent));
            Ok(Compared {
                cells,
                residual: Residual {
                    project: row.project().to_owned(),
                    step_percent: step,
                    reserved_percent: reserved,
                    ..Residual::of(&p)
                },
                fit: p.fit.clone(),
                model_flops: p.program.meta.model_flops.0 as f64,
                peak_flops: p.profile.peak_flops(p.program.meta.compute),
                tokens: p.program.meta.tokens as f64,
                row,
            })
        })
        .collect::<Vec<Result<Compared, RowError>>>()
        .into_iter()
        .collect()
}

/// Returns the path of a row's scenario: as given, or else relative to the folder of the table.
fn path_of(table: &Path, scenario: &str) -> PathBuf {
    let given = PathBuf::from(scenario);
    let next_to_table = table.parent().map(|folder| folder.join(scenario));
    match next_to_table {
        Some(next_to_table) if !given.exists() && next_to_table.exists() => next_to_table,
        _ => given,
    }
}

/// Returns the errors of the rows of each project, in the order of their first rows. Empty if all
/// rows are from one project.
#[must_use]
pub(crate) fn errors_by_project(rows: &[Compared]) -> Vec<(&str, Vec<Errors>)> {
    let mut projects: Vec<&str> = Vec::new();
    for project in rows.iter().map(|r| r.row.project()) {
        if !projects.contains(&project) {
            projects.push(project);
        }
    }
    if projects.len() < 2 {
        return Vec::new();
    }
    let own = |project| rows.iter().filter(move |r| r.row.project() == project);
    projects
        .into_iter()
        .map(|project| (project, errors(own(project))))
        .collect()
}

/// Returns the errors of every metric that was measured in any row.
#[must_use]
pub fn errors<'a>(rows: impl IntoIterator<Item = &'a Compared> + Clone) -> Vec<Errors> {
    Metric::ALL
        .into_iter()
        .enumerate()
        .filter_map(|(i, metric)| {
            let rows = rows.clone().into_iter();
            let cells: Vec<(&Compared, Cell)> =
                rows.filter_map(|r| Some((r, r.cells[i]?))).collect();
            let n = cells.len() as f64;
            let worst = cells
                .iter()
                .max_by(|a, b| a.1.error_percent.abs().total_cmp(&b.1.error_percent.abs()))?;
            Some(Errors {
                metric,
                rows: cells.len() as u32,
                mean_abs_percent: cells.iter().map(|c| c.1.error_percent.abs()).sum::<f64>() / n,
                mean_signed_percent: cells.iter().map(|c| c.1.error_percent).sum::<f64>() / n,
                worst_percent: worst.1.error_percent,
                worst_row: worst.0.row.label(),
            })
        })
        .collect()
}
