//! Matmuls: by the `gemm` crate on the CPU, by cuBLASLt on the GPU.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, Library};
use crate::kernels::error::OperandError;
use crate::kernels::gemm;
use shardlab_plan::ir::op;

impl CpuKernel for op::Gemm {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let Self {
            ta,
            tb,
            bias,
            accumulate,
        } = *self;
        gemm::run(call.whole()?, ta, tb, bias, accumulate)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Gemm {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::Library(Library::CublasLt, None)
    }
}
