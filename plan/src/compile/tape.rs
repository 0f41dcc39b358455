//! The tape: what one micro-batch executes, before any sharding decision.
//!
//! `model`, `autodiff` and `compile` together turn a scenario into a tape: kernels in host issue order, the storages
//! they read and write, when each storage is allocated and freed, and the boundaries of every module, where `lower`
//! hangs the sharding hooks. Parameters appear as operands ([`Source::Param`], [`Source::Grad`]); which buffer they live
//! in is `lower`'s decision.

use crate::model::layout;
use crate::units::{Bytes, DType, Flops};
use serde::Serialize;
use smallvec::SmallVec;

macro_rules! id {
    ($(#[$m:meta])* $name:ident) => {
        $(#[$m])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);
        impl $name {
            /// As an index into the table it belongs to.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}
id!(
    /// Index into [`Tape::modules`].
    ModuleId
);
id!(
    /// Index into [`Tape::params`].
    ParamId
);
id!(
    /// Index into [`Tape::storages`].
    StorageId
);
id!(
    /// Index into [`Tape::consts`].
    ConstId
);
id!(
    /// Index into a kernel table ([`Tape::kernels`], `Program::kernels`).
    KernelId
);

/// A tensor shape, outermost dimension first.
pub type Shape = SmallVec<[u64; 4]>;

/// What a module is, as far as units, compile modes and capture scopes care.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModuleKind {
    /// The whole model.
    Root,
    /// Token (and position) embedding.
    Embedding,
    /// A repeated block: transformer block, linear layer, convolution.
    Block,
    /// The attention half of a block (norm and residual included).
    Attention,
    /// The feed-forward half of a block (norm and residual included).
    Mlp,
    /// A norm.
    Norm,
    /// The output projection.
    Head,
    /// The loss.
    Loss,
    /// Any other leaf.
    Layer,
}

/// A node of the module tree, in pre-order; index 0 is the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Module {
    /// Dotted path from the root, for example `layers.3.attention`; the root's is empty.
    pub path: String,
    /// Parent; `None` for the root.
    pub parent: Option<ModuleId>,
    /// Kind.
    pub kind: ModuleKind,
}

/// A unique parameter (a tied one appears once), in registration order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Param {
    /// Fully qualified name, for example `layers.3.attention.q.weight`.
    pub name: String,
    /// Every module that owns it; more than one when tied. The first is the registering module.
    pub modules: SmallVec<[ModuleId; 2]>,
    /// Shape, dimension 0 first.
    pub shape: Shape,
    /// Whether it is trained.
    pub requires_grad: bool,
}

impl Param {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Elements of one row: the product of all dimensions but the first (1 for a vector).
    #[must_use]
    pub fn row(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }
}

/// What a storage holds, for the composition of a memory peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageRole {
    /// Saved in forward for backward.
    Saved,
    /// Lives within forward or within backward.
    Temporary,
    /// Logits and their relatives in the loss.
    Logits,
    /// Gradient with respect to an activation.
    ActivationGrad,
}

/// One allocation of the tape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Storage {
    /// Size before allocator rounding.
    pub bytes: Bytes,
    /// Element type of its first use.
    pub dtype: DType,
    /// Role.
    pub role: StorageRole,
    /// Module that allocated it.
    pub module: ModuleId,
}

/// A tensor that exists for the whole run or is an input of the step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Const {
    /// Name, for example `tokens`, `rope_cos`.
    pub name: &'static str,
    /// Size.
    pub bytes: Bytes,
    /// Element type.
    pub dtype: DType,
    /// A fresh buffer every micro-batch (tokens, labels) instead of one for the whole run (tables).
    pub per_micro_batch: bool,
}

/// What an operand refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A storage of the tape.
    Storage(StorageId),
    /// The full (unsharded) compute weight of a parameter.
    Param(ParamId),
    /// The full gradient of a parameter.
    Grad(ParamId),
    /// An input or table.
    Const(ConstId),
}

/// A byte range that a kernel touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Operand {
    /// What.
    pub source: Source,
    /// First byte within it.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Shape class of a kernel: what its cost depends on beside bytes and FLOPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelClass {
    /// Matrix product: `m` x `k` by `k` x `n`, `batch` times.
    Gemm {
        /// Rows of the result.
        m: u64,
        /// Columns of the result.
        n: u64,
        /// Inner dimension.
        k: u64,
        /// Independent products. No model has more than one today; digests of programs contain it.
        batch: u64,
    },
    /// Fused attention.
    Attention {
        /// Samples.
        batch: u64,
        /// Query heads.
        heads: u64,
        /// Key and value heads.
        kv_heads: u64,
        /// Sequence length.
        seq: u64,
        /// Head size.
        head_dim: u64,
        /// Causal mask (half the FLOPs).
        causal: bool,
        /// Backward kernel.
        backward: bool,
    },
    /// Two-dimensional convolution as an implicit matrix product.
    Conv {
        /// Output positions times images.
        m: u64,
        /// Output channels.
        n: u64,
        /// Input channels times kernel area.
        k: u64,
    },
    /// Contiguous elementwise.
    Pointwise,
    /// Elementwise over strided or broadcast operands.
    Strided,
    /// Row reduction with its elementwise neighbours: norms and their backward.
    Norm,
    /// Column reduction (gradients of norm weights and biases).
    ColumnReduce,
    /// Softmax-like over the vocabulary.
    Softmax,
    /// Gather of rows.
    Embedding,
    /// Scatter-add of rows.
    EmbeddingGrad,
    /// Copy or cast of contiguous memory.
    Copy,
    /// Many small copies in one kernel (copy-in, copy-out, chunk-cat).
    MultiCopy,
    /// Fill with a constant.
    Fill,
    /// Optimizer update over shards.
    Optimizer,
    /// Sum of squares or similar over shards.
    FullReduce,
    /// A compiled region of pointwise and reduction ops.
    Fused,
}

impl KernelClass {
    /// Whether arithmetic bounds it, as products, convolutions and attention; memory bounds all others.
    #[must_use]
    pub fn is_arithmetic(&self) -> bool {
        matches!(
            self,
            Self::Gemm { .. } | Self::Attention { .. } | Self::Conv { .. }
        )
    }
}

/// Operation of one step of a kernel's body. The operand order of each is documented in `model/ops.rs`.
pub use crate::model::OpKind;

/// One operation inside a kernel. Plain kernels have one, fused kernels several.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct BodyOp {
    /// What it computes.
    pub op: OpKind,
    /// Where its inputs come from, in the operation's order.
    pub inputs: SmallVec<[Slot; 4]>,
    /// Where its outputs go, in the operation's order.
    pub outputs: SmallVec<[Slot; 2]>,
}

impl BodyOp {
    /// The matrix products in front of a body's other operations, and these; `None` unless it has both.
    #[must_use]
    pub fn going_on(body: &[Self]) -> Option<(&[Self], &[Self])> {
        let is_product = |op: &&Self| matches!(op.op, OpKind::Gemm { .. });
        let (products, rest) = body.split_at(body.iter().take_while(is_product).count());
        (!products.is_empty() && !rest.is_empty()).then_some((products, rest))
    }
}

/// A value inside a kernel's body. All reads of a launch are taken before its writes (an operand may be both).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Slot {
    /// Place.
    pub place: Place,
    /// First element, counted from the start of the operand or register.
    pub offset: u64,
    /// Shape.
    pub shape: Shape,
    /// Strides in elements; empty for contiguous.
    pub strides: SmallVec<[u64; 4]>,
    /// Element type.
    pub dtype: DType,
}

/// Place of a value of a kernel's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// The launch's n-th read.
    Read(u8),
    /// The launch's n-th write.
    Write(u8),
    /// A value that never reaches memory.
    Register(u8),
}

/// A kernel descriptor, shared by all launches with the same work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kernel {
    /// Name, for example `mm`, `rms_norm_backward`, `fused_silu_mul`.
    pub name: String,
    /// Cost class.
    pub class: KernelClass,
    /// Arithmetic.
    pub flops: Flops,
    /// Bytes read from memory.
    pub read: Bytes,
    /// Bytes written to memory.
    pub written: Bytes,
    /// Element type of the arithmetic's inputs.
    pub dtype: DType,
    /// What it computes, in execution order.
    pub body: Vec<BodyOp>,
}

impl Kernel {
    /// Whether every element of the `n`th range that a launch writes is written: not where the body makes some columns of each row
    /// only. The others are somebody else's, and may not have been written yet.
    #[must_use]
    pub fn fills(&self, n: usize) -> bool {
        let made = self.body.iter().flat_map(|op| &op.outputs);
        let mut slots = made
            .filter(|s| matches!(s.place, Place::Write(w) if usize::from(w) == n))
            .peekable();
        slots.peek().is_none()
            || slots.any(|s| {
                s.strides.is_empty()
                    || layout::extent(&s.shape, &s.strides)
                        == layout::distinct(&s.shape, &s.strides)
            })
    }
}

/// Why the host spends time outside a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostWorkKind {
    /// Framework dispatch of one forward op run eagerly.
    Dispatch,
    /// Framework dispatch of one op by the autograd engine.
    AutogradDispatch,
    /// Guards and entry of a compiled region.
    Guard,
    /// A graph break: leaving compiled code for an opaque hook and coming back.
    GraphBreak,
    /// Body of a sharding hook.
    Hook,
    /// Per-parameter bookkeeping inside a hook.
    HookParam,
    /// Optimizer call.
    OptimizerStep,
    /// Fixed work of a training step (data loader, zero_grad, scalar reads).
    Step,
}

/// One entry of the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TapeOp {
    /// A module's forward (in [`Tape::forward`], [`Tape::eval`]) or backward (in [`Tape::backward`]) starts.
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
    /// Host work, `count` times.
    Host {
        /// Kind.
        kind: HostWorkKind,
        /// How often.
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
    /// Training forward, ends with the loss.
    pub forward: Vec<TapeOp>,
    /// Backward, recompute included.
    pub backward: Vec<TapeOp>,
    /// Validation forward: saves nothing.
    pub eval: Vec<TapeOp>,
    /// The loss of [`Tape::forward`], a float32 scalar that lives to the end of backward.
    pub loss: Option<StorageId>,
    /// The loss of [`Tape::eval`].
    pub eval_loss: Option<StorageId>,
    /// Model FLOPs of forward and backward of one micro-batch and rank, recompute not counted (for MFU).
    pub model_flops: Flops,
    /// Tokens (or samples, for families without tokens) of one micro-batch and rank.
    pub tokens: u64,
}
