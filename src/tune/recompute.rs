//! The number of recomputed blocks.
//!
//! All blocks of a model are alike, so only the number of recomputed blocks matters, and the
//! smallest number that fits is the fastest. Memory is nearly proportional to the number, so the
//! first tries interpolate, followed by bisection. Every number that is tried is simulated.

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

/// Tries at the ends.
const ENDS: u32 = 2;
/// Number of tries by interpolation, before bisection.
const INTERPOLATED: u32 = 3;

/// Returns for each point the variant with the fewest recomputed blocks that fits. `None` if blocks
/// cannot be chosen, if no variant fits, or if the goal is not the shortest step.
///
/// The searches advance in parallel, so that all cores have work.
pub(super) fn fewest(eval: &Evaluator<'_>, order: &Order, points: &[Point]) -> Vec<Option<Scored>> {
    let mut searches: Vec<Search<Scored>> = points.iter().map(|_| Search::default()).collect();
    let ladder = ladder(eval.space).filter(|_| order.goal == Goal::Throughput);
    if let Some((axis, rungs)) = ladder {
        loop {
            let next = searches.iter().enumerate();
            let next: Vec<(usize, usize)> = next
                .filter_map(|(i, search)| Some((i, search.next(rungs.len())?)))
                .collect();
            if next.is_empty() {
                break;
            }
            let at = next
                .iter()
                .map(|(i, rung)| points[*i].with(axis, rungs[*rung]));
            for ((i, rung), scored) in next.iter().zip(eval.each(at)) {
                // A number without an effect is reset.
                let own = scored.filter(|(p, _)| p.0[axis] == rungs[*rung]);
                searches[*i].learn(*rung, own.map(|s| (s.1.slack, s)));
            }
        }
    }
    let found = searches.into_iter().map(|s| Some(s.enough?.2));
    found.collect()
}

/// A search for the lowest rung that fits.
struct Search<T> {
    /// A rung that does not fit, and its slack.
    too_few: Option<(usize, i64)>,
    /// A rung that fits, its slack, and the result at that rung.
    enough: Option<(usize, i64, T)>,
    tries: u32,
    ended: bool,
}

impl<T> Default for Search<T> {
    fn default() -> Self {
        Self {
            too_few: None,
            enough: None,
            tries: 0,
            ended: false,
        }
    }
}

impl<T> Search<T> {
    /// Returns the rung to try next: the lowest of `rungs`, the highest, then those between.
    fn next(&self, rungs: usize) -> Option<usize> {
        if self.ended {
            return None;
        }
        let Some((low, lacks)) = self.too_few else {
            return (rungs > 0).then_some(0);
        };
        let Some((high, spare, _)) = self.enough else {
            return Some(rungs - 1);
        };
        let between = high - low - 1;
        let share = if self.tries < ENDS + INTERPOLATED {
            lacks as f64 / (lacks as f64 - spare as f64)
        } else {
            0.5
        };
        let step = ((between + 1) as f64 * share).ceil() as usize;
        (between > 0).then(|| low + step.clamp(1, between))
    }

    /// Adds the slack of a rung and the result; `None` if the rung is impossible.
    fn learn(&mut self, rung: usize, found: Option<(i64, T)>) {
        self.tries += 1;
        let first = self.too_few.is_none();
        match found {
            Some((spare, found)) if spare >= 0 => {
                self.enough = Some((rung, spare, found));
                self.ended |= first;
            }
            Some((lacks, _)) if first || self.enough.is_some() => {
                self.too_few = Some((rung, lacks));
            }
            // Not even the highest rung fits.
            _ => self.ended = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the rung that a search finds, and the number of tries.
    fn searched(slack: &[i64]) -> (Option<usize>, u32) {
        let mut search = Search::default();
        while let Some(rung) = search.next(slack.len()) {
            assert!(search.tries < 64, "it ends");
            search.learn(rung, Some((slack[rung], ())));
        }
        (search.enough.map(|(rung, ..)| rung), search.tries)
    }

    #[test]
    fn proportional_memory_takes_two_tries_between_the_ends() {
        let slack: Vec<i64> = (0..=64).map(|n| n * 100 - 2_350).collect();
        assert_eq!(searched(&slack), (Some(24), 4));
        assert_eq!(searched(&[5, 9]), (Some(0), 1));
        assert_eq!(searched(&[-9, -5]), (None, 2));
        assert_eq!(searched(&[-9]), (None, 2));
        assert_eq!(searched(&[]), (None, 0));
    }

    #[test]
    fn an_impossible_rung_ends_a_search_with_what_it_has() {
        let mut search = Search::default();
        for (rung, slack) in [(0, Some(-9)), (4, Some(3)), (3, None)] {
            assert_eq!(search.next(5), Some(rung));
            search.learn(rung, slack.map(|s| (s, ())));
        }
        assert_eq!(search.next(5), None);
        assert_eq!(search.enough.map(|(rung, ..)| rung), Some(4));
    }

    proptest! {
        #[test]
        fn the_lowest_rung_that_fits_is_found(
            steps in prop::collection::vec(0i64..1000, 1..80),
            start in -20_000i64..1000,
        ) {
            let slack: Vec<i64> = steps
                .iter()
                .scan(start, |at, step| {
                    *at += step;
                    Some(*at)
                })
                .collect();
            let (found, tries) = searched(&slack);
            prop_assert_eq!(found, slack.iter().position(|s| *s >= 0));
            prop_assert!(tries <= ENDS + INTERPOLATED + 7);
        }
    }
}
