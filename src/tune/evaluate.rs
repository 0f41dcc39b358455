//! Predicts points, each distinct scenario once.

use super::Request;
use super::score::{Order, Score};
use super::space::{Point, Space};
use crate::predict::predict_peak;
use rayon::prelude::*;
use shardlab_plan::Scenario;
use shardlab_plan::scenario::ScenarioErrorKind;
use shardlab_sim::Options;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Follows a search, and may end it.
pub trait Watch: Sync {
    /// Returns whether the search should end with its results so far.
    fn stopped(&self) -> bool;
    /// Callback for the best point so far, with the number of predicted settings.
    fn best(&self, evaluated: usize, score: &Score, fits: bool);
}

/// A point with its score.
pub(super) type Scored = (Point, Score);

/// Predicts a scenario; `None` if that is impossible.
pub(super) type Predict<'a> = &'a (dyn Fn(&Scenario) -> Option<Score> + Sync);

/// Predicts a scenario by its peak, with or without tasks that slow each other down.
pub(super) fn predicted(
    scenario: &Scenario,
    request: &Request<'_>,
    contention: bool,
) -> Option<Score> {
    let options = Options {
        record: false,
        contention,
        ..Options::default()
    };
    let p = predict_peak(scenario, request.profiles, &options).ok()?;
    Some(Score::of(&p, request.limits))
}

/// Predicts the points of a space.
pub(super) struct Evaluator<'a> {
    pub(super) space: &'a Space,
    pub(super) request: &'a Request<'a>,
    watch: &'a dyn Watch,
    predict: Predict<'a>,
    memory: Mutex<Memory>,
}

/// Results so far. Points are canonical: see [`Evaluator::settle`].
#[derive(Default)]
struct Memory {
    scores: BTreeMap<Point, Option<Score>>,
    /// Points by the digest of their scenario.
    scenarios: BTreeMap<u64, Point>,
}

impl<'a> Evaluator<'a> {
    /// Creates an evaluator with the score of the current settings.
    pub(super) fn new(
        space: &'a Space,
        request: &'a Request<'a>,
        watch: &'a dyn Watch,
        predict: Predict<'a>,
        today: Score,
    ) -> Self {
        let mut memory = Memory::default();
        memory.scenarios.insert(digest(&space.base), space.today());
        memory.scores.insert(space.today(), Some(today));
        Self {
            space,
            request,
            watch,
            predict,
            memory: Mutex::new(memory),
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        // Entries are only inserted, so they stay consistent after a panic in another thread.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stopped(&self) -> bool {
        self.watch.stopped()
    }

    /// Returns the number of scenarios that were predicted.
    pub(super) fn evaluated(&self) -> usize {
        self.memory().scores.len()
    }

    /// Returns the number of instructions of all plans that were predicted.
    pub(super) fn instrs(&self) -> usize {
        let memory = self.memory();
        let scores = memory.scores.values().flatten();
        scores.map(|score| score.instrs).sum()
    }

    /// Returns the score of a point; `None` if it is impossible or was not reached.
    pub(super) fn score(&self, point: &Point) -> Option<Score> {
        self.memory().scores.get(point).cloned().flatten()
    }

    /// Returns all points with scores, in order.
    pub(super) fn scores(&self) -> Vec<Scored> {
        let memory = self.memory();
        let all = memory.scores.iter();
        all.filter_map(|(p, s)| Some((p.clone(), s.clone()?)))
            .collect()
    }

    /// Predicts points on all cores and returns the possible ones, in the given order and without
    /// duplicates.
    pub(super) fn all(&self, points: impl IntoIterator<Item = Point>) -> Vec<Scored> {
        let mut seen: BTreeSet<Point> = BTreeSet::new();
        let scored = self.each(points).into_iter().flatten();
        scored.filter(|(p, _)| seen.insert(p.clone())).collect()
    }

    /// Predicts points on all cores; `None` for those that are impossible or were not reached.
    pub(super) fn each(&self, points: impl IntoIterator<Item = Point>) -> Vec<Option<Scored>> {
        let points: Vec<Point> = points.into_iter().collect();
        let settled: Vec<Option<(Point, Scenario)>> =
            points.into_par_iter().map(|p| self.settle(p)).collect();
        let mut wanted: Vec<Option<Point>> = Vec::with_capacity(settled.len());
        let mut new: BTreeMap<Point, Scenario> = BTreeMap::new();
        {
            let mut memory = self.memory();
            for settled in settled {
                wanted.push(settled.map(|(point, scenario)| {
                    let entry = memory.scenarios.entry(digest(&scenario));
                    let point = entry.or_insert(point).clone();
                    if !memory.scores.contains_key(&point) {
                        new.insert(point.clone(), scenario);
                    }
                    point
                }));
            }
        }
        let scores: Vec<(Point, Option<Score>)> = new
            .into_par_iter()
            .filter(|_| !self.stopped())
            .map(|(point, scenario)| (point, (self.predict)(&scenario)))
            .collect();
        self.memory().scores.extend(scores);
        let scored = |p: Point| {
            let score = self.score(&p)?;
            Some((p, score))
        };
        wanted.into_iter().map(|p| p.and_then(scored)).collect()
    }

    /// Predicts one point.
    pub(super) fn one(&self, point: Point) -> Option<Scored> {
        self.each([point]).pop().flatten()
    }

    /// Returns a lower bound of [`Score::time`] for the computation of each of these points: the
    /// compute stream is never idle, and nothing slows it down. Infinite for impossible points.
    pub(super) fn floors(&self, points: &[Point]) -> Vec<f64> {
        let floor = |point: &Point| {
            let (_, scenario) = self.settle(point.clone())?;
            Some(predicted(&scenario, self.request, false)?.busy_time())
        };
        let floors = points.par_iter().map(floor);
        floors.map(|f| f.unwrap_or(f64::INFINITY)).collect()
    }

    /// Returns a point whose settings all have an effect, and its scenario. Settings that have no
    /// effect in combination with the others are reset to the current ones. `None` if the point is
    /// impossible.
    fn settle(&self, mut point: Point) -> Option<(Point, Scenario)> {
        loop {
            let error = match (self.request.load)(&self.space.overrides(&point)) {
                Ok(scenario) => return Some((point, scenario)),
                Err(error) => error,
            };
            if error.kind() != ScenarioErrorKind::NoEffect {
                return None;
            }
            let idle = error.file().strip_prefix("--set ")?;
            let choice = |axis: usize| &self.space.axes[axis].choices[usize::from(point.0[axis])];
            let axis = point
                .changed()
                .find(|axis| choice(*axis).iter().any(|set| set == idle))?;
            point = point.with(axis, 0);
        }
    }

    /// Reports the best point so far.
    pub(super) fn report(&self, order: &Order, best: &Score) {
        self.watch.best(self.evaluated(), best, order.admits(best));
    }
}

/// Returns a hash of all options of a scenario.
pub(super) fn digest(scenario: &Scenario) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{scenario:?}").hash(&mut hasher);
    hasher.finish()
}
