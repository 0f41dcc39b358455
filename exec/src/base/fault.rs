//! Faults that tests inject.

use shardlab_plan::program::InstrId;

/// What a rank does when it comes to an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Its host thread panics.
    Panic,
    /// Its host thread reports an error.
    Error,
    /// Its host thread goes on no more: the others must notice.
    Stall,
    /// It never joins the others: on GPUs it stays away from NCCL's start, whatever the instruction, elsewhere it goes missing at it.
    Absent,
    /// The stream's worker panics: in a collective, after its arrival.
    DevicePanic,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Rank.
    pub rank: u32,
    /// Instruction.
    pub instr: InstrId,
    /// Kind.
    pub kind: FaultKind,
}
