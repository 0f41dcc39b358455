//! Kernels against float64 references: op by op, on shards, and over whole tapes.

mod case;
mod memory;
mod ops;
#[path = "../../../plan/src/compile/tests/semantics.rs"]
mod semantics;
mod shard;
mod tapes;

/// Names for `semantics`, the reference that the planner's tests use as well.
mod terms {
    pub(super) use shardlab_plan::ir::{BodyOp, OpKind, Slot, op};
    /// Tolerance of a log-sum-exp that forward saved in float32.
    pub(super) const SAVED: f64 = 1e-4;
}
