//! `[precision]`.

use super::Float8;
use crate::ir::{DType, PackedFormat};
use serde::Serialize;

/// Dtype of optimizer state.
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
    /// Returns the dtype of one element.
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

/// Dtype in which frozen parameters are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrozenType {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
    /// NF4 with double quantization, for the weights of linear layers (QLoRA): see
    /// [`Packed`](crate::ir::Packed). Other parameters are kept in the dtype in which they are
    /// gathered.
    Nf4,
    /// NF4 with float32 scales.
    Nf4F32,
    /// int8 with a scale per row, for the same weights (`load_in_8bit`).
    Int8,
}

words!(FrozenType {
    F32 = "f32",
    Bf16 = "bf16",
    F16 = "f16",
    Nf4 = "nf4",
    Nf4F32 = "nf4_f32",
    Int8 = "int8",
});

impl FrozenType {
    /// Returns the dtype of one element; `None` for packed weights.
    #[must_use]
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::Bf16),
            Self::F16 => Some(DType::F16),
            Self::Nf4 | Self::Nf4F32 | Self::Int8 => None,
        }
    }

    /// Returns the format of packed weights; `None` for unpacked dtypes.
    #[must_use]
    pub const fn packed(self) -> Option<PackedFormat> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => None,
            Self::Nf4 => Some(PackedFormat::Nf4),
            Self::Nf4F32 => Some(PackedFormat::Nf4F32),
            Self::Int8 => Some(PackedFormat::Int8),
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
    /// Dtype in which policy fsdp2 and compile mode full keep the shards of frozen parameters;
    /// `None` for that of trained ones. Other policies keep them in the compute dtype, or packed.
    pub frozen_params: Option<FrozenType>,
    /// Dtype in which gradients are kept between micro-batches.
    pub main_grads: DType,
    /// Dtype in which gradients are reduced over the inner axis (for policies fsdp2 and megatron,
    /// over both axes).
    pub comm_grads: DType,
    /// Type of the optimizer moments.
    pub moments: MomentType,
    /// Cross entropies read logits in float32, not in the compute type.
    pub loss_fp32_upcast: bool,
    /// All sums have a fixed order on every device.
    pub deterministic: bool,
    /// 8-bit matmuls.
    #[serde(flatten)]
    pub float8: Float8,
}
