//! Shards of main weights in 8 bits: maxima, scales and codes.
//!
//! Results equal those of the whole tensor: of a bfloat16 weight, to which main weights are rounded
//! first, or of the main weight itself.

use super::{BLOCK, Sequence, exactly, zero};
use crate::base::float8::{e8m0, scale};
use crate::kernels::convert;
use crate::kernels::error::OperandError;
use crate::kernels::operands::same;
use crate::kernels::ops::float8::{amax as largest, blocks as by_block, cast_row, most};
use crate::kernels::scratch::Scratch;
use crate::kernels::view::View;
use crate::operand::RawRange;
use shardlab_plan::ir::{DType, RECIPROCAL_STRIDE, ScaleBlock, Shape, op};
use shardlab_plan::program::ScaleRun;

/// Calls `f(scale, first element, block)` for blocks of rounded weights that share a scale.
fn blocks(
    main: &Sequence,
    through: DType,
    runs: &[ScaleRun],
    mut f: impl FnMut(Option<usize>, usize, &mut [f32]),
) -> Result<(), OperandError> {
    let all: u64 = runs.iter().map(|run| run.numel).sum();
    same("the weights with scales", main.numel, all as usize)?;
    let mut block = Scratch::take(BLOCK);
    let mut runs = runs.iter();
    // What is left of a run, and where it starts.
    let (mut scale, mut rest, mut at) = (None, 0, 0);
    main.blocks(|view, start, n| {
        let x = &mut block[..n];
        view.load(start, x);
        convert::round(through, x);
        let mut done = 0;
        while done < n {
            while rest == 0 {
                let Some(run) = runs.next() else { return };
                (scale, rest) = (run.scale.map(|scale| scale as usize), run.numel as usize);
            }
            let end = n.min(done + rest);
            f(scale, at, &mut x[done..end]);
            (rest, at, done) = (rest - (end - done), at + (end - done), end);
        }
    });
    Ok(())
}

/// Finds the largest absolute value of each tensor in shards.
pub(super) fn amax(
    through: DType,
    runs: &[ScaleRun],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [out] = exactly(writes, "writes")?;
    amax_of(&Sequence::new(reads)?, through, runs, &out)
}

/// Finds the largest absolute value of each tensor in several ranges.
pub(super) fn amax_of(
    main: &Sequence,
    through: DType,
    runs: &[ScaleRun],
    out: &View,
) -> Result<(), OperandError> {
    let mut found = vec![0.0f32; out.numel];
    let mut beyond = 0;
    blocks(main, through, runs, |scale, _, x| {
        let Some(scale) = scale else { return };
        match found.get_mut(scale) {
            Some(most) => *most = most.max(largest(x)),
            None => beyond = scale + 1,
        }
    })?;
    if beyond > 0 {
        return Err(OperandError::Size {
            what: "the maxima",
            needed: beyond,
            found: out.numel,
        });
    }
    out.store(0, &found);
    Ok(())
}

/// Makes scales and their reciprocals.
pub(super) fn scales(
    to: DType,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [amax] = exactly(reads, "reads")?;
    let [scales, inverses] = exactly(writes, "writes")?;
    same("the scales", amax.numel, scales.numel)?;
    let stride = RECIPROCAL_STRIDE as usize;
    same("their reciprocals", amax.numel * stride, inverses.numel)?;
    let most = most(to)?;
    for n in 0..amax.numel {
        let scale = scale(most, amax.get(n));
        scales.store(n, &[scale]);
        inverses.store(n * stride, &[1.0 / scale]);
    }
    Ok(())
}

/// Casts a shard to codes.
pub(super) fn cast(
    through: DType,
    runs: &[ScaleRun],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [main, by] = exactly(reads, "reads")?;
    // Nothing reads intermediate results.
    let [codes] = exactly(writes.get(..1).unwrap_or(&[]), "writes")?;
    same("the codes", main.numel, codes.numel)?;
    let most = runs.iter().filter_map(|run| run.scale).max();
    if let Some(most) = most.filter(|most| *most as usize >= by.numel) {
        return Err(OperandError::Size {
            what: "the scales",
            needed: most as usize + 1,
            found: by.numel,
        });
    }
    let mut scaled = Scratch::take(BLOCK);
    blocks(
        &Sequence::new(&reads[..1])?,
        through,
        runs,
        |scale, at, x| {
            let y = &mut scaled[..x.len()];
            // Padding is 0.
            cast_row(x, scale.map_or(1.0, |scale| by.get(scale)), y);
            codes.store(at, y);
        },
    )
}

/// Casts a shard to codes with a scale per block, row of blocks by row of blocks.
pub(super) fn cast_blocks(
    (through, block): (DType, ScaleBlock),
    shapes: &[Shape],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [main] = exactly(reads, "reads")?;
    let [codes, inverses] = exactly(writes, "writes")?;
    let each = block.numel() as usize;
    same("the codes", main.numel, codes.numel)?;
    same("the scales", main.numel, inverses.numel * each)?;
    let all: u64 = shapes.iter().flat_map(whole_bands(block)).sum();
    same("the weights with scales", main.numel, all as usize)?;
    let cast = op::Float8CastBlocks {
        to: codes.dtype,
        block,
        transposed: false,
    };
    let mut at = 0;
    for shape in shapes {
        let (rows, cols) = matrix(shape);
        let Some(cols) = cols else {
            // Nothing reads padding.
            zero(&[part(&writes[0], at, rows)])?;
            zero(&[part(&writes[1], at / each, rows / each)])?;
            at += rows;
            continue;
        };
        let band = block.rows as usize * cols;
        let mut x = Scratch::take(band);
        for _ in 0..rows * cols / band {
            main.load(at, &mut x);
            convert::round(through, &mut x);
            let to = [
                part(&writes[0], at, band),
                part(&writes[1], at / each, band / each),
            ];
            let [codes, inverses] = exactly(&to, "writes")?;
            by_block::cast(cast, &x, cols, [codes, inverses])?;
            at += band;
        }
    }
    Ok(())
}

/// Finds the largest absolute values of the blocks of shards and of their transposes.
pub(super) fn block_amax(
    (through, block): (DType, ScaleBlock),
    shapes: &[Shape],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [main] = exactly(reads, "reads")?;
    let both = [block, block.of_transpose()];
    let each = block.numel() as usize;
    for (out, block) in exactly::<2>(writes, "writes")?.iter().zip(both) {
        same("the maxima", main.numel, out.numel * each)?;
        let all: u64 = shapes.iter().flat_map(whole_bands(block)).sum();
        same("the weights with scales", main.numel, all as usize)?;
        let mut at = 0;
        for shape in shapes {
            let (rows, cols) = matrix(shape);
            let band = block.rows as usize * cols.unwrap_or(each);
            let numel = rows * cols.unwrap_or(1);
            let mut x = Scratch::take(band);
            for first in (at..at + numel).step_by(band) {
                main.load(first, &mut x);
                convert::round(through, &mut x);
                // Nothing reads maxima of padding.
                let found = match cols {
                    Some(cols) => by_block::maxima(block, &x, cols),
                    None => vec![0.0; band / each],
                };
                out.store(first / each, &found);
            }
            at += numel;
        }
    }
    Ok(())
}

/// Makes the exponents of scales of blocks from their largest absolute values.
pub(super) fn block_scales(
    to: DType,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let (maxima, scales) = (Sequence::new(reads)?, Sequence::new(writes)?);
    same("the scales", maxima.numel, scales.numel)?;
    let most = most(to)?;
    maxima.pieces(&scales, |from, first, to, start, n| {
        for i in 0..n {
            let exponent = e8m0(from.get(first + i), most);
            to.store(start + i, &[f32::from(exponent)]);
        }
    });
    Ok(())
}

/// Returns rows and columns of a matrix; for padding, its elements.
fn matrix(shape: &Shape) -> (usize, Option<usize>) {
    match shape[..] {
        [rows, cols] => (rows as usize, Some(cols as usize)),
        _ => (shape.iter().product::<u64>() as usize, None),
    }
}

/// Returns a function that returns the elements of a matrix or of padding if they make up whole
/// blocks.
fn whole_bands(block: ScaleBlock) -> impl Fn(&Shape) -> Option<u64> {
    move |shape| {
        let numel = shape.iter().product::<u64>();
        let whole = match shape[..] {
            [rows, cols] => rows.is_multiple_of(block.rows) && cols.is_multiple_of(block.cols),
            _ => numel.is_multiple_of(block.numel()),
        };
        whole.then_some(numel)
    }
}

/// Returns `n` elements of a range from element `first` on.
fn part(of: &RawRange, first: usize, n: usize) -> RawRange {
    let size = of.dtype.size() as usize;
    RawRange {
        ptr: of.ptr.wrapping_add(first * size),
        bytes: n * size,
        dtype: of.dtype,
    }
}
