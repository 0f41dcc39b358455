//! Counts bytes until the allocators are there.

use shardlab_plan::memory::{AllocError, Counters};
use shardlab_plan::program::{BufferId, Program};
use shardlab_plan::units::Bytes;

pub(crate) struct Memory {
    counters: Counters,
    limit: Option<Bytes>,
}

impl Memory {
    pub(crate) fn new(_: &Program, limit: Option<Bytes>) -> Self {
        Self {
            counters: Counters::default(),
            limit,
        }
    }

    pub(crate) fn alloc(&mut self, program: &Program, buffer: BufferId) -> Result<u64, AllocError> {
        let bytes = program.buffers[buffer.index()].bytes.round_up(512);
        let c = &mut self.counters;
        if let Some(limit) = self.limit.filter(|l| c.allocated + bytes > *l) {
            return Err(AllocError::OutOfMemory {
                requested: bytes,
                allocated: c.allocated,
                reserved: c.reserved,
                limit,
            });
        }
        c.allocated += bytes;
        c.reserved = c.reserved.max(c.allocated);
        Ok(0)
    }

    pub(crate) fn free(&mut self, program: &Program, buffer: BufferId) {
        self.counters.allocated -= program.buffers[buffer.index()].bytes.round_up(512);
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }
}
