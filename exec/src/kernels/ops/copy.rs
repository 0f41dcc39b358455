//! Copies, concatenations, constants.

use super::{Call, CpuKernel, Elementwise, Rows, float};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
use crate::kernels::error::OperandError;
use crate::kernels::operands::{Operands, same};
use crate::kernels::strides::numel;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Slot, op};

impl Elementwise for op::Fill {
    fn block(&self, _: &[&[f32]], y: &mut [f32]) {
        y.fill(self.value.0 as f32);
    }

    fn lane(&self, _: &[String], _: bool) -> String {
        float(self.value.0 as f32)
    }
}

/// Returns whether an operation copies integers, which floats could not represent.
pub(in crate::kernels) fn is_integer_copy(op: &BodyOp) -> bool {
    let mut slots = op.inputs.iter().chain(&op.outputs);
    op.op == OpKind::Copy && slots.all(|s| s.dtype == DType::I64)
}

/// Returns whether an operation copies.
pub(in crate::kernels) fn is_copy(op: &BodyOp) -> bool {
    op.op == OpKind::Copy
}

/// Copies integers exactly.
fn copy_integers(o: &Operands<'_>) -> Result<(), OperandError> {
    let (from, to) = (o.input(0)?, o.output(0)?);
    same("the copy's source", to.numel, from.numel)?;
    let mut block = [0i64; 256];
    for start in (0..to.numel).step_by(block.len()) {
        let n = block.len().min(to.numel - start);
        from.load_ids(start, &mut block[..n])?;
        to.store_ids(start, &block[..n]);
    }
    Ok(())
}

impl CpuKernel for op::Copy {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        match call {
            Call::Whole(o) => copy_integers(o),
            call => {
                let Rows { x, y, .. } = call.rows()?;
                y[0].copy_from_slice(x[0]);
                Ok(())
            }
        }
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Copy {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Copy
    }
}

impl CpuKernel for op::Cat {
    /// Interleaves the parts' blocks.
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Rows { op, x, y, .. } = call.rows()?;
        let tail = |shape: &[u64]| shape[usize::from(self.axis)..].iter().product::<u64>() as usize;
        let whole = tail(&op.outputs[0].shape);
        let mut from = 0;
        for (x, slot) in x.iter().zip(&op.inputs) {
            let part = tail(&slot.shape);
            if part == 0 {
                continue;
            }
            for (y, x) in y[0].chunks_exact_mut(whole).zip(x.chunks_exact(part)) {
                y[from..from + part].copy_from_slice(x);
            }
            from += part;
        }
        Ok(())
    }

    /// Cuts at the dimensions before the axis.
    fn rows(&self, op: &BodyOp, _: Option<&Slot>) -> Result<(usize, usize), OperandError> {
        let (shape, axis) = (&op.outputs[0].shape, usize::from(self.axis));
        let lead = shape
            .get(..axis)
            .ok_or_else(|| OperandError::Shape(format!("no axis {axis} in {shape:?}")))?;
        let rows = lead.iter().product::<u64>() as usize;
        let mut sizes = op.inputs.iter().map(numel);
        match sizes.find(|n| rows > 0 && !n.is_multiple_of(rows)) {
            Some(odd) => Err(OperandError::Shape(format!(
                "a part of {odd} elements is not a multiple of {rows} rows"
            ))),
            None => Ok((rows, 1)),
        }
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Cat {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Cat(usize::from(self.axis))
    }
}
