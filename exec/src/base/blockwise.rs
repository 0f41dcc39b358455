//! Block-wise 8-bit numbers: optimizer states of bitsandbytes and torchao.
//!
//! A block of [`STATE_BLOCK`] numbers has a float32 scale, its largest magnitude, and an 8-bit code
//! per number, which selects one of 256 multiples of the scale ("8-bit Optimizers via Block-wise
//! Quantization", Dettmers et al. 2022). Factors are close together near zero. First moments also
//! have negative factors; second moments do not.

use shardlab_plan::ir::STATE_BLOCK;
use std::sync::LazyLock;

/// Elements of a block.
pub(crate) const BLOCK: usize = STATE_BLOCK as usize;

/// Smallest scale of a block that has been written (torchao's `scale_tensor`).
pub(crate) const SMALLEST: f32 = 1e-12;

/// Factors by code, ascending.
pub(crate) type Codebook = [f32; 256];

static SIGNED: LazyLock<Codebook> = LazyLock::new(|| dynamic_map(true));
static UNSIGNED: LazyLock<Codebook> = LazyLock::new(|| dynamic_map(false));

/// Returns the factors of codes.
pub(crate) fn codebook(signed: bool) -> &'static Codebook {
    if signed { &SIGNED } else { &UNSIGNED }
}

/// Returns what bitsandbytes calls the dynamic map. It has seven decades, and 0 and 1. Each decade
/// divides [0.1, 1] into twice as many equal parts as the decade below and contains their
/// midpoints.
fn dynamic_map(signed: bool) -> Codebook {
    let mut all: Vec<f32> = vec![0.0, 1.0];
    for decade in 0..7u32 {
        let parts = if signed { 1u32 << decade } else { 2 << decade };
        let width = 0.9 / f64::from(parts);
        for part in 0..parts {
            let middle = 0.1 + width * (f64::from(part) + 0.5);
            let factor = (middle * 10f64.powi(decade as i32 - 6)) as f32;
            all.push(factor);
            if signed {
                all.push(-factor);
            }
        }
    }
    all.sort_by(f32::total_cmp);
    let mut map = [0.0; 256];
    map.copy_from_slice(&all);
    map
}

/// Returns the number of scales of `numel` numbers.
pub(crate) const fn scales(numel: usize) -> usize {
    numel.div_ceil(BLOCK)
}

/// Returns the code of the factor nearest to `x`. If two are equally near, returns the larger one.
fn nearest(map: &Codebook, x: f32) -> u8 {
    let mut code = 0;
    for step in [128, 64, 32, 16, 8, 4, 2, 1] {
        if x >= map[code + step] {
            code += step;
        }
    }
    let above = (code + 1).min(255);
    let up = x - map[code] >= (map[above] - map[code]) * 0.5;
    (if up { above } else { code }) as u8
}

/// Writes the codes of one block and returns its scale. A NaN makes the scale NaN, so that it
/// propagates.
pub(crate) fn quantize(values: &[f32], map: &Codebook, codes: &mut [u8]) -> f32 {
    let largest = |a: f32, x: &f32| {
        if x.abs() > a || x.is_nan() {
            x.abs()
        } else {
            a
        }
    };
    let scale = values.iter().fold(SMALLEST, largest);
    write(values, scale, map, codes);
    scale
}

fn write(values: &[f32], scale: f32, map: &Codebook, codes: &mut [u8]) {
    for (code, x) in codes.iter_mut().zip(values) {
        *code = nearest(map, x / scale);
    }
}

/// Reads numbers from one block.
pub(crate) fn dequantize(codes: &[u8], scale: f32, map: &Codebook, values: &mut [f32]) {
    for (x, code) in values.iter_mut().zip(codes) {
        *x = map[usize::from(*code)] * scale;
    }
}

/// Like [`quantize`], but for numbers that were read from a whole block: reading the result returns
/// the same numbers. Their largest magnitude is the block's scale or, because no factor is -1, the
/// scale times the smallest factor.
pub(crate) fn restore(values: &[f32], map: &Codebook, codes: &mut [u8]) -> f32 {
    let largest = values.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let negative = largest / map[0].abs().max(f32::MIN_POSITIVE);
    let candidates = [
        largest,
        negative,
        negative.next_down(),
        negative.next_up(),
        0.0,
    ];
    for scale in candidates.into_iter().filter(|s| s.is_finite()) {
        let divisor = if scale > 0.0 { scale } else { 1.0 };
        write(values, divisor, map, codes);
        let same = |(code, x): (&u8, &f32)| map[usize::from(*code)] * scale == *x;
        if codes.iter().zip(values).all(same) {
            return scale;
        }
    }
    quantize(values, map, codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tables of torchao and bitsandbytes, which PyTorch computes in float32 (`optimizers.py`).
    #[test]
    fn maps_are_those_of_bitsandbytes() {
        let text = include_str!("../../tests/kernels/optimizers.json");
        let all: serde_json::Value = serde_json::from_str(text).unwrap();
        for (name, signed) in [("signed", true), ("unsigned", false)] {
            let table = all[name].as_array().unwrap();
            assert_eq!(table.len(), 256);
            for (ours, theirs) in codebook(signed).iter().zip(table) {
                let (ours, theirs) = (f64::from(*ours), theirs.as_f64().unwrap());
                assert!(
                    (ours - theirs).abs() <= 1e-6 * theirs.abs(),
                    "{ours} {theirs}"
                );
            }
        }
    }

    #[test]
    fn codes_are_the_nearest_factors() {
        for map in [codebook(true), codebook(false)] {
            for (code, factor) in map.iter().enumerate() {
                assert_eq!(usize::from(nearest(map, *factor)), code);
            }
            for step in 0..=4000 {
                let x = step as f32 / 2000.0 - 1.0;
                let distance = |f: &f32| (f64::from(*f) - f64::from(x)).abs();
                let best = map.iter().map(distance).fold(f64::INFINITY, f64::min);
                let got = distance(&map[usize::from(nearest(map, x))]);
                assert!(got <= best + 1e-8, "{x}");
            }
        }
    }

    /// Codes and scales that are written after loading a checkpoint represent the numbers in it.
    #[test]
    fn numbers_that_were_read_are_restored() {
        let mut state = 7u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        for signed in [true, false] {
            let map = codebook(signed);
            for block in 0..400 {
                let unit = 10f32.powi(block % 30 - 25);
                let mut values: Vec<f32> = (0..BLOCK).map(|_| random() * unit).collect();
                if !signed {
                    values.iter_mut().for_each(|x| *x = x.abs());
                } else if block % 2 == 0 {
                    // Below zero alone.
                    values.iter_mut().for_each(|x| *x = -x.abs());
                }
                let mut codes = [0; BLOCK];
                let scale = quantize(&values, map, &mut codes);
                let mut read = [0.0; BLOCK];
                dequantize(&codes, scale, map, &mut read);
                let mut again = [0; BLOCK];
                let scale = restore(&read, map, &mut again);
                let mut back = [0.0; BLOCK];
                dequantize(&again, scale, map, &mut back);
                assert_eq!(back, read, "block {block}");
            }
        }
        // State at the start of the first step.
        let mut codes = [9; 4];
        let scale = restore(&[0.0; 4], codebook(true), &mut codes);
        let mut read = [1.0; 4];
        dequantize(&codes, scale, codebook(true), &mut read);
        assert_eq!(read, [0.0; 4]);
    }

    #[test]
    fn a_nan_spreads_over_its_block() {
        let mut codes = [0; 3];
        let scale = quantize(&[1.0, f32::NAN, 2.0], codebook(true), &mut codes);
        assert!(scale.is_nan());
    }
}
