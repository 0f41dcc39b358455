//! Kernels that sharding adds to the model's own: copies, casts, scaling, optimizer.

use super::builder::Builder;
use crate::program::{Kernel, KernelClass, KernelId};
use crate::units::{Bytes, DType, Flops};
use std::collections::HashMap;

/// What a sharding kernel does. Operands: reads and writes pair up in order unless stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Copy or cast, one read to one write.
    Cast,
    /// Many copies or casts in one kernel.
    MultiCopy,
    /// Gathered `[rank][param]` buffer to parameters.
    CopyOut,
    /// Gradients to the `[rank][param]` reduction input, with a cast.
    ChunkCat,
    /// Add reads to the write.
    Accumulate,
    /// Multiply in place by 1/dp.
    Scale,
    /// Zero padding ranges.
    FillPadding,
    /// Sum of squares of the reads into a scalar.
    SumSquares,
    /// Multiply gradients in place by the clip coefficient (last read is the scalar).
    ClipScale,
    /// Look for NaN.
    NanCheck,
    /// AdamW; clipping folded in when the last read is a scalar.
    AdamW,
    /// SGD.
    Sgd,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Cast => "cast",
            Self::MultiCopy => "multi_copy",
            Self::CopyOut => "split_copy_out",
            Self::ChunkCat => "chunk_cat",
            Self::Accumulate => "accumulate",
            Self::Scale => "scale",
            Self::FillPadding => "fill_padding",
            Self::SumSquares => "sum_squares",
            Self::ClipScale => "clip_scale",
            Self::NanCheck => "nan_check",
            Self::AdamW => "adamw",
            Self::Sgd => "sgd",
        }
    }

    const fn class(self) -> KernelClass {
        match self {
            Self::Cast => KernelClass::Copy,
            Self::MultiCopy | Self::CopyOut | Self::ChunkCat => KernelClass::MultiCopy,
            Self::Accumulate | Self::Scale | Self::ClipScale => KernelClass::Pointwise,
            Self::FillPadding => KernelClass::Fill,
            Self::SumSquares | Self::NanCheck => KernelClass::FullReduce,
            Self::AdamW | Self::Sgd => KernelClass::Optimizer,
        }
    }

    /// Arithmetic of one element.
    const fn flops(self) -> u64 {
        match self {
            Self::Accumulate | Self::Scale | Self::ClipScale => 1,
            Self::SumSquares | Self::Sgd => 2,
            Self::AdamW => 14,
            _ => 0,
        }
    }
}

/// Interned sharding kernels.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    known: HashMap<(Kind, u64, u64, u64, DType), KernelId>,
}

impl Kernels {
    /// The kernel of `kind` over `elements`, reading and writing so many bytes.
    pub(crate) fn get(
        &mut self,
        b: &mut Builder,
        kind: Kind,
        elements: u64,
        read: u64,
        written: u64,
        dtype: DType,
    ) -> KernelId {
        *self
            .known
            .entry((kind, elements, read, written, dtype))
            .or_insert_with(|| {
                b.kernel(Kernel {
                    name: kind.name().to_owned(),
                    class: kind.class(),
                    flops: Flops(kind.flops() * elements),
                    read: Bytes(read),
                    written: Bytes(written),
                    dtype,
                    body: Vec::new(),
                })
            })
    }
}
