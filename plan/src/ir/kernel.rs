//! Kernels: what they compute, on which operands, and their cost class.

use super::{AttentionShape, DType, NewtonSchulz, OpKind, Shape, ShardOp, strides};
use crate::units::{Bytes, Flops};
use serde::Serialize;
use smallvec::SmallVec;

/// Cost class of a kernel: what its cost depends on in addition to bytes and FLOPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelClass {
    /// GEMM: `m` x `k` by `k` x `n`, `batch` times.
    Gemm {
        /// Rows of the result.
        m: u64,
        /// Columns of the result.
        n: u64,
        /// Inner dimension.
        k: u64,
        /// Number of independent GEMMs. It is always 1 for current models, but digests of programs
        /// contain it.
        batch: u64,
    },
    /// Fused attention.
    Attention {
        /// Sizes.
        shape: AttentionShape,
        /// Backward kernel.
        backward: bool,
    },
    /// Two-dimensional convolution as an implicit GEMM.
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
    /// Row reduction with adjacent elementwise operations: norms and their backward.
    Norm {
        /// Whether it is a backward kernel. It is not part of digests, which contain what the
        /// kernel computes.
        #[serde(skip)]
        backward: bool,
    },
    /// Column reduction (gradients of norm weights and biases).
    ColumnReduce,
    /// Softmax-like over the vocabulary.
    Softmax {
        /// As in [`KernelClass::Norm`].
        #[serde(skip)]
        backward: bool,
    },
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
    /// One GEMM per expert, over its rows.
    GroupedGemm {
        /// Upper bound of the number of rows of all experts.
        rows: u64,
        /// Columns of the result.
        n: u64,
        /// Inner dimension. For weight gradients, the other dimension of the result.
        k: u64,
        /// Experts.
        experts: u64,
        /// Whether rows are the inner dimension, so that the result is one matrix per expert.
        weight_gradient: bool,
    },
}

impl KernelClass {
    /// Returns whether arithmetic limits its speed, as for GEMMs, convolutions and attention. All
    /// others are limited by memory.
    #[must_use]
    pub fn is_arithmetic(&self) -> bool {
        matches!(
            self,
            Self::Gemm { .. }
                | Self::Attention { .. }
                | Self::Conv { .. }
                | Self::GroupedGemm { .. }
        )
    }

    /// Returns the sizes of matmuls and convolutions as text, such as ` 4096x1024x512`; empty for
    /// other kernels.
    #[must_use]
    pub fn sizes(&self) -> String {
        match self {
            Self::Gemm { m, n, k, batch: 1 } | Self::Conv { m, n, k } => format!(" {m}x{n}x{k}"),
            Self::Gemm { m, n, k, batch } => format!(" {batch}x{m}x{n}x{k}"),
            Self::GroupedGemm {
                rows,
                n,
                k,
                experts,
                ..
            } => format!(" {experts} of {rows}x{n}x{k}"),
            _ => String::new(),
        }
    }

    /// Returns the class of a row kernel that does a part of a backward pass.
    #[must_use]
    pub(crate) fn of_backward(self) -> Self {
        match self {
            Self::Norm { .. } => Self::Norm { backward: true },
            Self::Softmax { .. } => Self::Softmax { backward: true },
            other => other,
        }
    }

    /// Returns the name that hardware profiles give to a memory-bound class; `None` for arithmetic.
    #[must_use]
    pub const fn memory_name(&self) -> Option<&'static str> {
        Some(match self {
            Self::Gemm { .. }
            | Self::Attention { .. }
            | Self::Conv { .. }
            | Self::GroupedGemm { .. } => return None,
            Self::Pointwise => "pointwise",
            Self::Strided => "strided",
            Self::Norm { backward: false } => "norm",
            Self::Norm { backward: true } => "norm_backward",
            Self::ColumnReduce => "column_reduce",
            Self::Softmax { backward: false } => "softmax",
            Self::Softmax { backward: true } => "softmax_backward",
            Self::Embedding => "embedding",
            Self::EmbeddingGrad => "embedding_grad",
            Self::Copy => "copy",
            Self::MultiCopy => "multi_copy",
            Self::Fill => "fill",
            Self::Optimizer => "optimizer",
            Self::FullReduce => "full_reduce",
            Self::Fused => "fused",
        })
    }
}

/// One operation in a kernel. Plain kernels have one operation, fused kernels several.
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
    /// Splits a fused body into its leading GEMMs, or its leading matmul of experts, and its
    /// elementwise epilogue; `None` if either part is empty.
    #[must_use]
    pub fn split_gemm_epilogue(body: &[Self]) -> Option<(&[Self], &[Self])> {
        let is_gemm = |op: &&Self| op.op.takes_epilogue();
        let (gemms, epilogue) = body.split_at(body.iter().take_while(is_gemm).count());
        (!gemms.is_empty() && !epilogue.is_empty()).then_some((gemms, epilogue))
    }
}

/// A value in a kernel's body. All reads of a launch happen before its writes, so an operand may be
/// both.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
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
    /// The rows that it computes, if not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_rows: Option<UsedRows>,
}

/// The rows that a kernel of elementwise and row operations computes: those that belong to an
/// expert. It leaves the other rows of its outputs unchanged in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct UsedRows {
    /// First row of each expert, and the end of the last one, `[experts + 1]`, as
    /// [`SortExperts`](super::op::SortExperts) writes them.
    pub offsets: Slot,
    /// Rows that there are.
    pub reserved: u64,
    /// Expected number of used rows. The kernel's FLOPs and bytes are for this number.
    pub expected: u64,
}

impl Kernel {
    /// Returns the orthogonalization of an update by Muon; `None` for other kernels.
    #[must_use]
    pub fn newton_schulz(&self) -> Option<NewtonSchulz> {
        match self.body.first()?.op {
            OpKind::Shard(ShardOp::Muon { newton_schulz, .. }) => Some(newton_schulz),
            OpKind::Shard(ShardOp::Orthogonalize { matrix }) => Some(NewtonSchulz::of_one(matrix)),
            _ => None,
        }
    }

    /// Returns whether a launch writes every element of the `n`th range in its writes. It does not
    /// if the body computes only some columns of each row; another launch writes the others,
    /// possibly later.
    #[must_use]
    pub fn fills(&self, n: usize) -> bool {
        let made = self.body.iter().flat_map(|op| &op.outputs);
        let mut slots = made
            .filter(|s| matches!(s.place, Place::Write(w) if usize::from(w) == n))
            .peekable();
        slots.peek().is_none()
            || slots.any(|s| {
                s.strides.is_empty()
                    || strides::extent(&s.shape, &s.strides)
                        == strides::distinct(&s.shape, &s.strides)
            })
    }
}
