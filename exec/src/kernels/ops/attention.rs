//! Softmax attention: by cuDNN on the GPU, where it has a kernel.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, Library};
use crate::kernels::attention;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{codegen, dnn};
use crate::kernels::error::OperandError;
use shardlab_plan::ir::op;

impl CpuKernel for op::Attention {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        attention::forward(call.whole()?, self.causal, self.scale.0 as f32)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::Attention {
    fn code(&self) -> CudaCode<'_> {
        let library = Library::Attention(dnn::Attention {
            causal: self.causal,
            scale: self.scale.0 as f32,
            backward: false,
        });
        CudaCode::library(library, |req, op| {
            codegen::attention::forward(req, op, self.causal, self.scale.0)
        })
    }
}

impl CpuKernel for op::AttentionGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        attention::backward(call.whole()?, self.causal, self.scale.0 as f32)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::AttentionGrad {
    fn code(&self) -> CudaCode<'_> {
        let library = Library::Attention(dnn::Attention {
            causal: self.causal,
            scale: self.scale.0 as f32,
            backward: true,
        });
        CudaCode::library(library, |req, op| {
            codegen::attention::backward(req, op, self.causal, self.scale.0)
        })
    }
}
