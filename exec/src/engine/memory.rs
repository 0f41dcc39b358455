//! Memory of a rank over the passes of a run, with the numbers that a run reports.
//!
//! Allocators and accounting are those of `sim`: the numbers must agree to the byte.

use shardlab_plan::ir::{BufferId, InstrId, Role};
use shardlab_plan::memory::{AllocError, Counters, Memory};
use shardlab_plan::program::Program;
use shardlab_plan::units::Bytes;

/// Memory statistics of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PassMemory {
    pub(crate) peak_allocated: Bytes,
    pub(crate) peak_reserved: Bytes,
    pub(crate) end_allocated: Bytes,
}

/// Peak of a run, and what was allocated at that time.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunPeak {
    pub(crate) allocated: u64,
    /// Pass of the peak.
    pub(crate) pass: usize,
    pub(crate) step: u32,
    pub(crate) instr: InstrId,
    pub(crate) time: u64,
    pub(crate) by_role: [u64; Role::ALL.len()],
    pub(crate) by_unit: Vec<u64>,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct RankMemory {
    memory: Memory,
    live: [u64; Role::ALL.len()],
    by_unit: Vec<u64>,
    counters: Counters,
    pub(crate) peak: RunPeak,
    /// Whether the composition of the peak has not been copied yet.
    fresh: bool,
    pub(crate) peak_reserved: Bytes,
    pass: PassMemory,
    passes: usize,
    step: u32,
}

impl RankMemory {
    pub(crate) fn new(program: &Program, capacity: Option<Bytes>) -> Self {
        let units = program.units.len().max(1);
        Self {
            memory: Memory::new(program, capacity),
            live: [0; Role::ALL.len()],
            by_unit: vec![0; units],
            counters: Counters::default(),
            peak: RunPeak {
                by_unit: vec![0; units],
                ..RunPeak::default()
            },
            fresh: false,
            peak_reserved: Bytes::ZERO,
            pass: PassMemory::default(),
            passes: 0,
            step: 0,
        }
    }

    /// Begins a pass; `step` counts finished training steps.
    pub(crate) fn begin(&mut self, step: u32) {
        self.step = step;
        self.pass = PassMemory {
            peak_allocated: self.counters.allocated,
            peak_reserved: self.counters.reserved,
            end_allocated: Bytes::ZERO,
        };
    }

    /// Ends the pass.
    pub(crate) fn end(&mut self) -> PassMemory {
        self.snapshot();
        self.peak_reserved = self.peak_reserved.max(self.pass.peak_reserved);
        self.pass.end_allocated = self.counters.allocated;
        self.passes += 1;
        self.pass
    }

    /// Allocates a buffer. Returns its address.
    pub(crate) fn alloc(
        &mut self,
        program: &Program,
        id: BufferId,
        instr: InstrId,
        time: u64,
    ) -> Result<u64, AllocError> {
        let address = self.memory.alloc(program, id)?;
        let now = self.memory.counters();
        let (role, unit) = self.owner(program, id);
        // The copies of a double buffer stay allocated while they are unused: they are attributed
        // to their first user.
        let bytes = now.allocated.0.saturating_sub(self.counters.allocated.0);
        self.live[role] += bytes;
        self.by_unit[unit] += bytes;
        self.counters = now;
        self.update(instr, time);
        Ok(address)
    }

    /// Frees a buffer. Returns whether it was live.
    pub(crate) fn free(
        &mut self,
        program: &Program,
        id: BufferId,
        instr: InstrId,
        time: u64,
    ) -> bool {
        self.snapshot();
        if !self.memory.free(program, id) {
            return false;
        }
        let now = self.memory.counters();
        let (role, unit) = self.owner(program, id);
        let bytes = self.counters.allocated.0.saturating_sub(now.allocated.0);
        self.live[role] = self.live[role].saturating_sub(bytes);
        self.by_unit[unit] = self.by_unit[unit].saturating_sub(bytes);
        self.counters = now;
        self.update(instr, time);
        true
    }

    fn owner(&self, program: &Program, id: BufferId) -> (usize, usize) {
        let b = &program.buffers[id.index()];
        (b.role as usize, b.unit.index().min(self.by_unit.len() - 1))
    }

    fn update(&mut self, instr: InstrId, time: u64) {
        let now = self.counters;
        // An equal peak of a later pass replaces an earlier one, since repeated peaks matter more.
        let again = now.allocated.0 == self.peak.allocated && self.passes > self.peak.pass;
        if now.allocated.0 > self.peak.allocated || again {
            self.peak.allocated = now.allocated.0;
            self.peak.pass = self.passes;
            self.peak.step = self.step;
            self.peak.instr = instr;
            self.peak.time = time;
            self.fresh = true;
        }
        self.pass.peak_allocated = self.pass.peak_allocated.max(now.allocated);
        self.pass.peak_reserved = self.pass.peak_reserved.max(now.reserved);
    }

    /// Copies the composition of a peak before memory shrinks.
    fn snapshot(&mut self) {
        if std::mem::take(&mut self.fresh) {
            self.peak.by_role = self.live;
            self.peak.by_unit.copy_from_slice(&self.by_unit);
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the live bytes by role, largest first.
    pub(crate) fn by_role(&self) -> Vec<(Role, Bytes)> {
        by_role(&self.live)
    }
}

/// Describes the memory that a step needs at its peak, from a dry run.
pub(crate) fn needs(program: &Program) -> String {
    use shardlab_plan::program::{Op, SectionKind};
    let mut memory = RankMemory::new(program, None);
    for kind in [SectionKind::Init, SectionKind::First, SectionKind::Steady] {
        let Some(section) = program.section(kind) else {
            continue;
        };
        memory.begin(0);
        for id in section.instrs.clone().map(InstrId) {
            match program.instrs[id.index()].op {
                // Without a limit, a dry run cannot run out of memory.
                Op::Alloc(b) => {
                    let _ = memory.alloc(program, b, id, 0);
                }
                Op::Free(b) => {
                    memory.free(program, b, id, 0);
                }
                _ => {}
            }
        }
        memory.end();
    }
    let roles = by_role(&memory.peak.by_role);
    let words: Vec<String> = roles
        .iter()
        .map(|(role, bytes)| format!("{} {bytes}", role.name()))
        .collect();
    let total: Bytes = roles.iter().map(|(_, bytes)| *bytes).sum();
    format!("the peak of a step is {total}: {}", words.join(", "))
}

/// Returns roles with bytes, largest first.
pub(crate) fn by_role(live: &[u64; Role::ALL.len()]) -> Vec<(Role, Bytes)> {
    let mut roles: Vec<(Role, Bytes)> = Role::ALL
        .iter()
        .map(|&r| (r, Bytes(live[r as usize])))
        .filter(|r| r.1.0 > 0)
        .collect();
    roles.sort_by_key(|&(role, bytes)| (std::cmp::Reverse(bytes), role));
    roles
}
