//! Which addresses are taken when: the index behind the pool's plan.
//!
//! Time is cut into columns (one a life), columns into buckets, buckets into blocks of buckets. Each of those knows the
//! addresses that are taken during *all* of it, and those taken during *any* of it, both as merged ranges; a bucket also
//! lists the lives that cover a part of it. A life then looks at few ranges, whatever its length: `any` of what it
//! covers, `all` and the listed parts of where it begins and ends.

use std::ops::Range;

/// Columns of a bucket.
const BUCKET: usize = 32;
/// Buckets of a block.
const BLOCK: usize = 16;

/// Disjoint address ranges, merged where they touch, ascending.
#[derive(Clone, Debug, Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn add(&mut self, lo: u64, hi: u64) {
        let v = &mut self.0;
        let from = v.partition_point(|r| r.1 < lo);
        let to = from + v[from..].partition_point(|r| r.0 <= hi);
        if from == to {
            v.insert(from, (lo, hi));
        } else {
            v[from] = (v[from].0.min(lo), v[to - 1].1.max(hi));
            v.drain(from + 1..to);
        }
    }
}

/// A life that covers a part of a bucket.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: u32,
    end: u32,
    lo: u64,
    hi: u64,
}

#[derive(Clone, Debug, Default)]
struct Node {
    all: Ranges,
    any: Ranges,
    parts: Vec<Part>,
}

/// Taken addresses over time.
#[derive(Clone, Debug)]
pub(super) struct Occupancy {
    buckets: Vec<Node>,
    blocks: Vec<Node>,
}

impl Occupancy {
    pub(super) fn new(columns: usize) -> Self {
        let buckets = columns.div_ceil(BUCKET);
        Self {
            buckets: vec![Node::default(); buckets],
            blocks: vec![Node::default(); buckets.div_ceil(BLOCK)],
        }
    }

    /// Appends the address ranges taken during any of `columns` to `out`.
    pub(super) fn taken(&self, columns: Range<u32>, out: &mut Vec<(u64, u64)>) {
        let time = columns.start as usize..columns.end as usize;
        for block in touched(&time, BUCKET * BLOCK) {
            let node = &self.blocks[block];
            if covers(&time, block, BUCKET * BLOCK) {
                out.extend_from_slice(&node.any.0);
                continue;
            }
            out.extend_from_slice(&node.all.0);
            for bucket in within(&time, block) {
                let node = &self.buckets[bucket];
                if covers(&time, bucket, BUCKET) {
                    out.extend_from_slice(&node.any.0);
                    continue;
                }
                out.extend_from_slice(&node.all.0);
                let overlapping = node
                    .parts
                    .iter()
                    .filter(|p| p.start < columns.end && columns.start < p.end);
                out.extend(overlapping.map(|p| (p.lo, p.hi)));
            }
        }
    }

    /// Takes addresses `lo..hi` during `columns`.
    pub(super) fn take(&mut self, columns: Range<u32>, lo: u64, hi: u64) {
        let time = columns.start as usize..columns.end as usize;
        for block in touched(&time, BUCKET * BLOCK) {
            let node = &mut self.blocks[block];
            node.any.add(lo, hi);
            if covers(&time, block, BUCKET * BLOCK) {
                node.all.add(lo, hi);
                continue;
            }
            for bucket in within(&time, block) {
                let node = &mut self.buckets[bucket];
                node.any.add(lo, hi);
                if covers(&time, bucket, BUCKET) {
                    node.all.add(lo, hi);
                } else {
                    node.parts.push(Part {
                        start: columns.start,
                        end: columns.end,
                        lo,
                        hi,
                    });
                }
            }
        }
    }
}

/// Cells of `width` columns that `time` touches.
fn touched(time: &Range<usize>, width: usize) -> Range<usize> {
    time.start / width..time.end.div_ceil(width)
}

/// Whether `time` covers all of a cell.
fn covers(time: &Range<usize>, cell: usize, width: usize) -> bool {
    time.start <= cell * width && (cell + 1) * width <= time.end
}

/// Buckets of a block that `time` touches.
fn within(time: &Range<usize>, block: usize) -> Range<usize> {
    let buckets = touched(time, BUCKET);
    buckets.start.max(block * BLOCK)..buckets.end.min((block + 1) * BLOCK)
}

/// Lowest multiple of `align` (a power of two) where `size` addresses are free, given the taken ranges in any order.
pub(super) fn lowest_gap(taken: &mut [(u64, u64)], size: u64, align: u64) -> u64 {
    let up = |x: u64| x.next_multiple_of(align);
    let mut at = 0;
    // Ranges come nearly ascending, so a few passes settle it; sorting is for the rest.
    for _ in 0..4 {
        let before = at;
        for &(lo, hi) in &*taken {
            if lo < at + size && at < hi {
                at = up(hi);
            }
        }
        if at == before {
            return at;
        }
    }
    taken.sort_unstable();
    for &(lo, hi) in &*taken {
        if lo >= at + size {
            break;
        }
        if at < hi {
            at = up(hi);
        }
    }
    at
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
        assert_eq!(r.0, [(10, 40), (50, 60)]);
        r.add(0, 100);
        assert_eq!(r.0, [(0, 100)]);
    }

    #[test]
    fn gaps() {
        assert_eq!(lowest_gap(&mut [(4, 8), (0, 4)], 4, 1), 8);
        assert_eq!(lowest_gap(&mut [(0, 4), (8, 12)], 4, 1), 4);
        assert_eq!(lowest_gap(&mut [(0, 3), (8, 12)], 5, 4), 12);
        let mut descending: Vec<_> = (0..10).rev().map(|i| (i, i + 1)).collect();
        assert_eq!(lowest_gap(&mut descending, 1, 1), 10);
    }

    proptest! {
        /// What the index finds taken is what a plain list of lives finds.
        #[test]
        fn agrees_with_a_list(
            lives in prop::collection::vec((0u32..1500, 1u32..1500, 0u64..50, 1u64..5), 1..60),
            ask in (0u32..1500, 1u32..1500),
        ) {
            let mut index = Occupancy::new(3000);
            for &(start, length, lo, size) in &lives {
                index.take(start..start + length, lo, lo + size);
            }
            let time = ask.0..ask.0 + ask.1;
            let mut ranges = Vec::new();
            index.taken(time.clone(), &mut ranges);
            for address in 0..60 {
                let found = ranges.iter().any(|r| r.0 <= address && address < r.1);
                let really = lives.iter().any(|&(start, length, lo, size)| {
                    start < time.end && time.start < start + length && lo <= address && address < lo + size
                });
                prop_assert_eq!(found, really, "address {}", address);
            }
        }
    }
}
