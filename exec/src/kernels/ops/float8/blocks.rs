//! Casts to 8-bit floating point with a scale per block.

use super::{amax, cast_row, most};
use crate::base::float8::{e8m0, e8m0_scale, power_of_two, scale};
use crate::kernels::error::OperandError;
use crate::kernels::operands::same;
use crate::kernels::scratch::Scratch;
use crate::kernels::view::View;
use shardlab_plan::ir::{ScaleBlock, op};

/// Casts a matrix with `cols` columns; writes codes, and the reciprocals of scales or their
/// exponents.
pub(in crate::kernels) fn cast(
    of: op::Float8CastBlocks,
    x: &[f32],
    cols: usize,
    [codes, inverses]: [View; 2],
) -> Result<(), OperandError> {
    let (most, block) = (most(of.to)?, of.block);
    let (height, width) = (block.rows as usize, block.cols as usize);
    let rows = x.len() / cols.max(1);
    let [down, across] = block.grid([rows as u64, cols as u64]);
    same("the codes", x.len(), codes.numel)?;
    same("the scales", (down * across) as usize, inverses.numel)?;
    let mut scaled = Scratch::take(cols);
    let mut scales = Scratch::take(across as usize);
    for (n, band) in x.chunks(cols.max(1) * height).enumerate() {
        for (k, to) in scales.iter_mut().enumerate() {
            let part = |row: &[f32]| amax(&row[k * width..cols.min((k + 1) * width)]);
            let largest = band.chunks(cols).map(part).fold(0.0, f32::max);
            let (factor, inverse) = match block {
                ScaleBlock::MX | ScaleBlock::MX_COLUMN => {
                    let exponent = e8m0(largest, most);
                    (e8m0_scale(exponent), f32::from(exponent))
                }
                _ => {
                    let factor = power_of_two(scale(most, largest));
                    (factor, 1.0 / factor)
                }
            };
            inverses.store(n * across as usize + k, &[inverse]);
            *to = factor;
        }
        for (r, row) in band.chunks(cols).enumerate() {
            let parts = row.chunks(width).zip(scaled.chunks_mut(width));
            for ((x, y), factor) in parts.zip(&*scales) {
                cast_row(x, *factor, y);
            }
            codes.store((n * height + r) * cols, &scaled);
        }
    }
    Ok(())
}

/// Returns the largest absolute values of the blocks of a matrix with `cols` columns, in the order
/// of the grid.
pub(in crate::kernels) fn maxima(block: ScaleBlock, x: &[f32], cols: usize) -> Vec<f32> {
    let (height, width) = (block.rows as usize, block.cols as usize);
    let of_band = |band: &[f32]| {
        let part = |k: usize| {
            let rows = band.chunks(cols);
            rows.map(|row| amax(&row[k..cols.min(k + width)]))
                .fold(0.0, f32::max)
        };
        (0..cols).step_by(width).map(part).collect::<Vec<f32>>()
    };
    x.chunks(cols.max(1) * height).flat_map(of_band).collect()
}
