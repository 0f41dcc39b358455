//! Where ranks are while a step runs, for whoever watches from another thread.

use shardlab_plan::program::InstrId;
use shardlab_plan::units::Bytes;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Places of the ranks of a world. Ranks write, anybody reads; readers see every value soon, and none waits.
#[derive(Debug, Default)]
pub struct Live(Box<[Slot]>);

#[derive(Debug, Default)]
struct Slot {
    /// Passes begun, and below them the instruction that the host issues, plus one; 0 before the first.
    at: AtomicU64,
    /// Of the pass.
    step: AtomicU32,
    allocated: AtomicU64,
    reserved: AtomicU64,
}

/// A rank's place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankLive {
    /// The instruction that its host issues or has issued last; none before the first.
    pub at: Option<InstrId>,
    /// Allocated bytes.
    pub allocated: Bytes,
    /// Reserved bytes.
    pub reserved: Bytes,
}

impl Live {
    /// For a world of so many ranks.
    #[must_use]
    pub fn new(world: u32) -> Self {
        Self((0..world).map(|_| Slot::default()).collect())
    }

    /// Places by rank, as far as they have reached this thread.
    #[must_use]
    pub fn ranks(&self) -> Vec<RankLive> {
        let of = |s: &Slot| RankLive {
            at: s.place().map(|(_, instr)| instr),
            allocated: Bytes(s.allocated.load(Ordering::Relaxed)),
            reserved: Bytes(s.reserved.load(Ordering::Relaxed)),
        };
        self.0.iter().map(of).collect()
    }

    /// How many passes a rank has begun, the last one's step, and the instruction that its host issues or has issued last.
    pub(crate) fn place(&self, rank: u32) -> Option<(u32, u32, InstrId)> {
        let slot = self.0.get(rank as usize)?;
        let (pass, instr) = slot.place()?;
        Some((pass, slot.step.load(Ordering::Relaxed), instr))
    }

    pub(crate) fn begins(&self, rank: u32, step: u32) {
        if let Some(slot) = self.0.get(rank as usize) {
            slot.step.store(step, Ordering::Relaxed);
        }
    }

    pub(crate) fn issues(&self, rank: u32, pass: u32, instr: InstrId) {
        if let Some(slot) = self.0.get(rank as usize) {
            let at = u64::from(pass) << 32 | u64::from(instr.0 + 1);
            slot.at.store(at, Ordering::Relaxed);
        }
    }

    pub(crate) fn memory(&self, rank: u32, allocated: Bytes, reserved: Bytes) {
        if let Some(slot) = self.0.get(rank as usize) {
            slot.allocated.store(allocated.0, Ordering::Relaxed);
            slot.reserved.store(reserved.0, Ordering::Relaxed);
        }
    }
}

impl Slot {
    fn place(&self) -> Option<(u32, InstrId)> {
        let at = self.at.load(Ordering::Relaxed);
        let instr = (at as u32).checked_sub(1).map(InstrId)?;
        Some(((at >> 32) as u32, instr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ranks_write_is_read_and_strangers_are_ignored() {
        let live = Live::new(2);
        assert_eq!(live.ranks(), [RankLive::default(); 2]);
        live.begins(1, 8);
        live.issues(1, 2, InstrId(0));
        live.memory(1, Bytes(5), Bytes(8));
        live.issues(7, 1, InstrId(3));
        let ranks = live.ranks();
        assert_eq!((ranks[0].at, ranks[1].at), (None, Some(InstrId(0))));
        assert_eq!(live.place(1), Some((2, 8, InstrId(0))));
        assert_eq!((live.place(0), live.place(7)), (None, None));
        assert_eq!(
            (ranks[1].allocated, ranks[1].reserved),
            (Bytes(5), Bytes(8))
        );
    }
}
