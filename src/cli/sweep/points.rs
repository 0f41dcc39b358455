//! The points of a sweep, predicted on all cores.

use crate::cli::interrupt;
use crate::predict::{Fit, PredictError, Prediction, Profiles, predict_light};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rayon::prelude::*;
use shardlab_plan::scenario::{BatchUnit, SweepPoint};
use std::io::IsTerminal;

/// What became of a point.
pub(super) enum Outcome {
    /// Predicted.
    Done(Box<Point>),
    /// Impossible, or failed.
    Failed(PredictError),
    /// Not reached before the interrupt.
    Missing,
}

/// A predicted point.
pub(super) struct Point {
    /// Axis values, in the order of the axes.
    pub(super) settings: Vec<String>,
    pub(super) step_ms: f64,
    pub(super) tokens_per_s: f64,
    pub(super) counted_in: BatchUnit,
    pub(super) mfu: f64,
    pub(super) exposed_ms: f64,
    pub(super) allocated: u64,
    pub(super) reserved: u64,
    pub(super) device: u64,
    pub(super) fit: Fit,
}

impl Point {
    fn of(settings: Vec<String>, p: &Prediction) -> Self {
        Self {
            settings,
            step_ms: p.step_ms(),
            tokens_per_s: p.tokens_per_s(),
            counted_in: p.scenario.model.family.counted_in(),
            mfu: p.run.mfu,
            exposed_ms: p.run.exposed_total().ms(),
            allocated: p.run.memory.peak_allocated.0,
            reserved: p.run.memory.peak_reserved.0,
            device: p.run.memory.peak_device.0,
            fit: p.fit.clone(),
        }
    }
}

/// What is called for each point that there is, with its settings.
type Done<'a> = &'a (dyn Fn(&Prediction, &[(String, String)]) + Sync);

/// Predicts the points, in their order, until done or interrupted; `done` is called for each that there is, with its
/// settings.
pub(super) fn evaluate(
    points: Vec<SweepPoint>,
    profiles: &Profiles,
    done: Done<'_>,
) -> Vec<Outcome> {
    let progress = progress(points.len() as u64);
    let outcomes = points
        .into_par_iter()
        .map(|point| {
            if interrupt::requested() {
                return Outcome::Missing;
            }
            let settings = point.settings;
            let outcome = point
                .scenario
                .map_err(PredictError::from)
                .and_then(|scenario| predict_light(&scenario, profiles))
                .map_or_else(Outcome::Failed, |p| {
                    done(&p, &settings);
                    let values = settings.into_iter().map(|(_, value)| value).collect();
                    Outcome::Done(Box::new(Point::of(values, &p)))
                });
            progress.inc(1);
            outcome
        })
        .collect();
    progress.finish_and_clear();
    outcomes
}

/// A bar with the time left on a terminal's stderr, nothing elsewhere.
fn progress(points: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(points), ProgressDrawTarget::stderr());
    match ProgressStyle::with_template("{bar:40} {pos}/{len} points, {elapsed} elapsed, {eta} left")
    {
        Ok(style) => bar.with_style(style),
        // The template is a constant that the tests use; without it the default bar will do.
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_bar_has_a_valid_template() {
        let template = "{bar:40} {pos}/{len} points, {elapsed} elapsed, {eta} left";
        assert!(indicatif::ProgressStyle::with_template(template).is_ok());
    }
}
