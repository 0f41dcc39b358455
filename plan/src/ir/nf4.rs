//! Weights in NF4 (QLoRA): a code of four bits per element, and a scale per block. Scales are
//! float32, or numbers of eight bits with a float32 factor per block of scales ("double
//! quantization").

use super::{DType, Shape};
use serde::Serialize;

/// Elements that share a scale (`bnb_4bit_blocksize`; `block_size` of torchao).
pub const NF4_BLOCK: u64 = 64;
/// Scales that share a factor (`scaler_block_size` of torchao).
pub const NF4_SCALES: u64 = 256;
/// Bytes of a weight's table of codes, as bitsandbytes allocates it.
const NF4_TABLE: u64 = 512;
/// Bytes of its table of codes of scales, and of the mean of its scales.
const NF4_SCALE_TABLE: u64 = 1024 + 512;

/// Place of the scales of a weight, their factors and their mean (`QuantState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Nf4Scales {
    /// In the parameter, behind the codes: they are sharded and gathered with them, as those of
    /// torchao's `NF4Tensor`.
    Sharded,
    /// In tensors of their own, whole on every rank, as those of bitsandbytes: `fully_shard` does
    /// not see them.
    Replicated,
}

/// A weight in NF4. The parameter that holds it has elements of another type, of which only the
/// bytes count (`bnb_4bit_quant_storage`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nf4 {
    /// Shape of the weight.
    pub shape: Shape,
    /// Place of the scales.
    pub scales: Nf4Scales,
    /// Scales have eight bits (`bnb_4bit_use_double_quant`).
    pub double: bool,
}

impl Nf4 {
    /// Returns the number of elements of the weight.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the bytes of the codes, rounded up to whole float32.
    #[must_use]
    pub fn code_bytes(&self) -> u64 {
        self.numel().div_ceil(2).next_multiple_of(4)
    }

    /// Returns the number of scales.
    #[must_use]
    pub fn scale_count(&self) -> u64 {
        self.numel().div_ceil(NF4_BLOCK)
    }

    /// Returns the number of factors of scales, if these have eight bits.
    #[must_use]
    pub fn factor_count(&self) -> u64 {
        self.scale_count().div_ceil(NF4_SCALES)
    }

    /// Returns the bytes of the scales; with double quantization of their factors, mean and codes,
    /// which follow each other in this order.
    #[must_use]
    pub fn scale_bytes(&self) -> u64 {
        if self.double {
            4 * self.factor_count() + 4 + self.scale_count()
        } else {
            4 * self.scale_count()
        }
    }

    /// Returns the bytes of the parameter.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        match self.scales {
            Nf4Scales::Sharded => self.code_bytes() + self.scale_bytes(),
            Nf4Scales::Replicated => self.code_bytes(),
        }
    }

    /// Returns the number of elements of a parameter of this type that holds the weight.
    #[must_use]
    pub fn stored_numel(&self, dtype: DType) -> u64 {
        self.stored_bytes().div_ceil(dtype.size())
    }

    /// Returns the bytes that every rank allocates for tensors which are not in the parameter, in
    /// the caching allocator's steps of 512.
    #[must_use]
    pub fn replicated_bytes(&self) -> u64 {
        let step = |bytes: u64| bytes.next_multiple_of(512);
        match self.scales {
            Nf4Scales::Sharded => 0,
            Nf4Scales::Replicated if self.double => {
                let factors = step(4 * self.factor_count());
                step(self.scale_count()) + factors + NF4_TABLE + NF4_SCALE_TABLE
            }
            Nf4Scales::Replicated => step(4 * self.scale_count()) + NF4_TABLE,
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
        let of = |scales| Nf4 {
            shape: smallvec![14_336, 4096],
            scales,
            double: true,
        };
        let (numel, sharded) = (14_336 * 4096, of(Nf4Scales::Sharded));
        let scales = numel / 64 + numel / 64 / 256 * 4;
        assert_eq!(sharded.stored_bytes(), numel / 2 + scales + 4);
        assert_eq!(sharded.replicated_bytes(), 0);
        let replicated = of(Nf4Scales::Replicated);
        assert_eq!(replicated.stored_bytes(), numel / 2);
        assert_eq!(replicated.stored_numel(DType::Bf16), numel / 4);
        assert_eq!(replicated.replicated_bytes(), scales + 2048);
        let float = Nf4 {
            double: false,
            ..replicated
        };
        assert_eq!(float.scale_bytes(), numel / 64 * 4);
        assert_eq!(float.replicated_bytes(), numel / 16 + 512);
    }

    #[test]
    fn sizes_that_are_no_multiple_of_a_block_are_rounded_up() {
        let odd = Nf4 {
            shape: smallvec![3, 43],
            scales: Nf4Scales::Sharded,
            double: true,
        };
        assert_eq!((odd.code_bytes(), odd.scale_count()), (68, 3));
        assert_eq!(odd.stored_bytes(), 68 + 4 + 4 + 3);
        assert_eq!(odd.stored_numel(DType::F32), 20);
    }
}
