//! Expandable segments: one growable range of addresses per (stream, pool).
//!
//! Memory is mapped into the range in pages of 2 MiB (small pool) or 20 MiB (large pool). A request
//! without a suitable free block maps the missing bytes: after the last block of the range, which
//! is extended if it is free, or into a hole that an earlier release left. Blocks are split
//! whenever at least 512 bytes remain. When the device is full, whole pages of free blocks are
//! unmapped. (c10 `try_allocate_expandable_block`, `map_block`, `unmap_block`.)

use super::{Bytes, CachingAllocator, LARGE_SEGMENT, NONE, Node, SMALL_SEGMENT, State};

/// Length of a range if the device's size is unknown. It is more than all tensors of a scenario can
/// take.
const RANGE: u64 = 1 << 56;

impl CachingAllocator {
    /// Returns the size that a free block can grow to.
    pub(super) fn reach(&self, id: u32) -> u64 {
        let node = self.node(id);
        match node.next {
            NONE => node.size,
            next if self.node(next).state == State::Unmapped => node.size + self.node(next).size,
            _ => node.size,
        }
    }

    /// Maps memory until some free block has room for `size`, and removes that block from the free
    /// list. Returns `None` if the device is full; pages mapped until then remain as free blocks.
    pub(super) fn grow_range(&mut self, list: usize, size: u64) -> Option<u32> {
        let mut at = self.room_in_range(list, size)?;
        if self.node(at).state == State::Unmapped {
            at = self.map(at, size)?;
        }
        while self.node(at).size < size {
            let hole = self.node(at).next;
            at = self.map(hole, size - self.node(at).size)?;
        }
        self.unlist(at);
        Some(at)
    }

    /// Returns the first run of free and unmapped blocks, in address order, with room for `size`,
    /// or a new range if there is none.
    fn room_in_range(&mut self, list: usize, size: u64) -> Option<u32> {
        for &hole in &self.lists[list].unmapped {
            let prev = self.node(hole).prev;
            let from = if prev != NONE && self.node(prev).state == State::Free {
                prev
            } else {
                hole
            };
            let (mut bytes, mut at) = (0, from);
            while at != NONE && bytes < size && self.node(at).state != State::Live {
                bytes += self.node(at).size;
                at = self.node(at).next;
            }
            if bytes >= size {
                return Some(from);
            }
        }
        let length = self
            .capacity
            .map_or(RANGE, |c| c.0.saturating_add(c.0 / 8).min(RANGE));
        let length = length.next_multiple_of(LARGE_SEGMENT);
        if size > length {
            return None;
        }
        let address = self.next_address.next_multiple_of(LARGE_SEGMENT);
        self.next_address = address
            .checked_add(length)
            .filter(|&end| end <= super::LAST_ADDRESS)?;
        let id = self.new_node(address, length, list, State::Unmapped);
        self.insert_unmapped(id);
        Some(id)
    }

    /// Maps whole pages for `size` bytes (but at most all) of an unmapped block, and merges them
    /// with their free neighbors.
    fn map(&mut self, id: u32, size: u64) -> Option<u32> {
        let Node {
            address,
            size: whole,
            list,
            ..
        } = *self.node(id);
        let mapped = size.min(whole).next_multiple_of(page(list));
        self.room(mapped)?;
        self.counters.reserved += Bytes(mapped);
        self.unlist(id);
        if mapped < whole {
            let rest = self.new_node(
                address + mapped,
                whole - mapped,
                list as usize,
                State::Unmapped,
            );
            self.link_after(id, rest);
            self.nodes[id as usize].size = mapped;
            self.insert_unmapped(rest);
        }
        self.nodes[id as usize].state = State::Free;
        let id = self.merge(id);
        self.insert_free(id);
        Some(id)
    }

    /// Releases the whole pages of a free block to the device.
    pub(super) fn unmap(&mut self, id: u32) {
        let Node {
            address,
            size,
            list,
            ..
        } = *self.node(id);
        let start = address.next_multiple_of(page(list));
        let end = (address + size) / page(list) * page(list);
        if start >= end {
            return;
        }
        self.unlist(id);
        if end < address + size {
            let after = self.new_node(end, address + size - end, list as usize, State::Free);
            self.link_after(id, after);
            self.insert_free(after);
        }
        let mut middle = id;
        if address < start {
            middle = self.new_node(start, end - start, list as usize, State::Unmapped);
            self.link_after(id, middle);
            self.nodes[id as usize].size = start - address;
            self.insert_free(id);
        } else {
            self.nodes[id as usize].size = end - start;
            self.nodes[id as usize].state = State::Unmapped;
        }
        self.counters.reserved -= Bytes(end - start);
        let hole = self.merge(middle);
        self.insert_unmapped(hole);
    }

    fn insert_unmapped(&mut self, id: u32) {
        let Node { address, list, .. } = *self.node(id);
        let at = self.lists[list as usize]
            .unmapped
            .partition_point(|&n| self.node(n).address < address);
        self.lists[list as usize].unmapped.insert(at, id);
    }
}

/// Returns the page size of a list. Small pools have odd indices.
fn page(list: u32) -> u64 {
    if list % 2 == 1 {
        SMALL_SEGMENT
    } else {
        LARGE_SEGMENT
    }
}
