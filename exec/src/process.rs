//! Ranks as processes: how they are launched, find each other, and end together.
//!
//! A [`Server`] runs the store in which processes exchange data, and detects processes that die or
//! hang. It runs in the launcher, or in rank 0's process if another launcher started the ranks.
//! [`ProcessGroup`] is a process's view of the run, and [`World`] describes which ranks it runs.

mod client;
mod codec;
pub(crate) mod config_check;
pub mod environment;
mod error;
mod force_exit;
mod launch;
mod local_store;
mod process_group;
mod protocol;
mod rendezvous;
mod server;
mod signals;
mod state;
mod world;

pub(crate) use codec::{Reader, Writer};
pub use environment::{EnvironmentError, Launcher, Placement, placement};
pub use error::PeerError;
pub use force_exit::ExitHook;
pub use launch::{ControlSignals, Launch, LaunchOutcome, describe_exit, launch};
pub use process_group::ProcessGroup;
pub use rendezvous::{Rendezvous, StoreOptions};
pub use server::Server;
pub use signals::{PARENT, end_with_launcher, has_launcher, interrupt};
pub use world::World;
