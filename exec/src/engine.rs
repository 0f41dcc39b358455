//! The interpreter: performs a program on devices, rank by rank, in host order.
//!
//! [`Session`] holds the ranks of a program that this process performs: all of them, or a part of a [`World`]. Each has an own host thread during a step, an own [`crate::device::Device`],
//! and the allocators that `sim` uses. The interpreter takes no scheduling decision: it resolves addresses, shifts ranges
//! to its rank and tells the device what the program says.

mod access;
mod error;
mod exchange;
mod fault;
mod gaps;
pub(crate) mod gate;
mod live;
mod median;
mod memory;
mod options;
mod rank;
mod regions;
mod report;
mod session;
pub(crate) mod standing;
mod taps;
mod world;

pub use error::ExecError;
pub use fault::{Fault, FaultKind};
pub use live::{Live, RankLive};
pub use options::{ExecOptions, Registration, Times};
pub use session::{RankInputs, RankTimes, Session, StepInputs, StepResult};
pub use world::World;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
