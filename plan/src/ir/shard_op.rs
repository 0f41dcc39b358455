//! What the kernels that sharding adds compute.

use super::Real;
use serde::Serialize;

/// A gradient that ranks have exchanged and nobody has added up: laid out `[rank][element]`, the
/// pieces of an element are added in rank order in float32, each multiplied by the factor first, as
/// [`ShardOp::SumPieces`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Pieces {
    /// Pieces of an element.
    pub ranks: u32,
    /// What every piece is multiplied by.
    pub factor: Real,
}

/// Operation of a sharding kernel. It works on the launch's byte ranges as they are, with the
/// dtypes of their buffers; reads and writes pair up in order unless stated. The kernel's body
/// names no slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardOp {
    /// Copies or casts: the reads, one after another, become the writes, one after another.
    Copy,
    /// Likewise, many small ranges in one kernel.
    MultiCopy,
    /// One read, laid out `[rank][parameter]` in padded shards, to one write a parameter.
    CopyOut {
        /// Ranks.
        ranks: u32,
    },
    /// One read a gradient (unpadded), to one write laid out `[rank][parameter]` in shards padded
    /// with zeros; casts.
    ChunkCat {
        /// Ranks.
        ranks: u32,
    },
    /// Adds the first read to the writes, in order.
    Accumulate,
    /// Multiplies the write in place.
    Scale {
        /// Factor.
        factor: Real,
    },
    /// Zeroes the writes.
    Zero,
    /// Sum of squares of the reads, written to a float32 scalar; a last read that is the scalar
    /// itself is added.
    SumSquares,
    /// Multiplies the writes in place by `min(1, clip_norm / (sqrt(scalar) + 1e-6))`; the last read
    /// is the scalar.
    ClipScale,
    /// Writes 1 to a scalar if a read holds a NaN, else 0.
    NanCheck,
    /// AdamW on weight, gradient, first and second moment, tensor after tensor (reads), writing
    /// weight and moments. Where a tensor names no moments, it goes on with those named before. A
    /// last read that is a scalar is the sum of squares of the global gradient norm: clipping is
    /// folded in.
    AdamW {
        /// Behind a tensor's other writes stand ranges that, one after another, get its new weight
        /// too, converted.
        cast: bool,
        /// Every gradient is in pieces.
        #[serde(skip_serializing_if = "Option::is_none")]
        pieces: Option<Pieces>,
    },
    /// SGD on weight and gradient, tensor after tensor; a last scalar read clips as in
    /// [`ShardOp::AdamW`].
    Sgd {
        /// As in [`ShardOp::AdamW`].
        cast: bool,
        /// As in [`ShardOp::AdamW`].
        #[serde(skip_serializing_if = "Option::is_none")]
        pieces: Option<Pieces>,
    },
    /// A read laid out `[rank][element]` to one sum an element: pieces are added in rank order in
    /// float32, each multiplied by the factor first, as a reduction with that factor would. The
    /// second half of a reduction whose first half is an all-to-all.
    SumPieces {
        /// Pieces.
        ranks: u32,
        /// What every piece is multiplied by.
        factor: Real,
        /// The sum is added to the writes, in order, which are reads too.
        accumulate: bool,
    },
}

impl ShardOp {
    /// Name of the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copy => "cast",
            Self::MultiCopy => "multi_copy",
            Self::CopyOut { .. } => "split_copy_out",
            Self::ChunkCat { .. } => "chunk_cat",
            Self::Accumulate => "accumulate",
            Self::SumPieces { .. } => "sum_pieces",
            Self::Scale { .. } => "scale",
            Self::Zero => "zero",
            Self::SumSquares => "sum_squares",
            Self::ClipScale => "clip_scale",
            Self::NanCheck => "nan_check",
            Self::AdamW { .. } => "adamw",
            Self::Sgd { .. } => "sgd",
        }
    }
}
