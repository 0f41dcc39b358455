//! shardlab-exec: performs the program that `sim` prices.
//!
//! ```text
//! program ─▶ engine (one interpreter) ─▶ Device (cpu: streams are worker threads)
//!                 │                          ├─ kernels (bodies of launches)
//!                 │                          └─ comm (collectives between ranks)
//!                 ├─ process (ranks as processes: launcher, rendezvous, watchdog)
//!                 └─ train (data, initialisation, optimizer schedule, checkpoints) ─▶ run
//! ```
//!
//! The engine takes no scheduling decision: what runs when, where memory lies and who waits for whom is in the program.

pub mod calibrate;
pub mod comm;
pub mod device;
pub mod engine;
pub mod kernels;
pub mod operand;
pub mod process;
mod stopped;
pub mod train;

pub use operand::{Hyper, LaunchContext, RawRange};
