//! Casts to 8-bit floating point, and the matmuls that read them.

pub(in crate::kernels) mod blocks;

use super::{Call, CpuKernel, Elementwise, Rows};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, Library, RowCode, float};
use crate::base::float8::{power_of_two, scale, scaled};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen::{
    CodegenError, Module, Request, float8, lanes::Lanes, rows::Row,
};
use crate::kernels::error::OperandError;
use crate::kernels::experts;
use crate::kernels::operands::{Operands, same};
use crate::kernels::scaled_gemm;
use crate::kernels::scratch::Scratch;
use crate::kernels::strides;
use crate::kernels::wide::wide;
#[cfg(feature = "cuda")]
use shardlab_plan::ir::ScaleBlock;
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

#[cfg(feature = "cuda")]
impl CudaKernel for op::RowAmax {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::RowAmax {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        Ok(vec![row.amax(0)?])
    }

    fn value(&self, _: &mut Lanes<'_, '_>, _: &[String]) -> Result<String, CodegenError> {
        Err(CodegenError::new("a maximum has one value per row"))
    }
}

/// Returns the largest number of an 8-bit type.
pub(in crate::kernels) fn most(to: DType) -> Result<f32, OperandError> {
    to.float8_max().ok_or(OperandError::Type(to))
}

impl CpuKernel for op::Float8Scale {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let o: &Operands<'_> = call.whole()?;
        o.expect(1 + usize::from(self.routed), 2)?;
        let maxima = o.floats(0)?;
        let used = match self.routed {
            true => experts::used_rows(&o.input(1)?, maxima.len())?,
            false => maxima.len(),
        };
        let scale = scale(most(self.to)?, amax(&maxima[..used]));
        for (n, value) in [scale, 1.0 / scale].into_iter().enumerate() {
            let out = o.output(n)?;
            same("the scale", 1, out.numel)?;
            out.store(0, &[value]);
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Float8Scale {
    fn code(&self) -> CudaCode<'_> {
        let generate = |req: &Request<'_>, op: &_| -> Result<Module, CodegenError> {
            float8::scale(req, op, &largest(self.to)?)
        };
        CudaCode::kernel(generate)
    }
}

/// Returns the largest number of an 8-bit type, as C.
#[cfg(feature = "cuda")]
fn largest(to: DType) -> Result<String, CodegenError> {
    most(to)
        .map(float)
        .map_err(|e| CodegenError::new(e.to_string()))
}

impl Elementwise for op::Float8Cast {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        cast(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("scaled_({}, {})", x[0], x[1])
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

#[cfg(feature = "cuda")]
impl CudaKernel for op::Float8CastRows {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Row(self)
    }
}

#[cfg(feature = "cuda")]
impl RowCode for op::Float8CastRows {
    fn statistics(&self, row: &mut Row<'_, '_>) -> Result<Vec<String>, CodegenError> {
        let (most, amax) = (largest(self.to)?, row.amax(0)?);
        let scale = row.define(&format!("power_of_two(scale_({most}, {amax}))"));
        Ok(vec![row.define(&format!("1.0f / {scale}")), scale])
    }

    fn value(&self, at: &mut Lanes<'_, '_>, stats: &[String]) -> Result<String, CodegenError> {
        Ok(format!("scaled_({}, {})", at.input(0)?, stats[1]))
    }
}

impl CpuKernel for op::Float8CastBlocks {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let o: &Operands<'_> = call.whole()?;
        o.expect(1, 2)?;
        let (rows, cols) = strides::matrix(o.slot(false, 0)?);
        let (x, outputs) = (o.floats(0)?, [o.output(0)?, o.output(1)?]);
        if !self.transposed {
            return blocks::cast(*self, &x, cols, outputs);
        }
        let mut turned = Scratch::take(x.len());
        for (row, values) in x.chunks_exact(cols).enumerate() {
            for (col, value) in values.iter().enumerate() {
                turned[col * rows + row] = *value;
            }
        }
        blocks::cast(*self, &turned, rows, outputs)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Float8CastBlocks {
    fn code(&self) -> CudaCode<'_> {
        if self.block == ScaleBlock::MX {
            return CudaCode::Absent(
                "`float8_recipe` \"mxfp8\" runs on CPUs only: use tensorwise, rowwise or blockwise",
            );
        }
        let generate = |req: &Request<'_>, op: &_| -> Result<Module, CodegenError> {
            float8::cast_blocks(req, op, *self, &largest(self.to)?)
        };
        CudaCode::kernel(generate)
    }
}

impl CpuKernel for op::ScaledGemm {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        scaled_gemm::run(call.whole()?, self.bias, self.accumulate)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::ScaledGemm {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Library(Library::CublasLt, None)
    }
}
