//! Allocated memory over the passes of a run, by role and by unit.
//!
//! `sim` and `exec` use the same ledger, so predicted and executed peaks agree by construction.

use super::arena::{Memory, MemoryState};
use super::{AllocError, Counters};
use crate::ir::{BufferId, InstrId, Role};
use crate::program::Program;
use crate::units::Bytes;
use std::cmp::Reverse;

/// Memory of one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassPeaks {
    /// Peak of allocated bytes within the pass.
    pub peak_allocated: Bytes,
    /// Peak of reserved bytes within the pass.
    pub peak_reserved: Bytes,
    /// Bytes allocated at its end.
    pub end_allocated: Bytes,
}

/// The peak of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunPeak {
    /// Allocated bytes.
    pub allocated: Bytes,
    /// Pass, counted from 0.
    pub pass: usize,
    /// Allocation that reached it.
    pub instr: InstrId,
}

/// Live bytes by role and by unit.
#[derive(Clone, Debug)]
struct Live {
    by_role: [u64; Role::ALL.len()],
    by_unit: Vec<u64>,
}

impl Live {
    /// Returns the roles that hold bytes, largest first.
    fn by_role(&self) -> Vec<(Role, Bytes)> {
        let mut roles: Vec<(Role, Bytes)> = Role::ALL
            .iter()
            .map(|&r| (r, Bytes(self.by_role[r as usize])))
            .filter(|r| r.1.0 > 0)
            .collect();
        roles.sort_by_key(|&(role, bytes)| (Reverse(bytes), role));
        roles
    }
}

/// A rank's [`Memory`], with live bytes by role and by unit, the peaks of each pass, and the live
/// bytes at the peak of the run.
///
/// Every method takes the program for which the ledger was created.
#[derive(Clone, Debug)]
pub struct Ledger {
    memory: Memory,
    counters: Counters,
    live: Live,
    peak: RunPeak,
    at_peak: Live,
    /// Whether `at_peak` should equal `live`. It is copied only before `live` shrinks.
    is_at_peak: bool,
    pass: PassPeaks,
    passes: usize,
    peak_reserved: Bytes,
}

impl Ledger {
    /// Creates a ledger for `memory`, in which nothing is live.
    #[must_use]
    pub fn new(program: &Program, memory: Memory) -> Self {
        let live = Live {
            by_role: [0; Role::ALL.len()],
            by_unit: vec![0; program.units.len().max(1)],
        };
        Self {
            memory,
            counters: Counters::default(),
            at_peak: live.clone(),
            live,
            peak: RunPeak::default(),
            is_at_peak: false,
            pass: PassPeaks::default(),
            passes: 0,
            peak_reserved: Bytes::ZERO,
        }
    }

    /// Starts a pass.
    pub fn begin_pass(&mut self) {
        self.pass = PassPeaks {
            peak_allocated: self.counters.allocated,
            peak_reserved: self.counters.reserved,
            end_allocated: Bytes::ZERO,
        };
    }

    /// Ends the pass and returns its peaks.
    pub fn end_pass(&mut self) -> PassPeaks {
        self.keep_peak();
        self.peak_reserved = self.peak_reserved.max(self.pass.peak_reserved);
        self.pass.end_allocated = self.counters.allocated;
        self.passes += 1;
        self.pass
    }

    /// Returns the state of the memory; see [`Memory::state`].
    #[must_use]
    pub fn state(&self) -> Option<MemoryState> {
        self.memory.state()
    }

    /// Counts one more pass, with exactly the effect of pass `before`.
    pub fn repeat_pass(&mut self, before: usize) {
        if self.peak.pass == before {
            self.peak.pass = self.passes;
        }
        self.passes += 1;
    }

    /// Allocates a buffer and returns its address.
    ///
    /// # Errors
    /// Those of [`Memory::alloc`].
    pub fn alloc(
        &mut self,
        program: &Program,
        id: BufferId,
        instr: InstrId,
    ) -> Result<u64, AllocError> {
        let address = self.memory.alloc(program, id)?;
        let now = self.memory.counters();
        let (role, unit) = self.owner(program, id);
        // The copies of a double buffer stay allocated while they are unused. They are attributed
        // to their first user.
        let bytes = now.allocated.0.saturating_sub(self.counters.allocated.0);
        self.live.by_role[role] += bytes;
        self.live.by_unit[unit] += bytes;
        self.update(now, instr);
        Ok(address)
    }

    /// Frees a buffer. If the buffer is not live, returns `false` and changes nothing.
    pub fn free(&mut self, program: &Program, id: BufferId, instr: InstrId) -> bool {
        self.keep_peak();
        if !self.memory.free(program, id) {
            return false;
        }
        let now = self.memory.counters();
        let (role, unit) = self.owner(program, id);
        let bytes = self.counters.allocated.0.saturating_sub(now.allocated.0);
        let less = |live: &mut u64| *live = live.saturating_sub(bytes);
        less(&mut self.live.by_role[role]);
        less(&mut self.live.by_unit[unit]);
        self.update(now, instr);
        true
    }

    fn owner(&self, program: &Program, id: BufferId) -> (usize, usize) {
        let b = &program.buffers[id.index()];
        let last = self.live.by_unit.len() - 1;
        (b.role as usize, b.unit.index().min(last))
    }

    fn update(&mut self, now: Counters, instr: InstrId) {
        self.counters = now;
        // An equal peak in a later pass replaces an earlier one, because repeated peaks are more
        // relevant.
        let again = now.allocated == self.peak.allocated && self.passes > self.peak.pass;
        if now.allocated > self.peak.allocated || again {
            self.peak = RunPeak {
                allocated: now.allocated,
                pass: self.passes,
                instr,
            };
            self.is_at_peak = true;
        }
        self.pass.peak_allocated = self.pass.peak_allocated.max(now.allocated);
        self.pass.peak_reserved = self.pass.peak_reserved.max(now.reserved);
    }

    fn keep_peak(&mut self) {
        if std::mem::take(&mut self.is_at_peak) {
            self.at_peak.by_role = self.live.by_role;
            self.at_peak.by_unit.copy_from_slice(&self.live.by_unit);
        }
    }

    /// Returns the counters after the last allocation or free.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the peak of the run so far.
    #[must_use]
    pub fn peak(&self) -> RunPeak {
        self.peak
    }

    /// Returns the highest reserved bytes of the passes that have ended.
    #[must_use]
    pub fn peak_reserved(&self) -> Bytes {
        self.peak_reserved
    }

    /// Returns the number of passes that have ended.
    #[must_use]
    pub fn passes(&self) -> usize {
        self.passes
    }

    /// Returns the live bytes by role, largest first.
    #[must_use]
    pub fn live_by_role(&self) -> Vec<(Role, Bytes)> {
        self.live.by_role()
    }

    /// Returns the live bytes at the peak by role, largest first. The peak of a pass is complete
    /// after the pass has ended.
    #[must_use]
    pub fn peak_by_role(&self) -> Vec<(Role, Bytes)> {
        self.at_peak.by_role()
    }

    /// Returns the live bytes at the peak by unit, largest first, with the unit's name.
    #[must_use]
    pub fn peak_by_unit(&self, program: &Program) -> Vec<(String, Bytes)> {
        let mut units: Vec<(usize, u64)> =
            self.at_peak.by_unit.iter().copied().enumerate().collect();
        units.retain(|u| u.1 > 0);
        units.sort_by_key(|&(i, bytes)| (Reverse(bytes), i));
        let name = |i: usize| {
            let unit = program.units.get(i);
            unit.map_or_else(|| "root".to_owned(), |u| u.name.clone())
        };
        units
            .into_iter()
            .map(|(i, bytes)| (name(i), Bytes(bytes)))
            .collect()
    }
}
