//! The number of recomputed blocks.
//!
//! Blocks of a model are alike, so the knapsack of blocks to recompute is their number: the fewest
//! that fit are the fastest. They are found by bisection, and every number that is tried is
//! simulated.

use super::evaluate::{Evaluator, Scored};
use super::score::{Goal, Order};
use super::space::{LAYERS, Point, Space};
use shardlab_plan::config::RecomputeLayers;

/// Returns the choices of the axis of recomputed blocks, fewest blocks first.
fn ladder(space: &Space) -> Option<(usize, Vec<u16>)> {
    let axis = space.axis(LAYERS)?;
    let all = space.base.model.layers;
    let count = |set: &String| match set.strip_prefix(LAYERS)?.strip_prefix('=')? {
        "all" => Some(all),
        number => number.parse().ok(),
    };
    let blocks = |choice: &Vec<String>| match choice.first() {
        Some(set) => count(set),
        None => match space.base.train.recompute_layers {
            RecomputeLayers::All => Some(all),
            RecomputeLayers::First(n) => Some(n),
            RecomputeLayers::Patterns(_) => None,
        },
    };
    let choices = space.axes[axis].choices.iter().enumerate();
    let mut rungs: Vec<(u32, u16)> = choices
        .filter_map(|(i, choice)| Some((blocks(choice)?, i as u16)))
        .collect();
    rungs.sort_unstable();
    Some((axis, rungs.into_iter().map(|(_, choice)| choice).collect()))
}

/// Returns the choices that local search tries on the axis of recomputed blocks: one or four blocks
/// more or fewer, and all. `None` for other axes.
pub(super) fn moves(space: &Space, axis: usize, from: u16) -> Option<Vec<u16>> {
    let (own, rungs) = ladder(space).filter(|(own, _)| *own == axis)?;
    debug_assert_eq!(own, axis, "the axis of the ladder");
    let at = rungs.iter().position(|c| *c == from)?;
    let near = [at.wrapping_sub(4), at.wrapping_sub(1), at + 1, at + 4];
    let near = near.into_iter().chain([rungs.len() - 1]);
    let mut moves: Vec<u16> = near.filter_map(|i| rungs.get(i).copied()).collect();
    moves.dedup();
    Some(moves)
}

/// Returns the point with the fewest recomputed blocks that fit; `None` if blocks cannot be chosen,
/// none fits, or the goal is another one than the shortest step.
pub(super) fn fewest(eval: &Evaluator<'_>, order: &Order, point: &Point) -> Option<Scored> {
    if order.goal != Goal::Throughput {
        return None;
    }
    let (axis, rungs) = ladder(eval.space)?;
    let at = |rung: usize| eval.one(point.with(axis, rungs[rung]));
    // The first call says whether the number has an effect, too: if not, it is reset.
    let last = rungs.len().checked_sub(1)?;
    let first = at(0).filter(|(p, _)| p.0[axis] == rungs[0])?;
    if first.1.fits() {
        return Some(first);
    }
    let mut found = at(last).filter(|(_, score)| score.fits())?;
    let (mut too_few, mut enough) = (0, last);
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        match at(middle) {
            Some(scored) if scored.1.fits() => (enough, found) = (middle, scored),
            Some(_) => too_few = middle,
            None => break,
        }
    }
    Some(found)
}
