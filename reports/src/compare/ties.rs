//! Ties: values closer than a tolerance are equal, and further criteria decide between them.
//!
//! The front and the best of several runs follow from one relation between [`Point`]s. A point
//! *dominates* another if it is no worse than a tie in time and in memory, and better by more than
//! the tolerance in one of them. Two points *tie* if neither is better by more than the tolerance
//! in either. Unlike exact dominance, this relation is not transitive. The front is therefore a set
//! that covers all points without overlap, not "all points that nothing dominates": see [`front`].

use crate::tolerance::Tolerance;

/// One of several candidates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Minimized: time per step, or per token if batches differ. A NaN point does not compete.
    pub time: f64,
    /// Minimized: reserved memory. A NaN point does not compete.
    pub memory: f64,
    /// Number of options that differ from the defaults. Among tied points, the one with the fewest
    /// wins.
    pub changes: usize,
}

impl Point {
    /// A point that does not compete: it is never the best and never on the front.
    pub const OUT: Self = Self {
        time: f64::NAN,
        memory: f64::NAN,
        changes: 0,
    };

    fn competes(&self) -> bool {
        !self.time.is_nan() && !self.memory.is_nan()
    }

    /// Returns whether this point makes another one unnecessary: it is no worse than a tie in both
    /// values, and better by more than the tolerance in at least one.
    #[must_use]
    pub(crate) fn dominates(&self, other: &Self, tolerance: Tolerance) -> bool {
        let memory = tolerance.of_memory();
        let worse = tolerance.less(other.time, self.time) || memory.less(other.memory, self.memory);
        let better =
            tolerance.less(self.time, other.time) || memory.less(self.memory, other.memory);
        better && !worse && self.competes() && other.competes()
    }

    /// Returns whether both points compete and do not tie.
    #[must_use]
    pub fn differs(&self, other: &Self, tolerance: Tolerance) -> bool {
        self.competes() && other.competes() && !self.ties(other, tolerance)
    }

    /// Returns whether both points are equal within the tolerance in time and in memory.
    #[must_use]
    pub fn ties(&self, other: &Self, tolerance: Tolerance) -> bool {
        tolerance.ties(self.time, other.time)
            && tolerance.of_memory().ties(self.memory, other.memory)
    }
}

/// Returns whether each point is on the Pareto front of time and memory.
///
/// No point of the front dominates another point of the front or ties with one. Every other
/// competing point is dominated by a point of the front or ties with one. Ties are resolved by the
/// fewest changes, then by less memory, then by less time, then by the first position. With
/// [`Tolerance::EXACT`] this is the classical front, with one point of each group of equal points.
#[must_use]
pub fn front(points: &[Point], tolerance: Tolerance) -> Vec<bool> {
    let mut on = vec![false; points.len()];
    let mut open: Vec<usize> = (0..points.len())
        .filter(|&i| points[i].competes())
        .collect();
    open.sort_by(|&a, &b| points[a].time.total_cmp(&points[b].time));
    while let Some(&fastest) = open.first() {
        // Dominance has no cycles: in a cycle, both numbers would have to fall by more than the
        // tolerance on half of the edges, and rise by at most the tolerance on the other half.
        let free = undominated(points, &open, tolerance);
        let anchor = free.first().copied().unwrap_or(fastest);
        let tied = free
            .into_iter()
            .filter(|&i| points[i].ties(&points[anchor], tolerance));
        let order = |&a: &usize, &b: &usize| {
            let (x, y) = (&points[a], &points[b]);
            let changes = x.changes.cmp(&y.changes);
            let memory = changes.then(x.memory.total_cmp(&y.memory));
            memory.then(x.time.total_cmp(&y.time)).then(a.cmp(&b))
        };
        let kept = tied.min_by(order).unwrap_or(anchor);
        on[kept] = true;
        open.retain(|&i| {
            let [kept, other] = [&points[kept], &points[i]];
            !kept.dominates(other, tolerance) && !kept.ties(other, tolerance)
        });
    }
    on
}

/// Returns the open points, sorted by time, that no other open point dominates.
fn undominated(points: &[Point], open: &[usize], tolerance: Tolerance) -> Vec<usize> {
    let memory = tolerance.of_memory();
    // The minimum memory of the points before the first one that `within` rejects. Thresholds rise
    // with time.
    let least = |within: &dyn Fn(f64, f64) -> bool| -> Vec<f64> {
        let (mut reached, mut so_far) = (0, f64::INFINITY);
        let of = |&i: &usize| {
            while let Some(&j) = open
                .get(reached)
                .filter(|&&j| within(points[j].time, points[i].time))
            {
                so_far = so_far.min(points[j].memory);
                reached += 1;
            }
            so_far
        };
        open.iter().map(of).collect()
    };
    let faster = least(&|other, own| tolerance.less(other, own));
    let as_fast = least(&|other, own| !tolerance.less(own, other));
    let all = open.iter().zip(faster.into_iter().zip(as_fast));
    all.filter(|&(&i, (faster, as_fast))| {
        let own = points[i].memory;
        let by_time = faster.is_finite() && !memory.less(own, faster);
        !by_time && !memory.less(as_fast, own)
    })
    .map(|(&i, _)| i)
    .collect()
}

/// Returns the best point: the fastest of the front. Among points that tie in time, it is the one
/// with the least memory, then the one with the fewest changes.
#[must_use]
pub fn best(points: &[Point], tolerance: Tolerance) -> Option<usize> {
    let on = front(points, tolerance);
    (0..points.len())
        .filter(|&i| on[i])
        .min_by(|&a, &b| points[a].time.total_cmp(&points[b].time))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn point(time: f64, memory: f64, changes: usize) -> Point {
        Point {
            time,
            memory,
            changes,
        }
    }

    /// A setting that saves 0.002 % of the time for 10 % more memory is not on the front. Among
    /// settings that tie in both, the one closest to the defaults is.
    #[test]
    fn noise_is_not_worth_memory() {
        let points = [
            point(8947.02, 50.16, 0),
            point(9278.5, 47.4, 1),
            point(8947.00, 50.16, 1),
            point(8946.90, 51.8, 1),
            point(8946.84, 54.93, 1),
        ];
        let on = front(&points, Tolerance::DEFAULT);
        assert_eq!(on, [true, true, false, false, false]);
        assert_eq!(best(&points, Tolerance::DEFAULT), Some(0));
        assert_eq!(best(&points, Tolerance::EXACT), Some(4));
        assert_eq!(best(&[Point::OUT], Tolerance::DEFAULT), None);
    }

    #[test]
    fn a_chain_of_ties_is_covered_without_gaps() {
        // Each point ties with the next in memory and is 1 % faster: the first and the last are far
        // apart.
        let points: Vec<Point> = (0..20)
            .map(|i| point(1.01f64.powi(i), 0.996f64.powi(i), 0))
            .collect();
        let on = front(&points, Tolerance::DEFAULT);
        let kept: Vec<usize> = (0..20).filter(|&i| on[i]).collect();
        assert_eq!(kept.first(), Some(&0));
        assert!(kept.len() > 5, "{kept:?}");
    }

    fn any_point() -> impl Strategy<Value = Point> {
        // A small grid has many ties, exact and inexact.
        let number = prop_oneof![
            (1..=60u32).prop_map(|i| 1.0 + f64::from(i) * 0.002),
            (1..=8u32).prop_map(f64::from),
            Just(f64::NAN),
        ];
        (number.clone(), number, 0..3usize).prop_map(|(t, m, c)| point(t, m, c))
    }

    fn any_tolerance() -> impl Strategy<Value = Tolerance> {
        prop_oneof![
            Just(Tolerance::EXACT),
            Just(Tolerance::DEFAULT),
            (0.0..0.2f64).prop_map(|x| Tolerance::new(x).unwrap()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn the_front_covers_all_points_without_overlap(
            points in prop::collection::vec(any_point(), 0..40),
            tolerance in any_tolerance(),
        ) {
            let on = front(&points, tolerance);
            let kept: Vec<Point> = (0..points.len()).filter(|&i| on[i]).map(|i| points[i]).collect();
            for (i, p) in kept.iter().enumerate() {
                prop_assert!(p.competes());
                for q in kept.iter().skip(i + 1) {
                    prop_assert!(!p.dominates(q, tolerance) && !q.dominates(p, tolerance), "{p:?} {q:?}");
                    prop_assert!(!p.ties(q, tolerance), "{p:?} {q:?}");
                }
            }
            for (p, on) in points.iter().zip(&on) {
                let covered = kept.iter().any(|k| k.dominates(p, tolerance) || k.ties(p, tolerance));
                prop_assert!(*on || covered || !p.competes(), "{p:?}");
            }
        }

        #[test]
        fn without_a_tolerance_it_is_the_classical_front(
            points in prop::collection::vec(any_point(), 0..40),
        ) {
            let on = front(&points, Tolerance::EXACT);
            let key = |p: &Point| (p.time.to_bits(), p.memory.to_bits());
            let values = |keep: &dyn Fn(usize) -> bool| -> std::collections::BTreeSet<(u64, u64)> {
                (0..points.len()).filter(|&i| keep(i)).map(|i| key(&points[i])).collect()
            };
            let beaten = |p: &Point| {
                points.iter().any(|q| {
                    q.time <= p.time && q.memory <= p.memory && (q.time < p.time || q.memory < p.memory)
                })
            };
            let classical = values(&|i| points[i].competes() && !beaten(&points[i]));
            prop_assert_eq!(values(&|i| on[i]), classical.clone());
            // One of several equal points is on the front.
            prop_assert_eq!(on.iter().filter(|on| **on).count(), classical.len());
        }

        #[test]
        fn the_best_ties_with_the_fastest(
            points in prop::collection::vec(any_point(), 1..40),
            tolerance in any_tolerance(),
        ) {
            let competing = points.iter().filter(|p| p.competes());
            let fastest = competing.map(|p| p.time).fold(f64::INFINITY, f64::min);
            match best(&points, tolerance) {
                Some(i) => prop_assert!(tolerance.ties(points[i].time, fastest)),
                None => prop_assert_eq!(fastest, f64::INFINITY),
            }
        }

        /// Dominance is antisymmetric and excludes a tie.
        #[test]
        fn of_two_points_at_most_one_dominates(p in any_point(), q in any_point(), t in any_tolerance()) {
            let facts = [p.dominates(&q, t), q.dominates(&p, t), p.ties(&q, t)];
            prop_assert!(facts.iter().filter(|f| **f).count() <= 1, "{facts:?}");
        }
    }
}
