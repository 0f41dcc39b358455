//! Shards of main weights in 8 bits: maxima, scales and codes.
//!
//! The arithmetic is that of a weight whose maximum, scale and codes follow from the whole tensor:
//! of one in bfloat16, to which weights are rounded first, or of the main weight itself.

use super::{BLOCK, Sequence, exactly};
use crate::base::float8::scale;
use crate::kernels::convert;
use crate::kernels::error::OperandError;
use crate::kernels::operands::same;
use crate::kernels::ops::float8::{amax as largest, cast_row, most};
use crate::kernels::scratch::Scratch;
use crate::kernels::view::View;
use crate::operand::RawRange;
use shardlab_plan::ir::{DType, RECIPROCAL_STRIDE};
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
