//! Operands of an operation that is a kernel of its own.

use super::error::OperandError;
use super::scratch::Scratch;
use super::view::{View, overlap};
use crate::operand::{LaunchContext, RawRange};
use shardlab_plan::ir::{BodyOp, Place, Slot};
use smallvec::SmallVec;

/// The operands of one launch.
pub(super) struct Operands<'a> {
    pub(super) ctx: &'a LaunchContext<'a>,
    pub(super) op: &'a BodyOp,
    pub(super) reads: &'a [RawRange],
    pub(super) writes: &'a [RawRange],
}

impl<'a> Operands<'a> {
    pub(super) fn new(
        ctx: &'a LaunchContext<'a>,
        op: &'a BodyOp,
        reads: &'a [RawRange],
        writes: &'a [RawRange],
    ) -> Self {
        Self {
            ctx,
            op,
            reads,
            writes,
        }
    }

    /// Fails unless there are this many operands (additional inputs and outputs are unused).
    pub(super) fn expect(&self, inputs: usize, outputs: usize) -> Result<(), OperandError> {
        for (what, needed, found) in [
            ("inputs", inputs, self.op.inputs.len()),
            ("outputs", outputs, self.op.outputs.len()),
        ] {
            if found < needed {
                return Err(OperandError::Count {
                    what,
                    needed,
                    found,
                });
            }
        }
        Ok(())
    }

    pub(super) fn slot(&self, outputs: bool, i: usize) -> Result<&'a Slot, OperandError> {
        let (what, slots) = if outputs {
            ("outputs", &self.op.outputs[..])
        } else {
            ("inputs", &self.op.inputs[..])
        };
        slots.get(i).ok_or(OperandError::Count {
            what,
            needed: i + 1,
            found: slots.len(),
        })
    }

    fn range(&self, slot: &Slot) -> Result<RawRange, OperandError> {
        let (ranges, i) = match slot.place {
            Place::Read(i) => (self.reads, i),
            Place::Write(i) => (self.writes, i),
            Place::Register(_) => (&[][..], 0),
        };
        let unknown = OperandError::UnknownSlot {
            place: slot.place,
            count: ranges.len(),
        };
        ranges.get(usize::from(i)).copied().ok_or(unknown)
    }

    pub(super) fn input(&self, i: usize) -> Result<View, OperandError> {
        let slot = self.slot(false, i)?;
        View::new(self.range(slot)?, slot)
    }

    pub(super) fn output(&self, i: usize) -> Result<View, OperandError> {
        let slot = self.slot(true, i)?;
        View::new(self.range(slot)?, slot)
    }

    /// Returns whether any output shares memory with this view.
    pub(super) fn written(&self, view: &View) -> Result<bool, OperandError> {
        for i in 0..self.op.outputs.len() {
            if overlap(&self.output(i)?.extent(), &view.extent()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns an input as contiguous floats that no output shares: its own memory if possible, or
    /// else a copy.
    pub(super) fn floats(&self, i: usize) -> Result<Floats, OperandError> {
        let view = self.input(i)?;
        match view.as_floats() {
            Some(ptr) if !self.written(&view)? => Ok(Floats::Memory(ptr, view.numel)),
            _ => {
                let mut copy = Scratch::take(view.numel);
                view.load(0, &mut copy);
                Ok(Floats::Copy(copy))
            }
        }
    }
}

/// Contiguous floats of an operand.
pub(super) enum Floats {
    /// In the launch's memory, which is not written meanwhile.
    Memory(*const f32, usize),
    /// Converted or gathered.
    Copy(Scratch),
}

impl std::ops::Deref for Floats {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match self {
            // SAFETY: `Operands::floats` checked that the launch does not write it, and the
            // launch's caller guarantees that nothing else does.
            Self::Memory(ptr, n) => unsafe { std::slice::from_raw_parts(*ptr, *n) },
            Self::Copy(copy) => copy,
        }
    }
}

/// Checks a number of elements.
pub(super) fn same(what: &'static str, needed: usize, found: usize) -> Result<(), OperandError> {
    if needed == found {
        Ok(())
    } else {
        Err(OperandError::Size {
            what,
            needed,
            found,
        })
    }
}

/// Returns the dimensions of an operand of known rank.
pub(super) fn dims<const N: usize>(slot: &Slot) -> Result<[usize; N], OperandError> {
    let sizes: SmallVec<[usize; 4]> = slot.shape.iter().map(|&n| n as usize).collect();
    <[usize; N]>::try_from(&sizes[..])
        .map_err(|_| OperandError::Shape(format!("{:?} instead of {N} dimensions", slot.shape)))
}
