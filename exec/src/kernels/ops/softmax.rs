//! Softmax over the last dimension, in logarithms.

use super::{Call, CpuKernel, Elementwise, Rows};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, RowCode};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen::{CodegenError, lanes::Lanes, rows::Row};
use crate::kernels::error::OperandError;
use crate::kernels::math::{exp, max, sum1};
use crate::kernels::wide::wide;
use shardlab_plan::ir::op;

wide! {
    /// Computes the log-sum-exp of each row of length `d`.
    fn log_sum_exp(x: &[f32], d: usize, out: &mut [f32]) {
        for (x, o) in x.chunks_exact(d).zip(out) {
            let m = max(x);
            *o = m + sum1(x, |v| exp(v - m)).ln();
        }
    }

    /// Computes `x - lse` of each row of length `d`.
    fn log_softmax(x: &[f32], d: usize, y: &mut [f32]) {
        for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
            let m = max(x);
            let z = m + sum1(x, |v| exp(v - m)).ln();
            for (y, &x) in y.iter_mut().zip(x) {
                *y = x - z;
            }
        }
    }

    /// Computes the gradient of [`log_softmax`] from its result.
    fn log_softmax_grad(dy: &[f32], y: &[f32], d: usize, dx: &mut [f32]) {
        let rows = dy.chunks_exact(d).zip(y.chunks_exact(d));
        for ((dy, y), dx) in rows.zip(dx.chunks_exact_mut(d)) {
            let total = sum1(dy, |v| v);
            for ((dx, &g), &y) in dx.iter_mut().zip(dy).zip(y) {
                *dx = g - exp(y) * total;
            }
        }
    }
}

impl CpuKernel for op::LogSoftmax {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, cols, .. } = call.rows()?;
        log_softmax(x[0], cols, y[0]);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LogSoftmax {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::LogSoftmax {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        Ok(vec![row.log_sum_exp(0)?])
    }

    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        Ok(format!("{} - {}", at.input(0)?, stats[0]))
    }
}

impl CpuKernel for op::LogSoftmaxGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, cols, .. } = call.rows()?;
        log_softmax_grad(x[0], x[1], cols, y[0]);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LogSoftmaxGrad {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::LogSoftmaxGrad {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let [sum] = row.sums(|at| Ok([at.input(0)?]))?;
        Ok(vec![sum])
    }

    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        let (dy, y) = (at.input(0)?, at.input(1)?);
        Ok(format!("{dy} - expf({y}) * {}", stats[0]))
    }
}

impl CpuKernel for op::LogSumExp {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, cols, .. } = call.rows()?;
        log_sum_exp(x[0], cols, y[0]);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::LogSumExp {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::LogSumExp {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        Ok(vec![row.log_sum_exp(0)?])
    }

    fn value(&self, _: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        Ok(stats[0].clone())
    }
}

impl Elementwise for op::LogProbs {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        op::Sub.block(x, y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        op::Sub.lane(x, fast)
    }
}
