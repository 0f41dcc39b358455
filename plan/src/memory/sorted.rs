//! A sorted set of small `Copy` items in chunks.
//!
//! Free lists have tens to hundreds of entries and change with every call. For these sizes,
//! contiguous chunks of 64 are faster than a B-tree, and they remain logarithmic when a list grows
//! to thousands of entries. A set keeps its chunks, so it allocates nothing in a steady state.

/// Number of entries of a full chunk.
const CHUNK: usize = 64;

/// Position of an entry; valid until the next change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pos {
    chunk: usize,
    index: usize,
}

#[derive(Clone, Debug)]
pub(super) struct SortedSet<T> {
    /// Chunks. Each is sorted, and below the next one. None is empty, unless it is the only one.
    chunks: Vec<Vec<T>>,
    /// An empty chunk, kept for the next split.
    spare: Option<Vec<T>>,
}

impl<T: Ord + Copy> SortedSet<T> {
    pub(super) fn new() -> Self {
        Self {
            chunks: vec![Vec::new()],
            spare: None,
        }
    }

    /// Returns the first entry that is not below `key`.
    pub(super) fn lower_bound(&self, key: &T) -> Option<Pos> {
        let chunk = self.chunk_of(key);
        let index = self.chunks[chunk].partition_point(|x| x < key);
        (index < self.chunks[chunk].len()).then_some(Pos { chunk, index })
    }

    /// Returns the last entry that is below `key`.
    pub(super) fn before(&self, key: &T) -> Option<T> {
        let chunk = self.chunk_of(key);
        match self.chunks[chunk].partition_point(|x| x < key) {
            0 if chunk == 0 => None,
            0 => self.chunks[chunk - 1].last().copied(),
            i => Some(self.chunks[chunk][i - 1]),
        }
    }

    pub(super) fn get(&self, at: Pos) -> T {
        self.chunks[at.chunk][at.index]
    }

    /// Returns the position after `at`.
    pub(super) fn next(&self, at: Pos) -> Option<Pos> {
        if at.index + 1 < self.chunks[at.chunk].len() {
            Some(Pos {
                chunk: at.chunk,
                index: at.index + 1,
            })
        } else if at.chunk + 1 < self.chunks.len() {
            Some(Pos {
                chunk: at.chunk + 1,
                index: 0,
            })
        } else {
            None
        }
    }

    pub(super) fn insert(&mut self, item: T) {
        let at = self.chunk_of(&item);
        let chunk = &mut self.chunks[at];
        let index = chunk.partition_point(|x| *x < item);
        chunk.insert(index, item);
        if chunk.len() >= CHUNK {
            let mut upper = self
                .spare
                .take()
                .unwrap_or_else(|| Vec::with_capacity(CHUNK));
            upper.extend(chunk.drain(CHUNK / 2..));
            self.chunks.insert(at + 1, upper);
        }
    }

    pub(super) fn remove_at(&mut self, at: Pos) -> T {
        let item = self.chunks[at.chunk].remove(at.index);
        if self.chunks[at.chunk].is_empty() && self.chunks.len() > 1 {
            self.spare = Some(self.chunks.remove(at.chunk));
        }
        item
    }

    /// Removes `item`. Returns whether it was present.
    pub(super) fn remove(&mut self, item: &T) -> bool {
        match self.lower_bound(item) {
            Some(at) if self.get(at) == *item => {
                self.remove_at(at);
                true
            }
            _ => false,
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.chunks.iter().flatten().copied()
    }

    /// Returns the only chunk that may contain `key`: the first one that ends at or after it, or
    /// else the last one.
    fn chunk_of(&self, key: &T) -> usize {
        if self.chunks.len() == 1 {
            return 0;
        }
        self.chunks
            .partition_point(|c| c.last().is_some_and(|x| x < key))
            .min(self.chunks.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn agrees_with_a_btree(ops in prop::collection::vec((any::<bool>(), 0u32..400), 0..1500)) {
            let (mut ours, mut std) = (SortedSet::new(), BTreeSet::new());
            for (insert, x) in ops {
                if insert {
                    if std.insert(x) {
                        ours.insert(x);
                    }
                } else {
                    prop_assert_eq!(ours.remove(&x), std.remove(&x));
                }
                let found = ours.lower_bound(&x).map(|p| ours.get(p));
                prop_assert_eq!(found, std.range(x..).next().copied());
                prop_assert_eq!(ours.before(&x), std.range(..x).next_back().copied());
                let next = ours.lower_bound(&x).and_then(|p| ours.next(p)).map(|p| ours.get(p));
                prop_assert_eq!(next, std.range(x..).nth(1).copied());
            }
            prop_assert!(ours.iter().eq(std.iter().copied()));
        }
    }
}
