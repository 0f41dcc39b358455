//! Ranks as processes: how they are started, find one another, and end together.

mod codec;
mod peers;

pub(crate) use codec::{Reader, Writer};
pub use peers::{PeerError, Peers};
