//! The planned pool: one fixed slot per key, from the lifetimes of one traced step.
//!
//! A plan that gives every key a single address forever remains valid when a validation forward
//! runs between two steps, and captured graphs may rely on it; see Note [Captured addresses].
//! (Megatron-FSDP's first trace pool gave a key several slots in allocation order with a cursor;
//! forward-only passes ran the cursor out of step.)

mod lifetimes;
mod occupancy;
mod plan;

pub use lifetimes::Lifetime;
pub(super) use lifetimes::trace;
pub use plan::{PoolPlan, Slot};

use super::sorted::SortedSet;
use super::{AllocError, Block, Counters};
use crate::units::Bytes;
use std::sync::Arc;

/// First address of the pool: above every address of the caching allocator.
pub const POOL_BASE: u64 = 1 << 62;

/// Serves requests from the slots of a [`PoolPlan`].
///
/// The bytes of a slot count as allocated while its key is live. The whole pool is reserved from
/// the start.
#[derive(Clone, Debug)]
pub struct PoolAllocator {
    plan: Arc<PoolPlan>,
    /// Live slots: offset, end, and index into the plan.
    live: SortedSet<(u64, u64, u32)>,
    /// Requested bytes of each live slot.
    requested: Vec<Option<Bytes>>,
    counters: Counters,
    /// Whether calls may come in an order other than the trace's, so that slots have to be
    /// compared.
    guarded: bool,
}

impl PoolAllocator {
    /// Creates an empty pool.
    #[must_use]
    pub fn new(plan: impl Into<Arc<PoolPlan>>) -> Self {
        let plan = plan.into();
        let counters = Counters {
            reserved: plan.total(),
            ..Counters::default()
        };
        Self {
            live: SortedSet::new(),
            requested: vec![None; plan.slots().len()],
            counters,
            plan,
            guarded: true,
        }
    }

    /// Creates an empty pool for callers that repeat exactly the trace of the plan. The plan then
    /// guarantees that no two live slots overlap, so only sizes and keys are checked.
    #[must_use]
    pub(super) fn unguarded(plan: Arc<PoolPlan>) -> Self {
        Self {
            guarded: false,
            ..Self::new(plan)
        }
    }

    /// Returns the plan.
    #[must_use]
    pub fn plan(&self) -> &PoolPlan {
        &self.plan
    }

    /// Returns the current counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Takes the slot at `index` of the plan.
    ///
    /// # Errors
    /// Returns [`AllocError::SizeChanged`] if the slot is smaller than `bytes`, or
    /// [`AllocError::SlotInUse`] if it or a slot that shares addresses with it is live.
    pub fn take(&mut self, index: usize, bytes: Bytes) -> Result<Block, AllocError> {
        let slot = self.plan.slots()[index];
        if bytes > slot.bytes {
            return Err(AllocError::SizeChanged {
                key: slot.key,
                slot: slot.bytes,
                requested: bytes,
            });
        }
        let entry = (slot.offset, slot.offset + slot.bytes.0, index as u32);
        // An empty slot shares no addresses with others, but its key may still be live.
        let conflict = if self.requested[index].is_some() {
            Some(entry)
        } else if slot.bytes == Bytes::ZERO || !self.guarded {
            None
        } else {
            let above = self
                .live
                .lower_bound(&(entry.0, 0, 0))
                .map(|at| self.live.get(at));
            let below = self.live.before(&(entry.0, 0, 0));
            above
                .filter(|a| a.0 < entry.1)
                .or(below.filter(|b| b.1 > entry.0))
        };
        if let Some((.., holder)) = conflict {
            return Err(AllocError::SlotInUse {
                key: slot.key,
                holder: self.plan.slots()[holder as usize].key,
            });
        }
        if self.guarded && slot.bytes > Bytes::ZERO {
            self.live.insert(entry);
        }
        self.requested[index] = Some(bytes);
        self.counters.requested += bytes;
        self.counters.allocated += slot.bytes;
        Ok(Block {
            address: POOL_BASE + slot.offset,
            bytes: slot.bytes,
        })
    }

    /// Frees the slot at `index`. If its key is not live, returns `false` and changes nothing: a
    /// key that does not hold its slot must never release it, because the addresses may belong to
    /// another key by then.
    pub fn release(&mut self, index: usize) -> bool {
        let Some(bytes) = self.requested[index].take() else {
            return false;
        };
        let slot = self.plan.slots()[index];
        if self.guarded {
            self.live
                .remove(&(slot.offset, slot.offset + slot.bytes.0, index as u32));
        }
        self.counters.requested -= bytes;
        self.counters.allocated -= slot.bytes;
        true
    }
}

#[cfg(test)]
mod tests;
