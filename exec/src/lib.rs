//! shardlab-exec: runs the program that `sim` prices.
//!
//! ```text
//! program ─▶ engine (one interpreter) ─▶ Device (cpu: streams are worker threads)
//!                 │                          ├─ kernels (bodies of launches)
//!                 │                          └─ comm (collectives between ranks)
//!                 ├─ process (ranks as processes: launcher, rendezvous, watchdog)
//!                 └─ train (data, initialization, optimizer schedule, checkpoints) ─▶ run
//! ```
//!
//! The engine makes no scheduling decision: the program says what runs when, where memory is, and
//! which work waits for which.
//!
//! ```
//! use shardlab_exec::train::{NoObserver, RunOptions, train};
//! use std::{path::Path, sync::Arc};
//!
//! let scenario = shardlab_plan::scenario::load(Path::new("llama-tiny"), &[])?;
//! let program = Arc::new(shardlab_plan::plan(&scenario)?);
//! let options = RunOptions { steps: Some(3), ..RunOptions::default() };
//! let run = train(&scenario, &program, options, &mut NoObserver)?.run;
//! assert!(run.losses[2] < run.losses[0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Layers
//!
//! Each folder imports only from those before it:
//!
//! - `base`: failures and the session's abort, options, progress of ranks, random numbers, operands
//! - [`kernels`]: the bodies of launches, on the CPU and on GPUs
//! - [`process`]: processes of a run, their store, and the ranks that each of them runs
//! - [`comm`]: collectives between rank threads, or between processes over the store
//! - [`device`]: the interface to hardware, with a CPU and a CUDA device
//! - [`engine`]: the interpreter
//! - [`train`]: training runs
//! - [`calibrate`]: hardware profiles, measured with devices, engine and training

mod base;
pub mod calibrate;
pub mod comm;
pub mod device;
pub mod engine;
pub mod kernels;
pub mod process;
pub mod train;

pub use base::operand;
pub use operand::{Hyper, LaunchContext, MuonSettings, NO_MUON, ONE_GROUP, RawRange};
