//! The op graph: values that view buffers, ops in issue order.

mod construct;
mod convert;

pub(crate) use construct::Peers;

use crate::ir::{
    AxisId, Const, ConstId, DType, ModelCollective, ModuleId, MoeStage, OpKind, ParamId, Shape,
    strides,
};
use smallvec::SmallVec;
use std::ops::Range;

/// Index into [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

impl ValueId {
    /// Returns the index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Memory of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Root {
    /// A buffer of the graph ([`Graph::buffers`]).
    Buffer(u32),
    /// A parameter.
    Param(ParamId),
    /// The reciprocals of the scales of a parameter that is gathered in 8 bits.
    Scale(ParamId),
    /// Codes of a parameter that is gathered in 8 bits, with scales of parts of columns.
    ColumnCodes(ParamId),
    /// The reciprocals of these scales.
    ColumnScale(ParamId),
    /// A parameter's gradient.
    Grad(ParamId),
    /// An input or table.
    Const(ConstId),
}

/// A tensor: a strided window on its root.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Shape of the tensor.
    pub shape: Shape,
    /// Strides in elements.
    pub strides: SmallVec<[u64; 4]>,
    /// Offset of the first element in the root.
    pub offset: u64,
    /// Element type.
    pub dtype: DType,
    /// Memory.
    pub root: Root,
    /// Whether it depends on a trained parameter.
    pub requires_grad: bool,
}

impl Value {
    /// Returns the number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the last dimension (1 for a scalar).
    #[must_use]
    pub fn cols(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns the product of all dimensions but the last.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.numel() / self.cols().max(1)
    }

    /// Returns whether the elements are row-major without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        strides::is_contiguous(&self.shape, &self.strides)
    }
}

/// A change of view: launches no kernel, and only costs dispatch time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Same elements, different shape.
    Reshape,
    /// Swaps two dimensions.
    Transpose(u8, u8),
    /// Part of one dimension.
    Slice {
        /// Dimension.
        axis: u8,
        /// First index.
        start: u64,
    },
    /// Parts of one dimension, one per output. They are equal, except for those of a merged GEMM.
    Split {
        /// Dimension.
        axis: u8,
    },
    /// Joins adjacent parts of one dimension, in compiled code.
    Join {
        /// Dimension.
        axis: u8,
    },
    /// Repeats dimensions (zero strides).
    Expand,
    /// `loss, x, w, d_x, d_w -> loss`: ties gradients of `x` and `w` that the forward pass has
    /// computed to the loss, where backward starts. They include the initial gradient as a factor.
    Precomputed,
    /// No change: an autograd node that only passes its gradient on.
    Pass,
    /// The host reads a value on the device, so it waits for all work before.
    HostRead,
    /// `x, sizes -> x`: the host reads `sizes` on the device, because the sizes of results computed
    /// from `x` depend on them.
    HostSizes,
    /// A value that is equal on all ranks along an axis, but that each rank uses differently: its
    /// gradient is the sum over ranks. This is the conjugate of an all-reduce, for which each rank
    /// has the full gradient (Megatron-LM's f and g).
    SumGradient(AxisId),
    /// `sum, rows, sent, got, position -> sum`: ties `rows` to the sum. Ranks have pushed the rows
    /// that `got` names back to their source ranks, which have summed them. Gradients are pushed in
    /// the other direction, to the ranks that `sent` names.
    PeerSum(ModelCollective),
}

/// The action of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Launches a kernel.
    Compute(OpKind),
    /// Creates views.
    View(View),
    /// Communicates along an axis.
    Collective(ModelCollective),
}

/// One op.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Action.
    pub act: Act,
    /// Operands.
    pub inputs: SmallVec<[ValueId; 4]>,
    /// Results. A result that shares its buffer with an input is written in place.
    pub outputs: SmallVec<[ValueId; 2]>,
    /// Module that the op belongs to.
    pub module: ModuleId,
    /// Part of an MoE layer that the op belongs to, if the part can be captured separately.
    pub stage: Option<MoeStage>,
    /// Autograd node (backward) or op (forward). Operands are held until all ops of a node have
    /// been issued.
    pub node: u32,
    /// Number of framework calls in eager execution, including the op itself.
    pub dispatches: u8,
}

impl Op {
    /// Returns whether the host reads sizes on the device before it continues.
    #[must_use]
    pub(crate) const fn is_host_sizes(&self) -> bool {
        matches!(self.act, Act::View(View::HostSizes))
    }

    /// Returns whether the op only creates views and launches nothing.
    #[must_use]
    pub(crate) const fn is_view(&self) -> bool {
        matches!(self.act, Act::View(_))
    }
}

/// An allocation of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Size in bytes.
    pub bytes: u64,
    /// Element type.
    pub dtype: DType,
    /// Module of the op that allocates it.
    pub module: ModuleId,
    /// Whether the buffer holds logits or tensors of their shape.
    pub logits: bool,
    /// Whether the buffer is the gradient of an activation.
    pub grad: bool,
    /// The value for which the buffer was created: all other values in it are newer.
    pub first: ValueId,
}

/// An MoE layer whose shared expert can overlap with the token exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedOverlap {
    /// The MoE layer.
    pub layer: ModuleId,
    /// Its shared expert.
    pub shared: ModuleId,
    /// The last linear layer of the shared expert.
    pub down: ModuleId,
    /// Whether it overlaps.
    pub overlaps: bool,
}

/// Ops over values, in issue order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Values.
    pub values: Vec<Value>,
    /// Ops.
    pub ops: Vec<Op>,
    /// Buffers.
    pub buffers: Vec<Buffer>,
    /// Inputs and tables.
    pub consts: Vec<Const>,
    /// By value: the op that computes it; `u32::MAX` for leaves.
    pub producer: Vec<u32>,
    /// `(op, buffer)`: a local variable of the model's code, or the cache of selective recompute,
    /// holds the buffer until this op has been issued.
    pub holds: Vec<(u32, u32)>,
    /// `(op, buffer)`: forward saves the buffer for a backward op that does not read it.
    pub saved: Vec<(u32, u32)>,
    /// Buffers that the code of the training loop holds until backward has ended.
    pub kept: Vec<u32>,
    /// Ranges of forward ops that the model's own code checkpoints, in order.
    pub checkpoints: Vec<Range<usize>>,
    /// Layers whose shared experts can overlap with the token exchange.
    pub overlaps: Vec<SharedOverlap>,
    /// Module of new ops.
    pub(crate) module: Option<ModuleId>,
    /// Part of an MoE layer that new ops belong to.
    pub(crate) stage: Option<MoeStage>,
    /// Autograd node of new ops; `None` makes each op a separate node.
    pub(crate) node: Option<u32>,
    pub(crate) nodes: u32,
    /// Vocabulary size. Tensors whose last dimension has this size are logits.
    pub(crate) vocab: Option<u64>,
    /// Modules whose code is compiled. Their ops never work in place, because the compiler decides
    /// that.
    pub(crate) compiled: Vec<bool>,
    /// Whether new buffers are gradients.
    pub(crate) in_backward: bool,
}

impl Graph {
    /// Returns the value with an id.
    #[must_use]
    pub fn value(&self, v: ValueId) -> &Value {
        &self.values[v.index()]
    }

    /// Returns the buffer of a value, if the graph allocates it.
    #[must_use]
    pub(crate) fn buffer_of(&self, v: ValueId) -> Option<u32> {
        match self.value(v).root {
            Root::Buffer(b) => Some(b),
            _ => None,
        }
    }

    /// Returns whether no op produces a value: it is a parameter, a constant or memory.
    pub(crate) fn is_leaf(&self, v: ValueId) -> bool {
        self.producer[v.index()] == u32::MAX
    }

    /// Returns the kernel op that computes a value, if any.
    pub(crate) fn computed_by(&self, v: ValueId) -> Option<(OpKind, &Op)> {
        let op = self.ops.get(self.producer[v.index()] as usize)?;
        match op.act {
            Act::Compute(kind) => Some((kind, op)),
            Act::View(_) | Act::Collective(_) => None,
        }
    }
}
