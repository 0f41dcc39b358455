//! Casts to 8-bit floating point, and the matmuls that read them.

use super::{Call, CpuKernel, Rows};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
use crate::base::float8::{power_of_two, scale, scaled};
use crate::kernels::error::OperandError;
use crate::kernels::operands::{Operands, same};
use crate::kernels::scaled_gemm;
use crate::kernels::wide::wide;
use shardlab_plan::ir::{DType, op};

wide! {
    /// Returns the largest absolute value; NaN does not count.
    fn amax(x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 16];
        let mut chunks = x.chunks_exact(16);
        for c in &mut chunks {
            for (a, v) in lanes.iter_mut().zip(c) {
                let v = v.abs();
                *a = if v > *a { v } else { *a };
            }
        }
        let rest = chunks.remainder().iter().fold(0.0, |a, v| v.abs().max(a));
        lanes.into_iter().fold(rest, f32::max)
    }

    /// Computes `x * scale`, with a scale for each element.
    fn cast(x: &[f32], scale: &[f32], y: &mut [f32]) {
        for ((y, &x), &scale) in y.iter_mut().zip(x).zip(scale) {
            *y = scaled(x, scale);
        }
    }

    /// Computes `x * scale`.
    fn cast_row(x: &[f32], scale: f32, y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = scaled(x, scale);
        }
    }
}

impl CpuKernel for op::RowAmax {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, cols, .. } = call.rows()?;
        for (row, out) in x[0].chunks_exact(cols).zip(&mut *y[0]) {
            *out = amax(row);
        }
        Ok(())
    }
}

/// Returns the largest number of an 8-bit type.
fn most(to: DType) -> Result<f32, OperandError> {
    to.float8_max().ok_or(OperandError::Type(to))
}

impl CpuKernel for op::Float8Scale {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let o: &Operands<'_> = call.whole()?;
        o.expect(1, 2)?;
        let scale = scale(most(self.to)?, amax(&o.floats(0)?));
        for (n, value) in [scale, 1.0 / scale].into_iter().enumerate() {
            let out = o.output(n)?;
            same("the scale", 1, out.numel)?;
            out.store(0, &[value]);
        }
        Ok(())
    }
}

impl CpuKernel for op::Float8Cast {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { x, y, .. } = call.rows()?;
        cast(x[0], x[1], y[0]);
        Ok(())
    }
}

impl CpuKernel for op::Float8CastRows {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let most = most(self.to)?;
        let Rows { x, y, cols, .. } = call.rows()?;
        let [codes, inverses] = y else {
            return Err(OperandError::Unsupported);
        };
        let rows = x[0].chunks_exact(cols).zip(codes.chunks_exact_mut(cols));
        for ((x, y), inverse) in rows.zip(&mut **inverses) {
            let scale = power_of_two(scale(most, amax(x)));
            cast_row(x, scale, y);
            *inverse = 1.0 / scale;
        }
        Ok(())
    }
}

impl CpuKernel for op::ScaledGemm {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        scaled_gemm::run(call.whole()?, self.bias, self.accumulate)
    }
}

/// States that operations have no kernel for GPUs.
macro_rules! cpu_only {
    ($($Op:ident)+) => {
        $(
            #[cfg(feature = "cuda")]
            impl CudaKernel for op::$Op {
                fn code(&self) -> CudaCode<'_> {
                    CudaCode::Absent(
                        "matmuls in 8 bits (precision.float8_recipe) run on CPUs, and are predicted for GPUs",
                    )
                }
            }
        )+
    };
}

cpu_only!(RowAmax Float8Scale Float8Cast Float8CastRows ScaledGemm);
