//! Memory over the passes of a run. Allocations happen in host order and do not depend on time.

use crate::SimError;
use crate::engine::Stall;
use crate::host::{Action, HostCosts, SectionCode};
use shardlab_plan::ir::{InstrId, Pool, UnitId};
use shardlab_plan::memory::{AllocError, Counters, Ledger, Memory, MemoryState, PassPeaks};
use shardlab_plan::program::{Op, Phase, Program, Section, SectionKind};
use shardlab_plan::units::Bytes;

/// Effect of a pass on memory.
#[derive(Clone, Debug)]
pub(crate) struct PassMemory {
    pub(crate) peaks: PassPeaks,
    /// Interruptions of the host by the allocator.
    pub(crate) stalls: Vec<Stall>,
    retries: u32,
    repetition: Repetition,
}

/// The effect on memory if a section's pass is repeated right after a pass, as far as it is
/// certain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repetition {
    /// Not certain, because an allocator makes new decisions.
    Unknown,
    /// All its allocations have fixed addresses.
    Fixed,
    /// The pass left memory in the state in which it found it, so the next one does the same.
    Same,
}

/// Allocated and reserved bytes after an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) instr: u32,
    pub(crate) allocated: u64,
    pub(crate) reserved: u64,
}

/// Memory of a run.
pub(crate) struct MemoryRun<'a> {
    program: &'a Program,
    pub(crate) ledger: Ledger,
    pub(crate) passes: Vec<PassMemory>,
    /// Timeline of the last pass for which one was requested.
    pub(crate) timeline: Vec<Sample>,
    /// State after the last pass, if it is known.
    state: Option<MemoryState>,
}

impl<'a> MemoryRun<'a> {
    pub(crate) fn new(program: &'a Program, limit: Option<Bytes>) -> Self {
        let memory = Memory::of_whole_sections(program, limit);
        Self {
            program,
            ledger: Ledger::new(program, memory),
            passes: Vec::new(),
            timeline: Vec::new(),
            state: None,
        }
    }

    /// Applies a section's allocations and frees.
    pub(crate) fn pass(
        &mut self,
        section: &Section,
        code: &SectionCode,
        host: &HostCosts,
        timeline: bool,
    ) -> Result<(), SimError> {
        let start = self.ledger.counters();
        let mut stalls = Stalls::new(code, host);
        let mut fixed = true;
        if timeline {
            self.timeline.clear();
        }
        self.ledger.begin_pass();
        for (i, instr) in self.program.section_instrs(section).iter().enumerate() {
            let id = InstrId(section.instrs.start + i as u32);
            let before = self.ledger.counters();
            let buffer = match instr.op {
                Op::Alloc(buffer) => {
                    if let Err(error) = self.ledger.alloc(self.program, buffer, id) {
                        return Err(self.refused(id, instr.phase, error));
                    }
                    buffer
                }
                Op::Free(buffer) => {
                    if !self.ledger.free(self.program, buffer, id) {
                        return Err(SimError::Program(format!(
                            "instruction {} frees buffer {}, which is not live",
                            id.0, buffer.0
                        )));
                    }
                    buffer
                }
                _ => continue,
            };
            let pool = self.program.buffers[buffer.index()].pool;
            fixed &= matches!(pool, Pool::Planned | Pool::Host);
            let now = self.ledger.counters();
            stalls.add(id, before, now);
            if timeline {
                self.timeline.push(Sample {
                    instr: id.0,
                    allocated: now.allocated.0,
                    reserved: now.reserved.0,
                });
            }
        }
        let state = self.ledger.state();
        let found = std::mem::replace(&mut self.state, state);
        let repetition = if fixed {
            Repetition::Fixed
        } else if found.is_some() && found == self.state {
            Repetition::Same
        } else {
            Repetition::Unknown
        };
        self.passes.push(PassMemory {
            peaks: self.ledger.end_pass(),
            stalls: stalls.found,
            retries: self.ledger.counters().retries - start.retries,
            repetition,
        });
        Ok(())
    }

    /// Adds a steady pass that repeats the last one, without running it. Returns `false` if the
    /// repetition is not certain, because an allocator makes new decisions in each pass.
    pub(crate) fn repeat(&mut self, kinds: &[SectionKind]) -> bool {
        let before = kinds[..self.passes.len()]
            .iter()
            .rposition(|k| *k == SectionKind::Steady);
        let certain = |p: &PassMemory| p.repetition != Repetition::Unknown;
        let Some(before) = before.filter(|&i| self.passes[i..].iter().all(certain)) else {
            return false;
        };
        self.ledger.repeat_pass(before);
        let mut again = self.passes[before].clone();
        if again.repetition == Repetition::Fixed {
            // No more memory is taken from the device.
            again.stalls.clear();
            again.retries = 0;
        }
        self.passes.push(again);
        true
    }

    fn refused(&self, instr: InstrId, phase: Phase, error: AllocError) -> SimError {
        if matches!(error, AllocError::OutOfMemory { .. }) {
            SimError::OutOfMemory {
                instr,
                phase,
                error,
                by_role: self.ledger.live_by_role(),
            }
        } else {
            SimError::Alloc {
                instr,
                phase,
                error,
            }
        }
    }

    /// Returns whether the last two passes, both steady, had the same effect.
    pub(crate) fn repeats(&self) -> bool {
        match self.passes.as_slice() {
            [.., a, b] => a.peaks == b.peaks && a.retries == b.retries && a.stalls == b.stalls,
            _ => false,
        }
    }

    /// Returns the phase, unit and micro-batch of the peak.
    pub(crate) fn peak_instr(&self) -> (Phase, UnitId, u16) {
        let peak = self.ledger.peak().instr;
        let instr = self.program.instrs.get(peak.index());
        instr.map_or((Phase::Init, UnitId(0), 0), |i| {
            (i.phase, i.unit, i.micro_batch)
        })
    }
}

/// Interruptions of the host by the device's own allocator.
struct Stalls<'a> {
    code: &'a SectionCode,
    host: &'a HostCosts,
    next_code: usize,
    found: Vec<Stall>,
}

impl<'a> Stalls<'a> {
    fn new(code: &'a SectionCode, host: &'a HostCosts) -> Self {
        Self {
            code,
            host,
            next_code: 0,
            found: Vec::new(),
        }
    }

    /// Adds the interruption by an instruction, if the allocator took memory from the device or
    /// returned memory to it.
    fn add(&mut self, instr: InstrId, before: Counters, now: Counters) {
        let drain = now.retries > before.retries;
        if now.reserved <= before.reserved && !drain {
            return;
        }
        let codes = &self.code.codes;
        while codes[self.next_code].instr < instr.0
            && codes[self.next_code].action != Action::Nothing
        {
            self.next_code += 1;
        }
        let cost = self.host.device_alloc * if drain { 2 } else { 1 };
        // Two interruptions before the same code count as one of their total length.
        match self.found.last_mut() {
            Some(last) if last.code == self.next_code as u32 => {
                last.cost += cost;
                last.drain |= drain;
            }
            _ => self.found.push(Stall {
                code: self.next_code as u32,
                cost,
                drain,
            }),
        }
    }
}

/// Returns the sections in the order of a run: the initial state, the first step, and steady steps
/// with one validation among them.
pub(crate) fn order(program: &Program, steady: usize) -> Vec<SectionKind> {
    let mut kinds = Vec::with_capacity(steady + 3);
    for kind in [SectionKind::Init, SectionKind::First] {
        if program.section(kind).is_some() {
            kinds.push(kind);
        }
    }
    for i in 0..steady {
        kinds.push(SectionKind::Steady);
        if i == 0
            && program.meta.validate_every > 0
            && program.section(SectionKind::Validation).is_some()
        {
            kinds.push(SectionKind::Validation);
        }
    }
    kinds
}
