//! Local search: single changes and pairs of changes, most promising first.
//!
//! The effect of a change is estimated from its last prediction: effects on the logarithm of the
//! time and on memory are added up. Only the most promising changes are predicted.

use super::evaluate::{Evaluator, Scored};
use super::recompute;
use super::score::{Order, compare};
use super::space::Point;
use std::collections::BTreeSet;

/// Number of points that are predicted at once.
const BATCH: usize = 12;
/// Number of batches without an improvement after which a climb ends.
const PATIENCE: usize = 3;
/// Estimated time relative to the best above which a point is not predicted.
const WORSE: f64 = 1.02;

/// Error of the estimates as a share of the reserved memory. Points that seem to exceed the limits
/// by less are also predicted.
const UNSURE: f64 = 0.03;

/// Effect relative to the current choice on the same axis.
#[derive(Clone, Copy, Debug, Default)]
struct Effect {
    log_time: f64,
    /// Bytes of reserved memory.
    memory: f64,
}

pub(super) struct Climb<'a> {
    eval: &'a Evaluator<'a>,
    order: Order,
    /// By axis and choice.
    effects: Vec<Vec<Effect>>,
    tried: BTreeSet<Point>,
}

impl<'a> Climb<'a> {
    pub(super) fn new(eval: &'a Evaluator<'a>, order: Order) -> Self {
        let axes = eval.space.axes.iter();
        Self {
            eval,
            order,
            effects: axes
                .map(|a| vec![Effect::default(); a.choices.len()])
                .collect(),
            tried: BTreeSet::new(),
        }
    }

    /// Returns the better of two points.
    pub(super) fn better(&self, a: Scored, b: Scored) -> Scored {
        match self.order.compare(&b.1, &a.1).then(b.0.cmp(&a.0)) {
            std::cmp::Ordering::Less => b,
            _ => a,
        }
    }

    /// Predicts all single changes of a point, and returns the best among these and the point
    /// itself.
    pub(super) fn neighbours(&mut self, of: &Scored) -> Scored {
        let scored = self.eval.all(self.singles(&of.0));
        self.learn(of, &scored);
        let best = scored
            .into_iter()
            .fold(of.clone(), |a, b| self.better(a, b));
        self.eval.report(&self.order, &best.1);
        best
    }

    fn singles(&self, of: &Point) -> Vec<Point> {
        let mut all = Vec::new();
        for (axis, choices) in self.effects.iter().enumerate() {
            let moves = recompute::moves(self.eval.space, axis, of.0[axis])
                .unwrap_or_else(|| (0..choices.len() as u16).collect());
            let moves = moves.into_iter().filter(|c| *c != of.0[axis]);
            all.extend(moves.map(|c| of.with(axis, c)));
        }
        all
    }

    /// Stores the effects of points that differ from another point on one axis.
    fn learn(&mut self, from: &Scored, scored: &[Scored]) {
        for (point, score) in scored {
            let pairs = || from.0.0.iter().zip(&point.0).enumerate();
            let mut other = pairs().filter(|(_, (a, b))| a != b).map(|(axis, _)| axis);
            let (Some(axis), None) = (other.next(), other.next()) else {
                continue;
            };
            let (before, after) = (&from.1.effect, &score.effect);
            let own = self.effects[axis][usize::from(from.0.0[axis])];
            let memory = after.peak_reserved.0 as f64 - before.peak_reserved.0 as f64;
            self.effects[axis][usize::from(point.0[axis])] = Effect {
                log_time: own.log_time + (score.time() / from.1.time()).ln(),
                memory: own.memory + memory,
            };
        }
    }

    /// Estimates a point from another one.
    fn estimate(&self, from: &Scored, to: &Point) -> [f64; 3] {
        let (mut log_time, mut memory) = (0.0, 0.0);
        for (axis, (a, b)) in from.0.0.iter().zip(&to.0).enumerate() {
            let [a, b] = [a, b].map(|c| self.effects[axis][usize::from(*c)]);
            log_time += b.log_time - a.log_time;
            memory += b.memory - a.memory;
        }
        let time = from.1.time() * log_time.exp();
        let reserved = from.1.effect.peak_reserved.0 as f64 + memory;
        let slack = from.1.slack as f64 - memory + UNSURE * reserved;
        self.order.value(slack, time, reserved)
    }

    /// Returns the current choices, except that each axis has the choice with the shortest step
    /// (`memory` is false) or with the least memory.
    pub(super) fn composite(&self, memory: bool) -> Point {
        let value = |e: &Effect| if memory { e.memory } else { e.log_time };
        let choice = |effects: &Vec<Effect>| {
            let all = effects.iter().enumerate();
            let best = all.min_by(|a, b| value(a.1).total_cmp(&value(b.1)));
            best.map_or(0, |(i, _)| i as u16)
        };
        Point(self.effects.iter().map(choice).collect())
    }

    /// Climbs from a point until no change promises an improvement.
    pub(super) fn climb(&mut self, start: Scored) -> Scored {
        let mut best = start;
        let mut idle = 0;
        while idle < PATIENCE && !self.eval.stopped() {
            let batch = self.proposals(&best);
            if batch.is_empty() {
                break;
            }
            let scored = self.eval.all(batch);
            self.learn(&best, &scored);
            let before = best.0.clone();
            let leaner = self.leaner(&best, &scored);
            best = scored.into_iter().fold(best, |a, b| self.better(a, b));
            let starts = [Some(best.0.clone()), leaner.map(|l| l.0)];
            let starts: Vec<Point> = starts.into_iter().flatten().collect();
            let fewer = recompute::fewest(self.eval, &self.order, &starts);
            let fewer = fewer.into_iter().flatten();
            best = fewer.fold(best, |a, b| self.better(a, b));
            idle = if best.0 == before { idle + 1 } else { 0 };
            self.eval.report(&self.order, &best.1);
        }
        best
    }

    /// Returns the fastest of some points that leave more memory free than another point, and could
    /// use it to recompute fewer blocks.
    fn leaner(&self, than: &Scored, scored: &[Scored]) -> Option<Scored> {
        let leaner = scored
            .iter()
            .filter(|(_, s)| s.fits() && s.slack > than.1.slack);
        let near = leaner.filter(|(_, s)| s.time() < than.1.time() * WORSE);
        near.min_by(|a, b| self.order.compare(&a.1, &b.1)).cloned()
    }

    /// Returns the most promising points that have not been proposed yet.
    fn proposals(&mut self, from: &Scored) -> Vec<Point> {
        let singles = self.singles(&from.0);
        let mut all = singles.clone();
        all.extend(from.0.pairs(&singles));
        let own = self.order.of(&from.1);
        let limit = [own[0], own[1] * WORSE, f64::INFINITY];
        let estimated = all.into_iter().filter(|p| !self.tried.contains(p));
        let mut estimated: Vec<([f64; 3], Point)> = estimated
            .map(|p| (self.estimate(from, &p), p))
            .filter(|(value, _)| compare(value, &limit).is_lt())
            .collect();
        estimated.sort_by(|a, b| compare(&a.0, &b.0).then_with(|| a.1.cmp(&b.1)));
        let batch: Vec<Point> = estimated.into_iter().take(BATCH).map(|(_, p)| p).collect();
        self.tried.extend(batch.iter().cloned());
        batch
    }
}
