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
    /// The reciprocal of the scale of a parameter that is gathered in 8 bits.
    Scale(ParamId),
    /// A parameter's gradient.
    Grad(ParamId),
    /// An input or table.
    Const(ConstId),
}

/// A tensor: a strided window on its root.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Shape.
    pub shape: Shape,
    /// Strides in elements.
    pub strides: SmallVec<[u64; 4]>,
    /// First element within the root.
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

/// A change of view: no kernel, only dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Same elements, different shape.
    Reshape,
    /// Two dimensions exchanged.
    Transpose(u8, u8),
    /// Part of one dimension.
    Slice {
        /// Dimension.
        axis: u8,
        /// First index.
        start: u64,
    },
    /// Parts of one dimension, one per output: equal ones, except for those of a merged GEMM.
    Split {
        /// Dimension.
        axis: u8,
    },
    /// Adjacent parts of one dimension as one, in compiled code.
    Join {
        /// Dimension.
        axis: u8,
    },
    /// Repeats dimensions (zero strides).
    Expand,
    /// `loss, x, w, d_x, d_w -> loss`: ties gradients of `x` and `w` that the forward pass has
    /// computed to the loss, where backward starts. They include the factor that it starts from.
    Precomputed,
    /// No change: a node of the autograd graph that passes its gradient on.
    Pass,
    /// The host reads a value on the device, so it waits until everything before has been done.
    HostRead,
    /// `x, sizes -> x`: the host reads `sizes` on the device, because the sizes of what uses `x`
    /// follow from it.
    HostSizes,
    /// Equal on every rank along an axis, but each uses it in its own way: its gradient is the sum
    /// of theirs. The conjugate of an all-reduce, whose gradient every rank has whole
    /// (Megatron-LM's f and g).
    SumGradient(AxisId),
    /// `sum, rows, sent, got, position -> sum`: ties `rows`, of which ranks have pushed those that
    /// `got` names to where they came from and added them up, to the sum. Gradients are pushed the
    /// other way, to the ranks that `sent` names.
    PeerSum(ModelCollective),
}

/// What an op does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Launches a kernel.
    Compute(OpKind),
    /// Makes views.
    View(View),
    /// Communicates along an axis.
    Collective(ModelCollective),
}

/// One op.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// What it does.
    pub act: Act,
    /// Operands.
    pub inputs: SmallVec<[ValueId; 4]>,
    /// Results. A result that shares its buffer with an input is written in place.
    pub outputs: SmallVec<[ValueId; 2]>,
    /// Module it belongs to.
    pub module: ModuleId,
    /// Part of a layer of experts that it belongs to, if one that may be captured on its own.
    pub stage: Option<MoeStage>,
    /// Autograd node (backward) or op (forward): operands are held until all of a node's ops have
    /// been issued.
    pub node: u32,
    /// Framework calls that it takes when run eagerly, including itself.
    pub dispatches: u8,
}

impl Op {
    /// Returns whether the host reads sizes on the device before it continues.
    #[must_use]
    pub const fn is_host_sizes(&self) -> bool {
        matches!(self.act, Act::View(View::HostSizes))
    }

    /// Returns whether it only makes views and launches nothing.
    #[must_use]
    pub const fn is_view(&self) -> bool {
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
    /// Whether it holds logits or tensors of their shape.
    pub logits: bool,
    /// Whether it is a gradient of an activation.
    pub grad: bool,
    /// The value it was made for: every other value in it is newer.
    pub first: ValueId,
}

/// A layer whose shared expert can compute while the layer's tokens travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedOverlap {
    /// The layer of experts.
    pub layer: ModuleId,
    /// Its shared expert.
    pub shared: ModuleId,
    /// The last linear layer of the shared expert.
    pub down: ModuleId,
    /// Whether it does so.
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
    /// Op that computes a value, by value; `u32::MAX` for leaves.
    pub producer: Vec<u32>,
    /// `(op, buffer)`: a local variable of the model's code, or the cache of selective recompute,
    /// holds the buffer until this op has been issued.
    pub holds: Vec<(u32, u32)>,
    /// `(op, buffer)`: forward saves the buffer for a backward op that does not read it.
    pub saved: Vec<(u32, u32)>,
    /// Forward ops that the model's own code checkpoints, in order.
    pub checkpoints: Vec<Range<usize>>,
    /// Layers whose shared experts can compute while tokens travel.
    pub overlaps: Vec<SharedOverlap>,
    /// Module of new ops.
    pub(crate) module: Option<ModuleId>,
    /// Part of a layer of experts that new ops belong to.
    pub(crate) stage: Option<MoeStage>,
    /// Node of new ops; `None` makes each op a node.
    pub(crate) node: Option<u32>,
    pub(crate) nodes: u32,
    /// Vocabulary size: tensors of this last dimension are logits.
    pub(crate) vocab: Option<u64>,
    /// Modules whose code is compiled: ops there do nothing in place, because the compiler decides
    /// that.
    pub(crate) compiled: Vec<bool>,
    /// Whether new buffers are gradients.
    pub(crate) in_backward: bool,
}

impl Graph {
    /// Returns the value of an id.
    #[must_use]
    pub fn value(&self, v: ValueId) -> &Value {
        &self.values[v.index()]
    }

    /// Returns the buffer of a value, if it is one of the graph.
    #[must_use]
    pub fn buffer_of(&self, v: ValueId) -> Option<u32> {
        match self.value(v).root {
            Root::Buffer(b) => Some(b),
            _ => None,
        }
    }

    /// Returns whether no op makes a value: it is a parameter, a constant or memory.
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
