//! A program's memory without a clock. All interpreters must agree with it.
//!
//! Allocations and frees happen in host order, so their addresses, counters and peaks do not depend
//! on time.

use super::arena::Memory;
use super::{AllocError, Counters};
use crate::ir::InstrId;
use crate::program::{Instr, Op, Program, Section, SectionKind};
use crate::units::Bytes;

/// One pass over a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassMemory {
    /// Section.
    pub section: SectionKind,
    /// Number of steps that have finished before it.
    pub step: u32,
    /// Peak of allocated bytes within the pass.
    pub peak_allocated: Bytes,
    /// Peak of reserved bytes within the pass.
    pub peak_reserved: Bytes,
    /// The allocation that caused the allocated peak; `None` if no allocation exceeded the bytes
    /// that were live at the start.
    pub peak_at: Option<InstrId>,
    /// Counters at its end.
    pub end: Counters,
}

/// Memory of a replay, pass by pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryTrace {
    /// Passes in the order in which they ran.
    pub passes: Vec<PassMemory>,
}

impl MemoryTrace {
    /// Returns the last pass over a section of this kind.
    #[must_use]
    pub fn last(&self, kind: SectionKind) -> Option<&PassMemory> {
        self.passes.iter().rev().find(|p| p.section == kind)
    }

    /// Returns the highest allocated peak of any pass.
    #[must_use]
    pub fn peak_allocated(&self) -> Bytes {
        self.passes
            .iter()
            .map(|p| p.peak_allocated)
            .max()
            .unwrap_or_default()
    }

    /// Returns the highest reserved peak of any pass.
    #[must_use]
    pub fn peak_reserved(&self) -> Bytes {
        self.passes
            .iter()
            .map(|p| p.peak_reserved)
            .max()
            .unwrap_or_default()
    }
}

/// Why a replay stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// An allocation failed.
    #[error("instruction {}: {source}", instr.0)]
    Alloc {
        /// Instruction.
        instr: InstrId,
        /// Reason.
        source: AllocError,
    },
    /// A buffer is freed that is not live.
    #[error("instruction {}: buffer {buffer} is freed but not live", instr.0)]
    NotLive {
        /// Instruction.
        instr: InstrId,
        /// Buffer.
        buffer: u32,
    },
}

/// Replays `Init`, the first step and `steps - 1` steady steps on an unlimited device.
/// `Validation`, if the program has it, runs before the last step, and after every
/// `validate_every`-th one.
///
/// # Errors
/// Returns [`ReplayError`] if an allocation fails, or if a buffer is freed that is not live.
pub fn replay(program: &Program, steps: u32) -> Result<MemoryTrace, ReplayError> {
    let mut memory = Memory::new(program, None);
    replay_on(program, steps, &mut memory, |_, _, _| {})
}

/// Runs [`replay`] on given memory. `sample` is called for every allocation and free, with the
/// state after it.
///
/// # Errors
/// As [`replay`].
pub fn replay_on(
    program: &Program,
    steps: u32,
    memory: &mut Memory,
    mut sample: impl FnMut(&PassMemory, InstrId, &Memory),
) -> Result<MemoryTrace, ReplayError> {
    let mut trace = MemoryTrace::default();
    let mut pass = |kind, step| -> Result<(), ReplayError> {
        if let Some(section) = program.section(kind) {
            trace
                .passes
                .push(run(program, section, step, memory, &mut sample)?);
        }
        Ok(())
    };
    pass(SectionKind::Init, 0)?;
    let every = program.meta.validate_every;
    for step in 0..steps {
        let due = step > 0 && (step + 1 == steps || (every > 0 && step % every == 0));
        if due {
            pass(SectionKind::Validation, step)?;
        }
        pass(
            if step == 0 {
                SectionKind::First
            } else {
                SectionKind::Steady
            },
            step,
        )?;
    }
    Ok(trace)
}

fn run(
    program: &Program,
    section: &Section,
    step: u32,
    memory: &mut Memory,
    sample: &mut impl FnMut(&PassMemory, InstrId, &Memory),
) -> Result<PassMemory, ReplayError> {
    memory.reset_peak();
    let start = memory.counters();
    let mut pass = PassMemory {
        section: section.kind,
        step,
        peak_allocated: start.allocated,
        peak_reserved: start.reserved,
        peak_at: None,
        end: start,
    };
    for (at, Instr { op, .. }) in (section.instrs.start..).zip(program.section_instrs(section)) {
        let instr = InstrId(at);
        match *op {
            Op::Alloc(id) => {
                memory
                    .alloc(program, id)
                    .map_err(|source| ReplayError::Alloc { instr, source })?;
                let peak = memory.peak();
                if peak.allocated > pass.peak_allocated {
                    pass.peak_allocated = peak.allocated;
                    pass.peak_at = Some(instr);
                }
                pass.peak_reserved = peak.reserved;
            }
            Op::Free(id) => {
                if !memory.free(program, id) {
                    return Err(ReplayError::NotLive {
                        instr,
                        buffer: id.0,
                    });
                }
            }
            _ => continue,
        }
        sample(&pass, instr, memory);
    }
    pass.end = memory.counters();
    Ok(pass)
}
