//! Ranks as processes: how they are started, find one another, and end together.
//!
//! A [`Server`] keeps the store where processes leave words for one another, and notices who dies or hangs; it lives in the
//! launcher, or in rank 0's process where something else started the ranks. [`Peers`] is a process's view of the others.

mod alone;
mod client;
mod codec;
pub mod environment;
pub(crate) mod facts;
mod guard;
mod launch;
mod peers;
mod server;
mod state;
mod wire;

pub use client::{LastResort, Meeting};
pub(crate) use codec::{Reader, Writer};
pub use environment::{EnvironmentError, Launcher, Placement, placement};
pub use guard::{PARENT, end_with_launcher, has_launcher, interrupt};
pub use launch::{Asked, Ended, Launch, ending, launch};
pub use peers::{PeerError, Peers};
pub use server::{Server, StoreOptions};
