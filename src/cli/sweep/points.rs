//! The points of a sweep, predicted on all cores.

use crate::cli::interrupt;
use crate::cli::progress::Progress;
use crate::predict::{Fit, PredictError, Prediction, Profiles, predict_light};
use rayon::prelude::*;
use shardlab_plan::record::Basis;
use shardlab_plan::scenario::{BatchUnit, SweepPoint};
use std::collections::BTreeMap;

/// A point and what became of it.
pub(super) struct Point {
    /// Values of the axes' keys, in the order of the axes.
    pub(super) settings: Vec<String>,
    /// How many of them differ from the scenario without axes.
    pub(super) changes: usize,
    pub(super) outcome: Outcome,
}

/// What became of a point.
pub(super) enum Outcome {
    /// Predicted.
    Done(Box<Numbers>),
    /// Impossible, or failed.
    Failed(PredictError),
    /// Not reached before the interrupt.
    Missing,
}

/// What is predicted of a point.
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
    /// Bytes of the device that are never taken; negative where more than there are would be.
    pub(super) free: Option<i64>,
    /// What the prediction rests on.
    pub(super) basis: Option<Basis>,
    fit: Fit,
    /// It fits, and leaves less of the device's memory free than is asked for.
    short: bool,
}

impl Point {
    /// Its numbers, where there are some.
    pub(super) fn done(&self) -> Option<&Numbers> {
        match &self.outcome {
            Outcome::Done(numbers) => Some(numbers),
            Outcome::Failed(_) | Outcome::Missing => None,
        }
    }
}

impl Numbers {
    fn of(p: &Prediction, headroom: f64) -> Self {
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
            fit: p.fit.clone(),
            short: p.fit.is_ok() && !p.leaves(headroom),
        }
    }

    /// Whether it fits as far as is known, with the headroom that is asked for.
    pub(super) fn fits(&self) -> bool {
        self.fit.is_ok() && !self.short
    }

    /// Whether it fits, but only by giving memory back to the device in between.
    pub(super) fn is_tight(&self) -> bool {
        self.fits() && matches!(self.fit, Fit::Tight { .. })
    }

    /// Whether the device's memory is not known.
    pub(super) fn is_unknown(&self) -> bool {
        self.fit == Fit::Unknown
    }

    /// One word for tables.
    pub(super) fn word(&self) -> &'static str {
        if self.short { "short" } else { self.fit.word() }
    }
}

/// What is called for each point that there is, with its settings.
type Done<'a> = &'a (dyn Fn(&Prediction, &[(String, String)]) + Sync);

/// Predicts the points, in their order, until done or interrupted; `done` is called for each that
/// there is, with its settings. What leaves less than the share `headroom` of the device free is
/// short of it.
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
                    done(&p, &point.settings);
                    Outcome::Done(Box::new(Numbers::of(&p, headroom)))
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

/// Counts the settings of every point that change the scenario, which is what `load` returns with
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
