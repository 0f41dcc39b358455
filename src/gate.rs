//! Collects the facts that [`shardlab_reports::gate`] judges for `shardlab gate`.

pub mod against;
pub mod collect;
pub mod plant;

pub use collect::{Collect, GateError, TIMEOUT};
pub use plant::Plant;
