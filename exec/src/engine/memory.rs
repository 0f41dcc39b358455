//! Memory of a rank over the passes of a run, with the numbers that a run reports.

use shardlab_plan::ir::{BufferId, InstrId};
use shardlab_plan::memory::{AllocError, Ledger, Memory, PassPeaks};
use shardlab_plan::program::{Op, Program, SectionKind};
use shardlab_plan::units::Bytes;

/// The shared ledger, with the step and the time of its peak.
#[derive(Debug)]
pub(crate) struct RankMemory {
    pub(crate) ledger: Ledger,
    /// Finished training steps.
    step: u32,
    /// Step of the peak.
    pub(crate) peak_step: u32,
    /// Time of the peak, ns.
    pub(crate) peak_time: u64,
}

impl RankMemory {
    pub(crate) fn new(program: &Program, capacity: Option<Bytes>) -> Self {
        Self {
            ledger: Ledger::new(program, Memory::new(program, capacity)),
            step: 0,
            peak_step: 0,
            peak_time: 0,
        }
    }

    /// Begins a pass; `step` counts finished training steps.
    pub(crate) fn begin(&mut self, step: u32) {
        self.step = step;
        self.ledger.begin_pass();
    }

    /// Ends the pass.
    pub(crate) fn end(&mut self) -> PassPeaks {
        self.ledger.end_pass()
    }

    /// Allocates a buffer at a time in ns. Returns its address.
    pub(crate) fn alloc(
        &mut self,
        program: &Program,
        id: BufferId,
        instr: InstrId,
        time: u64,
    ) -> Result<u64, AllocError> {
        let address = self.ledger.alloc(program, id, instr)?;
        self.date_peak(instr, time);
        Ok(address)
    }

    /// Frees a buffer at a time in ns. Returns whether it was live.
    pub(crate) fn free(
        &mut self,
        program: &Program,
        id: BufferId,
        instr: InstrId,
        time: u64,
    ) -> bool {
        let was_live = self.ledger.free(program, id, instr);
        self.date_peak(instr, time);
        was_live
    }

    fn date_peak(&mut self, instr: InstrId, time: u64) {
        let peak = self.ledger.peak();
        if peak.instr == instr && peak.pass == self.ledger.passes() {
            self.peak_step = self.step;
            self.peak_time = time;
        }
    }
}

/// Describes the memory that a step needs at its peak, from a dry run.
pub(crate) fn needs(program: &Program) -> String {
    let mut ledger = Ledger::new(program, Memory::new(program, None));
    for kind in [SectionKind::Init, SectionKind::First, SectionKind::Steady] {
        let Some(section) = program.section(kind) else {
            continue;
        };
        ledger.begin_pass();
        for id in section.instrs.clone().map(InstrId) {
            match program.instrs[id.index()].op {
                // Without a limit, a dry run cannot run out of memory.
                Op::Alloc(b) => {
                    let _ = ledger.alloc(program, b, id);
                }
                Op::Free(b) => {
                    ledger.free(program, b, id);
                }
                _ => {}
            }
        }
        ledger.end_pass();
    }
    let roles = ledger.peak_by_role();
    let words: Vec<String> = roles
        .iter()
        .map(|(role, bytes)| format!("{} {bytes}", role.name()))
        .collect();
    let total: Bytes = roles.iter().map(|(_, bytes)| *bytes).sum();
    format!("the peak of a step is {total}: {}", words.join(", "))
}
