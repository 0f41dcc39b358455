//! The double buffer: a few copies of one unit's buffers, which all units with equal buffers use in
//! turn.
//!
//! See Note [Double buffer].

use super::AllocError;
use crate::ir::{Buffer, DType, Pool, Role, UnitId};
use crate::program::Program;
use crate::units::Bytes;
use std::collections::{BTreeMap, BTreeSet};

// Note [Double buffer]
//
// Blocks of a transformer have equal buffers, and a schedule keeps few of them full at the same
// time. A double buffer holds `double_buffer_copies` (two) copies of one block's buffers, which all
// blocks take in turn. Memory is therefore fixed and addresses repeat, so that scopes can be
// captured and memory registered.
//
// - The largest set of units with identical buffers (role, element type, bytes) shares the copies.
//   Among equal sets, the first one in unit order is used.
// - Buffers of other units are either persistent (`persist_on_alloc_fail`) or temporary ones from
//   the caching allocator.
// - A copy is allocated from the caching allocator at its first use and kept forever, like
//   Megatron-FSDP's global memory buffers. It counts as allocated while it is idle.
//
// A third unit can never be full. Megatron limits its prefetch and its reduce queue accordingly
// (`limit_double_buffer`). Other schedules are rejected if they need more (`check_double_buffer`).

/// Properties that make two buffers interchangeable.
type Class = (Role, DType, Bytes);

/// Where a buffer is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a copy of this class.
    Class(u32),
    /// In a separate buffer that is kept forever.
    Persistent,
    /// In memory that is allocated and freed each time.
    Temporary,
}

/// A slot that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Slot.
    pub slot: u32,
    /// Whether this is its first use, for which it needs memory of [`DoubleBuffer::slot_bytes`].
    pub fresh: bool,
}

#[derive(Clone, Debug)]
struct Slot {
    bytes: Bytes,
    user: Option<u32>,
    used_before: bool,
}

/// State of a double buffer.
#[derive(Clone, Debug)]
pub struct DoubleBuffer {
    units: BTreeSet<UnitId>,
    classes: BTreeMap<Class, u32>,
    /// Slots of each class.
    of_class: Vec<Vec<u32>>,
    slots: Vec<Slot>,
    /// Slots of persistent buffers, by key.
    own: BTreeMap<u32, u32>,
    persist: bool,
}

impl DoubleBuffer {
    /// Creates slots for the program's buffers with [`Pool::DoubleBuffer`]: `double_buffer_copies`
    /// (at least 1) of each buffer of the shared unit pattern.
    #[must_use]
    pub fn new(program: &Program) -> Self {
        // Buffers with the same key are one bucket of the unit, in forward and in backward.
        let mut buckets: BTreeMap<UnitId, BTreeMap<u32, Class>> = BTreeMap::new();
        for b in program
            .buffers
            .iter()
            .filter(|b| b.pool == Pool::DoubleBuffer)
        {
            buckets.entry(b.unit).or_default().insert(b.key, class(b));
        }
        let mut patterns: Vec<(Vec<Class>, BTreeSet<UnitId>)> = Vec::new();
        for (unit, of_unit) in buckets {
            let mut pattern: Vec<Class> = of_unit.into_values().collect();
            pattern.sort_unstable();
            match patterns.iter_mut().find(|(p, _)| *p == pattern) {
                Some((_, units)) => {
                    units.insert(unit);
                }
                None => patterns.push((pattern, BTreeSet::from([unit]))),
            }
        }
        let most = patterns
            .iter()
            .map(|(_, units)| units.len())
            .max()
            .unwrap_or(0);
        let (pattern, units) = patterns
            .into_iter()
            .find(|(_, units)| units.len() == most)
            .unwrap_or_default();
        let mut this = Self {
            units,
            classes: BTreeMap::new(),
            of_class: Vec::new(),
            slots: Vec::new(),
            own: BTreeMap::new(),
            persist: program.persist_on_alloc_fail,
        };
        for class in pattern {
            let next = this.of_class.len() as u32;
            let index = *this.classes.entry(class).or_insert(next) as usize;
            this.of_class
                .resize_with(this.of_class.len().max(index + 1), Vec::new);
            for _ in 0..program.double_buffer_copies.max(1) {
                this.of_class[index].push(this.slots.len() as u32);
                this.slots.push(Slot {
                    bytes: class.2,
                    user: None,
                    used_before: false,
                });
            }
        }
        this
    }

    /// Returns where a buffer is placed.
    #[must_use]
    pub fn place(&self, buffer: &Buffer) -> Place {
        match self.classes.get(&class(buffer)) {
            Some(&c) if self.units.contains(&buffer.unit) => Place::Class(c),
            _ if self.persist => Place::Persistent,
            _ => Place::Temporary,
        }
    }

    /// Takes an idle copy of the buffer's class, lowest first, or the buffer's own persistent slot.
    /// Returns `None` for a buffer that is [`Place::Temporary`].
    ///
    /// # Errors
    /// Returns [`AllocError::DoubleBufferExhausted`] if all copies are in use, or
    /// [`AllocError::SlotInUse`] if the key's own slot is in use.
    pub fn take(&mut self, buffer: &Buffer) -> Result<Option<Taken>, AllocError> {
        let slot = match self.place(buffer) {
            Place::Temporary => return Ok(None),
            Place::Persistent => {
                let next = self.slots.len() as u32;
                let slot = *self.own.entry(buffer.key).or_insert(next);
                if slot == next {
                    self.slots.push(Slot {
                        bytes: buffer.bytes,
                        user: None,
                        used_before: false,
                    });
                }
                let own = &self.slots[slot as usize];
                if let Some(holder) = own.user {
                    return Err(AllocError::SlotInUse {
                        key: buffer.key,
                        holder,
                    });
                }
                if own.bytes < buffer.bytes {
                    let (slot, requested) = (own.bytes, buffer.bytes);
                    return Err(AllocError::SizeChanged {
                        key: buffer.key,
                        slot,
                        requested,
                    });
                }
                slot
            }
            Place::Class(c) => {
                let copies = &self.of_class[c as usize];
                *copies
                    .iter()
                    .find(|&&s| self.slots[s as usize].user.is_none())
                    .ok_or(AllocError::DoubleBufferExhausted {
                        key: buffer.key,
                        live: copies.len() as u32,
                    })?
            }
        };
        let s = &mut self.slots[slot as usize];
        s.user = Some(buffer.key);
        let fresh = !std::mem::replace(&mut s.used_before, true);
        Ok(Some(Taken { slot, fresh }))
    }

    /// Makes a slot idle. Returns `false` if it was idle.
    pub fn release(&mut self, slot: u32) -> bool {
        self.slots[slot as usize].user.take().is_some()
    }

    /// Undoes taking a slot whose memory could not be allocated, so that it is idle and fresh
    /// again.
    pub(super) fn undo(&mut self, slot: u32) {
        let s = &mut self.slots[slot as usize];
        s.user = None;
        s.used_before = false;
    }

    /// Returns the bytes of a slot.
    #[must_use]
    pub fn slot_bytes(&self, slot: u32) -> Bytes {
        self.slots[slot as usize].bytes
    }
}

fn class(b: &Buffer) -> Class {
    (b.role, b.dtype, b.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fixture::{buffer, builder};
    use crate::program::ProgramBuilder;

    /// Returns a root (with different buckets) and three equal layers, each with a weight and a
    /// gradient.
    fn program(persist: bool) -> ProgramBuilder {
        let mut f = builder();
        f.program.double_buffer_copies = 2;
        f.program.persist_on_alloc_fail = persist;
        for unit in 0..4u16 {
            let bytes = if unit == 0 { 900 } else { 400 };
            for role in [Role::FullWeight, Role::FullGrad] {
                f.add_buffer(Buffer {
                    role,
                    unit: UnitId(unit),
                    ..buffer(Pool::DoubleBuffer, bytes)
                });
            }
        }
        f
    }

    #[test]
    fn layers_take_turns() {
        let f = program(false);
        let b = |i: usize| &f.program.buffers[i];
        let mut db = DoubleBuffer::new(&f.program);
        assert_eq!(db.place(b(0)), Place::Temporary);
        assert_eq!(db.take(b(0)), Ok(None));
        let first = db.take(b(2)).unwrap().unwrap();
        let second = db.take(b(4)).unwrap().unwrap();
        assert!(first.fresh && second.fresh && first.slot != second.slot);
        assert_eq!(
            db.take(b(6)),
            Err(AllocError::DoubleBufferExhausted {
                key: b(6).key,
                live: 2
            })
        );
        // Gradients have separate copies.
        assert!(db.take(b(7)).unwrap().unwrap().fresh);
        assert!(db.release(first.slot));
        assert!(!db.release(first.slot));
        assert_eq!(
            db.take(b(6)),
            Ok(Some(Taken {
                slot: first.slot,
                fresh: false
            }))
        );
    }

    #[test]
    fn the_odd_unit_keeps_its_own() {
        let f = program(true);
        let b = |i: usize| &f.program.buffers[i];
        let mut db = DoubleBuffer::new(&f.program);
        assert_eq!(db.place(b(0)), Place::Persistent);
        let own = db.take(b(0)).unwrap().unwrap();
        assert!(own.fresh);
        assert_eq!(db.slot_bytes(own.slot), Bytes(900));
        assert_eq!(
            db.take(b(0)),
            Err(AllocError::SlotInUse {
                key: b(0).key,
                holder: b(0).key
            })
        );
        db.release(own.slot);
        assert_eq!(
            db.take(b(0)),
            Ok(Some(Taken {
                slot: own.slot,
                fresh: false
            }))
        );
    }
}
