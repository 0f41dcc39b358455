//! Groups of points, and the least step time that each can have.
//!
//! Points with the same micro-batch and recompute form a group. A group is left out if it does not
//! fit with the leanest choice on every other axis. Its bound is the time of its computation alone,
//! with the fastest choice on every other axis. Both take it that the choice that is leanest or
//! fastest next to today's settings is so next to others, too; the tests compare the bound with
//! exhaustive searches.

use super::evaluate::{Evaluator, Scored};
use super::recompute;
use super::score::Order;
use super::space::{GROUPS, Point};

/// Points with the same micro-batch and recompute.
pub(super) struct Group {
    /// The point with the fastest choices.
    pub(super) start: Point,
    /// A point that fits.
    pub(super) lean: Scored,
    /// No step of the group has a shorter [`Score::time`](super::Score::time).
    pub(super) floor: f64,
}

/// Returns the groups that can fit, the fastest ones first.
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
    eval.all(pairs.iter().map(|(_, lean)| lean.clone()));
    let mut starts = Vec::new();
    for (fast, lean) in pairs {
        let Some(scored) = eval.one(lean) else {
            continue;
        };
        if !scored.1.fits() {
            continue;
        }
        // The fewest recomputed blocks with which the group fits.
        let fewest = recompute::fewest(eval, order, &scored.0);
        let blocks = eval.space.axis(super::space::LAYERS);
        let start = match (&fewest, blocks) {
            (Some((p, _)), Some(axis)) => fast.with(axis, p.0[axis]),
            _ => fast,
        };
        starts.push((start, fewest.unwrap_or(scored)));
    }
    let points: Vec<Point> = starts.iter().map(|(start, _)| start.clone()).collect();
    let floors = eval.floors(&points);
    let mut groups: Vec<Group> = starts
        .into_iter()
        .zip(floors)
        .map(|((start, lean), floor)| Group { start, lean, floor })
        .collect();
    groups.sort_by(|a, b| a.floor.total_cmp(&b.floor));
    groups
}
