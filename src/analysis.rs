//! What a run means: where time and memory go, why, and what other options would do.
//!
//! Everything here is computed from a [`crate::predict::Prediction`] and rendered elsewhere (command line, dashboard).

mod awaited;
pub mod compile;
pub mod exposed;
mod misaligned;
pub mod pareto;
pub mod path;
pub mod peak;
pub mod slower;
pub mod spans;
pub mod validation;
pub mod whatif;
pub mod why;
