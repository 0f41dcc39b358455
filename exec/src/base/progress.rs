//! Progress of the ranks while a step runs. Any thread can read it.

use shardlab_plan::ir::InstrId;
use shardlab_plan::units::Bytes;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Progress of the ranks of a world. Ranks write it and any thread reads it, without locks. Values
/// are published with relaxed ordering.
#[derive(Debug, Default)]
pub struct Progress(Box<[Slot]>);

#[derive(Debug, Default)]
struct Slot {
    /// Number of passes that have started (upper half), and the instruction that the host is
    /// issuing, plus one (lower half); 0 before the first instruction.
    at: AtomicU64,
    /// Step of the current pass.
    step: AtomicU32,
    allocated: AtomicU64,
    reserved: AtomicU64,
}

/// Progress of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankSnapshot {
    /// Instruction that the host is issuing or issued last; `None` before the first one.
    pub at: Option<InstrId>,
    /// Allocated bytes.
    pub allocated: Bytes,
    /// Reserved bytes.
    pub reserved: Bytes,
}

impl Progress {
    /// Creates the counters of a world of `world` ranks.
    #[must_use]
    pub fn new(world: u32) -> Self {
        Self((0..world).map(|_| Slot::default()).collect())
    }

    /// Returns the progress of each rank, as visible to this thread.
    #[must_use]
    pub fn ranks(&self) -> Vec<RankSnapshot> {
        let of = |s: &Slot| RankSnapshot {
            at: s.position().map(|(_, instr)| instr),
            allocated: Bytes(s.allocated.load(Ordering::Relaxed)),
            reserved: Bytes(s.reserved.load(Ordering::Relaxed)),
        };
        self.0.iter().map(of).collect()
    }

    /// Returns a rank's number of passes, the step of the last one, and the instruction that its
    /// host is issuing or issued last.
    pub(crate) fn position(&self, rank: u32) -> Option<(u32, u32, InstrId)> {
        let slot = self.0.get(rank as usize)?;
        let (pass, instr) = slot.position()?;
        Some((pass, slot.step.load(Ordering::Relaxed), instr))
    }

    /// Records the step of the pass that a rank starts.
    pub(crate) fn begin_pass(&self, rank: u32, step: u32) {
        if let Some(slot) = self.0.get(rank as usize) {
            slot.step.store(step, Ordering::Relaxed);
        }
    }

    /// Records the instruction that a rank is issuing.
    pub(crate) fn set_instruction(&self, rank: u32, pass: u32, instr: InstrId) {
        if let Some(slot) = self.0.get(rank as usize) {
            let at = u64::from(pass) << 32 | u64::from(instr.0 + 1);
            slot.at.store(at, Ordering::Relaxed);
        }
    }

    /// Records the memory of a rank.
    pub(crate) fn set_memory(&self, rank: u32, allocated: Bytes, reserved: Bytes) {
        if let Some(slot) = self.0.get(rank as usize) {
            slot.allocated.store(allocated.0, Ordering::Relaxed);
            slot.reserved.store(reserved.0, Ordering::Relaxed);
        }
    }
}

impl Slot {
    fn position(&self) -> Option<(u32, InstrId)> {
        let at = self.at.load(Ordering::Relaxed);
        let instr = (at as u32).checked_sub(1).map(InstrId)?;
        Some(((at >> 32) as u32, instr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_back_and_unknown_ranks_are_ignored() {
        let progress = Progress::new(2);
        assert_eq!(progress.ranks(), [RankSnapshot::default(); 2]);
        progress.begin_pass(1, 8);
        progress.set_instruction(1, 2, InstrId(0));
        progress.set_memory(1, Bytes(5), Bytes(8));
        progress.set_instruction(7, 1, InstrId(3));
        let ranks = progress.ranks();
        assert_eq!((ranks[0].at, ranks[1].at), (None, Some(InstrId(0))));
        assert_eq!(progress.position(1), Some((2, 8, InstrId(0))));
        assert_eq!((progress.position(0), progress.position(7)), (None, None));
        assert_eq!(
            (ranks[1].allocated, ranks[1].reserved),
            (Bytes(5), Bytes(8))
        );
    }
}
