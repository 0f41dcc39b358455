//! Data types of everything else: ids, shapes, element types, modules, operations, kernels, buffers
//! and collectives.
//!
//! Invariant: nothing here imports another folder of the crate (except units of measure) or makes a
//! decision.

mod attention;
mod buffer;
mod collective;
mod documents;
mod dtype;
mod forced_choice;
mod gemm_kind;
mod host_work;
mod id;
mod indexing;
mod kernel;
mod mesh;
mod module;
pub mod op;
mod packed;
mod real;
mod row_limit;
mod scale_block;
mod shape;
mod shard_op;
mod storage;
pub(crate) mod strides;

pub use attention::{AttentionShape, ScoreMod, alibi_slope};
pub use buffer::{Access, Buffer, Holds, PerRank, Pool, Role};
pub use collective::{
    Collective, CollectiveKind, CopyDesc, CopyKind, CountedRows, ModelCollective, Part, PushedRows,
    ReduceOp, SelectedRows, SentRows,
};
pub use documents::{Documents, MAX_DOCUMENTS};
pub use dtype::{DType, Numeric, Values};
pub use forced_choice::{DrawnColumns, ForcedChoice, ForcedColumns, round_robin};
pub use gemm_kind::{Float8Gemm, GemmKind, ScaleMode};
pub use host_work::HostWorkKind;
pub use id::{
    AxisId, BufferId, COMPUTE, CollectiveId, CommId, ConstId, CopyId, EventId, GroupId, InstrId,
    KernelId, ModuleId, ParamId, ScopeId, StorageId, StreamId, UnitId,
};
pub use indexing::Indexing;
pub use kernel::{BodyOp, Kernel, KernelClass, Place, Slot, UsedRows};
pub use mesh::{AxisRole, AxisSet, DeviceMesh, MeshAxis, Placement, Placements, RankGroup};
pub use module::{HfForm, HfName, Init, Module, ModuleKind, MoeStage, Param, ParameterCount};
pub(crate) use module::{MAGNITUDE, ORIGINAL};
pub use op::OpKind;
pub use packed::{NF4_BLOCK, NF4_SCALES, Packed, PackedFormat, PackedScales};
pub use real::Real;
pub use row_limit::RowLimit;
pub use scale_block::ScaleBlock;
pub use shape::Shape;
pub use shard_op::{
    Fused, MatrixShape, NewtonSchulz, Pieces, RECIPROCAL_STRIDE, STATE_BLOCK, ShardOp, Update,
    UpdateRule,
};
pub use storage::{Const, Operand, Source, Storage, StorageRole};
