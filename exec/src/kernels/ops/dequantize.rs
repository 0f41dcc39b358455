//! Packed weights, as matmuls read them.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
use crate::base::packed;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::codegen;
use crate::kernels::error::OperandError;
#[cfg(feature = "cuda")]
use shardlab_plan::ir::PackedScales;
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
        match self.scales {
            PackedScales::Sharded => CudaCode::kernel(|req, op| {
                codegen::dequantize::dequantize(req, op, (self.format, self.scales))
            }),
            PackedScales::Replicated => CudaCode::Absent(
                "scales of packed weights that every rank has are predicted, and not run",
            ),
        }
    }
}
