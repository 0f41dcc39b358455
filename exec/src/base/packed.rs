//! Packed weights: the codec of each format.

use super::{int8, nf4};
use shardlab_plan::ir::{Packed, PackedFormat};

/// Returns the bytes that hold a weight: its codes, then its scales.
pub(crate) fn quantize(packed: &Packed, weight: &[f32]) -> Vec<u8> {
    match packed.format {
        PackedFormat::Nf4 | PackedFormat::Nf4F32 => nf4::quantize(packed, weight),
        PackedFormat::Int8 => int8::quantize(packed, weight),
    }
}

/// Writes the elements of a weight, from the bytes that hold it, in parts: calls
/// `write(first element, elements)`.
pub(crate) fn dequantize(packed: &Packed, stored: &[u8], write: impl FnMut(usize, &[f32])) {
    match packed.format {
        PackedFormat::Nf4 | PackedFormat::Nf4F32 => nf4::dequantize(packed, stored, write),
        PackedFormat::Int8 => int8::dequantize(packed, stored, write),
    }
}
