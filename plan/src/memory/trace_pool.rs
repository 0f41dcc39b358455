//! The pool of Megatron-LM #4435 (`TracePoolAllocator`), which plans itself from what it sees.
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
// - *Trace*: the first micro-batch of the run takes memory from PyTorch's allocator. The pool notes
//   the order of allocations and frees.
// - *Plan*: each buffer's lifetimes become intervals of that order. In the order of their starts,
//   each takes the first slot of its element type that is free by then (left-edge coloring), which
//   grows to the largest of its intervals. One tensor per element type holds the slots.
// - *Optimized*: a buffer takes the slots of its lifetimes in turn. A cursor per buffer says which
//   is next.
//
// The number of slots is the smallest possible, their bytes need not be. What the trace took from
// PyTorch's allocator stays reserved there.
//
// A slot serves weights that are gathered on one stream and gradients that another one reduces:
// nothing in the pool orders them. `check` proves that the schedule does.
//
// Deviations: the source plans at the end of the first backward and moves cursors back at the end
// of every backward. Here the pool plans when the second micro-batch takes its first buffer, and a
// cursor moves back after a buffer's last slot. Both are the same for micro-batches that do what
// the traced one did. Others are refused (`scenario/validate`): a forward without backward leaves
// cursors behind, and the next backward takes slots that are in use. Slots start at multiples of
// 512 bytes.

/// Alignment of slots.
const ALIGN: u64 = 512;

/// A slot of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Element type, whose tensor holds it.
    pub dtype: DType,
    /// First byte in that tensor.
    pub offset: u64,
    /// Size.
    pub bytes: Bytes,
}

/// Slots from lifetimes, and which buffer takes them in which order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TracePlan {
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
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Returns the element types and the bytes of their tensors.
    #[must_use]
    pub fn tensors(&self) -> &[(DType, Bytes)] {
        &self.tensors
    }
}

/// What the pool does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// It is traced; the caller takes memory from the caching allocator.
    Traced,
    /// The trace has ended: the caller allocates the tensors of the plan, then asks again.
    Plan,
    /// A slot.
    Slot(u32),
}

/// State of the pool.
#[derive(Clone, Debug)]
pub struct TracePool {
    /// Allocations and frees that the trace has yet to see.
    untraced: u32,
    now: u32,
    trace: Vec<Interval>,
    plan: Option<TracePlan>,
    /// Next of a buffer's slots.
    cursor: Vec<u32>,
    /// Buffer in each slot.
    user: Vec<Option<BufferId>>,
}

impl TracePool {
    /// Creates the pool of a program, which traces the first micro-batch of the first step. `None`
    /// if no buffer is of [`Pool::Traced`].
    #[must_use]
    pub fn new(program: &Program) -> Option<Self> {
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

    /// Returns the plan, once there is one.
    #[must_use]
    pub fn plan(&self) -> Option<&TracePlan> {
        self.plan.as_ref()
    }

    /// Asks for memory of a buffer.
    ///
    /// # Errors
    /// [`AllocError::UnknownKey`] for a buffer that the trace has not seen,
    /// [`AllocError::SlotInUse`] if the slot of its turn is.
    pub fn take(&mut self, program: &Program, id: BufferId) -> Result<Grant, AllocError> {
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

    /// Notes in the trace that a buffer is freed.
    pub fn traced_free(&mut self, id: BufferId) {
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
    pub fn release(&mut self, slot: u32) {
        self.user[slot as usize] = None;
    }

    /// Returns the slots that no buffer is in.
    pub fn idle(&self) -> impl Iterator<Item = &Slot> {
        let slots = self.plan.iter().flat_map(|p| &p.slots);
        let idle = slots.zip(&self.user).filter(|(_, user)| user.is_none());
        idle.map(|(slot, _)| slot)
    }
}

#[cfg(test)]
mod tests;
