//! The tape: what one micro-batch executes, before any sharding decision.
//!
//! `models`, `autodiff` and `compile` together turn a scenario into a tape: kernels in host issue
//! order, the storages they read and write, when each storage is allocated and freed, and the
//! boundaries of every module, to which `lower` attaches the sharding hooks. Parameters appear as
//! operands ([`Source`](crate::ir::Source)); `lower` decides which buffer holds them.

use crate::ir::{
    Const, DType, HostWorkKind, Kernel, KernelId, ModelCollective, Module, ModuleId, Operand,
    Param, ParamId, Storage, StorageId,
};
use crate::units::Flops;
use serde::Serialize;

/// One entry of the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TapeOp {
    /// A module's forward (in [`Tape::forward`], [`Tape::eval`]) or backward (in
    /// [`Tape::backward`]) starts.
    Enter(ModuleId),
    /// It ends.
    Exit(ModuleId),
    /// A module's forward is run again inside backward.
    EnterRecompute(ModuleId),
    /// It ends.
    ExitRecompute(ModuleId),
    /// Allocate a storage.
    Alloc(StorageId),
    /// Free a storage.
    Free(StorageId),
    /// Launch a kernel; operands are ranges of [`Tape::operands`].
    Launch {
        /// Kernel.
        kernel: KernelId,
        /// First read operand.
        reads: u32,
        /// First write operand (`reads..writes` are read).
        writes: u32,
        /// End of the written operands (`writes..end` are written).
        end: u32,
    },
    /// Communicate along an axis; operands are entries of [`Tape::operands`].
    Collective {
        /// The collective.
        collective: ModelCollective,
        /// Element type.
        dtype: DType,
        /// The operand that is sent; the one that is received follows it.
        operands: u32,
    },
    /// The host waits until all kernels before have been done.
    HostRead,
    /// Host work, `count` times.
    Host {
        /// Kind.
        kind: HostWorkKind,
        /// Repetitions.
        count: u16,
    },
    /// All contributions to this parameter's gradient of this micro-batch have been issued.
    GradReady(ParamId),
}

/// One micro-batch. See the module documentation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tape {
    /// Module tree in pre-order.
    pub modules: Vec<Module>,
    /// Unique parameters in registration order.
    pub params: Vec<Param>,
    /// Storages.
    pub storages: Vec<Storage>,
    /// Inputs and tables.
    pub consts: Vec<Const>,
    /// Kernels, each once.
    pub kernels: Vec<Kernel>,
    /// Operand arena.
    pub operands: Vec<Operand>,
    /// Training forward, which ends with the loss.
    pub forward: Vec<TapeOp>,
    /// Backward, including recompute.
    pub backward: Vec<TapeOp>,
    /// Validation forward: saves nothing.
    pub eval: Vec<TapeOp>,
    /// The loss of [`Tape::forward`], a float32 scalar that lives to the end of backward.
    pub loss: Option<StorageId>,
    /// The loss of [`Tape::eval`].
    pub eval_loss: Option<StorageId>,
    /// Model FLOPs of forward and backward of one micro-batch and rank, without recompute (for
    /// MFU).
    pub model_flops: Flops,
    /// Tokens (or samples, for families without tokens) of one micro-batch and rank.
    pub tokens: u64,
}
