//! shardlab-plan: from a scenario to a program.
//!
//! ```text
//! scenario ─▶ model ─▶ autodiff ─▶ compile ─▶ tape ─┐
//!    └────────▶ shard (mesh, groups, layouts) ──────┴▶ lower ─▶ program ─▶ check
//! ```
//!
//! Nothing here reads a clock or touches a device; nothing downstream takes a scheduling decision.

pub mod autodiff;
pub mod check;
pub mod compile;
pub mod config;
pub mod graph;
pub mod ir;
pub mod lower;
pub mod memory;
pub mod models;
mod names;
pub mod ops;
pub mod policies;
pub mod program;
mod recipes;
pub mod record;
pub mod scenario;
pub mod shard;
pub mod units;

pub use config::Scenario;
pub use policies::{plan, tape_of};
pub use program::Program;
