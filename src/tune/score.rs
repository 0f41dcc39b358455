//! The score of a point: its effect, and whether it is within the limits.

use crate::analysis::verdict::{HEADROOM, is_narrow};
use crate::analysis::whatif::Effect;
use crate::predict::{Fit, Prediction};
use shardlab_plan::record::Basis;
use shardlab_plan::units::Bytes;
use std::cmp::Ordering;

/// Definition of the best settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Goal {
    /// The shortest step.
    #[default]
    Throughput,
    /// The least reserved memory among steps that take no longer than the current one.
    Memory,
}

/// Memory that a step may use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Maximum reserved memory. If not given, the usual headroom of the device stays free.
    pub budget: Option<Bytes>,
}

/// A point's prediction in short.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// Step time and memory.
    pub effect: Effect,
    /// Time during which the compute stream runs nothing, milliseconds per step.
    pub exposed_ms: f64,
    /// Memory left within the limits, bytes; negative if the point does not fit.
    pub slack: i64,
    /// Whether less memory stays free than should, or than the prediction may be off by.
    pub is_narrow: bool,
    /// The basis of the prediction.
    pub basis: Option<Basis>,
    /// Number of instructions of the plan. The time of a prediction grows with it.
    pub instrs: usize,
}

impl Score {
    pub(super) fn of(p: &Prediction, limits: Limits) -> Self {
        let effect = Effect::of(p);
        Self {
            slack: slack(&effect, p.run.memory.capacity, limits),
            effect,
            exposed_ms: p.run.exposed_total().ms(),
            is_narrow: is_narrow(p),
            basis: p.run.basis.clone(),
            instrs: p.program.instrs.len(),
        }
    }

    /// Returns the score for another budget.
    #[cfg(test)]
    pub(super) fn within(&self, budget: Bytes) -> Self {
        let budget = Some(budget);
        Self {
            slack: slack(&self.effect, None, Limits { budget }),
            ..self.clone()
        }
    }

    /// Returns whether the point fits within the limits without freeing cached memory during the
    /// step.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.slack >= 0
    }

    /// Returns the time during which the compute stream is busy, milliseconds per step.
    #[must_use]
    pub fn busy_ms(&self) -> f64 {
        self.effect.step_ms - self.exposed_ms
    }

    /// Returns the time per token (or the model's batch unit) and GPU, milliseconds, so that steps
    /// with different batches are comparable.
    #[must_use]
    pub fn time(&self) -> f64 {
        1e3 / self.effect.tokens_per_s
    }

    /// Returns the part of [`Self::time`] during which the compute stream is busy.
    pub(super) fn busy_time(&self) -> f64 {
        self.time() * self.busy_ms() / self.effect.step_ms
    }
}

/// Returns the memory left within the limits, bytes.
fn slack(effect: &Effect, capacity: Option<Bytes>, limits: Limits) -> i64 {
    let signed = |bytes: Bytes| i64::try_from(bytes.0).unwrap_or(i64::MAX);
    let headroom = match (limits.budget, capacity) {
        (None, Some(capacity)) => (HEADROOM * capacity.0 as f64) as i64,
        _ => 0,
    };
    let free = effect.free_bytes.map(|free| free - headroom);
    let within = limits
        .budget
        .map(|most| signed(most) - signed(effect.peak_reserved));
    let slack = [free, within].into_iter().flatten().min().unwrap_or(0);
    match effect.fit {
        Fit::Fits | Fit::Unknown => slack,
        // A step that does not fit needs at least one more byte.
        Fit::Tight { .. } | Fit::Exceeds { .. } => slack.min(-1),
    }
}

/// Orders scores, best first: those that fit, then by the goal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) goal: Goal,
    /// [`Score::time`] of the current settings, if they fit.
    pub(super) today: Option<f64>,
}

impl Order {
    /// Returns the values to minimize, most important first. `slack` and `time` may be estimates.
    pub(super) fn value(&self, slack: f64, time: f64, reserved: f64) -> [f64; 3] {
        let missing = (-slack).max(0.0);
        match (self.goal, self.today) {
            (Goal::Throughput, _) => [missing, time, reserved],
            (Goal::Memory, Some(most)) => {
                let late = (time / most - 1.0 - crate::analysis::whatif::TOLERANCE).max(0.0);
                // A step that is 1 % too slow has the same weight as 1 GiB of missing memory.
                let late = late * 100.0 * f64::from(1 << 30);
                [missing + late, reserved, time]
            }
            (Goal::Memory, None) => [missing, reserved, time],
        }
    }

    pub(super) fn of(&self, score: &Score) -> [f64; 3] {
        let reserved = score.effect.peak_reserved.0 as f64;
        self.value(score.slack as f64, score.time(), reserved)
    }

    /// Returns whether a score fits and is fast enough for the goal.
    pub(super) fn admits(&self, score: &Score) -> bool {
        self.of(score)[0] <= 0.0
    }

    pub(super) fn compare(&self, a: &Score, b: &Score) -> Ordering {
        compare(&self.of(a), &self.of(b))
    }

    /// Returns whether `a` is as good as `b` within the tolerance of equal predictions.
    pub(super) fn ties(&self, a: &Score, b: &Score) -> bool {
        let ([missing, a, _], [_, b, _]) = (self.of(a), self.of(b));
        missing <= 0.0 && a <= b * (1.0 + crate::analysis::whatif::TOLERANCE)
    }
}

pub(super) fn compare(a: &[f64; 3], b: &[f64; 3]) -> Ordering {
    let pairs = a.iter().zip(b);
    pairs.fold(Ordering::Equal, |o, (a, b)| o.then(a.total_cmp(b)))
}
