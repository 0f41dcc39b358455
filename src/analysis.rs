//! What a prediction means: the verdict, the uses of time and memory, and the effect of other
//! options.
//!
//! Everything here is computed from a [`crate::predict::Prediction`], and rendered by the command
//! line or the dashboard.

pub(crate) mod attention;
mod awaited;
pub mod basis;
pub mod compile;
pub mod experts;
pub mod exposed;
pub mod float8;
pub(crate) mod gpu_counts;
mod misaligned;
pub(crate) mod options;
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
