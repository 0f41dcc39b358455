//! Weights in int8, as bitsandbytes stores them and backward reads them ("LLM.int8(): 8-bit Matrix
//! Multiplication for Transformers at Scale", Dettmers et al. 2022): `int8_vectorwise_quant`, and
//! `CB * (SCB / 127)` in `MatMul8bitLt.backward`.

use super::{float, magnitude};
use shardlab_plan::ir::Packed;

/// Largest magnitude of a code.
const LARGEST: f32 = 127.0;

/// Returns the bytes of a packed weight: its codes, then the largest magnitude of each row.
pub(super) fn quantize(of: &Packed, weight: &[f32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(of.stored_bytes() as usize);
    let mut scales = Vec::new();
    for row in weight.chunks(of.scale_block() as usize) {
        let largest = magnitude(row);
        // A row of zeros has codes of zero.
        let factor = if largest > 0.0 {
            LARGEST / largest
        } else {
            0.0
        };
        out.extend(
            row.iter()
                .map(|x| (x * factor).round_ties_even() as i8 as u8),
        );
        scales.extend(largest.to_le_bytes());
    }
    out.resize(of.code_bytes() as usize, 0);
    out.extend(scales);
    out
}

/// Writes the elements of a weight row by row.
pub(super) fn dequantize(of: &Packed, stored: &[u8], mut write: impl FnMut(usize, &[f32])) {
    let (codes, scales) = stored.split_at(of.code_bytes() as usize);
    let columns = of.scale_block() as usize;
    let mut row = vec![0.0; columns];
    for i in 0..of.scale_count() as usize {
        let scale = float(scales, i) / LARGEST;
        let first = i * columns;
        for (x, code) in row.iter_mut().zip(&codes[first..first + columns]) {
            *x = f32::from(*code as i8) * scale;
        }
        write(first, &row);
    }
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;
    use shardlab_plan::ir::{PackedFormat, PackedScales};

    fn packed(rows: u64, columns: u64) -> Packed {
        Packed {
            shape: [rows, columns].into_iter().collect(),
            format: PackedFormat::Int8,
            scales: PackedScales::Sharded,
        }
    }

    /// Values computed by hand: the largest magnitude of a row has code 127.
    #[test]
    fn codes_are_shares_of_the_largest_magnitude_of_a_row() {
        let of = packed(3, 3);
        let weight = [1.27, -0.5, 0.015, 0.0, 0.0, 0.0, -2.54, 2.54, 1.27];
        let stored = quantize(&of, &weight);
        assert_eq!(stored.len() as u64, of.stored_bytes());
        let codes: Vec<i8> = stored[..9].iter().map(|c| *c as i8).collect();
        assert_eq!(codes, [127, -50, 2, 0, 0, 0, -127, 127, 64]);
        for (x, y) in read(&of, &stored)
            .iter()
            .zip([1.27, -0.5, 0.02, 0.0, 0.0, 0.0, -2.54, 2.54, 1.28])
        {
            assert!((x - y).abs() < 1e-6, "{x} {y}");
        }
    }

    #[test]
    fn errors_are_at_most_half_a_step() {
        let of = packed(5, 67);
        let weight: Vec<f32> = (0..of.numel())
            .map(|i| ((i * 7919 % 1009) as f32 - 504.0) * (1 + i / 67) as f32)
            .collect();
        let again = read(&of, &quantize(&of, &weight));
        for (row, read) in weight.chunks(67).zip(again.chunks(67)) {
            let largest = magnitude(row);
            for (x, y) in row.iter().zip(read) {
                assert!((x - y).abs() <= 0.5001 * largest / 127.0, "{x} {y}");
            }
        }
    }
}
