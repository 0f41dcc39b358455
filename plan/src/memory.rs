//! Allocators as pure state machines over allocations and frees in host order.
//!
//! `sim` (prediction) and `exec` (real memory) use the same state machines: equal calls give equal
//! addresses and equal counters, independent of time.
//!
//! [`Memory`] holds all memory of a program: each buffer comes from the allocator that its
//! [`crate::ir::Pool`] names. Storage that is allocated and freed for every use ("temporary" in a
//! scenario) also comes from the caching allocator, because PyTorch allocates it there.

mod arena;
pub mod caching;
pub mod double_buffer;
#[cfg(test)]
pub(crate) mod fixture;
mod ledger;
mod placement;
pub mod pool;
mod replay;
mod sorted;
pub mod trace_pool;

pub use arena::{HOST_BASE, Memory, MemoryState, Peak};
pub use caching::{AllocatorSettings, CachingAllocator};
pub use double_buffer::DoubleBuffer;
pub use ledger::{Ledger, PassPeaks, RunPeak};
pub use placement::Placement;
pub use pool::{Lifetime, PoolAllocator, PoolPlan};
pub use replay::{MemoryTrace, PassMemory, ReplayError, replay, replay_on};

use crate::units::Bytes;

/// Granted memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address in the allocator's own address space.
    pub address: u64,
    /// Bytes counted as allocated: the rounded size, including a remainder that is not split off.
    pub bytes: Bytes,
}

/// Counters after an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Sum of the live requests.
    pub requested: Bytes,
    /// Sum of the live blocks.
    pub allocated: Bytes,
    /// Memory allocated on the device.
    pub reserved: Bytes,
    /// Number of times that all cached segments had to be released before a request could be
    /// served.
    pub retries: u32,
}

/// Reason why an allocation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The device is full even after all cached segments were released.
    #[error("{requested} requested, {reserved} of {limit} reserved, {allocated} allocated")]
    OutOfMemory {
        /// Requested bytes.
        requested: Bytes,
        /// Allocated bytes.
        allocated: Bytes,
        /// Bytes allocated on the device.
        reserved: Bytes,
        /// Limit.
        limit: Bytes,
    },
    /// A fixed slot is smaller than the request: the traced step had another size.
    #[error(
        "pool slot of key {key} holds {slot}, but {requested} were requested: the size has changed since planning"
    )]
    SizeChanged {
        /// Key.
        key: u32,
        /// Slot size.
        slot: Bytes,
        /// Requested bytes.
        requested: Bytes,
    },
    /// A key that the plan does not know.
    #[error("pool has no slot for key {key}: it was not seen in the traced step")]
    UnknownKey {
        /// Key.
        key: u32,
    },
    /// Two keys that share a slot in the plan are live at the same time, or one key is live twice.
    #[error("pool slot of key {key} is in use by key {holder}")]
    SlotInUse {
        /// Requested key.
        key: u32,
        /// Live key.
        holder: u32,
    },
    /// All copies of a double buffer are in use.
    #[error("double buffer exhausted: key {key} needs a copy, but all {live} are live")]
    DoubleBufferExhausted {
        /// Requested key.
        key: u32,
        /// Number of live copies.
        live: u32,
    },
    /// A live buffer is allocated again.
    #[error("buffer {buffer} is allocated twice without a free in between")]
    AlreadyLive {
        /// Buffer.
        buffer: u32,
    },
}
