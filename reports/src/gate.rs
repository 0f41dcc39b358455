//! Gates: report whether anything has regressed since the baseline, and whether the step is within
//! its budgets.
//!
//! ```text
//! program, prediction, check, measured runs ─▶ Facts ─┬─▶ Baseline (a text file)        `--bless`
//!                                  Baseline, Limits ──┴─▶ judge ─▶ Verdict ─▶ formats    `gate`
//! ```
//!
//! Deterministic facts are compared directly. Noisy facts (measured time) are compared only as a
//! ratio of runs that one call interleaves, see [`ratio`].

pub mod baseline;
pub mod facts;
pub mod finding;
pub mod format;
pub mod judge;
pub mod limits;
pub mod metric;
pub mod outline;
pub mod ratio;
pub mod runs;
#[cfg(test)]
mod testing;
mod view;

pub use baseline::{Baseline, BaselineError};
pub use facts::{CheckFacts, Curve, Facts, Measured, MemoryFacts, ProgramFacts, TimeFacts};
pub use finding::{Change, Class, Failure, Finding, Status, Verdict};
pub use judge::judge;
pub use limits::{Limit, Limits, Place};
