//! Conversion between parameters and buffers laid out `[rank][parameter]` in padded shards of whole
//! rows.

use super::super::error::OperandError;
use super::super::operands::same;
use super::super::scratch::Scratch;
use super::super::view::View;
use super::{BLOCK, copy, exactly};
use crate::operand::RawRange;
use shardlab_plan::ir::{DType, Shape};

/// Returns the elements of each parameter's padded shard: `ceil(rows / ranks)` rows.
fn shard(shape: &Shape, ranks: usize) -> usize {
    let rows = shape.first().copied().unwrap_or(1) as usize;
    let row: u64 = shape.iter().skip(1).product();
    rows.div_ceil(ranks.max(1)) * row as usize
}

/// Calls `f(parameter, its first element, position in the packed buffer, elements, padding after
/// them)` for every shard.
fn shards(
    ranks: usize,
    shapes: &[Shape],
    params: &[RawRange],
    packed: &View,
    mut f: impl FnMut(&View, usize, usize, usize, usize),
) -> Result<(), OperandError> {
    if shapes.len() != params.len() {
        return Err(OperandError::Count {
            what: "shapes",
            needed: params.len(),
            found: shapes.len(),
        });
    }
    // Parameters of several types are packed as bytes.
    let bytes = packed.dtype == DType::U8;
    let unit = |range: &RawRange| {
        if bytes {
            range.dtype.size() as usize
        } else {
            1
        }
    };
    let each = || shapes.iter().zip(params);
    let stride: usize = each().map(|(s, r)| shard(s, ranks) * unit(r)).sum();
    same("the packed buffer", stride * ranks, packed.numel)?;
    let mut offset = 0;
    for (shape, range) in each() {
        let unit = unit(range);
        let view = View::flat(if bytes { range.as_bytes() } else { *range })?;
        let numel = shape.iter().product::<u64>() as usize * unit;
        let len = shard(shape, ranks) * unit;
        // A gathered parameter may have the padding of the last shards after it.
        if view.numel != len * ranks {
            same("a parameter", numel, view.numel)?;
        }
        let numel = view.numel;
        for rank in 0..ranks {
            let first = (rank * len).min(numel);
            let n = len.min(numel - first);
            f(&view, first, rank * stride + offset, n, len - n);
        }
        offset += len;
    }
    Ok(())
}

/// Copies packed shards to parameters.
pub(super) fn copy_out(
    ranks: usize,
    shapes: &[Shape],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [packed] = exactly(reads, "reads")?;
    let mut block = Scratch::take(BLOCK);
    shards(ranks, shapes, writes, &packed, |param, first, at, n, _| {
        copy(&packed, at, param, first, n, &mut block);
    })
}

/// Copies gradients to packed shards; padding becomes zero.
pub(super) fn chunk_cat(
    ranks: usize,
    shapes: &[Shape],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [packed] = exactly(writes, "writes")?;
    let mut block = Scratch::take(BLOCK);
    shards(ranks, shapes, reads, &packed, |grad, first, at, n, pad| {
        copy(grad, first, &packed, at, n, &mut block);
        if pad > 0 {
            let size = packed.dtype.size() as usize;
            // SAFETY: the packed buffer has the length of all shards with their padding; zero bytes
            // are zeros of every type.
            unsafe { std::ptr::write_bytes(packed.ptr.add((at + n) * size), 0, pad * size) };
        }
    })
}
