//! shardlab-import reads profiler traces, memory snapshots and flight records of PyTorch jobs as
//! measured runs.
//!
//! ```text
//! file ─ source ─┬─▶ kineto ────┬─▶ Trace ─ attribute ─▶ places ─┬─▶ measured  a run like those of `exec`
//!                ├─▶ execution ─┘                                └─▶ facts ─ infer ─▶ scenario
//!                └─▶ pickle ─┬─▶ snapshot  the peak by role and unit
//!                            └─▶ flight    where ranks diverge
//! ```
//!
//! Nothing is dropped silently: events that cannot be read or attributed are counted and listed.

pub mod attribute;
mod error;
mod execution;
pub mod facts;
pub mod flight;
mod import;
pub mod infer;
pub mod kineto;
pub mod measured;
pub mod names;
pub mod pickle;
mod ranks;
pub mod snapshot;
pub mod source;

pub use error::ImportError;
pub use import::{Import, RunImport, Structure, facts_of, import};
pub use ranks::RankSummary;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
