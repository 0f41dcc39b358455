//! Two-dimensional convolutions: by cuDNN on the GPU, where it has a kernel.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, Library};
use crate::kernels::conv;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{codegen, dnn};
use crate::kernels::error::OperandError;
use shardlab_plan::ir::op;

impl CpuKernel for op::Conv {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        conv::forward(call.whole()?, self.kernel as usize)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Conv {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::library(
            Library::Convolution(dnn::Direction::Forward),
            codegen::convolution::forward,
        )
    }
}

impl CpuKernel for op::ConvGradInput {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        conv::grad_input(call.whole()?, self.kernel as usize)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::ConvGradInput {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::library(
            Library::Convolution(dnn::Direction::Image),
            codegen::convolution::grad_input,
        )
    }
}

impl CpuKernel for op::ConvGradWeight {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        conv::grad_weight(call.whole()?, self.kernel as usize)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::ConvGradWeight {
    fn code(&self) -> CudaCode<'_> {
        CudaCode::library(
            Library::Convolution(dnn::Direction::Filter),
            codegen::convolution::grad_weight,
        )
    }
}
