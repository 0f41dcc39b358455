//! Index of occupied addresses over time, for planning the pool.
//!
//! Time is divided into columns (one per lifetime), and the columns form a tree: a leaf covers
//! [`LEAF`] columns, and every other node covers [`FAN`] nodes of the level below. A lifetime is
//! stored at the largest nodes that it covers completely. Each node knows the addresses that
//! lifetimes stored at it occupy during *all* of its time, and those that they occupy during *any*
//! of it, both as merged ranges. A leaf knows the same for its parts. A query then visits a few
//! nodes per level, for any length: `any` of the largest nodes that it covers, `all` of those that
//! it covers in part, and the parts of its first and last leaf.

use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Counts steps of work, only in tests, so that a test can check without a clock that planning
/// remains nearly linear.
pub(super) mod work {
    #[cfg(test)]
    thread_local!(static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });

    /// Adds to the count.
    #[inline]
    pub(super) fn add(_steps: usize) {
        #[cfg(test)]
        STEPS.set(STEPS.get() + _steps as u64);
    }

    /// Returns the number of steps of this thread since the last call.
    #[cfg(test)]
    pub(in crate::memory) fn take() -> u64 {
        STEPS.take()
    }
}

/// Number of columns of a leaf.
const LEAF: usize = 32;
/// Number of children of a node.
const FAN: usize = 16;

/// Disjoint address ranges, merged where they touch, ascending.
#[derive(Clone, Debug, Default)]
struct Ranges(SmallVec<[(u64, u64); 1]>);

impl Ranges {
    fn add(&mut self, lo: u64, hi: u64) {
        let v = &mut self.0;
        let from = v.partition_point(|r| r.1 < lo);
        let to = from + v[from..].partition_point(|r| r.0 <= hi);
        work::add(1);
        if from == to {
            v.insert(from, (lo, hi));
        } else {
            v[from] = (v[from].0.min(lo), v[to - 1].1.max(hi));
            v.drain(from + 1..to);
        }
    }
}

/// A part of a leaf, and the addresses that are occupied there by lifetimes that cover it and no
/// more of the leaf. Many lifetimes may end at the same time, such as those of gradients after the
/// optimizer.
#[derive(Clone, Debug)]
struct Part {
    start: u32,
    end: u32,
    taken: Ranges,
}

#[derive(Clone, Debug, Default)]
struct Node {
    all: Ranges,
    any: Ranges,
}

/// Occupied addresses over time.
#[derive(Clone, Debug)]
pub(super) struct Occupancy {
    /// Nodes of each level, leaves first. The last level has at most [`FAN`] nodes.
    levels: Vec<Vec<Node>>,
    /// Parts of each leaf.
    parts: Vec<Vec<Part>>,
}

impl Occupancy {
    pub(super) fn new(columns: usize) -> Self {
        let leaves = columns.div_ceil(LEAF);
        let mut levels = vec![vec![Node::default(); leaves]];
        let mut nodes = leaves;
        while nodes > FAN {
            nodes = nodes.div_ceil(FAN);
            levels.push(vec![Node::default(); nodes]);
        }
        Self {
            levels,
            parts: vec![Vec::new(); leaves],
        }
    }

    /// Returns the lowest multiple of `align` (a power of two) at which `size` addresses are free
    /// during all of `spans`.
    pub(super) fn lowest_gap(&self, spans: &[Range<u32>], size: u64, align: u64) -> u64 {
        let mut taken: SmallVec<[&[(u64, u64)]; 64]> = SmallVec::new();
        for columns in spans {
            visit(self.levels.len(), columns, |level, at, covered| {
                let node = &self.levels[level][at];
                let ranges = if covered { &node.any.0 } else { &node.all.0 };
                // Most nodes are still empty when the largest keys are placed.
                if !ranges.is_empty() {
                    taken.push(ranges);
                }
                if level == 0 && !covered {
                    work::add(self.parts[at].len());
                    let overlapping = self.parts[at]
                        .iter()
                        .filter(|p| p.start < columns.end && columns.start < p.end);
                    taken.extend(overlapping.map(|p| &*p.taken.0));
                }
            });
        }
        lowest_gap(&mut taken, size, align)
    }

    /// Occupies addresses `lo..hi` during `columns`.
    pub(super) fn take(&mut self, columns: Range<u32>, lo: u64, hi: u64) {
        visit(self.levels.len(), &columns, |level, at, covered| {
            let node = &mut self.levels[level][at];
            node.any.add(lo, hi);
            if covered {
                node.all.add(lo, hi);
            } else if level == 0 {
                let leaf = (at * LEAF) as u32..((at + 1) * LEAF) as u32;
                let start = columns.start.max(leaf.start);
                let end = columns.end.min(leaf.end);
                let parts = &mut self.parts[at];
                work::add(parts.len());
                match parts.iter_mut().find(|p| (p.start, p.end) == (start, end)) {
                    Some(part) => part.taken.add(lo, hi),
                    None => parts.push(Part {
                        start,
                        end,
                        taken: Ranges(smallvec![(lo, hi)]),
                    }),
                }
            }
        });
    }
}

/// Calls `node` with a level, an index, and `true` for each of the largest nodes that `columns`
/// cover completely, or `false` for each node that they cover in part. Larger nodes come first,
/// because long lifetimes have low addresses.
fn visit(levels: usize, columns: &Range<u32>, mut node: impl FnMut(usize, usize, bool)) {
    let (start, end) = (columns.start as usize, columns.end as usize);
    // Nodes whose parent is covered completely are skipped.
    let mut above = 0..0;
    for level in (0..levels).rev() {
        let width = LEAF * FAN.pow(level as u32);
        let touched = start / width..end.div_ceil(width);
        let whole = start.div_ceil(width)..end / width;
        if whole.is_empty() {
            touched.for_each(|at| node(level, at, false));
            continue;
        }
        if touched.start < whole.start {
            node(level, touched.start, false);
        }
        if above.is_empty() {
            above = whole.end..whole.end;
        }
        (whole.start..above.start).for_each(|at| node(level, at, true));
        (above.end..whole.end).for_each(|at| node(level, at, true));
        if whole.end < touched.end {
            node(level, whole.end, false);
        }
        above = whole.start * FAN..whole.end * FAN;
    }
}

/// Returns the lowest multiple of `align` at which `size` addresses are in none of the lists. Each
/// list is ascending and disjoint.
fn lowest_gap(taken: &mut [&[(u64, u64)]], size: u64, align: u64) -> u64 {
    let mut at: u64 = 0;
    loop {
        let before = at;
        work::add(taken.len());
        for list in &mut *taken {
            // Ranges below this address do not matter any more. Most lists have none, and need no
            // search.
            if list.first().is_some_and(|r| r.1 <= at) {
                *list = &list[list.partition_point(|r| r.1 <= at)..];
            }
            while let Some((&(lo, hi), rest)) = list.split_first()
                && lo < at + size
            {
                work::add(1);
                at = at.max(hi.next_multiple_of(align));
                *list = rest;
            }
        }
        if at == before {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_merge() {
        let mut r = Ranges::default();
        for (lo, hi) in [(10, 20), (30, 40), (50, 60), (20, 30)] {
            r.add(lo, hi);
        }
        assert_eq!(&r.0[..], [(10, 40), (50, 60)]);
        r.add(0, 100);
        assert_eq!(&r.0[..], [(0, 100)]);
    }

    #[test]
    fn gaps() {
        let gap =
            |taken: &[&[(u64, u64)]], size, align| lowest_gap(&mut taken.to_vec(), size, align);
        assert_eq!(gap(&[], 4, 1), 0);
        assert_eq!(gap(&[&[(0, 4), (4, 8)]], 4, 1), 8);
        assert_eq!(gap(&[&[(0, 4), (8, 12)]], 4, 1), 4);
        assert_eq!(gap(&[&[(0, 3), (8, 12)]], 5, 4), 12);
        let descending: Vec<_> = (0..10).rev().map(|i| [(i, i + 1)]).collect();
        let descending: Vec<&[(u64, u64)]> = descending.iter().map(|r| &r[..]).collect();
        assert_eq!(gap(&descending, 1, 1), 10);
        let lists: [&[(u64, u64)]; 4] = [&[(8, 9), (20, 30)], &[], &[(30, 33)], &[(0, 2), (3, 8)]];
        assert_eq!(gap(&lists, 1, 1), 2);
        assert_eq!(gap(&lists, 2, 1), 9);
        assert_eq!(gap(&lists, 12, 1), 33);
        assert_eq!(gap(&lists[..2], 12, 16), 32);
    }

    proptest! {
        /// The index finds the same gap as a plain list of lifetimes.
        #[test]
        fn agrees_with_a_list(
            lives in prop::collection::vec((0u32..30_000, 1u32..30_000, 0u64..50, 1u64..5), 1..60),
            ask in (0u32..30_000, 1u32..30_000),
            size in 1u64..20,
        ) {
            let mut index = Occupancy::new(60_000);
            for &(start, length, lo, size) in &lives {
                index.take(start..start + length, lo, lo + size);
            }
            let time = ask.0..ask.0 + ask.1;
            let free = |at: u64| lives.iter().all(|&(start, length, lo, bytes)| {
                start >= time.end || time.start >= start + length || at + size <= lo || lo + bytes <= at
            });
            let lowest = (0..).find(|&at| free(at));
            prop_assert_eq!(Some(index.lowest_gap(&[time], size, 1)), lowest);
        }
    }
}
