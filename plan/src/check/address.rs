//! Addresses of buffers, as the program's allocators would give them.

use crate::memory::AllocError;
use crate::program::{BufferId, Program};
use std::collections::{BTreeMap, BTreeSet};

/// Stand-in for the allocators: best fit a stream and pool, blocks of 512 bytes, no splitting.
pub(super) struct Addresses {
    next: u64,
    free: BTreeMap<(u8, u8, u64), BTreeSet<u64>>,
    live: Vec<Option<(u64, u64)>>,
}

impl Addresses {
    /// Nothing allocated.
    pub(super) fn new(p: &Program) -> Self {
        Self {
            next: 512,
            free: BTreeMap::new(),
            live: vec![None; p.buffers.len()],
        }
    }

    /// Address of a buffer that gets memory now.
    ///
    /// # Errors
    /// What the allocator refuses.
    pub(super) fn alloc(&mut self, p: &Program, b: BufferId) -> Result<u64, AllocError> {
        let d = &p.buffers[b.index()];
        let bytes = d.bytes.round_up(512).0.max(512);
        let key = (d.pool as u8, d.stream.0, bytes);
        let fit = self
            .free
            .range(key..(key.0, key.1, 2 * bytes + 1))
            .find(|(_, v)| !v.is_empty())
            .map(|(k, _)| *k);
        let (address, size) = match fit {
            Some(k) => (self.free.get_mut(&k).and_then(BTreeSet::pop_first).unwrap_or(0), k.2),
            None => {
                self.next += bytes;
                (self.next - bytes, bytes)
            }
        };
        self.live[b.index()] = Some((address, size));
        Ok(address)
    }

    /// Takes the memory of a buffer back.
    pub(super) fn free(&mut self, p: &Program, b: BufferId) {
        let d = &p.buffers[b.index()];
        if let Some((address, size)) = self.live[b.index()].take() {
            self.free
                .entry((d.pool as u8, d.stream.0, size))
                .or_default()
                .insert(address);
        }
    }
}
