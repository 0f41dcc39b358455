//! shardlab-import: profiler traces, memory snapshots and flight records of PyTorch jobs as measured runs.
//!
//! ```text
//! file ─ source ─▶ kineto ─▶ Trace ─ attribute ─▶ places ─┬─▶ measured   a run like one that `exec` measures
//!                                                         └─▶ infer      the scenario that the trace shows
//! ```
//!
//! Nothing is dropped silently: what cannot be read or placed is counted and listed.

pub mod attribute;
mod error;
pub mod facts;
pub mod kineto;
pub mod measured;
pub mod names;
pub mod source;

pub use error::ImportError;
