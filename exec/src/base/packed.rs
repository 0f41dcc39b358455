//! Packed weights: the codec of each format.

mod int8;
mod nf4;

#[cfg(feature = "cuda")]
pub(crate) use nf4::TABLE as NF4_TABLE;
use shardlab_plan::ir::{Packed, PackedFormat};

/// Returns the bytes of a packed weight: its codes, then its scales.
pub(crate) fn quantize(packed: &Packed, weight: &[f32]) -> Vec<u8> {
    match packed.format {
        PackedFormat::Nf4 | PackedFormat::Nf4F32 => nf4::quantize(packed, weight),
        PackedFormat::Int8 => int8::quantize(packed, weight),
    }
}

/// Unpacks the elements of a weight from its bytes, in parts: calls
/// `write(first element, elements)`.
pub(crate) fn dequantize(packed: &Packed, stored: &[u8], write: impl FnMut(usize, &[f32])) {
    match packed.format {
        PackedFormat::Nf4 | PackedFormat::Nf4F32 => nf4::dequantize(packed, stored, write),
        PackedFormat::Int8 => int8::dequantize(packed, stored, write),
    }
}

/// Returns the largest magnitude of some numbers.
fn magnitude(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0f32, |a, x| a.max(x.abs()))
}

/// Returns the `n`-th float of some bytes.
fn float(bytes: &[u8], n: usize) -> f32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[4 * n..4 * n + 4]);
    f32::from_le_bytes(out)
}

#[cfg(test)]
fn read(packed: &Packed, stored: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; packed.numel() as usize];
    dequantize(packed, stored, |first, part| {
        out[first..first + part.len()].copy_from_slice(part);
    });
    out
}
