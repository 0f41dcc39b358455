//! The contents of an allocator.

use super::{Bytes, CachingAllocator, FreeKey, NONE, Node, SMALL, State};
use crate::ir::StreamId;

/// A block of an allocator that is in use, or address space without memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::memory) struct Extent {
    address: u64,
    size: u64,
    list: u32,
    state: State,
}

/// The state that determines how an allocator serves further requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::memory) struct Layout {
    /// Extents, in the order of their addresses.
    extents: Vec<Extent>,
    next_address: u64,
}

impl CachingAllocator {
    /// Returns the layout, if nothing else affects further requests. Garbage collection also
    /// depends on the age of blocks.
    pub(in crate::memory) fn layout(&self) -> Option<Layout> {
        if self.collects() {
            return None;
        }
        let used = self.nodes.iter().filter(|n| n.state != State::Vacant);
        let extent = |n: &Node| Extent {
            address: n.address,
            size: n.size,
            list: n.list,
            state: n.state,
        };
        let mut extents: Vec<Extent> = used.map(extent).collect();
        extents.sort_unstable();
        Some(Layout {
            extents,
            next_address: self.next_address,
        })
    }

    /// Returns the bytes reserved for one stream: its segments, or the mapped part of its ranges.
    #[must_use]
    pub fn reserved_of(&self, stream: StreamId) -> Bytes {
        let mine = |n: &&Node| {
            n.list / 2 == u32::from(stream.0) && matches!(n.state, State::Live | State::Free)
        };
        self.nodes.iter().filter(mine).map(|n| Bytes(n.size)).sum()
    }

    /// Returns the address and size of every segment, ascending. For expandable segments, each run
    /// of mapped memory counts as one.
    #[must_use]
    pub fn segments(&self) -> Vec<(u64, Bytes)> {
        let mapped = |id: u32| matches!(self.node(id).state, State::Live | State::Free);
        let heads = (0..self.nodes.len() as u32).filter(|&id| {
            mapped(id) && (self.node(id).prev == NONE || !mapped(self.node(id).prev))
        });
        let whole = |head: u32| {
            let (mut size, mut at) = (0, head);
            while at != NONE && mapped(at) {
                size += self.node(at).size;
                at = self.node(at).next;
            }
            (self.node(head).address, Bytes(size))
        };
        let mut all: Vec<_> = heads.map(whole).collect();
        all.sort_unstable();
        all
    }

    /// Returns the number of free blocks that could serve requests like one for `bytes` on
    /// `stream`, apart from their size, and the size of the largest.
    #[must_use]
    pub fn holes(&self, bytes: Bytes, stream: StreamId) -> (usize, Bytes) {
        let list = usize::from(stream.0) * 2 + usize::from(bytes.0 <= SMALL);
        let Some(list) = self.lists.get(list) else {
            return (0, Bytes::ZERO);
        };
        let add = |(count, largest): (usize, Bytes), key: FreeKey| {
            (count + 1, largest.max(Bytes(key.size())))
        };
        list.free.iter().fold((0, Bytes::ZERO), add)
    }
}
