//! Predicts the points of a sweep on all cores.

use crate::analysis::warnings::Warning;
use crate::cli::interrupt;
use crate::cli::progress::Progress;
use crate::predict::{Fit, PredictError, Prediction, Profiles, predict_light};
use rayon::prelude::*;
use shardlab_plan::ir::ParameterCount;
use shardlab_plan::record::Basis;
use shardlab_plan::scenario::{BatchUnit, SweepPoint};
use std::collections::BTreeMap;

/// A point and its outcome.
pub(super) struct Point {
    /// Values of the axes' keys, in the order of the axes.
    pub(super) settings: Vec<String>,
    /// Number of axes whose value differs from the scenario without axes.
    pub(super) changes: usize,
    pub(super) outcome: Outcome,
}

/// Outcome of a point.
pub(super) enum Outcome {
    /// The point was predicted.
    Done(Box<Numbers>),
    /// The point is impossible, or its prediction failed.
    Failed(PredictError),
    /// The point was not reached before an interrupt.
    Missing,
}

/// Predicted numbers of a point.
pub(super) struct Numbers {
    pub(super) world: u32,
    pub(super) step_ms: f64,
    pub(super) tokens_per_s: f64,
    pub(super) counted_in: BatchUnit,
    pub(super) mfu: f64,
    pub(super) exposed_ms: f64,
    pub(super) allocated: u64,
    pub(super) reserved: u64,
    pub(super) device: u64,
    /// Device memory that is never used, bytes; negative if the device has too little.
    pub(super) free: Option<i64>,
    /// The basis of the prediction.
    pub(super) basis: Option<Basis>,
    /// Number of parameters of the model.
    pub(super) parameters: ParameterCount,
    /// What the model's file contains that no key expresses.
    pub(super) warnings: Vec<Warning>,
    fit: Fit,
    /// Whether the point fits, but leaves less device memory free than requested.
    short: bool,
}

impl Point {
    /// Returns the numbers of a predicted point.
    pub(super) fn done(&self) -> Option<&Numbers> {
        match &self.outcome {
            Outcome::Done(numbers) => Some(numbers),
            Outcome::Failed(_) | Outcome::Missing => None,
        }
    }
}

impl Numbers {
    fn of(p: &Prediction, headroom: f64, warnings: Vec<Warning>) -> Self {
        Self {
            world: p.scenario.mesh.world(),
            step_ms: p.step_ms(),
            tokens_per_s: p.tokens_per_s(),
            counted_in: p.scenario.model.family.counted_in(),
            mfu: p.run.mfu,
            exposed_ms: p.run.exposed_total().ms(),
            allocated: p.run.memory.peak_allocated.0,
            reserved: p.run.memory.peak_reserved.0,
            device: p.run.memory.peak_device.0,
            free: p.free_bytes(),
            basis: p.run.basis.clone(),
            parameters: p.program.meta.parameters,
            warnings,
            fit: p.fit.clone(),
            short: p.fit.is_ok() && !p.leaves(headroom),
        }
    }

    /// Returns whether the point fits, as far as is known, with the requested headroom.
    pub(super) fn fits(&self) -> bool {
        self.fit.is_ok() && !self.short
    }

    /// Returns whether the point fits only if cached memory is freed in between.
    pub(super) fn is_tight(&self) -> bool {
        self.fits() && matches!(self.fit, Fit::Tight { .. })
    }

    /// Returns whether the capacity of the device is unknown.
    pub(super) fn is_unknown(&self) -> bool {
        self.fit == Fit::Unknown
    }

    /// Returns one word for tables.
    pub(super) fn word(&self) -> &'static str {
        if self.short { "short" } else { self.fit.word() }
    }
}

/// Callback for every finished prediction and its settings. Returns the warnings about the
/// prediction.
type Done<'a> = &'a (dyn Fn(&Prediction, &[(String, String)]) -> Vec<Warning> + Sync);

/// Predicts the points in order until all are done or the command is interrupted. Calls `done` for
/// every prediction with its settings. A point that leaves less than the share `headroom` of the
/// device free is marked as short.
pub(super) fn evaluate(
    points: Vec<SweepPoint>,
    headroom: f64,
    profiles: &Profiles,
    progress: &Progress,
    done: Done<'_>,
) -> Vec<Point> {
    points
        .into_par_iter()
        .map(|point| {
            let outcome = if interrupt::requested() {
                Outcome::Missing
            } else {
                let predicted = point
                    .scenario
                    .map_err(PredictError::from)
                    .and_then(|scenario| predict_light(&scenario, profiles));
                progress.step();
                predicted.map_or_else(Outcome::Failed, |p| {
                    let warnings = done(&p, &point.settings);
                    Outcome::Done(Box::new(Numbers::of(&p, headroom, warnings)))
                })
            };
            let values = point.settings.into_iter().map(|(_, value)| value);
            Point {
                settings: values.collect(),
                changes: 0,
                outcome,
            }
        })
        .collect()
}

/// Counts, for every point, the settings that change the scenario. `load` returns the scenario with
/// these overrides.
pub(super) fn count_changes<S: PartialEq>(
    points: &mut [Point],
    keys: &[String],
    load: impl Fn(&[String]) -> Option<S>,
) {
    let base = load(&[]);
    let mut known: BTreeMap<String, bool> = BTreeMap::new();
    for point in points {
        let settings = keys.iter().zip(&point.settings);
        point.changes = settings
            .map(|(key, value)| format!("{key}={value}"))
            .filter(|set| {
                let changes = || base.is_none() || load(std::slice::from_ref(set)) != base;
                *known.entry(set.clone()).or_insert_with(changes)
            })
            .count();
    }
}
