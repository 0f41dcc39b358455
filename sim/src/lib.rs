//! shardlab-sim: a discrete-event simulator of FSDP programs.
//!
//! ```text
//! program ─┬─▶ memory (allocators, host order) ───────────────┐
//!          ├─▶ costs (profile: tables, roofline, network) ─┐  │
//!          └─▶ host code per section ──────────────────────┴▶ engine ─▶ report ─▶ run
//! ```
//!
//! Time is an integer number of picoseconds. The host issues work in order and spends time on it,
//! streams are FIFO queues joined by events, communicators serialize their collectives, and running
//! tasks share SMs, bandwidth and links. The result reports which costs were measured, and every
//! run checks its own invariants.
//!
//! ```
//! use shardlab_sim::{Options, hardware, simulate};
//!
//! let text = r#"
//! model = { preset = "llama3-8b" }
//! train = { seq_len = 8192 }
//! mesh = { dp_shard = 8, hardware = "h100-80" }
//! "#;
//! let scenario = shardlab_plan::scenario::parse("llama3-8b", text, &[])?;
//! let program = shardlab_plan::plan(&scenario)?;
//! let profile = hardware::load(&scenario.mesh.hardware)?;
//! let run = simulate(&program, &profile, &Options::default())?;
//! println!("{:.0} ms per step, peak {}", run.step_ms(), run.memory.peak_reserved);
//! # assert!(run.step_ms() > 100.0 && run.step_ms() < 10_000.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod clock;
mod contention;
mod cost;
mod engine;
mod error;
pub mod hardware;
mod host;
mod memory;
mod network;
mod options;
mod part;
mod power;
mod price;
mod report;
mod simulate;
mod streams;
pub mod synthetic;

pub use error::SimError;
pub use hardware::Profile;
pub use network::{CollectiveCheck, check_collectives, misalignment};
pub use options::Options;
pub use part::Part;
pub use simulate::{simulate, simulate_counted, simulate_light};
