//! Facts that tests compare with an independent account of memory.

use super::*;
use crate::memory::trace_pool::TracePlan;

impl Memory {
    /// Returns the live buffers, ascending. Idle copies of a double buffer are allocated but do not
    /// belong to a buffer.
    pub(crate) fn live_buffers(&self) -> Vec<BufferId> {
        (0..)
            .zip(&self.held)
            .filter(|(_, h)| **h != Held::Nothing)
            .map(|(i, _)| BufferId(i))
            .collect()
    }

    /// Returns the bytes of double-buffer copies that no buffer currently uses. They stay
    /// allocated.
    pub(crate) fn idle_copies(&self) -> Bytes {
        let all: Bytes = self
            .copies
            .iter()
            .flatten()
            .map(|&b| self.caching.block(b).bytes)
            .sum();
        let used = |h: &Held| match h {
            Held::Copy(slot) => {
                self.copies[*slot as usize].map_or(Bytes::ZERO, |b| self.caching.block(b).bytes)
            }
            _ => Bytes::ZERO,
        };
        all - self.held.iter().map(used).sum()
    }

    /// Returns the plan of the trace pool, if there is one yet.
    pub(crate) fn trace_plan(&self) -> Option<&TracePlan> {
        self.traced.as_ref().and_then(TracePool::plan)
    }

    /// Returns the bytes of the trace pool's slots that no buffer currently uses. Its tensors stay
    /// allocated.
    pub(crate) fn idle_slots(&self) -> Bytes {
        let used = |slot: usize| self.held.contains(&Held::Traced(slot as u32));
        let slots = self.trace_plan().map_or(&[][..], TracePlan::slots);
        let idle = slots.iter().enumerate().filter(|(at, _)| !used(*at));
        idle.map(|(_, slot)| slot.bytes).sum()
    }
}
