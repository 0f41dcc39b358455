//! Implementation of each operation: the CPU's and the GPU's next to each other.
//!
//! One file per family of operations, as in `plan/src/ops`. Each operation implements [`CpuKernel`]
//! and `CudaKernel`; elementwise ones implement [`Elementwise`] instead, from which both follow. An
//! operation that lacks a part does not compile. Loops and generators of more than a few lines have
//! modules of their own, which the implementations call.

mod attention;
mod conv;
pub(super) mod copy;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod dequantize;
mod embedding;
mod experts;
pub(super) mod float8;
mod gemm;
mod loss;
mod norm;
mod pointwise;
mod reduce;
mod route;
mod scan;
mod shard;
mod softmax;

pub(super) use cpu::{Call, CpuKernel, Rows};
#[cfg(feature = "cuda")]
pub(super) use cuda::{CudaCode, CudaKernel, LabelCode, Library, LossCode, RowCode};

use shardlab_plan::ir::OpKind;
use shardlab_plan::match_op;

/// An operation that makes each element from the elements of its inputs at the same position.
pub(super) trait Elementwise {
    /// Computes a block: `x` are the inputs that the operation reads, with the length of `y`.
    fn block(&self, x: &[&[f32]], y: &mut [f32]);

    /// Returns the C expression of one element from those of its inputs. `fast` allows functions
    /// that are exact to 16 bits only.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "the code generator for GPUs calls it")
    )]
    fn lane(&self, x: &[String], fast: bool) -> String;
}

/// Returns the CPU implementation of an operation.
pub(super) fn cpu(op: &OpKind) -> &dyn CpuKernel {
    match_op!(op, op => op)
}

/// Returns how the code generator implements an operation.
#[cfg(feature = "cuda")]
pub(super) fn cuda(op: &OpKind) -> CudaCode<'_> {
    match_op!(op, op => op.code())
}

/// Formats a float literal of C with all its bits.
pub(super) fn float(x: f32) -> String {
    if x.is_finite() {
        format!("{x:?}f")
    } else {
        format!("__uint_as_float({}u)", x.to_bits())
    }
}
