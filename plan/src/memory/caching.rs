//! PyTorch's caching allocator as a state machine.
//!
//! Constants and rules are those of c10 `CUDACachingAllocator.cpp` (PyTorch 2.11), without
//! power-of-two rounding.
//!
//! * A request is rounded up to a multiple of 512 bytes. Up to 1 MiB it comes from the small pool,
//!   otherwise from the large one.
//! * Each (stream, pool) has its own free blocks. The smallest block that suffices is taken and,
//!   among equal ones, the one with the lowest address. Blocks never move to another stream.
//! * A miss allocates a new segment: 2 MiB for small requests, 20 MiB for requests below 10 MiB,
//!   otherwise the request rounded up to 2 MiB. Its address is below those of earlier segments:
//!   `cudaMalloc` gets addresses from Linux's `mmap`, which assigns them from high to low, as
//!   snapshots of jobs show.
//! * The low end of a block is handed out. The remainder becomes a free block if it is at least 512
//!   bytes (small pool) or more than 1 MiB (large pool). A smaller remainder stays with the block
//!   and counts as allocated.
//! * A freed block merges with free neighbors in its segment. The segment stays reserved.
//! * When the device is full, every segment without a live block is released, for all streams, and
//!   the request is retried once (a retry synchronizes the device).
//!
//! With `expandable_segments`, a (stream, pool) has one growable range instead; see `expandable`.
//! `reclaim` contains the rules of `max_split_size` and `garbage_collection_threshold`, and
//! `restore` builds an allocator that is already in use.

mod expandable;
mod inspect;
mod reclaim;
mod restore;
mod settings;

pub(super) use inspect::Layout;
pub use restore::SegmentState;
pub use settings::{AllocatorSettings, SettingsError};

use super::sorted::SortedSet;
use super::{AllocError, Block, Counters};
use crate::ir::StreamId;
use crate::units::Bytes;

const MIB: u64 = 1 << 20;
/// Granularity of block sizes.
pub const GRANULE: u64 = 512;
/// Largest request of the small pool, and largest remainder that stays with a large block.
const SMALL: u64 = MIB;
/// Segment (and page) size of the small pool.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// Smallest large request that gets a segment of its own size.
const OWN_SEGMENT: u64 = 10 * MIB;
/// Segment (and page) size of the large pool.
const LARGE_SEGMENT: u64 = 20 * MIB;
/// Granularity of such segments.
const SEGMENT_STEP: u64 = 2 * MIB;
/// Start (so that no address is 0) and end of the address space.
const FIRST_ADDRESS: u64 = LARGE_SEGMENT;
const LAST_ADDRESS: u64 = 1 << 62;
/// Upper bound of the size of requests. Longer free blocks count as this long.
const MAX_REQUEST: u64 = 1 << 50;

/// No neighbor.
const NONE: u32 = u32::MAX;

/// A block of a [`CachingAllocator`], for [`CachingAllocator::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Live,
    Free,
    /// Address space without memory (expandable segments).
    Unmapped,
    /// The node is not in use.
    Vacant,
}

/// A part of a segment, linked with its neighbors by address.
#[derive(Clone, Copy, Debug)]
struct Node {
    address: u64,
    size: u64,
    requested: u64,
    prev: u32,
    next: u32,
    list: u32,
    state: State,
    /// Number of searches of its pool before it became free, for garbage collection.
    free_since: u64,
}

/// A free block of one (stream, pool), ordered by size, then address.
///
/// Size and address in granules, and the node, share one number, because comparing keys is the most
/// frequent operation of allocators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FreeKey(u128);

impl FreeKey {
    /// A key above those of all blocks.
    const LAST: Self = Self(u128::MAX);
    const NODE_BITS: u32 = 32;
    /// A granule is 2^9 bytes.
    const ADDRESS_BITS: u32 = 64 - 9;

    fn new(size: u64, address: u64, node: u32) -> Self {
        let size = size.min(MAX_REQUEST) / GRANULE;
        let high = u128::from(size) << Self::ADDRESS_BITS;
        Self((high | u128::from(address / GRANULE)) << Self::NODE_BITS | u128::from(node))
    }

    /// Returns the key below those of all blocks with at least this size.
    fn of_size(size: u64) -> Self {
        Self::new(size, 0, 0)
    }

    fn size(self) -> u64 {
        (self.0 >> (Self::ADDRESS_BITS + Self::NODE_BITS)) as u64 * GRANULE
    }

    fn node(self) -> u32 {
        self.0 as u32
    }
}

#[derive(Clone, Debug)]
struct List {
    free: SortedSet<FreeKey>,
    /// Nodes of unmapped address space, by address.
    unmapped: Vec<u32>,
}

/// PyTorch's caching allocator. See the module documentation.
#[derive(Clone, Debug)]
pub struct CachingAllocator {
    settings: AllocatorSettings,
    /// Number of searches of the large pool. The age of its blocks is measured in searches.
    searches: u64,
    capacity: Option<Bytes>,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    /// Index: stream * 2 + (1 for the small pool).
    lists: Vec<List>,
    /// Address at which the next segment ends, or at which the next expandable range starts.
    next_address: u64,
    /// Address at which a device has placed the next segment.
    placed: Option<u64>,
    counters: Counters,
}

impl CachingAllocator {
    /// Creates an empty allocator on a device with at most `capacity` bytes (`None`: unlimited).
    #[must_use]
    pub fn new(expandable_segments: bool, capacity: Option<Bytes>) -> Self {
        let settings = AllocatorSettings {
            expandable_segments,
            ..AllocatorSettings::default()
        };
        Self::with_settings(settings, capacity)
    }

    /// Like [`CachingAllocator::new`], with other settings. Garbage collection needs a capacity, as
    /// in PyTorch.
    #[must_use]
    pub fn with_settings(settings: AllocatorSettings, capacity: Option<Bytes>) -> Self {
        let next_address = match settings.expandable_segments {
            true => FIRST_ADDRESS,
            false => LAST_ADDRESS,
        };
        Self {
            settings,
            searches: 0,
            capacity,
            nodes: Vec::new(),
            vacant: Vec::new(),
            lists: Vec::new(),
            next_address,
            placed: None,
            counters: Counters::default(),
        }
    }

    /// Allocates a block of `bytes` from the lists of `stream`.
    ///
    /// # Errors
    /// Returns [`AllocError::OutOfMemory`] if the device is full even after releasing every segment
    /// without a live block.
    pub fn take(&mut self, bytes: Bytes, stream: StreamId) -> Result<BlockId, AllocError> {
        let size = bytes
            .0
            .max(1)
            .checked_next_multiple_of(GRANULE)
            .filter(|&s| s < MAX_REQUEST);
        let Some(size) = size else {
            return Err(self.out_of_memory(bytes));
        };
        let small = size <= SMALL;
        let list = usize::from(stream.0) * 2 + usize::from(small);
        self.add_lists(list);
        let id = match self.best_fit(list, size) {
            Some(id) => id,
            None => self
                .take_new(list, size)
                .ok_or_else(|| self.out_of_memory(bytes))?,
        };
        let rest = self.node(id).size - size;
        let splits = if small || self.settings.expandable_segments {
            rest >= GRANULE
        } else {
            rest > SMALL && size < self.settings.max_split()
        };
        if splits {
            self.split(id, size);
        }
        let node = &mut self.nodes[id as usize];
        node.state = State::Live;
        node.requested = bytes.0;
        let block = node.size;
        self.counters.requested += bytes;
        self.counters.allocated += Bytes(block);
        Ok(BlockId(id))
    }

    /// Frees a block.
    ///
    /// # Panics
    /// Panics if the block is not live, because it is released twice.
    pub fn release(&mut self, block: BlockId) {
        let id = block.0;
        let node = self.nodes[id as usize];
        assert!(
            node.state == State::Live,
            "block at {:#x} is freed but not live",
            node.address
        );
        self.counters.requested -= Bytes(node.requested);
        self.counters.allocated -= Bytes(node.size);
        self.nodes[id as usize].state = State::Free;
        let id = self.merge(id);
        self.insert_free(id);
    }

    /// Returns the address and counted size of a live block.
    #[must_use]
    pub fn block(&self, block: BlockId) -> Block {
        let node = self.node(block.0);
        Block {
            address: node.address,
            bytes: Bytes(node.size),
        }
    }

    /// Returns the current counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Releases every segment without a live block (for expandable segments, every free page) to
    /// the device, as `torch.cuda.empty_cache` does.
    pub fn release_cached(&mut self) {
        for list in 0..self.lists.len() {
            let free: Vec<FreeKey> = self.lists[list].free.iter().collect();
            for key in free {
                let id = key.node();
                if self.settings.expandable_segments {
                    self.unmap(id);
                } else if self.is_whole(id) {
                    self.drop_segment(list, key);
                }
            }
        }
    }

    fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }

    /// Returns whether a block is a whole segment.
    fn is_whole(&self, id: u32) -> bool {
        self.node(id).prev == NONE && self.node(id).next == NONE
    }

    /// Releases a free segment to the device.
    fn drop_segment(&mut self, list: usize, key: FreeKey) {
        self.lists[list].free.remove(&key);
        self.counters.reserved -= Bytes(key.size());
        self.drop_node(key.node());
    }

    /// Adds empty lists up to `list`.
    fn add_lists(&mut self, list: usize) {
        while self.lists.len() <= list {
            self.lists.push(List {
                free: SortedSet::new(),
                unmapped: Vec::new(),
            });
        }
    }

    /// Allocates new memory with room for `size`. If the device is full, releases memory first.
    fn take_new(&mut self, list: usize, size: u64) -> Option<u32> {
        self.collect_garbage();
        if let Some(id) = self.grow(list, size) {
            return Some(id);
        }
        if self.release_oversize(list, size)
            && let Some(id) = self.grow(list, size)
        {
            return Some(id);
        }
        self.release_cached();
        self.counters.retries += 1;
        self.grow(list, size)
    }

    /// Removes the best free block from its list.
    fn best_fit(&mut self, list: usize, size: u64) -> Option<u32> {
        if list.is_multiple_of(2) && self.collects() {
            self.searches += 1;
        }
        let free = &self.lists[list].free;
        let mut at = free.lower_bound(&FreeKey::of_size(size))?;
        if self.settings.expandable_segments {
            // A block that can still grow counts with the size that it can grow to.
            while let Some(next) = free.next(at) {
                if self.reach(free.get(next).node()) >= self.reach(free.get(at).node()) {
                    break;
                }
                at = next;
            }
        }
        if !self.settings.may_serve(free.get(at).size(), size) {
            return None;
        }
        Some(self.lists[list].free.remove_at(at).node())
    }

    /// Allocates new memory with room for `size`, as a block outside of the free list; `None` if
    /// the device is full.
    fn grow(&mut self, list: usize, size: u64) -> Option<u32> {
        if self.settings.expandable_segments {
            return self.grow_range(list, size);
        }
        let segment = match size {
            s if s <= SMALL => SMALL_SEGMENT,
            s if s < OWN_SEGMENT => LARGE_SEGMENT,
            s => s.next_multiple_of(SEGMENT_STEP),
        };
        let address = self.reserve(segment)?;
        self.counters.reserved += Bytes(segment);
        Some(self.new_node(address, segment, list, State::Free))
    }

    /// Reserves address space, if the device and the space have room.
    fn reserve(&mut self, size: u64) -> Option<u64> {
        self.room(size)?;
        if let Some(address) = self.placed.take() {
            return Some(address);
        }
        let below = self.next_address.checked_sub(size);
        self.next_address = below.filter(|&address| address >= FIRST_ADDRESS)?;
        Some(self.next_address)
    }

    /// Checks that the device has room for `size` more bytes.
    fn room(&self, size: u64) -> Option<()> {
        let after = self.counters.reserved.0.checked_add(size)?;
        (after <= self.capacity.map_or(LAST_ADDRESS, |c| c.0)).then_some(())
    }

    /// Splits a block at `size`. The upper part becomes a free block.
    fn split(&mut self, id: u32, size: u64) {
        let low = *self.node(id);
        let rest = self.new_node(
            low.address + size,
            low.size - size,
            low.list as usize,
            State::Free,
        );
        self.link_after(id, rest);
        self.nodes[id as usize].size = size;
        self.insert_free(rest);
    }

    /// Merges a block that is not in a list with its neighbors of the same state, and removes
    /// those from their lists.
    fn merge(&mut self, id: u32) -> u32 {
        let Node {
            prev, next, state, ..
        } = *self.node(id);
        if next != NONE && self.node(next).state == state {
            self.unlist(next);
            self.absorb_next(id);
        }
        if prev != NONE && self.node(prev).state == state {
            self.unlist(prev);
            self.absorb_next(prev);
            return prev;
        }
        id
    }

    fn absorb_next(&mut self, id: u32) {
        let next = self.node(id).next;
        let Node {
            size, next: after, ..
        } = *self.node(next);
        let node = &mut self.nodes[id as usize];
        node.size += size;
        node.next = after;
        if after != NONE {
            self.nodes[after as usize].prev = id;
        }
        self.drop_node(next);
    }

    fn link_after(&mut self, id: u32, new: u32) {
        let next = std::mem::replace(&mut self.nodes[id as usize].next, new);
        self.nodes[new as usize].prev = id;
        self.nodes[new as usize].next = next;
        if next != NONE {
            self.nodes[next as usize].prev = new;
        }
    }

    fn insert_free(&mut self, id: u32) {
        let Node {
            size,
            address,
            list,
            ..
        } = *self.node(id);
        self.nodes[id as usize].free_since = self.searches;
        self.lists[list as usize]
            .free
            .insert(FreeKey::new(size, address, id));
    }

    /// Removes a free or unmapped block from its list.
    fn unlist(&mut self, id: u32) {
        let Node {
            size,
            address,
            list,
            state,
            ..
        } = *self.node(id);
        let list = &mut self.lists[list as usize];
        if state == State::Free {
            list.free.remove(&FreeKey::new(size, address, id));
        } else {
            list.unmapped.retain(|&n| n != id);
        }
    }

    fn new_node(&mut self, address: u64, size: u64, list: usize, state: State) -> u32 {
        let node = Node {
            address,
            size,
            requested: 0,
            prev: NONE,
            next: NONE,
            list: list as u32,
            state,
            free_since: 0,
        };
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    fn drop_node(&mut self, id: u32) {
        self.nodes[id as usize].state = State::Vacant;
        self.vacant.push(id);
    }

    fn out_of_memory(&self, requested: Bytes) -> AllocError {
        AllocError::OutOfMemory {
            requested,
            allocated: self.counters.allocated,
            reserved: self.counters.reserved,
            limit: self.capacity.unwrap_or(Bytes(LAST_ADDRESS)),
        }
    }
}

#[cfg(test)]
mod fsdp2_tests;
#[cfg(test)]
mod tests;
