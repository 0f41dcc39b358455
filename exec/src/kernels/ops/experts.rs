//! Experts: the order of rows, copies of rows, matmuls, row-wise factors.

use super::{Call, CpuKernel, Elementwise, Rows};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, RowCode};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen::{self, CodegenError, lanes::Lanes, rows::Row};
use crate::kernels::error::OperandError;
use crate::kernels::experts;
use crate::kernels::math::sum2;
use crate::kernels::wide::wide;
use shardlab_plan::ir::op;

wide! {
    /// Computes the dot product of each pair of rows of length `d`.
    fn row_dot(a: &[f32], b: &[f32], d: usize, out: &mut [f32]) {
        for ((a, b), o) in a.chunks_exact(d).zip(b.chunks_exact(d)).zip(out) {
            *o = sum2(a, b, |a, b| a * b);
        }
    }
}

impl CpuKernel for op::LocalExperts {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::local(call.whole()?, self.experts as usize)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LocalExperts {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::permute::local(req, op, self.experts as usize))
    }
}

impl CpuKernel for op::PushedRows {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::pushed(call.whole()?, self)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::PushedRows {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::permute::pushed(req, op, self))
    }
}

impl CpuKernel for op::DispatchExperts {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::dispatch(call.whole()?, self)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::DispatchExperts {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::permute::dispatch(req, op, self))
    }
}

impl CpuKernel for op::SortExperts {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::sort(call.whole()?, self)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::SortExperts {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::permute::sort(req, op, self))
    }
}

impl CpuKernel for op::Permute {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::permute(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Permute {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::permute::permute)
    }
}

impl CpuKernel for op::Unpermute {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::unpermute(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Unpermute {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::permute::unpermute)
    }
}

impl CpuKernel for op::GroupedGemm {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::grouped(call.whole()?, self.tb)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::GroupedGemm {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::grouped::forward(req, op, self.tb))
    }
}

impl CpuKernel for op::GroupedGemmWeightGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::grouped_weight_grad(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::GroupedGemmWeightGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::grouped::weight_grad)
    }
}

impl CpuKernel for op::RepeatRows {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::repeat(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RepeatRows {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::repeat::forward)
    }
}

impl CpuKernel for op::RepeatRowsGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::repeat_grad(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RepeatRowsGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::repeat::backward)
    }
}

impl CpuKernel for op::ScaledGroupedGemm {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::scaled(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::ScaledGroupedGemm {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(|req, op| codegen::grouped::scaled(req, op, self.fast))
    }
}

impl CpuKernel for op::ScaledGroupedGemmWeightGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        experts::scaled_weight_grad(call.whole()?)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::ScaledGroupedGemmWeightGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::kernel(codegen::grouped::scaled_weight_grad)
    }
}

impl Elementwise for op::ScaleRows {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        op::Mul.block(x, y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        op::Mul.lane(x, fast)
    }
}

impl Elementwise for op::MaskRows {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        for ((y, x), mask) in y.iter_mut().zip(x[0]).zip(x[1]) {
            *y = if *mask == 0.0 { *x } else { 0.0 };
        }
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("({} == 0.0f ? {} : 0.0f)", x[1], x[0])
    }
}

impl CpuKernel for op::RowDot {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, cols, .. } = call.rows()?;
        row_dot(x[0], x[1], cols, y[0]);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::RowDot {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::RowDot {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let [dot] = row.sums(|at| {
            let (a, b) = (at.input(0)?, at.input(1)?);
            Ok([format!("{a} * {b}")])
        })?;
        Ok(vec![dot])
    }

    fn value(&self, _: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        Ok(stats[0].clone())
    }
}
