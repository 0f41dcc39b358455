//! The interpreter: runs a program on devices, rank by rank, in host order.
//!
//! [`Session`] owns the ranks of a program that this process runs: all of them, or its share of a
//! [`World`](crate::process::World). Each rank has a host thread during a step, a
//! [`crate::device::Device`], and the allocators that `sim` uses. The interpreter makes no
//! scheduling decision: it resolves addresses, shifts ranges to its rank, and passes the program's
//! instructions to the device.

mod error;
mod exchange;
mod gaps;
mod median;
mod memory;
mod offsets;
mod pass;
mod rank;
mod readback;
mod regions;
mod report;
mod session;
mod squares;
mod state_blocks;
mod step;
pub(crate) mod step_barrier;

pub use crate::base::fault::{Fault, FaultKind};
pub use crate::base::options::{DelaySpec, ExecOptions, Registration, Times};
pub use crate::base::progress::{Progress, RankSnapshot};
pub use error::ExecError;
pub use session::Session;
pub use squares::GradientPart;
pub(crate) use squares::reads_in_scope;
pub use step::{RankInputs, RankTimes, StepInputs, StepResult};

#[cfg(test)]
mod tests;
