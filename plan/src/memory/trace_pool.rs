//! The pool of Megatron-LM #4435 (`TracePoolAllocator`), which plans itself from a trace.
//!
//! See Note [Trace pool].

use super::AllocError;
use crate::ir::{BufferId, DType, Pool};
use crate::program::{Op, Program, SectionKind};
use crate::units::Bytes;

// Note [Trace pool]
//
// The pool has three phases:
//
// - *Trace*: the first micro-batch of the run allocates from PyTorch's allocator. The pool records
//   the order of allocations and frees.
// - *Plan*: the lifetimes of each buffer become intervals of that order. In the order of their
//   starts, each takes the first slot of its element type that is free by then (left-edge
//   coloring). The slot grows to the largest of its intervals. One tensor per element type contains
//   the slots.
// - *Optimized*: a buffer takes the slots of its lifetimes in turn. A cursor per buffer points at
//   the next one.
//
// The number of slots is the smallest possible, but their total size may not be. Memory that the
// trace allocated from PyTorch's allocator stays reserved there.
//
// A slot is used for weights that are gathered on one stream and for gradients that another stream
// reduces. Nothing in the pool orders these uses; `check` proves that the schedule does.
//
// Deviations: the source plans at the end of the first backward and moves cursors back at the end
// of every backward. Here, the pool plans when the second micro-batch takes its first buffer, and a
// cursor moves back after a buffer's last slot. Both have the same effect for micro-batches that
// repeat the traced one. Others are rejected (`scenario/validate`): a forward without a backward
// leaves cursors advanced, so the next backward takes slots that are in use. Slots start at
// multiples of 512 bytes.

/// Alignment of slots.
const ALIGN: u64 = 512;

/// A slot of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Element type. The tensor of this type contains the slot.
    pub dtype: DType,
    /// First byte in that tensor.
    pub offset: u64,
    /// Size.
    pub bytes: Bytes,
}

/// Slots from lifetimes, and the order in which each buffer takes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TracePlan {
    slots: Vec<Slot>,
    /// Slots of each buffer, in order of its lifetimes.
    of_buffer: Vec<Vec<u32>>,
    /// Element types and the bytes of their tensors.
    tensors: Vec<(DType, Bytes)>,
}

/// End of a lifetime that has not ended.
const OPEN: u32 = u32::MAX;

/// A lifetime in the trace.
#[derive(Clone, Copy, Debug)]
struct Interval {
    buffer: BufferId,
    start: u32,
    end: u32,
}

impl TracePlan {
    /// Plans slots for the lifetimes of a trace, in order of their starts.
    fn plan(program: &Program, trace: &[Interval]) -> Self {
        struct Growing {
            dtype: DType,
            bytes: u64,
            free: u32,
        }
        let mut slots: Vec<Growing> = Vec::new();
        let mut of_buffer = vec![Vec::new(); program.buffers.len()];
        // The source drops allocations without a free.
        for life in trace.iter().filter(|l| l.end != OPEN) {
            let buffer = &program.buffers[life.buffer.index()];
            let fits = |s: &Growing| s.dtype == buffer.dtype && s.free < life.start;
            let index = slots.iter().position(fits).unwrap_or_else(|| {
                slots.push(Growing {
                    dtype: buffer.dtype,
                    bytes: 0,
                    free: 0,
                });
                slots.len() - 1
            });
            let slot = &mut slots[index];
            slot.free = life.end;
            slot.bytes = slot.bytes.max(buffer.bytes.0);
            of_buffer[life.buffer.index()].push(index as u32);
        }
        let mut plan = Self {
            of_buffer,
            ..Self::default()
        };
        for slot in slots {
            let (dtype, bytes) = (slot.dtype, Bytes(slot.bytes));
            let at = plan.tensors.iter().position(|t| t.0 == dtype);
            let at = at.unwrap_or_else(|| {
                plan.tensors.push((dtype, Bytes::ZERO));
                plan.tensors.len() - 1
            });
            let tensor = &mut plan.tensors[at].1;
            plan.slots.push(Slot {
                dtype,
                offset: tensor.0,
                bytes,
            });
            *tensor += bytes.round_up(ALIGN);
        }
        plan
    }

    /// Returns the slots.
    #[must_use]
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Returns the element types and the bytes of their tensors.
    #[must_use]
    pub(crate) fn tensors(&self) -> &[(DType, Bytes)] {
        &self.tensors
    }
}

/// What the pool does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grant {
    /// The request is traced. The caller allocates from the caching allocator.
    Traced,
    /// The trace has ended. The caller allocates the tensors of the plan, then asks again.
    Plan,
    /// A slot.
    Slot(u32),
}

/// State of the pool.
#[derive(Clone, Debug)]
pub(crate) struct TracePool {
    /// Number of allocations and frees that have yet to be traced.
    untraced: u32,
    now: u32,
    trace: Vec<Interval>,
    plan: Option<TracePlan>,
    /// Next slot of each buffer.
    cursor: Vec<u32>,
    /// Buffer in each slot.
    user: Vec<Option<BufferId>>,
}

impl TracePool {
    /// Creates the pool of a program. It traces the first micro-batch of the first step. Returns
    /// `None` if no buffer is in [`Pool::Traced`].
    #[must_use]
    pub(crate) fn new(program: &Program) -> Option<Self> {
        let traced = |id: BufferId| program.buffers[id.index()].pool == Pool::Traced;
        if !program.buffers.iter().any(|b| b.pool == Pool::Traced) {
            return None;
        }
        let first = program.section(SectionKind::First);
        let instrs = first.map_or(&[][..], |s| program.section_instrs(s));
        let calls = instrs.iter().filter(|i| {
            let traced = matches!(i.op, Op::Alloc(id) | Op::Free(id) if traced(id));
            traced && i.micro_batch == 0
        });
        Some(Self {
            untraced: calls.count() as u32,
            now: 0,
            trace: Vec::new(),
            plan: None,
            cursor: vec![0; program.buffers.len()],
            user: Vec::new(),
        })
    }

    /// Returns the plan, if there is one yet.
    #[must_use]
    pub(crate) fn plan(&self) -> Option<&TracePlan> {
        self.plan.as_ref()
    }

    /// Asks for the memory of a buffer.
    ///
    /// # Errors
    /// Returns [`AllocError::UnknownKey`] for a buffer that was not traced, or
    /// [`AllocError::SlotInUse`] if its next slot is in use.
    pub(crate) fn take(&mut self, program: &Program, id: BufferId) -> Result<Grant, AllocError> {
        if self.untraced > 0 {
            self.untraced -= 1;
            self.now += 1;
            self.trace.push(Interval {
                buffer: id,
                start: self.now,
                end: OPEN,
            });
            return Ok(Grant::Traced);
        }
        let Some(plan) = &self.plan else {
            let plan = TracePlan::plan(program, &self.trace);
            self.user = vec![None; plan.slots.len()];
            self.plan = Some(plan);
            return Ok(Grant::Plan);
        };
        let turns = &plan.of_buffer[id.index()];
        let cursor = &mut self.cursor[id.index()];
        let Some(&slot) = turns.get(*cursor as usize) else {
            return Err(AllocError::UnknownKey { key: id.0 });
        };
        if let Some(holder) = self.user[slot as usize] {
            return Err(AllocError::SlotInUse {
                key: id.0,
                holder: holder.0,
            });
        }
        *cursor = (*cursor + 1) % turns.len() as u32;
        self.user[slot as usize] = Some(id);
        Ok(Grant::Slot(slot))
    }

    /// Records in the trace that a buffer is freed.
    pub(crate) fn traced_free(&mut self, id: BufferId) {
        if self.untraced == 0 {
            return;
        }
        self.untraced -= 1;
        self.now += 1;
        let mut open = self.trace.iter_mut().rev();
        if let Some(life) = open.find(|l| l.buffer == id && l.end == OPEN) {
            life.end = self.now;
        }
    }

    /// Makes a slot idle.
    pub(crate) fn release(&mut self, slot: u32) {
        self.user[slot as usize] = None;
    }
}

#[cfg(test)]
mod tests;
