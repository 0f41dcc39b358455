//! shardlab-plan: from a scenario to a program.
//!
//! ```text
//! scenario ─▶ model ─▶ autodiff ─▶ compile ─▶ tape ─┐
//!    └────────▶ shard (mesh, groups, layouts) ──────┴▶ lower ─▶ program ─▶ check
//! ```
//!
//! Nothing here reads a clock or touches a device. No other crate makes scheduling decisions.
//!
//! ```
//! use shardlab_plan::{check::check, plan, scenario};
//!
//! let text = r#"
//! model = { family = "llama", layers = 4, hidden = 64, heads = 4, vocab = 256, max_seq_len = 64 }
//! mesh = { dp_shard = 2, hardware = "cpu" }
//! "#;
//! let scenario = scenario::parse("tiny", text, &[])?;
//! let program = plan(&scenario)?;
//! assert!(check(&program).is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod autodiff;
pub mod check;
pub mod compile;
pub mod config;
mod divisors;
pub mod graph;
pub mod hardware;
pub mod ir;
pub mod lower;
pub mod memory;
pub mod models;
mod names;
pub mod ops;
pub mod policies;
pub mod program;
pub mod random;
mod recipes;
pub mod record;
pub mod scenario;
pub mod shard;
#[cfg(test)]
mod testing;
pub mod units;

pub use config::Scenario;
pub use policies::{plan, plan_tape, tape_of};
pub use program::Program;
