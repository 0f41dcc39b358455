//! Searches a space: all points of a small one; groups with bounds, and local search, in a large
//! one.

use super::bound::{self, Group};
use super::climb::Climb;
use super::evaluate::{Evaluator, Scored};
use super::score::{Goal, Order};
use super::space::Point;
use crate::analysis::whatif::TOLERANCE;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Maximum number of points of a space that is searched exhaustively.
pub(super) const EXACT: u64 = 512;
/// Number of points after which no further group is opened.
const MAX_POINTS: usize = 1500;
/// Number of instructions of predicted plans after which no further group is opened. This takes
/// about five seconds on two cores.
const MAX_INSTRS: usize = 45_000_000;
/// Number of random restarts near the best point.
const RESTARTS: usize = 6;
/// Number of axes that a restart changes.
const KICK: usize = 3;

/// Result of a search.
pub(super) struct Found {
    pub(super) order: Order,
    pub(super) today: Scored,
    /// The best point, or the one that is closest to being admitted if none is.
    pub(super) best: Scored,
    /// Lower bound of the [`Score::time`](super::Score::time) of steps within the limits; `None` if
    /// it is unknown.
    pub(super) bound: Option<f64>,
    /// Whether all points were predicted.
    pub(super) exact: bool,
}

/// Searches a space: exhaustively if it has at most `exact` points.
pub(super) fn search(eval: &Evaluator<'_>, today: Scored, seed: u64, exact: u64) -> Found {
    let fits = today.1.fits();
    let order = Order {
        goal: eval.request.goal,
        today: fits.then_some(today.1.time()),
    };
    let mut climb = Climb::new(eval, order);
    let exact = eval.space.size() <= exact;
    let (best, bound) = if exact {
        let all = eval.all(eval.space.points());
        let best = all
            .into_iter()
            .fold(today.clone(), |a, b| climb.better(a, b));
        let bound = order.admits(&best.1).then(|| best.1.time());
        (best, bound)
    } else {
        large(eval, &mut climb, order, today.clone(), seed)
    };
    let best = fewest_changes(eval, &order, best);
    eval.report(&order, &best.1);
    Found {
        order,
        today,
        best,
        bound: bound.filter(|_| order.goal == Goal::Throughput && !eval.stopped()),
        exact,
    }
}

/// Searches a space that is too large for all of its points.
fn large(
    eval: &Evaluator<'_>,
    climb: &mut Climb<'_>,
    order: Order,
    today: Scored,
    seed: u64,
) -> (Scored, Option<f64>) {
    let mut best = climb.neighbours(&today);
    let (fast, lean) = (climb.composite(false), climb.composite(true));
    let mut groups = bound::groups(eval, &order, &fast, &lean);
    for group in groups.iter().filter(|g| g.lean.1.fits()) {
        best = climb.better(best, group.lean.clone());
    }
    best = climb.climb(best);
    // The better it is, the more groups are left out.
    best = polished(climb, eval, best);
    let mut floors = Vec::new();
    for group in &mut groups {
        if spent(eval) || is_pruned(group, &order, &best) {
            floors.push(group.floor);
            continue;
        }
        if !group.lean.1.fits() && !group.fit(eval, &order) {
            // If nothing fits, the answer is the point that lacks the least memory.
            best = climb.better(best, group.lean.clone());
            continue;
        }
        floors.push(group.floor);
        let start = eval.one(group.start(eval.space));
        let start = start.map_or_else(
            || group.lean.clone(),
            |s| climb.better(s, group.lean.clone()),
        );
        let reached = climb.climb(start);
        best = climb.better(best, reached);
    }
    best = polished(climb, eval, best);
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..RESTARTS {
        if spent(eval) {
            break;
        }
        let Some(start) = eval.one(kicked(eval, &best.0, &mut random)) else {
            continue;
        };
        let reached = climb.climb(start);
        best = climb.better(best, reached);
    }
    best = polished(climb, eval, best);
    let bound = floors.into_iter().min_by(f64::total_cmp);
    let bound = bound.map(|floor| floor.min(best.1.time()));
    (best, bound)
}

/// Returns whether a search should end with its results so far.
fn spent(eval: &Evaluator<'_>) -> bool {
    eval.stopped() || eval.evaluated() > MAX_POINTS || eval.instrs() > MAX_INSTRS
}

/// Returns whether no point of a group can be better than the best one.
fn is_pruned(group: &Group, order: &Order, best: &Scored) -> bool {
    order.goal == Goal::Throughput
        && order.admits(&best.1)
        && group.floor >= best.1.time() * (1.0 - TOLERANCE)
}

/// Climbs until no single change of the point is better.
fn polished(climb: &mut Climb<'_>, eval: &Evaluator<'_>, mut best: Scored) -> Scored {
    while !eval.stopped() {
        let next = climb.neighbours(&best);
        let next = climb.climb(next);
        if next.0 == best.0 {
            break;
        }
        best = next;
    }
    best
}

/// Changes some axes at random.
fn kicked(eval: &Evaluator<'_>, point: &Point, random: &mut ChaCha8Rng) -> Point {
    let mut next = point.clone();
    for _ in 0..KICK {
        let axis = random.next_u32() as usize % next.0.len();
        let choices = eval.space.axes[axis].choices.len() as u32;
        next.0[axis] = (random.next_u32() % choices) as u16;
    }
    next
}

/// Returns the point with the fewest changes among those that are as good as the best one, then the
/// one with the least memory. Changes that do not matter are taken back first. Points that fit
/// narrowly come last: a change that leaves enough memory free does matter.
fn fewest_changes(eval: &Evaluator<'_>, order: &Order, best: Scored) -> Scored {
    let changes = |point: &Point| point.changed().count();
    let preferred = |a: &Scored, b: &Scored| {
        let ([_, _, a_other], [_, _, b_other]) = (order.of(&a.1), order.of(&b.1));
        let safer = a.1.is_narrow.cmp(&b.1.is_narrow);
        let fewer = safer.then_with(|| changes(&a.0).cmp(&changes(&b.0)));
        let leaner = fewer.then(a_other.total_cmp(&b_other));
        leaner
            .then_with(|| order.compare(&a.1, &b.1))
            .then_with(|| a.0.cmp(&b.0))
    };
    let mut point = best.clone();
    while order.admits(&best.1) {
        let undone: Vec<Point> = point
            .0
            .changed()
            .map(|axis| point.0.with(axis, 0))
            .collect();
        eval.all(undone);
        let tied = eval.scores().into_iter();
        let tied = tied.filter(|(_, score)| order.ties(score, &best.1));
        match tied.min_by(preferred) {
            Some(next) if next.0 != point.0 => point = next,
            _ => break,
        }
    }
    point
}
