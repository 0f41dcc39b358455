//! Packed weights, as matmuls read them. GPUs have no kernel for it: there, programs with such
//! weights are refused.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
use crate::base::packed;
use crate::kernels::error::OperandError;
use shardlab_plan::ir::{Packed, op};

impl CpuKernel for op::Dequantize {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let o = call.whole()?;
        o.expect(1, 1)?;
        let (stored, weight) = (o.input(0)?, o.output(0)?);
        let packed = Packed {
            shape: o.slot(true, 0)?.shape.clone(),
            format: self.format,
            scales: self.scales,
        };
        let stored = stored.bytes()?;
        let (needed, found) = (packed.stored_bytes() as usize, stored.len());
        if found < needed {
            return Err(OperandError::Size {
                what: "a packed weight",
                needed,
                found,
            });
        }
        packed::dequantize(&packed, stored, |first, part| weight.store(first, part));
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Dequantize {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Absent(
            "packed weights (precision.frozen_params = \"nf4\", \"nf4_f32\" or \"int8\") run on CPUs, and \
             are predicted for GPUs",
        )
    }
}
