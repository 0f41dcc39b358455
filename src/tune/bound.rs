//! Groups of points, and a lower bound for the step time of each.
//!
//! Points with the same micro-batch and recompute form a group. Its bound is the time of its
//! computation alone, with the fastest choice on every other axis. This assumes that the fastest
//! choice in combination with the current settings is also the fastest in combination with other
//! settings. A group is left out if it does not fit with the choices that need the least memory:
//! first those that need the least in combination with the current settings, then after saving
//! memory on one axis at a time, and then on two axes at once. The tests compare the bound and the
//! omitted groups with exhaustive searches.

use super::evaluate::{Evaluator, Scored};
use super::recompute;
use super::score::Order;
use super::space::{GROUPS, LAYERS, Point, Space};
use std::cmp::Reverse;

/// Maximum share of its memory that a group may lack with the most economical choices next to the
/// current settings. If it lacks more, no other choices are tried.
const NEAR: f64 = 0.4;
/// Number of predicted points after which two changes at once are no longer tried, so that every
/// group is examined.
const MAX_POINTS: usize = 1000;
/// Limit on the instructions of all plans of points with two changes. Beyond it, these points are
/// not predicted.
const MAX_INSTRS: usize = 5_000_000;

/// Points with the same micro-batch and recompute.
pub(super) struct Group {
    /// The point with the fastest choices.
    start: Point,
    /// The point with the most economical choices. If it fits, it recomputes as few blocks as
    /// possible.
    pub(super) lean: Scored,
    /// Lower bound of the [`Score::time`](super::Score::time) of the group's steps.
    pub(super) floor: f64,
}

impl Group {
    /// Returns the point with the fastest choices and as many recomputed blocks as the most
    /// economical point.
    pub(super) fn start(&self, space: &Space) -> Point {
        match space.axis(LAYERS) {
            Some(axis) if self.lean.1.fits() => self.start.with(axis, self.lean.0.0[axis]),
            _ => self.start.clone(),
        }
    }

    /// Searches for a point of the group that fits: on one axis at a time, and, if no axis helps
    /// alone and plans are short, on two axes at once. Returns whether there is one.
    pub(super) fn fit(&mut self, eval: &Evaluator<'_>, order: &Order) -> bool {
        let fixed: Vec<usize> = GROUPS.iter().filter_map(|k| eval.space.axis(k)).collect();
        let blocks = eval.space.axis(LAYERS);
        let axes = (0..eval.space.axes.len()).filter(|a| !fixed.contains(a) && Some(*a) != blocks);
        let axes: Vec<usize> = axes.collect();
        while !self.lean.1.fits() && !eval.stopped() {
            let before = self.lean.0.clone();
            for &axis in &axes {
                self.leaner(eval, &fixed, changed(eval.space, &self.lean.0, axis));
            }
            if self.lean.0 == before {
                let singles = axes.iter().flat_map(|&a| changed(eval.space, &before, a));
                let singles: Vec<Point> = singles.filter(|p| *p != before).collect();
                let pairs = before.pairs(&singles);
                let few = eval.evaluated() + pairs.len() <= MAX_POINTS;
                if few && pairs.len() * self.lean.1.instrs <= MAX_INSTRS {
                    self.leaner(eval, &fixed, pairs);
                }
            }
            if self.lean.0 == before {
                break;
            }
        }
        let fewest = recompute::fewest(eval, order, std::slice::from_ref(&self.lean.0));
        if let Some(fewest) = fewest.into_iter().flatten().next() {
            self.lean = fewest;
        }
        self.lean.1.fits()
    }

    /// Takes the most economical of some points with the same choices on the fixed axes, if it
    /// needs less memory than the current one.
    fn leaner(&mut self, eval: &Evaluator<'_>, fixed: &[usize], points: Vec<Point>) {
        let same = |p: &Point| fixed.iter().all(|a| p.0[*a] == self.lean.0.0[*a]);
        let own = eval.all(points).into_iter().filter(|(p, _)| same(p));
        let leanest = own.max_by_key(|(p, score)| (score.slack, Reverse(p.clone())));
        if let Some(other) = leanest.filter(|(_, s)| s.slack > self.lean.1.slack) {
            self.lean = other;
        }
    }
}

/// Returns one point for each choice on an axis.
fn changed(space: &Space, point: &Point, axis: usize) -> Vec<Point> {
    let choices = 0..space.axes[axis].choices.len() as u16;
    choices.map(|c| point.with(axis, c)).collect()
}

/// Returns the groups that fit or nearly fit, fastest first among each kind.
pub(super) fn groups(
    eval: &Evaluator<'_>,
    order: &Order,
    fast: &Point,
    lean: &Point,
) -> Vec<Group> {
    let axes: Vec<usize> = GROUPS.iter().filter_map(|k| eval.space.axis(k)).collect();
    let mut pairs = vec![(fast.clone(), lean.clone())];
    for axis in axes {
        let choices = 0..eval.space.axes[axis].choices.len() as u16;
        let all = pairs.iter().flat_map(|(fast, lean)| {
            let choices = choices.clone();
            choices.map(move |c| (fast.with(axis, c), lean.with(axis, c)))
        });
        pairs = all.collect();
    }
    let leanest = eval.each(pairs.iter().map(|(_, lean)| lean.clone()));
    let near =
        |(_, score): &Scored| -score.slack as f64 <= NEAR * score.effect.peak_reserved.0 as f64;
    let groups = pairs.into_iter().zip(leanest);
    let groups = groups.filter_map(|((start, _), lean)| {
        Some(Group {
            start,
            lean: lean.filter(near)?,
            floor: f64::NAN,
        })
    });
    let mut groups: Vec<Group> = groups.collect();
    let leanest: Vec<Point> = groups.iter().map(|g| g.lean.0.clone()).collect();
    for (group, fewest) in groups
        .iter_mut()
        .zip(recompute::fewest(eval, order, &leanest))
    {
        if let Some(fewest) = fewest {
            group.lean = fewest;
        }
    }
    let starts: Vec<Point> = groups.iter().map(|g| g.start(eval.space)).collect();
    for (group, floor) in groups.iter_mut().zip(eval.floors(&starts)) {
        group.floor = floor;
    }
    // Groups that fit come first, because they may make it unnecessary to examine others.
    groups.sort_by(|a, b| {
        let fits = |g: &Group| g.lean.1.fits();
        fits(b).cmp(&fits(a)).then(a.floor.total_cmp(&b.floor))
    });
    groups
}
