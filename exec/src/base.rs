//! The foundation that devices, collectives, processes and the engine all use.
//!
//! Nothing here depends on a device, a kernel or a socket, so every other folder may import this
//! one.

pub(crate) mod abort;
pub(crate) mod blockwise;
pub(crate) mod clock;
pub(crate) mod delay;
pub(crate) mod divergence;
pub(crate) mod element;
pub(crate) mod failure;
pub(crate) mod fault;
pub(crate) mod float8;
pub mod operand;
pub(crate) mod options;
pub(crate) mod packed;
pub(crate) mod progress;
pub(crate) mod random;
pub(crate) mod start_barrier;
pub(crate) mod suspend;
#[cfg(test)]
pub(crate) mod testing;
