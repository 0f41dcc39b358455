//! Fault injection, for tests.

use shardlab_plan::ir::InstrId;

/// What a rank does when it reaches an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The host thread panics.
    Panic,
    /// The host thread reports an error.
    Error,
    /// The host thread stops issuing work, which the other ranks must notice.
    Stall,
    /// The rank never joins the others. On GPUs it skips NCCL's initialization, for any
    /// instruction; on other devices it stops at the instruction.
    Absent,
    /// The worker of the stream panics. In a collective, it panics after its arrival.
    DevicePanic,
}

/// A fault to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Rank that fails.
    pub rank: u32,
    /// Instruction at which it fails.
    pub instr: InstrId,
    /// Kind of failure.
    pub kind: FaultKind,
}
