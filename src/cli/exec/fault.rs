//! Faults that tests inject into a run, and limits that make it fail.

use shardlab_exec::engine::{Fault, FaultKind};
use shardlab_plan::Program;
use shardlab_plan::program::{InstrId, Op, SectionKind};
use shardlab_plan::scenario::parse_bytes;
use shardlab_plan::units::Bytes;

/// `RANK:KIND`: what a rank does at the first collective of the second step.
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultAt {
    rank: u32,
    kind: FaultKind,
}

/// Reads [`FaultAt`].
pub(super) fn fault(text: &str) -> Result<FaultAt, String> {
    let wanted = "RANK:KIND is expected, the kind one of panic, error, stall and collective";
    let (rank, kind) = text.split_once(':').ok_or(wanted)?;
    Ok(FaultAt {
        rank: rank.parse().map_err(|_| wanted)?,
        kind: match kind {
            "panic" => FaultKind::Panic,
            "error" => FaultKind::Error,
            "stall" => FaultKind::Stall,
            "collective" => FaultKind::DevicePanic,
            _ => return Err(wanted.to_owned()),
        },
    })
}

impl FaultAt {
    /// The fault in a program; `None` if it has no collective.
    pub(super) fn of(self, program: &Program) -> Option<Fault> {
        let steady = program.section(SectionKind::Steady)?;
        let is_collective = |i: &u32| {
            let op = &program.instrs[*i as usize].op;
            matches!(op, Op::Collective { .. })
        };
        let instr = steady.instrs.clone().find(is_collective)?;
        Some(Fault {
            rank: self.rank,
            instr: InstrId(instr),
            kind: self.kind,
        })
    }
}

/// Reads a number of bytes, such as `512MiB`.
pub(super) fn bytes(text: &str) -> Result<Bytes, String> {
    parse_bytes(text)
        .map(Bytes)
        .ok_or_else(|| "a size such as 512MiB or 4GiB is expected".to_owned())
}
