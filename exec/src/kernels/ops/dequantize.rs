//! Weights in four bits, as matmuls read them. GPUs have no kernel for it: there, programs with
//! such weights are refused.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
use crate::base::nf4;
use crate::kernels::error::OperandError;
use shardlab_plan::ir::{Nf4, op};

impl CpuKernel for op::DequantizeNf4 {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let o = call.whole()?;
        o.expect(1, 1)?;
        let (stored, weight) = (o.input(0)?, o.output(0)?);
        let nf4 = Nf4 {
            shape: o.slot(true, 0)?.shape.clone(),
            scales: self.scales,
            double: self.double,
        };
        let stored = stored.bytes()?;
        let (needed, found) = (nf4.stored_bytes() as usize, stored.len());
        if found < needed {
            return Err(OperandError::Size {
                what: "a weight in four bits",
                needed,
                found,
            });
        }
        nf4::dequantize(&nf4, stored, |first, part| weight.store(first, part));
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::DequantizeNf4 {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Absent(
            "weights in four bits (precision.frozen_params = \"nf4\") run on CPUs, and are predicted \
             for GPUs",
        )
    }
}
