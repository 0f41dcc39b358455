//! Errors of a simulation.

use shardlab_plan::ir::{InstrId, Role};
use shardlab_plan::memory::AllocError;
use shardlab_plan::program::Phase;
use shardlab_plan::units::Bytes;

/// Error of a simulation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The step does not fit the device.
    #[error("out of memory in {} at instruction {}: {error}; in use: {}", phase.name(), instr.0, composition(by_role))]
    OutOfMemory {
        /// Instruction that requested memory.
        instr: InstrId,
        /// Its phase.
        phase: Phase,
        /// The allocator's answer.
        error: AllocError,
        /// Memory allocated at that time, largest role first.
        by_role: Vec<(Role, Bytes)>,
    },
    /// An allocation failed for a reason other than size, because the program is invalid.
    #[error("allocation refused at instruction {} ({}): {error}", instr.0, phase.name())]
    Alloc {
        /// Instruction.
        instr: InstrId,
        /// Its phase.
        phase: Phase,
        /// The allocator's answer.
        error: AllocError,
    },
    /// The program has no steady section, or refers to entries that do not exist.
    #[error("the program cannot be simulated: {0}")]
    Program(String),
    /// Every stream waits for another one.
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// An option is impossible.
    #[error("{0}")]
    Options(String),
    /// An invariant is violated, which is a bug in the simulator.
    #[error("internal error: {0}")]
    Internal(String),
}

fn composition(by_role: &[(Role, Bytes)]) -> String {
    let parts: Vec<String> = by_role
        .iter()
        .map(|(role, bytes)| format!("{} {bytes}", role.name()))
        .collect();
    if parts.is_empty() {
        "nothing".into()
    } else {
        parts.join(", ")
    }
}
