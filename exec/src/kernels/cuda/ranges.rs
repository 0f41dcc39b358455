//! Launches of the sharding engine as lists of ranges.
//!
//! Pure address arithmetic: which kernels, over which pieces. Pieces that are adjacent in all
//! operands are joined.

mod float8;
mod muon;
#[cfg(test)]
mod tests;

pub(super) use muon::{Matrix, Rows};

use super::codegen::shard::{RangeUpdate, Ranges};
use crate::kernels::error::OperandError;
use crate::operand::{RawRange, copied};
use shardlab_plan::ir::{
    DType, MatrixShape, RECIPROCAL_STRIDE, STATE_BLOCK, Shape, ShardOp, Update, UpdateRule,
};
use shardlab_plan::program::{GroupRun, ScaleRun};
use smallvec::SmallVec;

/// Maximum number of operands of a range.
pub(super) const OPERANDS: usize = 10;

/// What a launch knows of its operands besides their addresses.
#[derive(Clone, Copy, Default)]
pub(super) struct Parameters<'a> {
    /// Shapes of the parameters behind the operands of `CopyOut` and `ChunkCat`, and of the
    /// matrices of `Muon` and `ShardCastBlocks`.
    pub(super) shapes: &'a [Shape],
    /// Parameter groups of the weights of an optimizer; empty if there is only one.
    pub(super) groups: &'a [GroupRun],
    /// Scales of the weights of `ShardAmax`, `ShardCast` and optimizers that find maxima.
    pub(super) scales: &'a [ScaleRun],
}

/// A range that a block list covers: addresses of its operands, elements (bytes for raw copies).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) at: [u64; OPERANDS],
    pub(super) n: u64,
}

/// Pieces of one kind, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) kind: Ranges,
    pub(super) pieces: SmallVec<[Piece; 8]>,
}

/// How the blocks' parts are reduced to one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fold {
    /// Whether to test that one is not 0, instead of summing.
    pub(super) any: bool,
    /// Address of the result.
    pub(super) out: u64,
    /// Address of the accumulator, or 0.
    pub(super) before: u64,
}

/// Work of a launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Work {
    pub(super) batches: SmallVec<[Batch; 2]>,
    /// Factor of scalings.
    pub(super) factor: f32,
    /// Address of the squared norm for clipping, or 0.
    pub(super) square: u64,
    pub(super) fold: Option<Fold>,
    /// Matrices that Muon updates.
    pub(super) matrices: Vec<Matrix>,
    /// Matrix that is orthogonalized, with its address.
    pub(super) orthogonalized: Option<(MatrixShape, u64)>,
    /// Rows of matrices that are updated.
    pub(super) rows: Vec<Rows>,
    /// Copies of the new weights of `matrices`.
    pub(super) copies: SmallVec<[Batch; 2]>,
}

impl Work {
    /// Copies `n` new weights once they are written.
    fn copy_after(&mut self, to: (u64, DType), from: (u64, DType), n: u64) {
        let mut after = Self::default();
        after.copy(to, Some(from), n);
        self.copies.extend(after.batches);
    }

    fn add(&mut self, kind: Ranges, piece: Piece) {
        if piece.n == 0 {
            return;
        }
        let batch = match self.batches.iter().position(|b| b.kind == kind) {
            Some(i) => &mut self.batches[i],
            None => {
                self.batches.push(Batch {
                    kind,
                    pieces: SmallVec::new(),
                });
                let last = self.batches.len() - 1;
                &mut self.batches[last]
            }
        };
        if let Some(last) = batch.pieces.last_mut()
            && follows(kind, last, &piece)
        {
            last.n += piece.n;
            return;
        }
        batch.pieces.push(piece);
    }

    /// Copies `n` elements; `from` is `None` for zeros.
    fn copy(&mut self, to: (u64, DType), from: Option<(u64, DType)>, n: u64) {
        let at = |from: u64| operands([to.0, from]);
        match from {
            Some((from, ty)) if ty != to.1 => {
                self.add(
                    Ranges::Cast { from: ty, to: to.1 },
                    Piece { at: at(from), n },
                );
            }
            _ => {
                let bytes = n * to.1.size();
                let at = at(from.map_or(0, |f| f.0));
                self.add(Ranges::Raw, Piece { at, n: bytes });
            }
        }
    }

    /// Returns the number of blocks of all batches that leave a part each.
    pub(super) fn parts(&self) -> u64 {
        let blocks = |b: &Batch| {
            b.pieces
                .iter()
                .map(|p| p.n.div_ceil(b.kind.chunk()))
                .sum::<u64>()
        };
        if self.fold.is_some() {
            self.batches.iter().map(blocks).sum()
        } else {
            0
        }
    }
}

/// Returns the bytes of an element of each operand of a kind. The distance of pieces, the number of
/// a parameter group, and the address of a scale or maximum stay as they are.
fn sizes(kind: Ranges) -> [u64; OPERANDS] {
    match kind {
        Ranges::Raw => operands([1, 1]),
        Ranges::Cast { from, to }
        | Ranges::Accumulate { from, to }
        | Ranges::Sum { from, to, .. } => operands([to.size(), from.size()]),
        Ranges::Amax { of, .. } => operands([0, of.size()]),
        Ranges::Scales { .. } => {
            operands([1, RECIPROCAL_STRIDE, 1].map(|stride| stride * DType::F32.size()))
        }
        Ranges::Codes { from, to, .. } => operands([to.size(), from.size()]),
        // Pieces are rows of blocks, which a block of threads finds by their number.
        Ranges::BlockCodes { .. } => operands([]),
        Ranges::RouterBias => operands([DType::F32.size(); 2]),
        Ranges::Scale { of } | Ranges::Squares { of } | Ranges::Nan { of } => operands([of.size()]),
        Ranges::Update(u) => {
            let states = std::iter::repeat_n(u.states.size(), u.rule.states());
            let copy = u.copy.map(DType::size);
            operands(
                [u.weight.size(), u.grad.size()]
                    .into_iter()
                    .chain(states)
                    .chain(copy),
            )
        }
    }
}

/// Returns the operands of a range, in order.
fn operands(all: impl IntoIterator<Item = u64>) -> [u64; OPERANDS] {
    let mut at = [0; OPERANDS];
    for (to, x) in at.iter_mut().zip(all) {
        *to = x;
    }
    at
}

fn follows(kind: Ranges, a: &Piece, b: &Piece) -> bool {
    // A range is all of a router, or of a matrix.
    if matches!(kind, Ranges::RouterBias | Ranges::BlockCodes { .. }) {
        return false;
    }
    // Blocks of states start with their range.
    if matches!(kind, Ranges::Update(u) if u.states == DType::U8) {
        return false;
    }
    // Zeros have no source to be adjacent to.
    let zeros = kind == Ranges::Raw && (a.at[1] == 0 || b.at[1] == 0);
    if zeros && a.at[1] != b.at[1] {
        return false;
    }
    let sizes = sizes(kind);
    (0..OPERANDS).all(|i| i == 1 && zeros || a.at[i] + a.n * sizes[i] == b.at[i])
}

fn numel(r: &RawRange) -> u64 {
    r.bytes as u64 / r.dtype.size()
}

fn at(r: &RawRange) -> u64 {
    r.ptr as u64
}

fn size(what: &'static str, needed: u64, found: u64) -> Result<(), OperandError> {
    if needed == found {
        return Ok(());
    }
    Err(OperandError::Size {
        what,
        needed: needed as usize,
        found: found as usize,
    })
}

fn count(what: &'static str, needed: usize, found: usize) -> OperandError {
    OperandError::Count {
        what,
        needed,
        found,
    }
}

fn scalar(range: Option<&RawRange>) -> Result<u64, OperandError> {
    let r = range.ok_or(count("scalars", 1, 0))?;
    size("the scalar", 1, numel(r))?;
    if r.dtype != DType::F32 {
        return Err(OperandError::Type(r.dtype));
    }
    Ok(at(r))
}

/// Calls `f(target, source, elements)` for pieces that are in one range of each of two sequences of
/// equal length.
fn pairs(
    to: &[RawRange],
    from: &[RawRange],
    mut f: impl FnMut((u64, DType), (u64, DType), u64),
) -> Result<(), OperandError> {
    let total = |rs: &[RawRange]| rs.iter().map(numel).sum();
    size("the source", total(to), total(from))?;
    let (mut i, mut j, mut a, mut b) = (0, 0, 0, 0);
    while let (Some(t), Some(s)) = (to.get(i), from.get(j)) {
        let n = (numel(t) - a).min(numel(s) - b);
        let place = |r: &RawRange, first: u64| (at(r) + first * r.dtype.size(), r.dtype);
        f(place(t, a), place(s, b), n);
        (a, b) = (a + n, b + n);
        if a == numel(t) {
            (i, a) = (i + 1, 0);
        }
        if b == numel(s) {
            (j, b) = (j + 1, 0);
        }
    }
    Ok(())
}

/// Plans a sharding kernel's launch.
pub(super) fn work(
    op: ShardOp,
    Parameters {
        shapes,
        groups,
        scales,
    }: Parameters<'_>,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<Work, OperandError> {
    let mut w = Work {
        factor: 1.0,
        ..Work::default()
    };
    match op {
        ShardOp::Copy | ShardOp::MultiCopy => {
            let [reads, writes] = copied(reads, writes);
            pairs(&writes, &reads, |to, from, n| w.copy(to, Some(from), n))?;
        }
        ShardOp::CopyOut { ranks } => shards(ranks, shapes, writes, reads, |p| {
            w.copy(p.param, Some(p.packed), p.n);
        })?,
        ShardOp::ChunkCat { ranks } => shards(ranks, shapes, reads, writes, |p| {
            w.copy(p.packed, Some(p.param), p.n);
            let (packed, ty) = p.packed;
            w.copy((packed + p.n * ty.size(), ty), None, p.pad);
        })?,
        ShardOp::Accumulate => accumulations(&mut w, reads, writes)?,
        ShardOp::SumPieces {
            ranks,
            factor,
            accumulate,
        } => {
            w.factor = factor.0 as f32;
            sums(&mut w, ranks.max(1), accumulate, reads, writes)?;
        }
        ShardOp::Scale { factor } => {
            w.factor = factor.0 as f32;
            for r in writes {
                w.add(Ranges::Scale { of: r.dtype }, single(r));
            }
        }
        ShardOp::ClipScale => {
            w.square = scalar(reads.last())?;
            for r in writes {
                w.add(Ranges::Scale { of: r.dtype }, single(r));
            }
        }
        ShardOp::Zero => {
            for r in writes {
                w.copy((at(r), r.dtype), None, numel(r));
            }
        }
        ShardOp::SumSquares => squares(&mut w, reads, writes)?,
        ShardOp::NanCheck => {
            for r in reads {
                w.add(Ranges::Nan { of: r.dtype }, single(r));
            }
            w.fold = Some(Fold {
                any: true,
                out: scalar(writes.first())?,
                before: 0,
            });
        }
        ShardOp::ShardAmax { through } => {
            float8::maxima(&mut w, through, scales, reads, writes)?;
        }
        ShardOp::ShardScales { to } => float8::scales(&mut w, to, reads, writes)?,
        ShardOp::ShardCast { through } => {
            float8::codes(&mut w, through, scales, reads, writes)?;
        }
        ShardOp::ShardCastBlocks { through, block } => {
            float8::block_codes(&mut w, (through, block), shapes, reads, writes)?;
        }
        // Casts of activations refuse recipe mxfp8 by name.
        ShardOp::ShardBlockAmax { .. } | ShardOp::ShardBlockScales { .. } => {
            return Err(OperandError::Unsupported);
        }
        ShardOp::AdamW { .. }
        | ShardOp::Lion { .. }
        | ShardOp::Sgd { .. }
        | ShardOp::Muon { .. }
        | ShardOp::MuonMomentum => {
            if let Some(rule) = op.update() {
                update(&mut w, rule, (groups, scales, shapes), reads, writes)?;
            }
        }
        ShardOp::Orthogonalize { matrix } => {
            w.orthogonalized = Some((matrix, muon::whole(matrix, reads, writes)?));
        }
        ShardOp::MuonApply { matrix } => {
            w.rows = muon::rows(matrix, groups, reads, writes)?;
        }
        ShardOp::RouterBias { speed } => routers(&mut w, speed.0 as f32, reads, writes)?,
    }
    Ok(w)
}

/// Returns the piece of a kernel that has one operand.
fn single(r: &RawRange) -> Piece {
    Piece {
        at: operands([at(r)]),
        n: numel(r),
    }
}

/// Plans the addition of the first operand to the ranges that are written.
fn accumulations(
    w: &mut Work,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let from = reads.get(..1).unwrap_or(&[]);
    pairs(writes, from, |to, from, n| {
        let kind = Ranges::Accumulate {
            from: from.1,
            to: to.1,
        };
        let at = operands([to.0, from.0]);
        w.add(kind, Piece { at, n });
    })
}

/// Plans sums over the pieces of `pieces` ranks, which follow one another in the first operand.
fn sums(
    w: &mut Work,
    pieces: u32,
    accumulate: bool,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    // An accumulator is a read as well, and is found among the writes.
    let [from, ..] = reads else {
        return Err(count("reads", 1, 0));
    };
    let one = writes.iter().map(numel).sum::<u64>();
    size("the pieces", one * u64::from(pieces), numel(from))?;
    let distance = one * from.dtype.size();
    let mut first = at(from);
    for to in writes {
        let kind = Ranges::Sum {
            from: from.dtype,
            to: to.dtype,
            pieces,
            accumulate,
        };
        let n = numel(to);
        let at = operands([at(to), first, distance]);
        w.add(kind, Piece { at, n });
        first += n * from.dtype.size();
    }
    Ok(())
}

/// Plans a sum of squares. If the result is also the last operand, the squares are added to it.
fn squares(w: &mut Work, reads: &[RawRange], writes: &[RawRange]) -> Result<(), OperandError> {
    let out = scalar(writes.first())?;
    let (reads, before) = match reads.split_last() {
        Some((last, rest)) if at(last) == out => (rest, out),
        _ => (reads, 0),
    };
    for r in reads {
        w.add(Ranges::Squares { of: r.dtype }, single(r));
    }
    w.fold = Some(Fold {
        any: false,
        out,
        before,
    });
    Ok(())
}

/// Plans updates of routers, given the biases and counts of each.
fn routers(
    w: &mut Work,
    speed: f32,
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    w.factor = speed;
    if reads.len() != 2 * writes.len() {
        return Err(count("biases and counts", 2 * writes.len(), reads.len()));
    }
    for (pair, written) in reads.chunks_exact(2).zip(writes) {
        let [bias, counts] = [&pair[0], &pair[1]];
        if let Some(of) = [bias, counts].into_iter().find(|of| of.dtype != DType::F32) {
            return Err(OperandError::Type(of.dtype));
        }
        updates(bias, (counts, 1), Some(written))?;
        let n = numel(bias);
        if n > Ranges::RouterBias.chunk() {
            return Err(OperandError::Shape(format!("a router of {n} experts")));
        }
        let at = operands([at(bias), at(counts)]);
        w.add(Ranges::RouterBias, Piece { at, n });
    }
    Ok(())
}

/// A parameter's part in one rank's shard.
struct Packed {
    param: (u64, DType),
    packed: (u64, DType),
    n: u64,
    pad: u64,
}

/// Calls `f` for every shard of every parameter of a buffer laid out `[rank][parameter]`.
fn shards(
    ranks: u32,
    shapes: &[Shape],
    params: &[RawRange],
    packed: &[RawRange],
    mut f: impl FnMut(Packed),
) -> Result<(), OperandError> {
    let [packed] = packed else {
        return Err(count("packed buffers", 1, packed.len()));
    };
    if shapes.len() != params.len() {
        return Err(count("shapes", params.len(), shapes.len()));
    }
    let ranks = u64::from(ranks.max(1));
    let shard = |s: &Shape| {
        let rows = s.first().copied().unwrap_or(1);
        rows.div_ceil(ranks) * s.iter().skip(1).product::<u64>()
    };
    // Parameters of several types are packed as bytes.
    let bytes = packed.dtype == DType::U8;
    let unit = |range: &RawRange| if bytes { range.dtype.size() } else { 1 };
    let each = || shapes.iter().zip(params);
    let stride: u64 = each().map(|(s, r)| shard(s) * unit(r)).sum();
    size("the packed buffer", stride * ranks, numel(packed))?;
    for rank in 0..ranks {
        let mut offset = 0;
        for (shape, range) in each() {
            let unit = unit(range);
            let range = &if bytes { range.as_bytes() } else { *range };
            let len = shard(shape) * unit;
            // A gathered parameter may have the padding of the last shards after it.
            let n = numel(range);
            if n != len * ranks {
                size("a parameter", shape.iter().product::<u64>() * unit, n)?;
            }
            let first = (rank * len).min(n);
            let here = len.min(n - first);
            f(Packed {
                param: (at(range) + first * range.dtype.size(), range.dtype),
                packed: (
                    at(packed) + (rank * stride + offset) * packed.dtype.size(),
                    packed.dtype,
                ),
                n: here,
                pad: len - here,
            });
            offset += len;
        }
    }
    Ok(())
}

/// Checks that a weight is updated in place by a gradient of its length, or by pieces of its
/// length.
fn updates(
    weight: &RawRange,
    (grad, pieces): (&RawRange, u32),
    target: Option<&RawRange>,
) -> Result<(), OperandError> {
    let target = target.ok_or(count("writes", 1, 0))?;
    size("a gradient", numel(weight) * u64::from(pieces), numel(grad))?;
    if (weight.ptr, weight.bytes) != (target.ptr, target.bytes) && weight.bytes > 0 {
        return Err(OperandError::Shape(
            "a weight is not written where it is read".to_owned(),
        ));
    }
    Ok(())
}

/// Calls `f(first element, elements, copy)` for the parts of a weight of `n` elements that have one
/// copy each: with `cast` the writes from `next` on, or else the whole without a copy.
fn copies(
    cast: bool,
    n: u64,
    writes: &[RawRange],
    next: &mut usize,
    mut f: impl FnMut(u64, u64, Option<(u64, DType)>),
) -> Result<(), OperandError> {
    if !cast {
        f(0, n, None);
        return Ok(());
    }
    let mut first = 0;
    while first < n {
        let Some(r) = writes.get(*next) else { break };
        *next += 1;
        let here = numel(r).min(n - first);
        size("a weight's copy", here, numel(r))?;
        f(first, here, Some((at(r), r.dtype)));
        first += here;
    }
    size("a weight's copies", n, first)
}

/// Calls `f(group, first element, elements)` for the parts of `n` elements from `done` on, counted
/// over the launch's weights, that are in one parameter group each.
fn in_groups(groups: &[GroupRun], done: u64, n: u64, mut f: impl FnMut(u8, u64, u64)) {
    if groups.is_empty() {
        return f(0, 0, n);
    }
    in_runs(groups.iter().map(|run| (run.group, run.numel)), done, n, f);
}

/// Calls `f(key, first element, elements)` for the parts of `n` elements from `done` on that are in
/// one run each, of runs that follow one another from element 0 on.
fn in_runs<K>(
    runs: impl Iterator<Item = (K, u64)>,
    done: u64,
    n: u64,
    mut f: impl FnMut(K, u64, u64),
) {
    let mut start = 0;
    for (key, numel) in runs {
        let (first, last) = (start.max(done), (start + numel).min(done + n));
        if first < last {
            f(key, first - done, last - first);
        }
        start += numel;
    }
}

/// Plans `weight, gradient[, states], ..[, square of the norm]`; a tensor without states continues
/// those of the tensor before. With `cast`, a tensor's writes end with the copies of its weight.
fn update(
    w: &mut Work,
    update: Update,
    (groups, scales_of, shapes): (&[GroupRun], &[ScaleRun], &[Shape]),
    reads: &[RawRange],
    writes: &[RawRange],
) -> Result<(), OperandError> {
    let (writes, maxima) = match writes.split_last() {
        Some((maxima, rest)) if update.fused.maxima => (rest, Some(maxima)),
        _ => (writes, None),
    };
    let slots = float8::Slots::of(maxima, scales_of)?;
    if let Some(out) = maxima {
        w.copy((at(out), out.dtype), None, numel(out));
    }
    let pieces = update.fused.pieces.map_or(1, |p| {
        w.factor = p.factor.0 as f32;
        p.ranks.max(1)
    });
    let count_of = update.rule.states();
    let (mut r, mut k) = (0, 0);
    // State of the last tensor that has some, and the number of its elements in use.
    let (mut states, mut scales, mut used): (&[RawRange], &[RawRange], u64) = (&[], &[], 0);
    let mut shapes = shapes.iter();
    // Weights of the tensors before.
    let mut before = 0;
    while r + 1 < reads.len() {
        let (weight, grad) = (&reads[r], &reads[r + 1]);
        updates(weight, (grad, pieces), writes.get(k))?;
        (r, k) = (r + 2, k + 1);
        let n = numel(weight);
        if count_of > 0 && n > 0 && states.first().is_none_or(|s| numel(s) == used) {
            let in_bytes = reads.get(r).is_some_and(|s| s.dtype == DType::U8);
            let ranges = if in_bytes { 2 * count_of } else { count_of };
            let written = writes.get(k..k + ranges).unwrap_or_default();
            (states, scales) = reads
                .get(r..r + ranges)
                .unwrap_or_default()
                .split_at_checked(count_of)
                .unwrap_or_default();
            let same = |(a, b): (&RawRange, &RawRange)| a.ptr == b.ptr && a.bytes == b.bytes;
            let all = states.iter().chain(scales).zip(written);
            if states.is_empty() || written.is_empty() || !all.into_iter().all(same) {
                return Err(count("states", count_of, 0));
            }
            for (state, scales) in states.iter().zip(scales) {
                size(
                    "the scales",
                    numel(state).div_ceil(STATE_BLOCK),
                    numel(scales),
                )?;
            }
            used = 0;
            (r, k) = (r + ranges, k + ranges);
        }
        for state in states {
            if used + n > numel(state) {
                size("a state", used + n, numel(state))?;
            }
            if state.dtype != states[0].dtype {
                return Err(OperandError::Type(state.dtype));
            }
        }
        let mut whole = true;
        let distance = (pieces > 1).then(|| n * grad.dtype.size());
        let place = |r: &RawRange, element: u64| at(r) + element * r.dtype.size();
        if let UpdateRule::Muon(_) = update.rule {
            let tensor = muon::Tensor {
                weight,
                grad: (grad, pieces),
                momentum: states.first().map(|s| (s, used)),
                before,
            };
            muon::matrices(&mut w.matrices, tensor, &mut shapes, groups)?;
            copies(update.fused.cast, n, writes, &mut k, |first, here, copy| {
                if let Some(to) = copy {
                    w.copy_after(to, (place(weight, first), weight.dtype), here);
                }
            })?;
            (used, before) = (used + n, before + n);
            continue;
        }
        copies(update.fused.cast, n, writes, &mut k, |first, here, copy| {
            let kind = Ranges::Update(RangeUpdate {
                rule: update.rule,
                weight: weight.dtype,
                grad: grad.dtype,
                states: states.first().map_or(DType::F32, |s| s.dtype),
                copy: copy.map(|c| c.1),
                pieces,
                grouped: !groups.is_empty(),
                maxima: maxima.is_some(),
            });
            let mut add = |group: u8, slot: Option<u64>, start: u64, here: u64| {
                let element = first + start;
                whole &= scales.is_empty() || here == n && numel(&states[0]) == n;
                let copy = copy.map(|(at, ty)| at + start * ty.size());
                let all = [place(weight, element), place(grad, element)].into_iter();
                let all = all.chain(states.iter().map(|s| place(s, used + element)));
                let block = (used + element) / STATE_BLOCK;
                let all = all.chain(scales.iter().map(|s| place(s, block)));
                let group = (!groups.is_empty()).then_some(u64::from(group));
                let all = all.chain(copy).chain(distance).chain(slot);
                w.add(
                    kind,
                    Piece {
                        at: operands(all.chain(group)),
                        n: here,
                    },
                );
            };
            in_groups(groups, before + first, here, |group, start, here| {
                slots.cut(before + first + start, here, |slot, further, here| {
                    add(group, slot, start + further, here);
                });
            });
        })?;
        if !whole {
            let message = "a state in 8 bits belongs to several ranges of weights";
            return Err(OperandError::Shape(message.to_owned()));
        }
        used += if count_of > 0 { n } else { 0 };
        before += n;
    }
    if let Some(square) = reads.get(r) {
        w.square = scalar(Some(square))?;
    }
    slots.cover(before)?;
    if k == writes.len() {
        Ok(())
    } else {
        Err(count("writes", k, writes.len()))
    }
}
