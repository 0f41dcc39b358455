//! shardlab predicts the cost of a fully sharded training step, and explains it.
//!
//! This is the library behind the command line. [`cli`] has one file per subcommand, [`predict`]
//! computes the predicted run of a scenario, [`analysis`] explains runs and compares options, and
//! [`trace`] writes timelines.
//!
//! ```
//! use shardlab::predict::{Profiles, predict};
//! use shardlab_plan::scenario;
//!
//! let sets = ["fsdp.prefetch_forward=2".to_owned()];
//! let scenario = scenario::load("llama3-8b-4xh200".as_ref(), &sets)?;
//! let prediction = predict(&scenario, &Profiles::default(), &Default::default())?;
//! println!("{:.0} ms per step, {}", prediction.step_ms(), prediction.fit.word());
//! # assert!(prediction.fit.is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod analysis;
pub mod cli;
#[cfg(feature = "dash")]
pub mod dash;
pub mod dcp;
pub mod gate;
pub mod predict;
pub mod trace;
pub mod tune;
