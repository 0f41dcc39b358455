//! Interface of an operation to the code generator.

use super::Elementwise;
use crate::kernels::cuda::codegen::expr::{Gen, Var};
use crate::kernels::cuda::codegen::index::Index;
use crate::kernels::cuda::codegen::lanes::Lanes;
use crate::kernels::cuda::codegen::rows::Row;
use crate::kernels::cuda::codegen::{CodegenError, Entry, Module, Request};
use crate::kernels::cuda::dnn;
use shardlab_plan::ir::{BodyOp, ShardOp};

/// Generates the kernel of a body that is one operation.
pub(in crate::kernels) type Generate<'o> =
    Box<dyn Fn(&Request<'_>, &BodyOp) -> Result<Module, CodegenError> + 'o>;

/// Returns what a row adds to each output's columns, as C expressions of one element.
pub(in crate::kernels) type Terms = fn(&mut Lanes<'_, '_>) -> Result<Vec<String>, CodegenError>;

/// How an operation is generated.
pub(in crate::kernels) enum CudaCode<'o> {
    /// Each element from the inputs' elements.
    Elementwise(&'o dyn Elementwise),
    /// Copies in logical order.
    Copy,
    /// Concatenates along an axis.
    Cat(usize),
    /// Each element from the row's, once the row's statistics are known.
    Row(&'o dyn RowCode),
    /// Reduces all rows to scalars.
    Loss(&'o dyn LossCode),
    /// Each element depending on whether it is in the column of the row's label.
    Label(&'o dyn LabelCode),
    /// Sums over rows.
    Columns(Terms),
    /// A kernel of its own.
    Kernel(Generate<'o>),
    /// A library's kernel; a generated one if the library has none.
    Library(Library, Option<Generate<'o>>),
    /// A list of byte ranges.
    Ranges(ShardOp),
    /// No kernel, with the reason.
    Absent(&'static str),
}

/// A kernel of a library.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) enum Library {
    /// cuBLASLt's matmul.
    CublasLt,
    /// cuDNN's attention.
    Attention(dnn::Attention),
    /// cuDNN's convolution.
    Convolution(dnn::Direction),
}

/// An operation on the GPU.
pub(in crate::kernels) trait CudaKernel {
    /// Returns how the operation is made.
    fn code(&self) -> CudaCode<'_>;
}

/// An operation that needs statistics of each whole row.
pub(in crate::kernels) trait RowCode {
    /// Generates the row's statistics; returns their variables.
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError>;

    /// Returns the C expression of one element, from the row's statistics.
    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError>;
}

/// An operation that reduces all rows to scalars.
pub(in crate::kernels) trait LossCode {
    /// Generates the row's share in the sum, for operation `i` of the body, the `n`-th such.
    fn share(&self, g: &mut Gen<'_>, i: usize, n: usize) -> Result<(), CodegenError>;

    /// Generates the entry that makes the outputs from the shares of all rows.
    fn totals(
        &self,
        req: &Request<'_>,
        op: &BodyOp,
        n: usize,
        rows: usize,
    ) -> Result<(String, Entry), CodegenError>;
}

/// An operation that treats the column of each row's label differently.
pub(in crate::kernels) trait LabelCode {
    /// Generates the value at a position, for operation `i` of the body.
    fn value(&self, g: &mut Gen<'_>, i: usize, at: &Index) -> Result<Var, CodegenError>;

    /// Generates the kernel that writes only the labels' elements; `None` if others change too.
    fn labels_only(&self, req: &Request<'_>, op: &BodyOp) -> Option<Result<Module, CodegenError>>;
}

impl<'o> CudaCode<'o> {
    /// Makes a kernel of its own.
    pub(super) fn kernel(
        generate: impl Fn(&Request<'_>, &BodyOp) -> Result<Module, CodegenError> + 'o,
    ) -> Self {
        Self::Kernel(Box::new(generate))
    }

    /// Makes a library's kernel, and a generated one if the library has none.
    pub(super) fn library(
        library: Library,
        otherwise: impl Fn(&Request<'_>, &BodyOp) -> Result<Module, CodegenError> + 'o,
    ) -> Self {
        Self::Library(library, Some(Box::new(otherwise)))
    }
}

impl<T: Elementwise> CudaKernel for T {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Elementwise(self)
    }
}
