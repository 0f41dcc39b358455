//! Why a simulation has no result.

use shardlab_plan::ir::{InstrId, Role};
use shardlab_plan::memory::AllocError;
use shardlab_plan::program::Phase;
use shardlab_plan::units::Bytes;

/// Error of a simulation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The step does not fit.
    #[error("out of memory in {} at instruction {}: {error}; in use: {}", phase.name(), instr.0, composition(by_role))]
    OutOfMemory {
        /// Instruction that asked for memory.
        instr: InstrId,
        /// Its phase.
        phase: Phase,
        /// The allocator's answer.
        error: AllocError,
        /// Memory allocated at that moment, largest role first.
        by_role: Vec<(Role, Bytes)>,
    },
    /// An allocator refused for a reason other than size: the program is wrong.
    #[error("allocation refused at instruction {} ({}): {error}", instr.0, phase.name())]
    Alloc {
        /// Instruction.
        instr: InstrId,
        /// Its phase.
        phase: Phase,
        /// The allocator's answer.
        error: AllocError,
    },
    /// The program has no steady section, or refers to entries that it does not have.
    #[error("the program cannot be simulated: {0}")]
    Program(String),
    /// Every stream waits for another one.
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// An option is impossible.
    #[error("{0}")]
    Options(String),
    /// An invariant does not hold: a bug in the simulator.
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
