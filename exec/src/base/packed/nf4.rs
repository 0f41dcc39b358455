//! Weights in NF4, as bitsandbytes stores and reads them ("QLoRA:
//! Efficient Finetuning of Quantized LLMs", Dettmers et al. 2023).
//!
//! Every block of [`NF4_BLOCK`] elements has a scale, which is its largest magnitude. Every element
//! is stored as one of 16 multiples of the scale, in 4 bits; the first of two elements is in the
//! upper half of a byte. With double quantization, the mean is subtracted from the scales, and they
//! are stored in 8 bits ([`blockwise`]), in blocks of [`NF4_SCALES`].

use super::{float, magnitude};
use crate::base::blockwise;
use shardlab_plan::ir::{NF4_BLOCK, NF4_SCALES, Packed, PackedFormat};

const BLOCK: usize = NF4_BLOCK as usize;
const SCALES: usize = NF4_SCALES as usize;

/// Factors by code: quantiles of a normal distribution (`get_4bit_type("nf4")`).
pub(crate) const TABLE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Bounds between adjacent factors (`dQuantizeNF4`).
const BOUNDS: [f32; 15] = [
    -0.848_096_4,
    -0.610_632_9,
    -0.459_995_27,
    -0.339_679_43,
    -0.234_607_4,
    -0.137_911_73,
    -0.045_525_018,
    0.039_790_15,
    0.120_255_25,
    0.203_521_25,
    0.292_013_77,
    0.389_312_53,
    0.501_663_44,
    0.642_786_9,
    0.861_478_45,
];

/// Returns the code of a number between -1 and 1. NaN has the first code.
fn code(x: f32) -> u8 {
    BOUNDS.partition_point(|bound| x > *bound) as u8
}

/// Returns the bytes of a packed weight: its codes and its scales, or, with double quantization,
/// the factors, the mean and the codes of the scales.
pub(super) fn quantize(nf4: &Packed, weight: &[f32]) -> Vec<u8> {
    let scales: Vec<f32> = weight.chunks(BLOCK).map(magnitude).collect();
    let mut out = Vec::with_capacity(nf4.stored_bytes() as usize);
    let mut codes = Vec::with_capacity(weight.len());
    for (block, scale) in weight.chunks(BLOCK).zip(&scales) {
        let inverse = 1.0 / scale;
        codes.extend(block.iter().map(|x| code(x * inverse)));
    }
    let pair = |two: &[u8]| two[0] << 4 | two.get(1).copied().unwrap_or(0);
    out.extend(codes.chunks(2).map(pair));
    out.resize(nf4.code_bytes() as usize, 0);
    if nf4.format == PackedFormat::Nf4F32 {
        out.extend(scales.iter().flat_map(|s| s.to_le_bytes()));
        return out;
    }
    let mean = (scales.iter().map(|s| f64::from(*s)).sum::<f64>() / scales.len() as f64) as f32;
    let centered: Vec<f32> = scales.iter().map(|s| s - mean).collect();
    let mut small = vec![0; scales.len()];
    for (values, codes) in centered.chunks(SCALES).zip(small.chunks_mut(SCALES)) {
        let factor = blockwise::quantize(values, blockwise::codebook(true), codes);
        out.extend(factor.to_le_bytes());
    }
    out.extend(mean.to_le_bytes());
    out.extend(small);
    out
}

/// Unpacks the elements of a weight from its bytes, in parts of at most one block: calls
/// `write(first element, elements)`.
pub(super) fn dequantize(nf4: &Packed, stored: &[u8], mut write: impl FnMut(usize, &[f32])) {
    let numel = nf4.numel() as usize;
    let (codes, rest) = stored.split_at(nf4.code_bytes() as usize);
    let scales = Scales::new(nf4, rest);
    let mut block = [0.0; BLOCK];
    for first in (0..numel).step_by(BLOCK) {
        let n = BLOCK.min(numel - first);
        let scale = scales.get(first / BLOCK);
        for (i, x) in block[..n].iter_mut().enumerate() {
            let both = codes[(first + i) / 2];
            let code = if i % 2 == 0 { both >> 4 } else { both & 15 };
            *x = TABLE[usize::from(code)] * scale;
        }
        write(first, &block[..n]);
    }
}

/// Scales of a weight's blocks.
enum Scales<'b> {
    Float(&'b [u8]),
    Double {
        factors: &'b [u8],
        mean: f32,
        codes: &'b [u8],
    },
}

impl<'b> Scales<'b> {
    fn new(nf4: &Packed, bytes: &'b [u8]) -> Self {
        if nf4.format == PackedFormat::Nf4F32 {
            return Self::Float(bytes);
        }
        let (factors, rest) = bytes.split_at(4 * nf4.factor_count() as usize);
        Self::Double {
            factors,
            mean: float(rest, 0),
            codes: &rest[4..],
        }
    }

    fn get(&self, block: usize) -> f32 {
        match self {
            Self::Float(scales) => float(scales, block),
            Self::Double {
                factors,
                mean,
                codes,
            } => {
                let map = blockwise::codebook(true);
                map[usize::from(codes[block])] * float(factors, block / SCALES) + mean
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;
    use serde_json::Value;
    use shardlab_plan::ir::PackedScales;

    fn nf4(rows: u64, columns: u64) -> Packed {
        Packed {
            shape: [rows, columns].into_iter().collect(),
            format: PackedFormat::Nf4,
            scales: PackedScales::Sharded,
        }
    }

    fn floats(value: &Value) -> Vec<f32> {
        let bits = value.as_array().unwrap().iter();
        bits.map(|b| f32::from_bits(b.as_u64().unwrap() as u32))
            .collect()
    }

    fn hex(value: &Value) -> Vec<u8> {
        let text = value.as_str().unwrap().as_bytes();
        let byte = |two: &[u8]| u8::from_str_radix(str::from_utf8(two).unwrap(), 16).unwrap();
        text.chunks(2).map(byte).collect()
    }

    /// Codes and scales equal those of bitsandbytes bit by bit, and so do the numbers read from
    /// them (`nf4.py`).
    #[test]
    fn bytes_and_values_are_those_of_bitsandbytes() {
        let text = include_str!("../../../tests/kernels/nf4.json");
        let cases: Value = serde_json::from_str(text).unwrap();
        let cases = cases.as_array().unwrap();
        assert_eq!(cases.len(), 3);
        for case in cases {
            let shape = case["shape"].as_array().unwrap();
            let nf4 = nf4(shape[0].as_u64().unwrap(), shape[1].as_u64().unwrap());
            let unit = case["unit"].as_f64().unwrap() as f32;
            let element = |i: u64| {
                let (number, factor) = (i * 7919 % 1009, 1 + i / 64 % 37);
                (number as f32 - 504.0) * factor as f32 * unit
            };
            let weight: Vec<f32> = (0..nf4.numel()).map(element).collect();
            let stored = quantize(&nf4, &weight);
            assert_eq!(stored.len() as u64, nf4.stored_bytes());
            let (codes, rest) = stored.split_at(nf4.code_bytes() as usize);
            assert_eq!(codes, hex(&case["codes"]));
            let near = |a: f32, b: f32| (a - b).abs() <= 1e-6 * b.abs();
            let (numbers, scales) = rest.split_at(rest.len() - nf4.scale_count() as usize);
            assert_eq!(scales, hex(&case["scales"]));
            let theirs = [floats(&case["factors"]), floats(&case["mean"])].concat();
            assert_eq!(numbers.len(), 4 * theirs.len());
            for (ours, theirs) in numbers.chunks(4).zip(theirs) {
                let ours = f32::from_le_bytes(ours.try_into().unwrap());
                assert!(near(ours, theirs), "{ours} {theirs}");
            }
            let ours = read(&nf4, &stored);
            let theirs = floats(&case["read"]);
            assert_eq!(theirs.len(), ours.len().div_ceil(97));
            for (ours, theirs) in ours.iter().step_by(97).zip(theirs) {
                assert!(near(*ours, theirs), "{ours} {theirs}");
            }
        }
    }

    #[test]
    fn bounds_are_halfway_between_factors() {
        for (pair, bound) in TABLE.windows(2).zip(BOUNDS) {
            assert!((pair[0].midpoint(pair[1]) - bound).abs() < 1e-6, "{bound}");
        }
        for (n, x) in TABLE.iter().enumerate() {
            assert_eq!(usize::from(code(*x)), n);
        }
    }

    /// A block of zeros has a scale of zero, whose inverse is infinite.
    #[test]
    fn zeros_stay_near_zero() {
        let of = nf4(2, 64);
        let mut weight = vec![0.0; 128];
        weight[64..].fill(0.5);
        let back = read(&of, &quantize(&of, &weight));
        assert!(back.iter().all(|x| x.is_finite()), "{back:?}");
        assert!(back[64..].iter().all(|x| (x - 0.5).abs() < 0.01));
    }

    #[test]
    fn odd_sizes_are_read_to_their_end() {
        let weight: Vec<f32> = (0..129).map(|i| (i as f32 * 0.7).sin()).collect();
        for format in [PackedFormat::Nf4F32, PackedFormat::Nf4] {
            let of = Packed {
                format,
                ..nf4(3, 43)
            };
            let stored = quantize(&of, &weight);
            assert_eq!(stored.len() as u64, of.stored_bytes());
            for (a, b) in weight.iter().zip(read(&of, &stored)) {
                assert!((a - b).abs() < 0.17, "{a} {b}");
            }
        }
    }
}
