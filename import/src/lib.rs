//! shardlab-import reads profiler traces, memory snapshots and flight records of PyTorch jobs as
//! measured runs.
//!
//! ```text
//! file ─ source ─┬─▶ kineto ────┬─▶ Trace ─ attribute ─▶ places ─┬─▶ measured  a run like those of `exec`
//!                ├─▶ execution ─┘                                ├─▶ facts ─ infer ─▶ scenario
//!                ├─▶ nsys (sqlite) ─▶ Trace                      └─▶ replay    a tape without a model
//!                └─▶ pickle ─┬─▶ snapshot  the peak by role and unit
//!                            └─▶ flight    where ranks diverge
//! ```
//!
//! Nothing is dropped silently: events that cannot be read or attributed are counted and listed.
//!
//! ```
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/traces/megatron-rank0.json.gz");
//! let found = shardlab_import::import(&[path.into()], "megatron")?;
//! let run = found.run.expect("a profiler trace holds a run");
//! println!("{:.1} % of device time is attributed", 100.0 * run.attributed_share);
//! # assert!(run.attributed_share > 0.99);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod attribute;
pub mod costs;
mod error;
mod execution;
pub mod facts;
pub mod flight;
mod frames;
mod import;
pub mod infer;
mod joined;
pub mod kineto;
mod limits;
pub mod measured;
pub mod names;
mod nsys;
pub mod pickle;
mod ranks;
pub mod replay;
pub mod snapshot;
pub mod source;
mod sqlite;

pub use error::ImportError;
pub use import::{Import, Options, RunImport, Structure, facts_of, import, import_with, jobs};
pub use ranks::RankSummary;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
