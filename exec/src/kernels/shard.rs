//! Kernels of the sharding engine, on byte ranges.

mod float8;
mod layout;
mod muon;
mod optimizer;
mod router_bias;

use super::error::OperandError;
use super::math::LANES;
use super::operands::same;
use super::scratch::Scratch;
use super::view::{View, overlap};
use super::wide::wide;
use crate::operand::{LaunchContext, RawRange, copied};
use shardlab_plan::ir::{DType, ShardOp};
use smallvec::SmallVec;

/// Number of elements of a block.
const BLOCK: usize = 2048;

wide! {
    /// Computes `x += y`.
    fn add_to(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }

    /// Computes `x *= factor`.
    fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    /// Returns the sum of squares in float64, by lanes.
    fn squares(x: &[f32]) -> f64 {
        let mut acc = [0.0f64; LANES];
        let mut chunks = x.chunks_exact(LANES);
        for c in &mut chunks {
            for (a, &v) in acc.iter_mut().zip(c) {
                *a += f64::from(v) * f64::from(v);
            }
        }
        for (a, &v) in acc.iter_mut().zip(chunks.remainder()) {
            *a += f64::from(v) * f64::from(v);
        }
        acc.iter().sum()
    }

    /// Returns whether there is a NaN.
    fn any_nan(x: &[f32]) -> bool {
        x.iter().fold(false, |found, v| found | v.is_nan())
    }
}

/// Consecutive ranges, as one sequence of elements.
struct Sequence {
    views: SmallVec<[View; 8]>,
    numel: usize,
}

impl Sequence {
    /// Returns the first of `ranges` that together hold `numel` elements, or all if there are
    /// fewer.
    fn of_length(ranges: &[RawRange], numel: usize) -> Result<Self, OperandError> {
        let mut found = Self::new(&[])?;
        for r in ranges {
            if found.numel >= numel {
                break;
            }
            let view = View::flat(*r)?;
            found.numel += view.numel;
            found.views.push(view);
        }
        Ok(found)
    }

    /// Writes `values` at position `at` of the sequence.
    fn store(&self, at: usize, values: &[f32]) {
        let mut first = 0;
        for v in &self.views {
            let (start, end) = (at.max(first), (at + values.len()).min(first + v.numel));
            if start < end {
                v.store(start - first, &values[start - at..end - at]);
            }
            first += v.numel;
        }
    }

    fn new(ranges: &[RawRange]) -> Result<Self, OperandError> {
        let mut views = SmallVec::with_capacity(ranges.len());
        for r in ranges {
            views.push(View::flat(*r)?);
        }
        let numel = views.iter().map(|v: &View| v.numel).sum();
        Ok(Self { views, numel })
    }

    /// Calls `f(view, first element within it, length, position within the sequence)` for blocks of
    /// at most `BLOCK` elements that are in one range.
    fn blocks(&self, mut f: impl FnMut(&View, usize, usize)) {
        for v in &self.views {
            for start in (0..v.numel).step_by(BLOCK) {
                f(v, start, BLOCK.min(v.numel - start));
            }
        }
    }

    /// Calls `f(view, first, other's view, other's first, length)` for pieces that are in one range
    /// of each of two sequences of the same length.
    fn pieces(&self, other: &Self, mut f: impl FnMut(&View, usize, &View, usize, usize)) {
        let (mut i, mut j, mut at, mut from) = (0, 0, 0, 0);
        while let (Some(a), Some(b)) = (self.views.get(i), other.views.get(j)) {
            let n = (a.numel - at).min(b.numel - from);
            if n > 0 {
                f(a, at, b, from, n);
            }
            at += n;
            from += n;
            if at == a.numel {
                (i, at) = (i + 1, 0);
            }
            if from == b.numel {
                (j, from) = (j + 1, 0);
            }
        }
    }
}

/// Copies elements from one range to another, converting; equal types are copied as bytes.
fn copy(from: &View, first: usize, to: &View, start: usize, n: usize, block: &mut [f32]) {
    if from.dtype == to.dtype {
        let size = from.dtype.size() as usize;
        // SAFETY: both pieces are inside their ranges, which the launch's caller guarantees to be
        // live; they may overlap.
        unsafe {
            std::ptr::copy(
                from.ptr.add(first * size),
                to.ptr.add(start * size),
                n * size,
            )
        };
        return;
    }
    for done in (0..n).step_by(BLOCK) {
        let len = BLOCK.min(n - done);
        from.load(first + done, &mut block[..len]);
        to.store(start + done, &block[..len]);
    }
}

/// Returns all of a launch's ranges, of which there are `N`.
fn exactly<const N: usize>(
    ranges: &[RawRange],
    what: &'static str,
) -> Result<[View; N], OperandError> {
    let count = |_| OperandError::Count {
        what,
        needed: N,
        found: ranges.len(),
    };
    let views: SmallVec<[View; N]> = ranges
        .iter()
        .map(|r| View::flat(*r))
        .collect::<Result<_, _>>()?;
    views.into_inner().map_err(count)
}

/// Returns a float32 scalar.
fn scalar(range: Option<&RawRange>) -> Result<View, OperandError> {
    let view = View::flat(*range.ok_or(OperandError::Count {
        what: "scalars",
        needed: 1,
        found: 0,
    })?)?;
    same("the scalar", 1, view.numel)?;
    if view.dtype != DType::F32 {
        return Err(OperandError::Type(view.dtype));
    }
    Ok(view)
}

/// Returns the factor of gradients that makes their norm, given its square, at most `limit` (0 for
/// no limit).
fn clip_factor(square: f32, limit: f64) -> f32 {
    if limit <= 0.0 {
        return 1.0;
    }
    let factor = limit as f32 / (square.sqrt() + 1e-6);
    // Written so that a NaN norm propagates, as it does in torch.
    if factor > 1.0 { 1.0 } else { factor }
}

/// Returns the factor of an update's gradients. `square` is the square of their norm, if the launch
/// reads it.
fn clip_of(square: Option<&RawRange>, limit: f64) -> Result<f32, OperandError> {
    match square {
        Some(_) => Ok(clip_factor(scalar(square)?.get(0), limit)),
        None => Ok(1.0),
    }
}

/// Performs a sharding kernel.
pub(super) fn run(
    op: ShardOp,
    ctx: &LaunchContext<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    match op {
        ShardOp::Copy | ShardOp::MultiCopy => {
            let [reads, writes] = copied(reads, writes);
            copies(&reads, &writes)
        }
        ShardOp::CopyOut { ranks } => layout::copy_out(ranks as usize, ctx.shapes, reads, writes),
        ShardOp::ChunkCat { ranks } => layout::chunk_cat(ranks as usize, ctx.shapes, reads, writes),
        ShardOp::Accumulate => accumulate(reads, writes),
        ShardOp::SumPieces {
            ranks,
            factor,
            accumulate,
        } => sum_pieces(ranks, factor.0 as f32, accumulate, reads, writes),
        ShardOp::Scale { factor } => multiply(writes, factor.0 as f32),
        ShardOp::Zero => zero(writes),
        ShardOp::SumSquares => sum_squares(reads, writes),
        ShardOp::ClipScale => {
            let square = scalar(reads.last())?.get(0);
            multiply(writes, clip_factor(square, ctx.hyper.clip_norm))
        }
        ShardOp::NanCheck => nan_check(reads, writes),
        ShardOp::ShardAmax { through } => float8::amax(through, ctx.scales, reads, writes),
        ShardOp::ShardScales { to } => float8::scales(to, reads, writes),
        ShardOp::ShardCast { through } => float8::cast(through, ctx.scales, reads, writes),
        ShardOp::ShardCastBlocks { through, block } => {
            float8::cast_blocks((through, block), ctx.shapes, reads, writes)
        }
        ShardOp::ShardBlockAmax { through, block } => {
            float8::block_amax((through, block), ctx.shapes, reads, writes)
        }
        ShardOp::ShardBlockScales { to } => float8::block_scales(to, reads, writes),
        ShardOp::AdamW { .. } | ShardOp::Lion { .. } | ShardOp::Sgd { .. } => {
            let mut update = op.update().into_iter();
            update.try_for_each(|u| optimizer::update(ctx, u, reads, writes))
        }
        ShardOp::Muon { .. } => {
            let mut update = op.update().into_iter();
            update.try_for_each(|u| muon::update(ctx, u, reads, writes))
        }
        ShardOp::MuonMomentum => {
            let mut update = op.update().into_iter();
            update.try_for_each(|u| muon::momentum(ctx, u, reads, writes))
        }
        ShardOp::Orthogonalize { matrix } => muon::orthogonalize_whole(matrix, reads, writes),
        ShardOp::MuonApply { matrix } => muon::apply(ctx, matrix, reads, writes),
        ShardOp::RouterBias { speed } => router_bias::update(speed.0 as f32, reads, writes),
    }
}

fn copies(reads: &[RawRange], writes: &[RawRange]) -> Result<(), OperandError> {
    let (from, to) = (Sequence::new(reads)?, Sequence::new(writes)?);
    same("the copy's source", to.numel, from.numel)?;
    let mut block = Scratch::take(BLOCK);
    to.pieces(&from, |w, start, r, first, n| {
        copy(r, first, w, start, n, &mut block)
    });
    Ok(())
}

fn accumulate(reads: &[RawRange], writes: &[RawRange]) -> Result<(), OperandError> {
    let (from, to) = (
        Sequence::new(reads.get(..1).unwrap_or(&[]))?,
        Sequence::new(writes)?,
    );
    same("what is added", to.numel, from.numel)?;
    if let [r] = &from.views[..]
        && to.views.iter().any(|w| overlap(&w.extent(), &r.extent()))
    {
        return Err(OperandError::Shape(
            "what is added overlaps the sum".to_owned(),
        ));
    }
    let [mut x, mut y] = [BLOCK, BLOCK].map(Scratch::take);
    to.pieces(&from, |w, start, r, first, n| {
        for done in (0..n).step_by(BLOCK) {
            let len = BLOCK.min(n - done);
            r.load(first + done, &mut y[..len]);
            w.load(start + done, &mut x[..len]);
            add_to(&mut x[..len], &y[..len]);
            w.store(start + done, &x[..len]);
        }
    });
    Ok(())
}

fn sum_pieces(
    ranks: u32,
    factor: f32,
    accumulate: bool,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let (from, to) = (
        Sequence::new(reads.get(..1).unwrap_or(&[]))?,
        Sequence::new(writes)?,
    );
    let ranks = ranks.max(1) as usize;
    same("the pieces", to.numel * ranks, from.numel)?;
    let [r] = &from.views[..] else {
        return Err(OperandError::Shape("pieces in several ranges".to_owned()));
    };
    if to.views.iter().any(|w| overlap(&w.extent(), &r.extent())) {
        return Err(OperandError::Shape(
            "the pieces overlap their sum".to_owned(),
        ));
    }
    let [mut sum, mut x] = [BLOCK, BLOCK].map(Scratch::take);
    let mut at = 0;
    to.blocks(|w, start, n| {
        let (sum, x) = (&mut sum[..n], &mut x[..n]);
        add_up(r, (ranks, factor), to.numel, at, (sum, x));
        if accumulate {
            w.load(start, x);
            // The order of `accumulate`: the accumulator is on the left.
            add_to(x, sum);
            w.store(start, x);
        } else {
            w.store(start, sum);
        }
        at += n;
    });
    Ok(())
}

/// Sums pieces that are `apart` elements from one another, from element `start` of each on,
/// multiplied by the factor, in order. The last argument receives the sums, and has their length.
fn add_up(
    pieces: &View,
    (ranks, factor): (usize, f32),
    apart: usize,
    start: usize,
    (sum, x): (&mut [f32], &mut [f32]),
) {
    for rank in 0..ranks {
        let into = if rank == 0 { &mut *sum } else { &mut *x };
        pieces.load(rank * apart + start, into);
        if factor != 1.0 {
            scale(into, factor);
        }
        if rank > 0 {
            add_to(sum, x);
        }
    }
}

fn multiply(writes: &[RawRange], factor: f32) -> Result<(), OperandError> {
    if factor == 1.0 {
        return Ok(());
    }
    let mut x = Scratch::take(BLOCK);
    Sequence::new(writes)?.blocks(|v, start, n| {
        v.load(start, &mut x[..n]);
        scale(&mut x[..n], factor);
        v.store(start, &x[..n]);
    });
    Ok(())
}

fn zero(writes: &[RawRange]) -> Result<(), OperandError> {
    for w in writes {
        // SAFETY: the launch's caller guarantees the range; all types' zeros are zero bytes.
        unsafe { std::ptr::write_bytes(w.ptr, 0, w.bytes) };
    }
    Ok(())
}

fn sum_squares(reads: &[RawRange], writes: &[RawRange]) -> Result<(), OperandError> {
    let out = scalar(writes.first())?;
    let (reads, mut total) = match reads.split_last() {
        Some((last, rest)) if last.ptr == out.ptr => (rest, f64::from(out.get(0))),
        _ => (reads, 0.0),
    };
    let mut x = Scratch::take(BLOCK);
    Sequence::new(reads)?.blocks(|v, start, n| {
        v.load(start, &mut x[..n]);
        total += squares(&x[..n]);
    });
    out.store(0, &[total as f32]);
    Ok(())
}

fn nan_check(reads: &[RawRange], writes: &[RawRange]) -> Result<(), OperandError> {
    let out = scalar(writes.first())?;
    let mut found = false;
    let mut x = Scratch::take(BLOCK);
    Sequence::new(reads)?.blocks(|v, start, n| {
        v.load(start, &mut x[..n]);
        found |= any_nan(&x[..n]);
    });
    out.store(0, &[if found { 1.0 } else { 0.0 }]);
    Ok(())
}
