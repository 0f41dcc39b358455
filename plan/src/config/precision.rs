//! `[precision]`.

use super::Float8;
use crate::ir::DType;
use serde::Serialize;

/// Type of an optimizer's states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentType {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
    /// A byte per element, and a float32 scale per block of
    /// [`STATE_BLOCK`](crate::ir::STATE_BLOCK), as in bitsandbytes and torchao.
    Block8,
}

words!(MomentType {
    F32 = "f32",
    Bf16 = "bf16",
    F16 = "f16",
    Block8 = "8bit",
});

impl MomentType {
    /// Returns the type of one element.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::F16 => DType::F16,
            Self::Block8 => DType::U8,
        }
    }
}

/// `[precision]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Precision {
    /// Dtype of gathered parameters, activations and GEMMs.
    pub compute: DType,
    /// Dtype of the main (optimizer) weights; `None` (scenario: `"none"`): the optimizer updates
    /// the compute weights.
    pub main_params: Option<DType>,
    /// Dtype in which policy fsdp2 and compile mode full keep the shards of parameters that are not
    /// trained; `None` for that of trained ones. (Other policies keep them as they compute.)
    pub frozen_params: Option<DType>,
    /// Dtype in which gradients are kept between micro-batches.
    pub main_grads: DType,
    /// Dtype in which gradients are reduced over the inner axis (policies fsdp2 and megatron: over
    /// both).
    pub comm_grads: DType,
    /// Type of the optimizer moments.
    pub moments: MomentType,
    /// Every sum has a fixed order on every device.
    pub deterministic: bool,
    /// Matmuls in 8 bits.
    #[serde(flatten)]
    pub float8: Float8,
}
