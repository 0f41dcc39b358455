//! shardlab predicts what a fully sharded training step costs, and says why.
//!
//! This is the library behind the command line. [`cli`] has one file per verb, [`predict`] goes
//! from a scenario to a run, [`analysis`] explains runs and compares options, and [`trace`] writes
//! timelines.

pub mod analysis;
pub mod cli;
#[cfg(feature = "dash")]
pub mod dash;
pub mod gate;
pub mod predict;
pub mod trace;
