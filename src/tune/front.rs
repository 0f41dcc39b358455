//! The Pareto front of step time and reserved memory, and the simplest settings that are equally
//! good.

use super::evaluate::{Evaluator, Scored};
use super::score::Order;
use super::space::Point;
use crate::analysis::pareto::{self, Tolerance};

/// Returns the Pareto front of all predicted points that fit, fastest first.
pub(super) fn front(eval: &Evaluator<'_>) -> Vec<Scored> {
    let all = eval.scores();
    let points: Vec<pareto::Point> = all
        .iter()
        .map(|(point, score)| match score.fits() {
            true => pareto::Point {
                time: score.time(),
                memory: score.effect.peak_reserved.0 as f64,
                changes: point.changed().count(),
            },
            false => pareto::Point::OUT,
        })
        .collect();
    let on = pareto::front(&points, Tolerance::DEFAULT);
    let mut front: Vec<Scored> = all
        .into_iter()
        .zip(on)
        .filter_map(|(scored, on)| on.then_some(scored))
        .collect();
    front.sort_by(|a, b| a.1.time().total_cmp(&b.1.time()));
    front
}

/// Returns the point with the fewest changes that ties with the best one within the error of the
/// predictions, if it has fewer changes than the best one. Adds the changes of the best point to
/// the current settings one at a time, most useful first, and also considers all other predicted
/// points.
pub(super) fn simplest(eval: &Evaluator<'_>, order: &Order, best: &Scored) -> Option<Scored> {
    let mut reached = eval.space.today();
    let axes: Vec<usize> = best.0.changed().collect();
    // The loop counts its steps, because a change that has no effect without another one is undone.
    for _ in 1..axes.len() {
        let left = axes
            .iter()
            .filter(|axis| reached.0[**axis] != best.0.0[**axis]);
        let next: Vec<Point> = left
            .map(|axis| reached.with(*axis, best.0.0[*axis]))
            .collect();
        let scored = eval.all(next).into_iter().filter(|(p, _)| *p != reached);
        match scored.min_by(|a, b| order.compare(&a.1, &b.1).then_with(|| a.0.cmp(&b.0))) {
            Some((point, _)) => reached = point,
            None => break,
        }
    }
    let tolerance = Tolerance::of_bases([best.1.basis.as_ref()].into_iter());
    let changes = |p: &Point| p.changed().count();
    let limit = changes(&best.0);
    let primary = |s: &super::Score| order.of(s)[1];
    let tied = eval.scores().into_iter().filter(|(point, score)| {
        changes(point) < limit
            && order.admits(score)
            && !tolerance.less(primary(&best.1), primary(score))
    });
    tied.min_by(|a, b| {
        let fewer = changes(&a.0).cmp(&changes(&b.0));
        fewer
            .then_with(|| order.compare(&a.1, &b.1))
            .then_with(|| a.0.cmp(&b.0))
    })
}
