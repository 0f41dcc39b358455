//! Faults that tests inject into a run, and limits that make a run fail.

use crate::cli::output::Failure;
use shardlab_exec::engine::{Fault, FaultKind};
use shardlab_plan::Program;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::{Op, SectionKind};

/// `RANK:KIND`: what a rank does at the first collective of the second step, or of the whole run
/// for the kind `absent`.
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultAt {
    rank: u32,
    kind: FaultKind,
}

/// Parses [`FaultAt`].
pub(super) fn fault(text: &str) -> Result<FaultAt, String> {
    let wanted =
        "RANK:KIND is expected, the kind one of panic, error, stall, absent and collective";
    let (rank, kind) = text.split_once(':').ok_or(wanted)?;
    Ok(FaultAt {
        rank: rank.parse().map_err(|_| wanted)?,
        kind: match kind {
            "panic" => FaultKind::Panic,
            "error" => FaultKind::Error,
            "stall" => FaultKind::Stall,
            "absent" => FaultKind::Absent,
            "collective" => FaultKind::DevicePanic,
            _ => return Err(wanted.to_owned()),
        },
    })
}

impl FaultAt {
    /// Returns the fault for a program. Rejects a fault that can never happen, because a test would
    /// conclude that the run survived it.
    pub(super) fn of(self, program: &Program) -> Result<Fault, Failure> {
        let (rank, world) = (self.rank, program.meta.mesh.world());
        if rank >= world {
            let ranks = match world {
                1 => "rank 0 only".to_owned(),
                n => format!("ranks 0 to {}", n - 1),
            };
            return Err(Failure::bad_input(format_args!(
                "--fault: there is no rank {rank}; the scenario's mesh has {ranks}"
            )));
        }
        let is_collective = |i: &u32| {
            let op = &program.instrs[*i as usize].op;
            matches!(op, Op::Collective { .. })
        };
        let section = match self.kind {
            FaultKind::Absent => SectionKind::First,
            _ => SectionKind::Steady,
        };
        let instr = program
            .section(section)
            .and_then(|section| section.instrs.clone().find(is_collective))
            .ok_or_else(|| {
                Failure::bad_input("--fault happens at a collective, but the program has none")
            })?;
        Ok(Fault {
            rank,
            instr: InstrId(instr),
            kind: self.kind,
        })
    }
}
