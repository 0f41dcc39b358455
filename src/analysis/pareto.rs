//! Points that no other point beats in everything.

pub use shardlab_reports::compare::front;
