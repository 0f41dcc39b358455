//! Softmax attention: by cuDNN on the GPU, where it has a kernel.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel, Library};
use crate::kernels::attention::{self, Kind};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::{codegen, dnn};
use crate::kernels::error::OperandError;
use shardlab_plan::ir::{Documents, Real, ScoreMod, op};

fn kind(causal: bool, scale: Real, score_mod: ScoreMod) -> Kind {
    Kind {
        causal,
        scale: scale.0 as f32,
        score_mod,
    }
}

impl CpuKernel for op::Attention {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        attention::forward(call.whole()?, kind(self.causal, self.scale, ScoreMod::NONE))
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
        let kind = kind(self.causal, self.scale, ScoreMod::NONE);
        CudaCode::library(library, move |req, op| {
            codegen::attention::forward(req, op, kind)
        })
    }
}

impl CpuKernel for op::AttentionGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        attention::backward(call.whole()?, kind(self.causal, self.scale, ScoreMod::NONE))
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
        let kind = kind(self.causal, self.scale, ScoreMod::NONE);
        CudaCode::library(library, move |req, op| {
            codegen::attention::backward(req, op, kind)
        })
    }
}

impl CpuKernel for op::FlexAttention {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        attention::forward(call.whole()?, kind(self.causal, self.scale, self.score_mod))
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::FlexAttention {
    fn code(&self) -> CudaCode<'_> {
        let kind = kind(self.causal, self.scale, self.score_mod);
        CudaCode::kernel(move |req, op| codegen::attention::forward(req, op, kind))
    }
}

impl CpuKernel for op::FlexAttentionGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        attention::backward(call.whole()?, kind(self.causal, self.scale, self.score_mod))
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::FlexAttentionGrad {
    fn code(&self) -> CudaCode<'_> {
        let kind = kind(self.causal, self.scale, self.score_mod);
        CudaCode::kernel(move |req, op| codegen::attention::backward(req, op, kind))
    }
}

impl CpuKernel for op::SinkAttention {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let kind = kind(self.causal, self.scale, self.score_mod);
        attention::forward_with_sinks(call.whole()?, kind)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::SinkAttention {
    fn code(&self) -> CudaCode<'_> {
        let kind = kind(self.causal, self.scale, self.score_mod);
        CudaCode::kernel(move |req, op| codegen::attention::forward_with_sinks(req, op, kind))
    }
}

impl CpuKernel for op::SinkAttentionGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let kind = kind(self.causal, self.scale, self.score_mod);
        attention::backward_with_sinks(call.whole()?, kind)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::SinkAttentionGrad {
    fn code(&self) -> CudaCode<'_> {
        let kind = kind(self.causal, self.scale, self.score_mod);
        CudaCode::kernel(move |req, op| codegen::attention::backward_with_sinks(req, op, kind))
    }
}

/// Returns what attention computes within documents that are data.
fn within_data(causal: bool, scale: Real, score_mod: ScoreMod) -> Kind {
    let documents = Documents::NONE;
    kind(
        causal,
        scale,
        ScoreMod {
            documents,
            ..score_mod
        },
    )
}

impl CpuKernel for op::DocumentAttention {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let kind = within_data(self.causal, self.scale, self.score_mod);
        attention::forward_within_documents(call.whole()?, kind)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::DocumentAttention {
    fn code(&self) -> CudaCode<'_> {
        let kind = within_data(self.causal, self.scale, self.score_mod);
        CudaCode::kernel(move |req, op| codegen::attention::forward_within_documents(req, op, kind))
    }
}

impl CpuKernel for op::DocumentAttentionGrad {
    fn run(&self, call: Call<'_, '_>) -> Result<(), OperandError> {
        let kind = within_data(self.causal, self.scale, self.score_mod);
        attention::backward_within_documents(call.whole()?, kind)
    }
}

#[cfg(feature = "cuda")]
impl CudaKernel for op::DocumentAttentionGrad {
    fn code(&self) -> CudaCode<'_> {
        let kind = within_data(self.causal, self.scale, self.score_mod);
        CudaCode::kernel(move |req, op| {
            codegen::attention::backward_within_documents(req, op, kind)
        })
    }
}
