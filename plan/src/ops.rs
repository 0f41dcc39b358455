//! The planner's definition of each operation: operands, fusion, cost and derivative.
//!
//! One file per family of operations, one `impl OpDef` per operation. [`crate::ir::op`] lists the
//! operations; the compiler asks for an implementation of each.

mod attention;
mod conv;
mod copy;
mod dequantize;
pub(crate) mod eager;
mod embedding;
mod experts;
mod float8;
mod gemm;
mod loss;
mod norm;
mod operands;
mod pointwise;
mod reduce;
mod route;
mod scan;
mod shard;
mod signature;
mod softmax;
#[cfg(test)]
mod tests;
mod vjp;

pub(crate) use experts::masked_fill;
pub use operands::Operands;
pub use signature::{Extent, Operand, Reduced, Signature};
pub(crate) use vjp::Contributions;
pub use vjp::Vjp;
pub(crate) use vjp::sum_to;

use crate::ir::op::match_op;
use crate::ir::{DType, KernelClass, OpKind, op};

/// How fusion may treat an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// A library kernel: its operands must be in memory.
    Extern,
    /// A separate generated kernel (column and full reductions).
    Alone,
    /// Column sums for the gradients of a norm's parameters. They form a separate kernel or fuse
    /// with kernels over the same rows.
    Column,
    /// Reduces rows; fuses with elementwise neighbors over the same elements.
    Row,
    /// Elementwise.
    Pointwise,
}

/// Definition of an operation for planning.
pub trait OpDef {
    /// Returns the name of the kernel that does only this, in PyTorch's terms.
    fn name(&self) -> &'static str;

    /// Describes the operands.
    fn signature(&self) -> Signature;

    /// Returns the dtype of output `n` of a forward operation, given those of the inputs. The
    /// default is the dtype of the first input, or float32 without inputs.
    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        let _ = n;
        inputs.first().copied().unwrap_or(DType::F32)
    }

    /// Returns how a compiler may treat the operation.
    fn fusion(&self) -> Fusion {
        Fusion::Extern
    }

    /// Counts the arithmetic of one call. Elementwise functions count a fixed number of FLOPs per
    /// element.
    fn flops(&self, at: &Operands<'_>) -> u64;

    /// Returns the cost class of a kernel that does only this.
    fn class(&self, at: &Operands<'_>) -> KernelClass;

    /// Returns the number of bytes of input `n` that the operation reads, if it does not read all
    /// of it.
    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        let _ = (at, n);
        None
    }

    /// Returns the number of bytes of output `n` that the operation writes, if it does not write
    /// all of it.
    fn bytes_written(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        let _ = (at, n);
        None
    }

    /// Returns whether input `n` can have a gradient (ids, labels and statistics cannot).
    fn differentiable(&self, n: usize) -> bool {
        let _ = n;
        true
    }

    /// Emits the operations that turn the gradient of the first output into gradients of the inputs
    /// that need one. Emits nothing for operations of backward graphs, which are not differentiated
    /// again, and for operations without differentiable inputs.
    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let _ = at;
        Contributions::new()
    }

    /// Returns whether the operation only occurs in backward passes.
    fn is_backward(&self) -> bool {
        false
    }

    /// Returns whether `exec` has no kernel for the operation. Such operations are planned and
    /// priced, and `exec` rejects programs that contain them.
    fn is_priced_only(&self) -> bool {
        false
    }

    /// Returns whether outputs have rows that are neither written nor read, given whether an input
    /// has such rows. Experts leave out rows that no choice reaches on this rank.
    fn leaves_rows(&self, input: bool) -> bool {
        input
    }

    /// Returns whether selective recompute saves the results instead of recomputing them.
    fn saved_by_selective_recompute(&self) -> bool {
        false
    }

    /// Returns whether the kernel accepts operands whose rows are not adjacent, such as columns of
    /// a wider buffer.
    fn takes_strides(&self) -> bool {
        self.fusion() == Fusion::Pointwise
    }
}

/// Returns the names of the operations of forward passes.
pub(crate) fn forward_names() -> impl Iterator<Item = &'static str> {
    let bias = OpKind::Gemm(op::Gemm {
        ta: false,
        tb: true,
        bias: true,
        accumulate: false,
    });
    let all = OpKind::ALL.iter().copied().chain([bias]);
    // Casts to 8 bits are added to graphs after differentiation.
    let casts = |kind: &OpKind| {
        matches!(
            kind,
            OpKind::RowAmax
                | OpKind::Float8Scale(_)
                | OpKind::Float8Cast
                | OpKind::Float8CastRows(_)
                | OpKind::Float8CastBlocks(_)
                | OpKind::ScaledGemm(_)
                | OpKind::ScaledGroupedGemm(_)
                | OpKind::ScaledGroupedGemmWeightGrad(_)
        )
    };
    all.filter(move |kind| {
        let forward = !kind.def().is_backward() && !matches!(kind, OpKind::Shard(_));
        forward && !casts(kind)
    })
    .map(|kind| kind.def().name())
}

impl OpKind {
    /// Returns the definition of the operation.
    #[must_use]
    pub fn def(&self) -> &dyn OpDef {
        match_op!(self, op => op)
    }

    /// Returns the name of the kernel that does only this.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.def().name()
    }

    /// Returns how a compiler may treat it.
    #[must_use]
    pub fn fusion(&self) -> Fusion {
        self.def().fusion()
    }

    /// Returns whether the operation reads the offsets of experts, and thus only rows that some
    /// expert has.
    pub(crate) fn stops_at_offsets(&self) -> bool {
        let signature = self.def().signature();
        signature.inputs.contains(&experts::OFFSETS)
    }

    /// Returns whether a matmul adds to its last input; `None` for other operations.
    pub(crate) fn accumulates(&mut self) -> Option<&mut bool> {
        match self {
            Self::Gemm(gemm) => Some(&mut gemm.accumulate),
            Self::ScaledGemm(gemm) => Some(&mut gemm.accumulate),
            _ => None,
        }
    }

    /// Returns whether the operation sums rows, for the gradients of a norm's parameters.
    #[must_use]
    pub fn sums_rows(&self) -> bool {
        self.fusion() == Fusion::Column
    }
}
