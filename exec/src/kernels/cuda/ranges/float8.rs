//! Ranges of sharded weights in 8 bits.

use super::{Piece, Work, at, count, numel, operands, size};
use crate::kernels::cuda::codegen::shard::Ranges;
use crate::kernels::error::OperandError;
use crate::operand::RawRange;
use shardlab_plan::ir::DType;
use shardlab_plan::program::ScaleRun;

/// Returns all of a launch's ranges, of which there are `N`.
fn exactly<'a, const N: usize>(
    ranges: &'a [RawRange],
    what: &'static str,
) -> Result<&'a [RawRange; N], OperandError> {
    let found = ranges.len();
    ranges.try_into().map_err(|_| count(what, N, found))
}

/// Returns a range of float32 numbers, one per scale.
fn floats(r: &RawRange) -> Result<&RawRange, OperandError> {
    match r.dtype {
        DType::F32 => Ok(r),
        other => Err(OperandError::Type(other)),
    }
}

/// Calls `f(number of float32, first element, elements)` for the runs of weights that share one of
/// the numbers in `by`; padding has none.
fn runs(
    main: &RawRange,
    by: &RawRange,
    scales: &[ScaleRun],
    mut f: impl FnMut(Option<u64>, u64, u64),
) -> Result<(), OperandError> {
    let all = scales.iter().map(|run| run.numel).sum();
    size("the weights with scales", numel(main), all)?;
    let most = scales.iter().filter_map(|run| run.scale).max();
    if let Some(most) = most.filter(|most| u64::from(*most) >= numel(by)) {
        size("the scales", u64::from(most) + 1, numel(by))?;
    }
    let mut first = 0;
    for run in scales {
        let scale = run
            .scale
            .map(|scale| at(by) + u64::from(scale) * by.dtype.size());
        f(scale, first, run.numel);
        first += run.numel;
    }
    Ok(())
}

/// Plans the largest absolute value of each tensor; a tensor without elements has 0.
pub(super) fn maxima(
    w: &mut Work,
    scales: &[ScaleRun],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [main] = exactly(reads, "reads")?;
    let [out] = exactly(writes, "writes")?;
    floats(out)?;
    w.copy((at(out), out.dtype), None, numel(out));
    let kind = Ranges::Amax { of: main.dtype };
    runs(main, out, scales, |slot, first, n| {
        let Some(slot) = slot else { return };
        let from = at(main) + first * main.dtype.size();
        let at = operands([slot, from]);
        w.add(kind, Piece { at, n });
    })
}

/// Plans scales and their reciprocals.
pub(super) fn scales(
    w: &mut Work,
    to: DType,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [amax] = exactly(reads, "reads")?;
    let [scales, inverses] = exactly(writes, "writes")?;
    for r in [amax, scales, inverses] {
        size("the scales", numel(amax), numel(floats(r)?))?;
    }
    if to.float8_max().is_none() {
        return Err(OperandError::Type(to));
    }
    let piece = Piece {
        at: operands([scales, inverses, amax].map(at)),
        n: numel(amax),
    };
    w.add(Ranges::Scales { to }, piece);
    Ok(())
}

/// Plans the codes of a shard.
pub(super) fn codes(
    w: &mut Work,
    scales: &[ScaleRun],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [main, by] = exactly(reads, "reads")?;
    let [codes] = exactly(writes, "writes")?;
    size("the codes", numel(main), numel(codes))?;
    let (from, to) = (main.dtype, codes.dtype);
    runs(main, floats(by)?, scales, |scale, first, n| {
        let place = |r: &RawRange| at(r) + first * r.dtype.size();
        let at = operands([place(codes), place(main), scale.unwrap_or(0)]);
        w.add(Ranges::Codes { from, to }, Piece { at, n });
    })
}
