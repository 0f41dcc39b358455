//! What a prediction means: the verdict, where time and memory go, and what other options would do.
//!
//! Everything here is computed from a [`crate::predict::Prediction`] and rendered elsewhere
//! (command line, dashboard).

mod awaited;
pub mod basis;
pub mod compile;
pub mod experts;
pub mod exposed;
mod misaligned;
pub mod pareto;
pub mod path;
pub mod peak;
mod phrases;
mod shapes;
pub mod slower;
pub mod smallest_fit;
pub mod spans;
pub mod validation;
pub mod verdict;
pub mod warnings;
pub mod what_fits;
pub mod whatif;
pub mod why;
