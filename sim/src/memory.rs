//! Memory over the passes of a run: allocations in host order, independent of time.

use crate::SimError;
use crate::engine::Stall;
use crate::host::{Action, HostCosts, SectionCode};
use shardlab_plan::ir::{InstrId, Pool, Role, UnitId};
use shardlab_plan::memory::{AllocError, Counters, Memory};
use shardlab_plan::program::{Op, Program, Section, SectionKind};
use shardlab_plan::units::Bytes;

/// What a pass did to memory.
#[derive(Clone, Debug)]
pub(crate) struct PassMemory {
    /// Peaks within the pass.
    pub(crate) peak_allocated: u64,
    pub(crate) peak_reserved: u64,
    /// Allocated at its end.
    pub(crate) end_allocated: u64,
    /// Interruptions of the host.
    pub(crate) stalls: Vec<Stall>,
    retries: u32,
    /// Everything that it allocated has one address for ever.
    fixed: bool,
}

/// The peak of a run and what was allocated then.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peak {
    pub(crate) allocated: u64,
    /// Pass and instruction.
    pub(crate) pass: usize,
    pub(crate) instr: u32,
    pub(crate) by_role: [u64; Role::ALL.len()],
    pub(crate) by_unit: Vec<u64>,
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
    memory: Memory,
    live: [u64; Role::ALL.len()],
    live_by_unit: Vec<u64>,
    counters: Counters,
    pub(crate) peak: Peak,
    /// The peak's composition is not copied yet.
    fresh_peak: bool,
    pub(crate) peak_reserved: u64,
    pub(crate) retries: u32,
    pub(crate) passes: Vec<PassMemory>,
    /// Timeline of the last pass that was asked for one.
    pub(crate) timeline: Vec<Sample>,
}

impl<'a> MemoryRun<'a> {
    pub(crate) fn new(program: &'a Program, limit: Option<Bytes>) -> Self {
        let units = program.units.len().max(1);
        Self {
            program,
            memory: Memory::of_whole_sections(program, limit),
            live: [0; Role::ALL.len()],
            live_by_unit: vec![0; units],
            counters: Counters::default(),
            peak: Peak {
                by_unit: vec![0; units],
                ..Peak::default()
            },
            fresh_peak: false,
            peak_reserved: 0,
            retries: 0,
            passes: Vec::new(),
            timeline: Vec::new(),
        }
    }

    /// Performs a section's allocations and frees.
    pub(crate) fn pass(
        &mut self,
        section: &Section,
        code: &SectionCode,
        host: &HostCosts,
        timeline: bool,
    ) -> Result<(), SimError> {
        let start = self.counters;
        let mut pass = PassMemory {
            peak_allocated: start.allocated.0,
            peak_reserved: start.reserved.0,
            end_allocated: 0,
            stalls: Vec::new(),
            retries: 0,
            fixed: true,
        };
        if timeline {
            self.timeline.clear();
        }
        let index = self.passes.len();
        let mut next_code = 0;
        for (i, instr) in self.program.section_instrs(section).iter().enumerate() {
            let id = section.instrs.start + i as u32;
            let buffer = match instr.op {
                Op::Alloc(b) | Op::Free(b) => b,
                _ => continue,
            };
            let allocates = matches!(instr.op, Op::Alloc(_));
            if allocates {
                if let Err(error) = self.memory.alloc(self.program, buffer) {
                    return Err(self.refused(InstrId(id), instr.phase, error));
                }
            } else {
                self.snapshot();
                if !self.memory.free(self.program, buffer) {
                    return Err(SimError::Program(format!(
                        "instruction {id} frees buffer {}, which is not live",
                        buffer.0
                    )));
                }
            }
            let now = self.memory.counters();
            let described = &self.program.buffers[buffer.index()];
            pass.fixed &= matches!(described.pool, Pool::Planned | Pool::Host);
            let (role, unit) = (
                described.role as usize,
                described.unit.index().min(self.live_by_unit.len() - 1),
            );
            // A double buffer's copies stay allocated when nobody uses them: they remain with their
            // first user.
            if allocates {
                let bytes = now.allocated.0.saturating_sub(self.counters.allocated.0);
                self.live[role] += bytes;
                self.live_by_unit[unit] += bytes;
            } else {
                let bytes = self.counters.allocated.0.saturating_sub(now.allocated.0);
                self.live[role] = self.live[role].saturating_sub(bytes);
                self.live_by_unit[unit] = self.live_by_unit[unit].saturating_sub(bytes);
            }
            if now.reserved > self.counters.reserved || now.retries > self.counters.retries {
                while code.codes[next_code].instr < id
                    && code.codes[next_code].action != Action::Nothing
                {
                    next_code += 1;
                }
                let drain = now.retries > self.counters.retries;
                let cost = host.device_alloc * if drain { 2 } else { 1 };
                // Two interruptions before one code count as one of their joint length.
                match pass.stalls.last_mut() {
                    Some(last) if last.code == next_code as u32 => {
                        last.cost += cost;
                        last.drain |= drain;
                    }
                    _ => pass.stalls.push(Stall {
                        code: next_code as u32,
                        cost,
                        drain,
                    }),
                }
            }
            self.counters = now;
            // An equal peak of a later pass replaces an earlier one: what repeats matters more.
            let again = now.allocated.0 == self.peak.allocated && index > self.peak.pass;
            if now.allocated.0 > self.peak.allocated || again {
                self.peak.allocated = now.allocated.0;
                self.peak.pass = index;
                self.peak.instr = id;
                self.fresh_peak = true;
            }
            pass.peak_allocated = pass.peak_allocated.max(now.allocated.0);
            pass.peak_reserved = pass.peak_reserved.max(now.reserved.0);
            if timeline {
                self.timeline.push(Sample {
                    instr: id,
                    allocated: now.allocated.0,
                    reserved: now.reserved.0,
                });
            }
        }
        self.snapshot();
        self.peak_reserved = self.peak_reserved.max(pass.peak_reserved);
        pass.end_allocated = self.counters.allocated.0;
        pass.retries = self.counters.retries - start.retries;
        self.retries = self.counters.retries;
        self.passes.push(pass);
        Ok(())
    }

    /// Adds a steady pass that does what the last one did, without performing it. `false` where
    /// that is not certain: where an allocator decides anew each time.
    pub(crate) fn repeat(&mut self, kinds: &[SectionKind]) -> bool {
        let before = kinds[..self.passes.len()]
            .iter()
            .rposition(|k| *k == SectionKind::Steady);
        let Some(before) = before.filter(|&i| self.passes[i..].iter().all(|p| p.fixed)) else {
            return false;
        };
        if self.peak.pass == before {
            self.peak.pass = self.passes.len();
        }
        self.passes.push(PassMemory {
            stalls: Vec::new(),
            retries: 0,
            ..self.passes[before].clone()
        });
        true
    }

    /// Keeps the composition of a peak before memory shrinks again.
    fn snapshot(&mut self) {
        if self.fresh_peak {
            self.fresh_peak = false;
            self.peak.by_role = self.live;
            self.peak.by_unit.copy_from_slice(&self.live_by_unit);
        }
    }

    fn refused(
        &self,
        instr: InstrId,
        phase: shardlab_plan::program::Phase,
        error: AllocError,
    ) -> SimError {
        if matches!(error, AllocError::OutOfMemory { .. }) {
            SimError::OutOfMemory {
                instr,
                phase,
                error,
                by_role: by_role(&self.live),
            }
        } else {
            SimError::Alloc {
                instr,
                phase,
                error,
            }
        }
    }

    /// Whether the last two passes, both steady, did the same.
    pub(crate) fn repeats(&self) -> bool {
        match self.passes.as_slice() {
            [.., a, b] => {
                a.peak_allocated == b.peak_allocated
                    && a.peak_reserved == b.peak_reserved
                    && a.end_allocated == b.end_allocated
                    && a.retries == b.retries
                    && a.stalls == b.stalls
            }
            _ => false,
        }
    }

    /// Composition of the peak by role, largest first.
    pub(crate) fn peak_by_role(&self) -> Vec<(Role, Bytes)> {
        by_role(&self.peak.by_role)
    }

    /// Composition of the peak by unit, largest first.
    pub(crate) fn peak_by_unit(&self) -> Vec<(String, Bytes)> {
        let mut units: Vec<(usize, u64)> = self
            .peak
            .by_unit
            .iter()
            .copied()
            .enumerate()
            .filter(|u| u.1 > 0)
            .collect();
        units.sort_by_key(|&(i, bytes)| (std::cmp::Reverse(bytes), i));
        let name = |i: usize| {
            self.program
                .units
                .get(i)
                .map_or_else(|| "root".to_owned(), |u| u.name.clone())
        };
        units
            .into_iter()
            .map(|(i, bytes)| (name(i), Bytes(bytes)))
            .collect()
    }

    /// Unit, phase and micro-batch of the peak.
    pub(crate) fn peak_instr(&self) -> (shardlab_plan::program::Phase, UnitId, u16) {
        self.program
            .instrs
            .get(self.peak.instr as usize)
            .map_or((shardlab_plan::program::Phase::Init, UnitId(0), 0), |i| {
                (i.phase, i.unit, i.micro_batch)
            })
    }
}

fn by_role(live: &[u64; Role::ALL.len()]) -> Vec<(Role, Bytes)> {
    let mut roles: Vec<(Role, Bytes)> = Role::ALL
        .iter()
        .map(|&r| (r, Bytes(live[r as usize])))
        .filter(|r| r.1.0 > 0)
        .collect();
    roles.sort_by_key(|&(role, bytes)| (std::cmp::Reverse(bytes), role));
    roles
}

/// Sections in the order of a run: initial state, first step, steady steps with one validation
/// among them.
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
