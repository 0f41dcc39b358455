//! Builds an allocator that is in use, from its segments and live blocks.

use super::{BlockId, Bytes, CachingAllocator, GRANULE, SMALL, State};
use crate::ir::StreamId;

/// A segment with its live blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentState {
    /// Address of its first byte.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Stream of its blocks.
    pub stream: StreamId,
    /// Whether it belongs to the small pool.
    pub small: bool,
    /// Addresses and requested bytes of live blocks, ascending, within the segment.
    pub live: Vec<(u64, u64)>,
}

impl CachingAllocator {
    /// Adds a segment and returns its live blocks in order. Later segments have lower addresses.
    ///
    /// Space between live blocks becomes free, except remainders that the allocator would not have
    /// split off.
    pub fn restore(&mut self, segment: &SegmentState) -> Vec<BlockId> {
        let list = usize::from(segment.stream.0) * 2 + usize::from(segment.small);
        self.add_lists(list);
        let end = segment.address + segment.size;
        self.next_address = self.next_address.min(segment.address);
        self.counters.reserved += Bytes(segment.size);
        let mut at = segment.address;
        let mut last = None;
        let mut live = Vec::with_capacity(segment.live.len());
        for (i, &(address, requested)) in segment.live.iter().enumerate() {
            if at < address {
                last = Some(self.append(last, at, address - at, list, State::Free));
            }
            let size = requested.max(1).next_multiple_of(GRANULE);
            let next = segment.live.get(i + 1).map_or(end, |n| n.0);
            let rest = next.saturating_sub(address + size);
            let splits = if segment.small {
                rest >= GRANULE
            } else {
                rest > SMALL && size < self.settings.max_split()
            };
            let size = if splits { size } else { size + rest };
            let id = self.append(last, address, size, list, State::Live);
            self.nodes[id as usize].requested = requested;
            self.counters.requested += Bytes(requested);
            self.counters.allocated += Bytes(size);
            live.push(BlockId(id));
            last = Some(id);
            at = address + size;
        }
        if at < end {
            self.append(last, at, end - at, list, State::Free);
        }
        live
    }

    /// Makes the next segment start at `address`, where a device has placed it. Addresses determine
    /// the choice between free blocks of equal size.
    pub fn place_next_segment(&mut self, address: u64) {
        self.placed = Some(address);
    }

    fn append(
        &mut self,
        last: Option<u32>,
        address: u64,
        size: u64,
        list: usize,
        state: State,
    ) -> u32 {
        let id = self.new_node(address, size, list, state);
        if let Some(last) = last {
            self.link_after(last, id);
        }
        if state == State::Free {
            self.insert_free(id);
        }
        id
    }
}
