//! Kernels compared with float64 references: op by op, on shards, and over whole tapes.

mod case;
mod every;
#[path = "../../../plan/src/ops/tests/examples.rs"]
mod examples;
mod experts;
mod memory;
mod muon;
mod ops;
mod optimizers;
#[path = "../../../plan/src/compile/tests/semantics.rs"]
mod semantics;
mod shard;
mod tapes;

/// Names that `examples` and `semantics` use. The planner's tests include these files as well.
mod terms {
    pub(super) use shardlab_plan::ir::{
        BodyOp, DType, Documents, DrawnColumns, ForcedChoice, OpKind, ScaleBlock, ScoreMod, Slot,
        op,
    };
    pub(super) use shardlab_plan::ops::{Extent, Operand};
    /// Tolerance for a log-sum-exp that forward has saved in float32.
    pub(super) const SAVED: f64 = 1e-4;
}
