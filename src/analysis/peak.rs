//! Live buffers at the peak of memory.

pub use shardlab_reports::view::{Alive, alive_at, largest, launched_after};
