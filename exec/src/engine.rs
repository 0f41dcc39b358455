//! The interpreter: performs a program on devices, rank by rank, in host order.
//!
//! [`Session`] holds all ranks of a program. Each has an own host thread during a step, an own [`crate::device::Device`],
//! and the allocators that `sim` uses. The interpreter takes no scheduling decision: it resolves addresses, shifts ranges
//! to its rank and tells the device what the program says.

mod access;
mod error;
mod fault;
mod gaps;
mod memory;
mod options;
mod rank;
mod regions;
mod report;
mod session;
mod taps;

pub use error::ExecError;
pub use fault::{Fault, FaultKind};
pub use options::ExecOptions;
pub use session::{RankInputs, Session, StepInputs, StepResult};

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
