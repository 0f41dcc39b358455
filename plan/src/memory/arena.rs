//! All memory of a program. Each buffer comes from the allocator that it names.

use super::caching::{BlockId, CachingAllocator, Layout};
use super::double_buffer::DoubleBuffer;
use super::placement::Placement;
use super::pool::{PoolAllocator, PoolPlan};
use super::trace_pool::{Grant, TracePool};
use super::{AllocError, Counters};
use crate::ir::{BufferId, COMPUTE, Pool, StreamId};
use crate::program::Program;
use crate::units::Bytes;
use std::sync::Arc;

/// The memory of a live buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Nothing,
    /// The buffer is live and has no bytes. PyTorch does not ask its allocator for empty tensors.
    Empty,
    Block(BlockId),
    Slot(u32),
    Copy(u32),
    /// In a slot of the trace pool.
    Traced(u32),
    /// In host memory, without device bytes.
    Host,
}

/// Highest counters so far. The two peaks may occur at different times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// Maximum bytes in live blocks.
    pub allocated: Bytes,
    /// Maximum bytes allocated on the device.
    pub reserved: Bytes,
}

/// State of a [`Memory`]. From equal states, the same allocations and frees have the same effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryState {
    caching: Layout,
    /// Addresses of the live buffers that the caching allocator holds.
    blocks: Vec<(BufferId, u64)>,
}

/// Memory of one rank that runs one program: the caching allocator, and a planned pool, a double
/// buffer and a trace pool if the program uses them.
///
/// Every method takes the program for which the memory was created. Counters are sums over the
/// allocators. A planned pool is reserved from the start, the copies of a double buffer stay
/// allocated after their first use, and the tensors of a trace pool after they have been planned.
#[derive(Clone, Debug)]
pub struct Memory {
    caching: CachingAllocator,
    pool: Option<PoolAllocator>,
    /// Slot in the pool, by buffer.
    slot: Vec<u32>,
    /// Set if the planned pool does not fit the device.
    pool_too_large: Option<AllocError>,
    double: Option<DoubleBuffer>,
    /// Memory of the double buffer's slots.
    copies: Vec<Option<BlockId>>,
    traced: Option<TracePool>,
    /// Tensors of the trace pool, in the order of its plan.
    tensors: Vec<BlockId>,
    /// Address of each host buffer.
    host: Vec<u64>,
    held: Vec<Held>,
    peak: Peak,
}

const NO_SLOT: u32 = u32::MAX;

/// First address of host buffers: above the caching allocator's, below the pool's.
pub const HOST_BASE: u64 = 1 << 61;

/// Returns the addresses of host buffers, which are consecutive in the program's order and never
/// change. Empty if there are none.
fn host_addresses(program: &Program) -> Vec<u64> {
    if program.buffers.iter().all(|b| b.pool != Pool::Host) {
        return Vec::new();
    }
    let mut next = HOST_BASE;
    let address = |b: &crate::ir::Buffer| {
        let at = next;
        if b.pool == Pool::Host {
            next += b.bytes.round_up(512).0;
        }
        at
    };
    program.buffers.iter().map(address).collect()
}

impl Memory {
    /// Creates empty memory of a device with at most `capacity` bytes. Plans the pool from the
    /// program's sections.
    #[must_use]
    pub fn new(program: &Program, capacity: Option<Bytes>) -> Self {
        Self::with(program, capacity, PoolAllocator::new)
    }

    /// Like [`Memory::new`], for a caller that only runs whole sections in the program's order. The
    /// planned pool then need not check for conflicts, because its plan rules them out.
    #[must_use]
    pub fn of_whole_sections(program: &Program, capacity: Option<Bytes>) -> Self {
        Self::with(program, capacity, PoolAllocator::unguarded)
    }

    fn with(
        program: &Program,
        capacity: Option<Bytes>,
        pool: impl FnOnce(Arc<PoolPlan>) -> PoolAllocator,
    ) -> Self {
        let pool = Placement::of(program).map(pool);
        let mut slot = Vec::new();
        if let Some(pool) = &pool {
            let of = |b: &crate::ir::Buffer| match b.pool {
                Pool::Planned => pool.plan().index(b.key).map_or(NO_SLOT, |i| i as u32),
                _ => NO_SLOT,
            };
            slot = program.buffers.iter().map(of).collect();
        }
        let pooled = pool.as_ref().map_or(Bytes::ZERO, |p| p.plan().total());
        let pool_too_large =
            capacity
                .filter(|&c| c < pooled)
                .map(|limit| AllocError::OutOfMemory {
                    requested: pooled,
                    allocated: Bytes::ZERO,
                    reserved: Bytes::ZERO,
                    limit,
                });
        let rest = capacity.map(|c| Bytes(c.0.saturating_sub(pooled.0)));
        Self {
            caching: CachingAllocator::new(program.meta.expandable_segments, rest),
            pool,
            slot,
            pool_too_large,
            double: program
                .buffers
                .iter()
                .any(|b| b.pool == Pool::DoubleBuffer)
                .then(|| DoubleBuffer::new(program)),
            copies: Vec::new(),
            traced: TracePool::new(program),
            tensors: Vec::new(),
            host: host_addresses(program),
            held: vec![Held::Nothing; program.buffers.len()],
            peak: Peak {
                allocated: Bytes::ZERO,
                reserved: pooled,
            },
        }
    }

    /// Allocates a buffer and returns its address. Empty buffers get address 0.
    ///
    /// # Errors
    /// Returns [`AllocError`] if the allocator cannot serve the request, and
    /// [`AllocError::AlreadyLive`] for a buffer that is live.
    pub fn alloc(&mut self, program: &Program, id: BufferId) -> Result<u64, AllocError> {
        let buffer = &program.buffers[id.index()];
        if self.held[id.index()] != Held::Nothing {
            return Err(AllocError::AlreadyLive { buffer: id.0 });
        }
        let (held, address) = match buffer.pool {
            _ if buffer.bytes == Bytes::ZERO => (Held::Empty, 0),
            Pool::Caching => self.take_block(buffer.bytes, buffer.stream)?,
            Pool::Planned => {
                if let Some(e) = &self.pool_too_large {
                    return Err(e.clone());
                }
                let slot = self.slot[id.index()];
                let pool = self.pool.as_mut().filter(|_| slot != NO_SLOT);
                let pool = pool.ok_or(AllocError::UnknownKey { key: buffer.key })?;
                (
                    Held::Slot(slot),
                    pool.take(slot as usize, buffer.bytes)?.address,
                )
            }
            Pool::DoubleBuffer => self.take_copy(program, id)?,
            Pool::Traced => self.take_traced(program, id)?,
            Pool::Host => (Held::Host, self.host[id.index()]),
        };
        self.held[id.index()] = held;
        let now = self.counters();
        self.peak.allocated = self.peak.allocated.max(now.allocated);
        self.peak.reserved = self.peak.reserved.max(now.reserved);
        Ok(address)
    }

    /// Frees a buffer's memory. If the buffer is not live, returns `false` and changes nothing.
    pub fn free(&mut self, program: &Program, id: BufferId) -> bool {
        match std::mem::replace(&mut self.held[id.index()], Held::Nothing) {
            Held::Nothing => return false,
            Held::Empty | Held::Host => {}
            Held::Block(block) => {
                self.caching.release(block);
                if let Some(pool) = self.traced.as_mut().filter(|_| is_traced(program, id)) {
                    pool.traced_free(id);
                }
            }
            Held::Traced(slot) => {
                if let Some(pool) = &mut self.traced {
                    pool.release(slot);
                }
            }
            Held::Slot(slot) => {
                if let Some(pool) = &mut self.pool {
                    pool.release(slot as usize);
                }
            }
            Held::Copy(slot) => {
                if let Some(double) = &mut self.double {
                    double.release(slot);
                }
            }
        }
        true
    }

    /// Returns the current counters, over all allocators.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut sum = self.caching.counters();
        if let Some(pool) = &self.pool {
            let c = pool.counters();
            sum.requested += c.requested;
            sum.allocated += c.allocated;
            sum.reserved += c.reserved;
        }
        sum
    }

    /// Returns the state; `None` with a double buffer or a trace pool, which have additional state.
    #[must_use]
    pub fn state(&self) -> Option<MemoryState> {
        if self.double.is_some() || self.traced.is_some() {
            return None;
        }
        let held = (0..).map(BufferId).zip(&self.held);
        let blocks = held.filter_map(|(id, held)| match held {
            Held::Block(block) => Some((id, self.caching.block(*block).address)),
            _ => None,
        });
        Some(MemoryState {
            caching: self.caching.layout()?,
            blocks: blocks.collect(),
        })
    }

    /// Returns whether a buffer is live.
    #[must_use]
    pub fn live(&self, id: BufferId) -> bool {
        self.held[id.index()] != Held::Nothing
    }

    /// Returns the bytes that a buffer contributes to `allocated`; 0 if it is not live.
    #[must_use]
    pub fn block_bytes(&self, id: BufferId) -> Bytes {
        match self.held[id.index()] {
            Held::Nothing | Held::Empty | Held::Host => Bytes::ZERO,
            Held::Block(block) => self.caching.block(block).bytes,
            Held::Slot(slot) => self
                .pool
                .as_ref()
                .map_or(Bytes::ZERO, |p| p.plan().slots()[slot as usize].bytes),
            Held::Copy(slot) => {
                self.copies[slot as usize].map_or(Bytes::ZERO, |b| self.caching.block(b).bytes)
            }
            Held::Traced(slot) => {
                let plan = self.traced.as_ref().and_then(TracePool::plan);
                plan.map_or(Bytes::ZERO, |p| p.slots()[slot as usize].bytes)
            }
        }
    }

    /// Returns the highest counters since the start or the last [`Memory::reset_peak`].
    #[must_use]
    pub fn peak(&self) -> Peak {
        self.peak
    }

    /// Starts a new peak from the current counters.
    pub fn reset_peak(&mut self) {
        let now = self.counters();
        self.peak = Peak {
            allocated: now.allocated,
            reserved: now.reserved,
        };
    }

    /// Returns the pool's plan, if the program has a planned pool.
    #[must_use]
    pub fn pool_plan(&self) -> Option<&PoolPlan> {
        self.pool.as_ref().map(PoolAllocator::plan)
    }

    /// Returns the caching allocator, for its figures by stream.
    #[must_use]
    pub fn caching(&self) -> &CachingAllocator {
        &self.caching
    }

    fn take_block(&mut self, bytes: Bytes, stream: StreamId) -> Result<(Held, u64), AllocError> {
        let block = self.caching.take(bytes, stream)?;
        Ok((Held::Block(block), self.caching.block(block).address))
    }

    fn take_copy(&mut self, program: &Program, id: BufferId) -> Result<(Held, u64), AllocError> {
        let buffer = &program.buffers[id.index()];
        let taken = match &mut self.double {
            Some(double) => double.take(buffer)?.map(|t| (t, double.slot_bytes(t.slot))),
            None => None,
        };
        let Some((taken, bytes)) = taken else {
            return self.take_block(buffer.bytes, buffer.stream);
        };
        let at = taken.slot as usize;
        if taken.fresh {
            match self.caching.take(bytes, buffer.stream) {
                Ok(block) => {
                    self.copies.resize(self.copies.len().max(at + 1), None);
                    self.copies[at] = Some(block);
                }
                Err(e) => {
                    if let Some(double) = &mut self.double {
                        double.undo(taken.slot);
                    }
                    return Err(e);
                }
            }
        }
        let address = self.copies[at].map_or(0, |b| self.caching.block(b).address);
        Ok((Held::Copy(taken.slot), address))
    }

    fn take_traced(&mut self, program: &Program, id: BufferId) -> Result<(Held, u64), AllocError> {
        let buffer = &program.buffers[id.index()];
        let Some(pool) = &mut self.traced else {
            return self.take_block(buffer.bytes, buffer.stream);
        };
        let mut grant = pool.take(program, id)?;
        if grant == Grant::Plan {
            // One tensor per element type, of the stream that plans.
            let sizes = pool.plan().map(|p| p.tensors().to_vec());
            for (_, bytes) in sizes.unwrap_or_default() {
                self.tensors.push(self.caching.take(bytes, COMPUTE)?);
            }
            grant = pool.take(program, id)?;
        }
        let (Grant::Slot(index), Some(plan)) = (grant, pool.plan()) else {
            return self.take_block(buffer.bytes, buffer.stream);
        };
        let slot = plan.slots()[index as usize];
        let tensor = plan.tensors().iter().position(|t| t.0 == slot.dtype);
        let block = tensor.and_then(|at| self.tensors.get(at));
        let start = block.map_or(0, |b| self.caching.block(*b).address);
        Ok((Held::Traced(index), start + slot.offset))
    }
}

/// Returns whether a buffer belongs to the trace pool.
fn is_traced(program: &Program, id: BufferId) -> bool {
    program.buffers[id.index()].pool == Pool::Traced
}

#[cfg(test)]
mod inspect;
#[cfg(test)]
mod tests;
