//! What `shardlab gate` does around [`shardlab_reports::gate`]: it makes the facts.

pub mod against;
pub mod collect;
pub mod plant;

pub use collect::{Collect, GateError, TIMEOUT};
pub use plant::Plant;
