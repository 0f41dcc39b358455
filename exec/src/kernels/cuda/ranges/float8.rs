//! Ranges of sharded weights in 8 bits.

use super::{Piece, Work, at, count, in_runs, numel, operands, size};
use crate::kernels::cuda::codegen::shard::Ranges;
use crate::kernels::error::OperandError;
use crate::operand::RawRange;
use shardlab_plan::ir::{DType, RECIPROCAL_STRIDE, ScaleBlock, Shape};
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

/// Float32 numbers of tensors, maxima or scales, by runs of weights.
#[derive(Clone, Copy)]
pub(super) struct Slots<'a> {
    /// The numbers, if the launch has any.
    of: Option<&'a RawRange>,
    runs: &'a [ScaleRun],
}

impl<'a> Slots<'a> {
    /// Checks that every run has its number.
    pub(super) fn of(of: Option<&'a RawRange>, runs: &'a [ScaleRun]) -> Result<Self, OperandError> {
        if let Some(of) = of {
            let most = runs.iter().filter_map(|run| run.scale).max();
            let needed = most.map_or(0, |most| u64::from(most) + 1);
            let found = numel(floats(of)?);
            size("the scales", needed.max(found), found)?;
        }
        Ok(Self { of, runs })
    }

    /// Checks that runs make up all weights.
    pub(super) fn cover(self, weights: u64) -> Result<(), OperandError> {
        match self.of {
            Some(_) => size(
                "the weights with scales",
                weights,
                self.runs.iter().map(|run| run.numel).sum(),
            ),
            None => Ok(()),
        }
    }

    /// Calls `f(address of their number, first element, elements)` for the parts of `n` weights
    /// from `done` on that share one. The address is 0 for padding, and missing without numbers.
    pub(super) fn cut(self, done: u64, n: u64, mut f: impl FnMut(Option<u64>, u64, u64)) {
        let Some(of) = self.of else {
            return f(None, 0, n);
        };
        let place = |scale: u32| at(of) + u64::from(scale) * of.dtype.size();
        let runs = self.runs.iter();
        let runs = runs.map(|run| (Some(run.scale.map_or(0, place)), run.numel));
        in_runs(runs, done, n, f);
    }
}

/// Plans the largest absolute value of each tensor; a tensor without elements has 0.
pub(super) fn maxima(
    w: &mut Work,
    through: DType,
    scales: &[ScaleRun],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [out] = exactly(writes, "writes")?;
    let slots = Slots::of(Some(out), scales)?;
    slots.cover(reads.iter().map(numel).sum())?;
    w.copy((at(out), out.dtype), None, numel(out));
    let mut done = 0;
    for main in reads {
        let of = main.dtype;
        slots.cut(done, numel(main), |slot, first, n| {
            let Some(slot) = slot.filter(|slot| *slot != 0) else {
                return;
            };
            let at = operands([slot, at(main) + first * of.size()]);
            w.add(Ranges::Amax { of, through }, Piece { at, n });
        });
        done += numel(main);
    }
    Ok(())
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
    for (r, stride) in [(amax, 1), (scales, 1), (inverses, RECIPROCAL_STRIDE)] {
        size("the scales", numel(amax) * stride, numel(floats(r)?))?;
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

/// Plans the codes of a shard. Nothing reads intermediate results.
pub(super) fn codes(
    w: &mut Work,
    through: DType,
    scales: &[ScaleRun],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [main, by] = exactly(reads, "reads")?;
    let [codes] = exactly(writes.get(..1).unwrap_or(&[]), "writes")?;
    size("the codes", numel(main), numel(codes))?;
    let (from, to) = (main.dtype, codes.dtype);
    let slots = Slots::of(Some(by), scales)?;
    slots.cover(numel(main))?;
    slots.cut(0, numel(main), |scale, first, n| {
        let place = |r: &RawRange| at(r) + first * r.dtype.size();
        let at = operands([place(codes), place(main), scale.unwrap_or(0)]);
        let kind = Ranges::Codes { from, through, to };
        w.add(kind, Piece { at, n });
    });
    Ok(())
}

/// Plans the codes of a shard and the reciprocals of the scales of its square blocks, matrix by
/// matrix. Nothing reads the codes and scales of padding, which become zeros.
pub(super) fn block_codes(
    w: &mut Work,
    (through, block): (DType, ScaleBlock),
    shapes: &[Shape],
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let [main] = exactly(reads, "reads")?;
    let [codes, inverses] = exactly(writes, "writes")?;
    // Casts of activations refuse recipe mxfp8 by name.
    if block != ScaleBlock::SQUARE {
        return Err(OperandError::Shape("blocks of 128x128 weights".to_owned()));
    }
    let each = block.numel();
    size("the codes", numel(main), numel(codes))?;
    size("the scales", numel(main), numel(floats(inverses)?) * each)?;
    let all = shapes.iter().map(|shape| shape.iter().product::<u64>());
    size("the weights with scales", numel(main), all.sum())?;
    let kind = Ranges::BlockCodes {
        from: main.dtype,
        through,
        to: codes.dtype,
    };
    let mut done = 0;
    for shape in shapes {
        let n = shape.iter().product::<u64>();
        let place = |r: &RawRange, first: u64| at(r) + first * r.dtype.size();
        let [to, scales] = [place(codes, done), place(inverses, done / each)];
        match shape[..] {
            [rows, cols] if rows.is_multiple_of(block.rows) && cols.is_multiple_of(block.cols) => {
                let at = operands([to, place(main, done), scales, cols]);
                w.add(kind, Piece { at, n });
            }
            [n] if n.is_multiple_of(each) => {
                w.copy((to, codes.dtype), None, n);
                w.copy((scales, inverses.dtype), None, n / each);
            }
            _ => {
                let found = format!("{:?}, which blocks do not cover", shape.as_slice());
                return Err(OperandError::Shape(found));
            }
        }
        done += n;
    }
    Ok(())
}
