//! Frozen weights with fewer bits than the compute type: NF4 (QLoRA) and int8 (`LLM.int8`).
//!
//! NF4 has a four-bit code per element and a scale per block. Scales are float32, or eight-bit
//! numbers with a float32 factor per block of scales ("double quantization"). int8 has an eight-bit
//! code per element and a float32 scale per row.

use super::{DType, Shape};
use serde::Serialize;

/// Number of NF4 elements that share a scale (`bnb_4bit_blocksize`; `block_size` of torchao).
pub const NF4_BLOCK: u64 = 64;
/// Number of scales that share a factor (`scaler_block_size` of torchao).
pub const NF4_SCALES: u64 = 256;
/// Bytes of a weight's table of codes, as bitsandbytes allocates it.
const NF4_TABLE: u64 = 512;
/// Bytes of a weight's table of codes for scales, and of the mean of its scales.
const NF4_SCALE_TABLE: u64 = 1024 + 512;

/// Format of a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PackedFormat {
    /// NF4 with double quantization (`bnb_4bit_use_double_quant`).
    Nf4,
    /// NF4 with scales in float32.
    Nf4F32,
    /// int8 with a scale per row, as `Linear8bitLt` of bitsandbytes stores it.
    Int8,
}

/// Place of the scales of a weight, their factors and their mean (`QuantState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PackedScales {
    /// In the parameter, after the codes. They are sharded and gathered with the codes, as in
    /// torchao's `NF4Tensor`.
    Sharded,
    /// In separate tensors, which are whole on every rank, as in bitsandbytes. `fully_shard` does
    /// not manage them.
    Replicated,
}

/// A weight with fewer bits. The parameter that stores it has elements of another type, whose
/// values have no meaning (`bnb_4bit_quant_storage`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Packed {
    /// Shape of the weight.
    pub shape: Shape,
    /// Format.
    pub format: PackedFormat,
    /// Place of the scales.
    pub scales: PackedScales,
}

impl Packed {
    /// Returns the number of elements of the weight.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the bytes of the codes, rounded up to whole float32 elements.
    #[must_use]
    pub fn code_bytes(&self) -> u64 {
        let bytes = match self.format {
            PackedFormat::Nf4 | PackedFormat::Nf4F32 => self.numel().div_ceil(2),
            PackedFormat::Int8 => self.numel(),
        };
        bytes.next_multiple_of(4)
    }

    /// Returns the number of scales.
    #[must_use]
    pub fn scale_count(&self) -> u64 {
        match self.format {
            PackedFormat::Nf4 | PackedFormat::Nf4F32 => self.numel().div_ceil(NF4_BLOCK),
            PackedFormat::Int8 => self.shape.first().copied().unwrap_or(1),
        }
    }

    /// Returns the number of adjacent elements that share a scale.
    #[must_use]
    pub fn scale_block(&self) -> u64 {
        match self.format {
            PackedFormat::Nf4 | PackedFormat::Nf4F32 => NF4_BLOCK,
            PackedFormat::Int8 => (self.numel() / self.scale_count().max(1)).max(1),
        }
    }

    /// Returns the number of factors of scales, if scales have eight bits.
    #[must_use]
    pub fn factor_count(&self) -> u64 {
        self.scale_count().div_ceil(NF4_SCALES)
    }

    /// Returns the bytes of the scales. With double quantization, these are the bytes of their
    /// factors, mean and codes, in this order.
    #[must_use]
    pub(crate) fn scale_bytes(&self) -> u64 {
        match self.format {
            PackedFormat::Nf4 => 4 * self.factor_count() + 4 + self.scale_count(),
            PackedFormat::Nf4F32 | PackedFormat::Int8 => 4 * self.scale_count(),
        }
    }

    /// Returns the bytes of the parameter.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        match self.scales {
            PackedScales::Sharded => self.code_bytes() + self.scale_bytes(),
            PackedScales::Replicated => self.code_bytes(),
        }
    }

    /// Returns the number of elements of a parameter of this type that holds the weight.
    #[must_use]
    pub(crate) fn stored_numel(&self, dtype: DType) -> u64 {
        self.stored_bytes().div_ceil(dtype.size())
    }

    /// Returns the bytes that every rank allocates for tensors that are not in the parameter, in
    /// the caching allocator's steps of 512.
    #[must_use]
    pub(crate) fn replicated_bytes(&self) -> u64 {
        let step = |bytes: u64| bytes.next_multiple_of(512);
        match (self.scales, self.format) {
            (PackedScales::Sharded, _) => 0,
            (PackedScales::Replicated, PackedFormat::Nf4) => {
                let factors = step(4 * self.factor_count());
                step(self.scale_count()) + factors + NF4_TABLE + NF4_SCALE_TABLE
            }
            (PackedScales::Replicated, PackedFormat::Nf4F32) => {
                step(4 * self.scale_count()) + NF4_TABLE
            }
            (PackedScales::Replicated, PackedFormat::Int8) => step(4 * self.scale_count()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    /// 4.127 bits per element: 4, 8 per 64, and 32 per 64 * 256.
    #[test]
    fn bytes_are_those_of_double_quantization() {
        let of = |scales| Packed {
            shape: smallvec![14_336, 4096],
            format: PackedFormat::Nf4,
            scales,
        };
        let (numel, sharded) = (14_336 * 4096, of(PackedScales::Sharded));
        let scales = numel / 64 + numel / 64 / 256 * 4;
        assert_eq!(sharded.stored_bytes(), numel / 2 + scales + 4);
        assert_eq!(sharded.replicated_bytes(), 0);
        let replicated = of(PackedScales::Replicated);
        assert_eq!(replicated.stored_bytes(), numel / 2);
        assert_eq!(replicated.stored_numel(DType::Bf16), numel / 4);
        assert_eq!(replicated.replicated_bytes(), scales + 2048);
        let float = Packed {
            format: PackedFormat::Nf4F32,
            ..replicated
        };
        assert_eq!(float.scale_bytes(), numel / 64 * 4);
        assert_eq!(float.replicated_bytes(), numel / 16 + 512);
    }

    #[test]
    fn sizes_that_are_no_multiple_of_a_block_are_rounded_up() {
        let odd = Packed {
            shape: smallvec![3, 43],
            format: PackedFormat::Nf4,
            scales: PackedScales::Sharded,
        };
        assert_eq!((odd.code_bytes(), odd.scale_count()), (68, 3));
        assert_eq!(odd.stored_bytes(), 68 + 4 + 4 + 3);
        assert_eq!(odd.stored_numel(DType::F32), 20);
    }

    /// `CB` and `SCB` of a bitsandbytes layer.
    #[test]
    fn int8_has_a_scale_per_row() {
        let of = |scales| Packed {
            shape: smallvec![3, 43],
            format: PackedFormat::Int8,
            scales,
        };
        let sharded = of(PackedScales::Sharded);
        assert_eq!((sharded.code_bytes(), sharded.scale_count()), (132, 3));
        assert_eq!(sharded.stored_bytes(), 132 + 12);
        let replicated = of(PackedScales::Replicated);
        assert_eq!(
            (replicated.stored_bytes(), replicated.replicated_bytes()),
            (132, 512)
        );
    }
}
