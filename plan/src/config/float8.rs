//! Keys of `[precision]` about 8-bit matmuls.

use crate::ir::DType;
use serde::Serialize;

/// How operands of matmuls are scaled before they are cast to 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float8Recipe {
    /// No matmul runs in 8 bits.
    None,
    /// One scale per tensor, from its amax (torchao: tensorwise; Transformer Engine: current
    /// scaling).
    Tensorwise,
    /// One power-of-two scale per row of each operand.
    Rowwise,
    /// One power-of-two scale per 128 elements of a row of activations and gradients, and per
    /// 128x128 elements of weights (DeepSeek-V3, Transformer Engine: block scaling).
    Blockwise,
    /// One power-of-two scale per 32 elements of a row (MXFP8).
    Mxfp8,
}

words!(Float8Recipe {
    None = "none",
    Tensorwise = "tensorwise",
    Rowwise = "rowwise",
    Blockwise = "blockwise",
    Mxfp8 = "mxfp8",
});

/// An 8-bit floating-point dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float8Format {
    /// 4 exponent bits, 3 mantissa bits.
    E4m3,
    /// 5 exponent bits, 2 mantissa bits.
    E5m2,
}

words!(Float8Format {
    E4m3 = "e4m3",
    E5m2 = "e5m2",
});

impl Float8Format {
    /// Returns the dtype.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::E4m3 => DType::F8E4m3,
            Self::E5m2 => DType::F8E5m2,
        }
    }
}

/// The form of a layer's input that is saved for the gradient of its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float8Saved {
    /// The input itself; backward casts it.
    Compute,
    /// Its transposed 8-bit copy, which forward writes.
    Float8,
}

words!(Float8Saved {
    Compute = "compute",
    Float8 = "float8",
});

/// 8-bit matmuls of linear layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Float8 {
    /// Scales.
    #[serde(rename = "float8_recipe")]
    pub recipe: Float8Recipe,
    /// Format of gradients; activations and weights are e4m3.
    #[serde(rename = "float8_grad")]
    pub grad: Float8Format,
    /// The form of inputs that forward saves for the gradients of weights.
    #[serde(rename = "float8_saved")]
    pub saved: Float8Saved,
    /// Globs of modules whose linear layers stay in the compute dtype.
    #[serde(rename = "float8_exclude")]
    pub exclude: Vec<String>,
    /// Number of blocks at the start of the stack that stay in the compute dtype.
    #[serde(rename = "float8_first_bf16")]
    pub first_bf16: u32,
    /// Number of blocks at the end of the stack that stay in the compute dtype.
    #[serde(rename = "float8_last_bf16")]
    pub last_bf16: u32,
    /// Tensor cores use their fast, less precise accumulation in forward.
    #[serde(rename = "float8_fast_accum")]
    pub fast_accum: bool,
    /// Gathers send the 8-bit codes of weights, with scales from the amax over all ranks.
    #[serde(rename = "float8_all_gather")]
    pub all_gather: bool,
    /// The grouped matmuls of experts also run in 8 bits.
    #[serde(rename = "float8_experts", skip_serializing_if = "std::ops::Not::not")]
    pub experts: bool,
    /// The weights of experts are sharded, so gathers send them: several ranks have the same
    /// experts.
    #[serde(skip)]
    pub gathers_experts: bool,
}

impl Float8 {
    /// Returns whether any matmul runs in 8 bits.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.recipe != Float8Recipe::None
    }
}

#[cfg(test)]
impl Float8 {
    /// Returns the defaults of scenarios without `float8_recipe`.
    pub(crate) fn off() -> Self {
        Self {
            recipe: Float8Recipe::None,
            grad: Float8Format::E5m2,
            saved: Float8Saved::Compute,
            exclude: Vec::new(),
            first_bf16: 0,
            last_bf16: 0,
            fast_accum: true,
            all_gather: false,
            experts: false,
            gathers_experts: false,
        }
    }
}
