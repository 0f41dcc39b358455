//! Softmax attention, by blocks of query rows.
//!
//! A block's scores are a small GEMM over the keys it may see; nothing of the size of the whole
//! score matrix is kept. Backward recomputes the scores from the saved log-sum-exp.

use super::error::OperandError;
use super::gemm::{Mat, multiply};
use super::math::{LANES, exp, max, sum1, sum2, tanh};
use super::operands::{Operands, dims, same};
use super::parallel;
use super::scratch::Scratch;
use super::strides;
use super::view::View;
use super::wide::wide;
use shardlab_plan::ir::{AttentionShape, DType, ScoreMod, alibi_slope};
use std::ops::Range;

/// Number of query rows of a block.
const ROWS: usize = 64;

wide! {
    /// Replaces the first `seen` scores of a row by `exp(scale * (score - max))` and the others by
    /// 0. Returns the sum of these and the log-sum-exp of the scaled scores. The length of the row
    /// is a multiple of [`LANES`].
    fn attention_row(row: &mut [f32], seen: usize, scale: f32) -> (f32, f32) {
        let (used, rest) = row.split_at_mut(seen.next_multiple_of(LANES));
        used[seen..].fill(f32::NEG_INFINITY);
        rest.fill(0.0);
        let m = scale * max(used);
        let mut acc = [0.0; LANES];
        for c in used.chunks_exact_mut(LANES) {
            for (s, v) in acc.iter_mut().zip(c) {
                *v = exp(scale * *v - m);
                *s += *v;
            }
        }
        let total = sum1(&acc, |v| v);
        (total, m + total.ln())
    }

    /// Replaces the first `seen` scores of a row by their probabilities, given the log-sum-exp of
    /// the scaled scores, and the others by 0; `dp` becomes `p * (dp - delta) * scale`. The length
    /// of both is a multiple of [`LANES`].
    fn attention_row_grad(row: &mut [f32], dp: &mut [f32], seen: usize, scale: f32, lse: f32, delta: f32) {
        let used = seen.next_multiple_of(LANES);
        row[seen..].fill(f32::NEG_INFINITY);
        dp[seen..].fill(0.0);
        for (p, d) in row[..used].chunks_exact_mut(LANES).zip(dp[..used].chunks_exact_mut(LANES)) {
            for (p, d) in p.iter_mut().zip(d) {
                *p = exp(scale * *p - lse);
                *d = *p * (*d - delta) * scale;
            }
        }
        row[used..].fill(0.0);
    }

    /// Scales scores, limits them softly unless `cap` is 0, and adds `slope` times the distance
    /// from the query, which is `query` positions after the row's first key, to the key. `factor`
    /// becomes the derivative of a changed score by the scaled one.
    fn modify(row: &mut [f32], factor: &mut [f32], query: f32, scale: f32, cap: f32, slope: f32) {
        for (j, (s, f)) in row.iter_mut().zip(factor).enumerate() {
            *s *= scale;
            *f = 1.0;
            if cap != 0.0 {
                let t = tanh(*s / cap);
                *s = cap * t;
                *f = 1.0 - t * t;
            }
            *s += slope * (j as f32 - query);
        }
    }

    /// Multiplies numbers by others.
    fn multiply_by(x: &mut [f32], by: &[f32]) {
        for (x, by) in x.iter_mut().zip(by) {
            *x *= by;
        }
    }

    /// Computes the dot products of the rows of two matrices of `d` columns.
    fn row_dots(a: &[f32], b: &[f32], d: usize, out: &mut [f32]) {
        for ((a, b), o) in a.chunks_exact(d).zip(b.chunks_exact(d)).zip(out) {
            *o = sum2(a, b, |x, y| x * y);
        }
    }

    /// Multiplies each row of `d` columns by a factor.
    fn scale_rows(x: &mut [f32], d: usize, factors: &[f32]) {
        for (x, &f) in x.chunks_exact_mut(d).zip(factors) {
            for v in x {
                *v *= f;
            }
        }
    }
}

/// A `[batch, heads, seq, head_dim]` operand.
struct Heads {
    view: View,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Heads {
    fn new(o: &Operands<'_>, outputs: bool, i: usize) -> Result<Self, OperandError> {
        let slot = o.slot(outputs, i)?;
        let shape = dims::<4>(slot)?;
        let st = strides::of(slot);
        let view = if outputs { o.output(i)? } else { o.input(i)? };
        Ok(Self {
            view,
            shape,
            strides: [st[0], st[1], st[2], st[3]],
        })
    }

    fn like(&self, other: &Self) -> Result<(), OperandError> {
        if self.shape == other.shape {
            return Ok(());
        }
        Err(OperandError::Shape(format!(
            "{:?} and {:?} in one attention",
            self.shape, other.shape
        )))
    }

    /// Returns the rows `from..from + n` of a head as a matrix of floats: in memory, or copied into
    /// `to`.
    fn matrix(&self, b: usize, h: usize, from: usize, n: usize, to: &mut [f32]) -> Mat {
        let [_, heads, seq, d] = self.shape;
        if self.view.dtype == DType::F32 {
            let at = b * self.strides[0] + h * self.strides[1] + from * self.strides[2];
            let ptr = self.view.ptr.cast::<f32>().wrapping_add(at);
            return Mat {
                ptr,
                row: self.strides[2],
                col: self.strides[3],
            };
        }
        let to = &mut to[..n * d];
        self.view.load(((b * heads + h) * seq + from) * d, to);
        Mat::rows(to, d)
    }

    /// Copies rows of a head.
    fn load(&self, b: usize, h: usize, from: usize, to: &mut [f32]) {
        let [_, heads, seq, d] = self.shape;
        self.view.load(((b * heads + h) * seq + from) * d, to);
    }

    fn store(&self, b: usize, h: usize, from: usize, rows: &[f32]) {
        let [_, heads, seq, d] = self.shape;
        self.view.store(((b * heads + h) * seq + from) * d, rows);
    }
}

/// Sizes of one attention, as indices.
#[derive(Clone, Copy)]
struct Geometry<'d> {
    batch: usize,
    heads: usize,
    kv: usize,
    seq: usize,
    d: usize,
    kind: Kind,
    /// First positions of the documents of all positions of all samples, ascending in each; empty
    /// if the documents are those of `kind`.
    starts: &'d [usize],
}

/// What attention computes.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) causal: bool,
    pub(super) scale: f32,
    pub(super) score_mod: ScoreMod,
}

impl Kind {
    /// Returns the window; all positions if there is none.
    fn window(self) -> usize {
        match self.score_mod.window {
            0 => usize::MAX,
            window => window as usize,
        }
    }

    /// Returns the factor of scores that are left when they have been changed.
    fn rest(self) -> f32 {
        if self.changes() { 1.0 } else { self.scale }
    }

    /// Returns whether scores are more than scaled.
    fn changes(self) -> bool {
        self.score_mod.softcap.0 != 0.0 || self.score_mod.alibi
    }

    /// Changes the scores of a query of a head with the keys from `start` on.
    fn modify(
        self,
        row: &mut [f32],
        factor: &mut [f32],
        g: Geometry<'_>,
        h: usize,
        query: usize,
        start: usize,
    ) {
        if !self.changes() {
            return;
        }
        let slope = match self.score_mod.alibi {
            true => alibi_slope(h as u64, g.heads as u64) as f32,
            false => 0.0,
        };
        let cap = self.score_mod.softcap.0 as f32;
        modify(
            row,
            factor,
            query as f32 - start as f32,
            self.scale,
            cap,
            slope,
        );
    }
}

impl Geometry<'_> {
    fn of(s: AttentionShape, kind: Kind) -> Self {
        let [batch, heads, seq, d] = s.queries().map(|n| n as usize);
        Self {
            batch,
            heads,
            kv: s.kv_heads as usize,
            seq,
            d,
            kind,
            starts: &[],
        }
    }
}

/// Multiplications below which more threads do not pay off.
const PARALLEL: usize = 1 << 20;

impl<'d> Geometry<'d> {
    /// Returns the minimum number of groups of heads per thread.
    fn step(self) -> usize {
        let groups = (self.batch * self.kv).max(1);
        let all = self.batch * self.heads * self.seq * self.seq * self.d;
        if all < PARALLEL { groups } else { 1 }
    }

    fn new([q, k, v]: [&Heads; 3], kind: Kind, starts: &'d [usize]) -> Result<Self, OperandError> {
        v.like(k)?;
        let [of_q, of_k] = [q, k].map(|x| x.shape.map(|n| n as u64));
        let shape = AttentionShape::of(&of_q, &of_k, kind.causal).ok_or_else(|| {
            OperandError::Shape(format!("queries {:?} with keys {:?}", q.shape, k.shape))
        })?;
        let g = Self {
            starts,
            ..Self::of(shape, kind)
        };
        if !starts.is_empty() {
            same("the starts of documents", g.batch * g.seq, starts.len())?;
        }
        Ok(g)
    }

    /// Returns the blocks of query rows of sample `b`: first row, number of rows, and the keys that
    /// these rows see.
    fn blocks(self, b: usize) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
        (0..self.seq).step_by(ROWS).map(move |from| {
            let n = ROWS.min(self.seq - from);
            let (first, last) = (self.seen(b, from), self.seen(b, from + n - 1));
            (from, n, first.start..last.end)
        })
    }

    /// Returns the keys that a row of sample `b` sees.
    fn seen(self, b: usize, row: usize) -> Range<usize> {
        let window = self.kind.window();
        let document = self.document(b, row);
        let end = match self.kind.causal {
            true => row + 1,
            false => row.saturating_add(window).min(document.end),
        };
        (row + 1).saturating_sub(window).max(document.start)..end
    }

    /// Returns the positions of the document of a row of sample `b`.
    fn document(self, b: usize, row: usize) -> Range<usize> {
        if self.starts.is_empty() {
            let documents = self.kind.score_mod.documents;
            let of = documents.span(row as u64, self.seq as u64);
            return of.start as usize..of.end as usize;
        }
        let starts = &self.starts[b * self.seq..][..self.seq];
        let start = starts[row];
        start..starts.partition_point(|other| *other <= start)
    }
}

/// Returns the rows of a matrix from `start` on.
fn from_row(m: &Mat, start: usize) -> Mat {
    Mat {
        ptr: m.ptr.wrapping_add(start * m.row),
        ..*m
    }
}

/// Returns the log-sum-exp, whose rows may be padded.
fn statistics(view: &View, shape: [usize; 3], g: Geometry<'_>) -> Result<usize, OperandError> {
    let [batch, heads, rows] = shape;
    same("the log-sum-exp", g.batch * g.heads, batch * heads)?;
    if rows < g.seq {
        return Err(OperandError::Size {
            what: "a row of the log-sum-exp",
            needed: g.seq,
            found: rows,
        });
    }
    debug_assert_eq!(view.numel, batch * heads * rows);
    Ok(rows)
}

/// Computes `q, k, v -> out, lse[, seed, offset]`.
pub(super) fn forward(o: &Operands<'_>, kind: Kind) -> Result<(), OperandError> {
    o.expect(3, 2)?;
    run_forward(o, kind, None, &[])
}

/// Computes `q, k, v, sinks -> out, lse`.
pub(super) fn forward_with_sinks(o: &Operands<'_>, kind: Kind) -> Result<(), OperandError> {
    o.expect(4, 2)?;
    run_forward(o, kind, Some(o.input(3)?), &[])
}

/// Computes `q, k, v, starts -> out, lse[, seed, offset]`.
pub(super) fn forward_within_documents(o: &Operands<'_>, kind: Kind) -> Result<(), OperandError> {
    o.expect(4, 2)?;
    run_forward(o, kind, None, &starts(o, 3)?)
}

/// Reads the first positions of the documents of all positions, `[batch, seq]`, from an input.
fn starts(o: &Operands<'_>, input: usize) -> Result<Vec<usize>, OperandError> {
    let [batch, seq] = dims::<2>(o.slot(false, input)?)?;
    let mut ids = vec![0; batch * seq];
    o.input(input)?.load_ids(0, &mut ids)?;
    let starts: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
    for sample in starts.chunks_exact(seq.max(1)) {
        let before = sample.iter().enumerate().all(|(i, start)| *start <= i);
        if !before || !sample.is_sorted() {
            return Err(OperandError::Shape(
                "documents do not start in order, before their positions".to_owned(),
            ));
        }
    }
    Ok(starts)
}

fn run_forward(
    o: &Operands<'_>,
    kind: Kind,
    sinks: Option<View>,
    starts: &[usize],
) -> Result<(), OperandError> {
    let [q, k, v] = [
        Heads::new(o, false, 0)?,
        Heads::new(o, false, 1)?,
        Heads::new(o, false, 2)?,
    ];
    let out = Heads::new(o, true, 0)?;
    let g = Geometry::new([&q, &k, &v], kind, starts)?;
    out.like(&q)?;
    let lse = o.output(1)?;
    let rows = statistics(&lse, dims::<3>(o.slot(true, 1)?)?, g)?;
    for x in [&q, &k, &v] {
        if o.written(&x.view)? {
            return Err(OperandError::Shape(
                "attention cannot work in place".to_owned(),
            ));
        }
    }
    let sinks = sinks.map(|sinks| of_heads(&sinks, g)).transpose()?;
    parallel::split(g.batch * g.kv, g.step(), |part| {
        forward_heads(g, part, [&q, &k, &v], sinks.as_deref(), &out, (&lse, rows));
        Ok::<(), OperandError>(())
    })?;
    for i in 2..o.op.outputs.len() {
        o.output(i)?.fill(0.0);
    }
    Ok(())
}

/// Reads one number for each head.
fn of_heads(sinks: &View, g: Geometry<'_>) -> Result<Vec<f32>, OperandError> {
    same("the sinks", g.heads, sinks.numel)?;
    let mut all = vec![0.0; g.heads];
    sinks.load(0, &mut all);
    Ok(all)
}

/// Adds a sink to the softmax of a row: returns the reciprocal of the sum of exponentials, relative
/// to the row's own maximum as `total` is, and the log-sum-exp, given those without the sink.
fn with_sink(total: f32, z: f32, sink: f32) -> (f32, f32) {
    let all = z.max(sink) + (-(z - sink).abs()).exp().ln_1p();
    ((z - all).exp() / total, all)
}

/// Computes forward of some pairs of sample and key head.
fn forward_heads(
    g: Geometry<'_>,
    part: Range<usize>,
    [q, k, v]: [&Heads; 3],
    sinks: Option<&[f32]>,
    out: &Heads,
    (lse, rows): (&View, usize),
) {
    let (seq, d) = (g.seq, g.d);
    let [mut keys, mut values, mut queries, mut result] =
        [seq * d, seq * d, ROWS * d, ROWS * d].map(Scratch::take);
    let [mut scores, mut slopes] = [ROWS * seq.next_multiple_of(LANES), seq].map(Scratch::take);
    let rest = g.kind.rest();
    let mut stats = [0.0; ROWS];
    let mut factors = [0.0; ROWS];
    for bk in part {
        let (b, kh) = (bk / g.kv, bk % g.kv);
        let km = k.matrix(b, kh, 0, seq, &mut keys);
        let vm = v.matrix(b, kh, 0, seq, &mut values);
        for h in kh * (g.heads / g.kv)..(kh + 1) * (g.heads / g.kv) {
            for (from, n, seen) in g.blocks(b) {
                let (start, keys) = (seen.start, seen.len());
                let pitch = keys.next_multiple_of(LANES);
                let qm = q.matrix(b, h, from, n, &mut queries);
                let (km, vm) = (from_row(&km, start), from_row(&vm, start));
                // SAFETY: the matrices are inside checked views or in scratch that is long enough.
                unsafe {
                    multiply(
                        n,
                        keys,
                        d,
                        qm,
                        km.t(),
                        Mat::target(&mut scores, pitch),
                        false,
                    )
                };
                for (i, row) in scores[..n * pitch].chunks_exact_mut(pitch).enumerate() {
                    let seen = g.seen(b, from + i);
                    g.kind
                        .modify(&mut row[..keys], &mut slopes, g, h, from + i, start);
                    row[..seen.start - start].fill(f32::NEG_INFINITY);
                    let (total, z) = attention_row(row, seen.end - start, rest);
                    (factors[i], stats[i]) = match sinks {
                        Some(sinks) => with_sink(total, z, sinks[h]),
                        None => (1.0 / total, z),
                    };
                }
                // SAFETY: as above.
                unsafe {
                    multiply(
                        n,
                        d,
                        keys,
                        Mat::rows(&scores, pitch),
                        vm,
                        Mat::target(&mut result, d),
                        false,
                    )
                };
                scale_rows(&mut result[..n * d], d, &factors[..n]);
                out.store(b, h, from, &result[..n * d]);
                lse.store((b * g.heads + h) * rows + from, &stats[..n]);
            }
            for pad in seq..rows {
                lse.store((b * g.heads + h) * rows + pad, &[0.0]);
            }
        }
    }
}

/// Computes `d_out, q, k, v, out, lse, .. -> d_q, d_k, d_v`.
pub(super) fn backward(o: &Operands<'_>, kind: Kind) -> Result<(), OperandError> {
    o.expect(6, 3)?;
    run_backward(o, kind, 4, &[])?;
    Ok(())
}

/// Computes `d_out, q, k, v, starts, out, lse, .. -> d_q, d_k, d_v`.
pub(super) fn backward_within_documents(o: &Operands<'_>, kind: Kind) -> Result<(), OperandError> {
    o.expect(7, 3)?;
    run_backward(o, kind, 5, &starts(o, 4)?)?;
    Ok(())
}

/// Computes `d_out, q, k, v, sinks, out, lse -> d_q, d_k, d_v, d_sinks`.
pub(super) fn backward_with_sinks(o: &Operands<'_>, kind: Kind) -> Result<(), OperandError> {
    o.expect(7, 4)?;
    let g = run_backward(o, kind, 5, &[])?;
    let (dy, y) = (Heads::new(o, false, 0)?, Heads::new(o, false, 5)?);
    let sinks = of_heads(&o.input(4)?, g)?;
    let (lse, to) = (o.input(6)?, o.output(3)?);
    let rows = statistics(&lse, dims::<3>(o.slot(false, 6)?)?, g)?;
    same("the gradient of the sinks", g.heads, to.numel)?;
    let gradients = sink_gradients(g, &sinks, [&dy, &y], (&lse, rows));
    to.store(0, &gradients);
    Ok(())
}

/// Computes the gradients of sinks: the negative sums over rows of a sink's probability times the
/// dot product of the result and its gradient, in the order of samples and rows.
fn sink_gradients(
    g: Geometry<'_>,
    sinks: &[f32],
    [dy, y]: [&Heads; 2],
    (lse, rows): (&View, usize),
) -> Vec<f32> {
    let [mut douts, mut outs] = [g.seq * g.d; 2].map(Scratch::take);
    let [mut delta, mut stats] = [g.seq; 2].map(Scratch::take);
    let mut all = vec![0.0; g.heads];
    for (h, (sum, &sink)) in all.iter_mut().zip(sinks).enumerate() {
        for b in 0..g.batch {
            dy.load(b, h, 0, &mut douts[..g.seq * g.d]);
            y.load(b, h, 0, &mut outs[..g.seq * g.d]);
            lse.load((b * g.heads + h) * rows, &mut stats[..g.seq]);
            row_dots(&douts, &outs, g.d, &mut delta[..g.seq]);
            for (z, delta) in stats.iter().zip(&*delta).take(g.seq) {
                *sum -= (sink - z).exp() * delta;
            }
        }
    }
    all
}

/// Computes the gradients of queries, keys and values; the forward's result and log-sum-exp are
/// inputs `result` and the next one.
fn run_backward<'d>(
    o: &Operands<'_>,
    kind: Kind,
    result: usize,
    starts: &'d [usize],
) -> Result<Geometry<'d>, OperandError> {
    let heads = |i| Heads::new(o, false, i);
    let [dy, q, k, v, y] = [heads(0)?, heads(1)?, heads(2)?, heads(3)?, heads(result)?];
    let [dq, dk, dv] = [
        Heads::new(o, true, 0)?,
        Heads::new(o, true, 1)?,
        Heads::new(o, true, 2)?,
    ];
    let g = Geometry::new([&q, &k, &v], kind, starts)?;
    for (a, b) in [(&dy, &q), (&y, &q), (&dq, &q), (&dk, &k), (&dv, &k)] {
        a.like(b)?;
    }
    let lse = o.input(result + 1)?;
    let rows = statistics(&lse, dims::<3>(o.slot(false, result + 1)?)?, g)?;
    for x in [&dy, &q, &k, &v, &y] {
        if o.written(&x.view)? {
            return Err(OperandError::Shape(
                "attention cannot work in place".to_owned(),
            ));
        }
    }
    parallel::split(g.batch * g.kv, g.step(), |part| {
        backward_heads(
            g,
            part,
            [&dy, &q, &k, &v, &y],
            [&dq, &dk, &dv],
            (&lse, rows),
        );
        Ok::<(), OperandError>(())
    })?;
    Ok(g)
}

/// Computes backward of some pairs of sample and key head.
fn backward_heads(
    g: Geometry<'_>,
    part: Range<usize>,
    [dy, q, k, v, y]: [&Heads; 5],
    [dq, dk, dv]: [&Heads; 3],
    (lse, rows): (&View, usize),
) {
    let (seq, d) = (g.seq, g.d);
    let [mut keys, mut values, mut queries] = [seq * d, seq * d, ROWS * d].map(Scratch::take);
    let [mut douts, mut outs, mut dqs] = [ROWS * d, ROWS * d, ROWS * d].map(Scratch::take);
    let [mut dks, mut dvs] = [seq * d, seq * d].map(Scratch::take);
    let [mut p, mut dp] = [ROWS * seq.next_multiple_of(LANES); 2].map(Scratch::take);
    let mut slopes = Scratch::take(seq);
    let (rest, scale) = (g.kind.rest(), g.kind.scale);
    let (mut stats, mut delta) = ([0.0; ROWS], [0.0; ROWS]);
    for bk in part {
        let (b, kh) = (bk / g.kv, bk % g.kv);
        let km = k.matrix(b, kh, 0, seq, &mut keys);
        let vm = v.matrix(b, kh, 0, seq, &mut values);
        dks.fill(0.0);
        dvs.fill(0.0);
        for h in kh * (g.heads / g.kv)..(kh + 1) * (g.heads / g.kv) {
            for (from, n, seen) in g.blocks(b) {
                let (start, keys) = (seen.start, seen.len());
                let pitch = keys.next_multiple_of(LANES);
                let qm = q.matrix(b, h, from, n, &mut queries);
                let (km, vm) = (from_row(&km, start), from_row(&vm, start));
                dy.load(b, h, from, &mut douts[..n * d]);
                y.load(b, h, from, &mut outs[..n * d]);
                lse.load((b * g.heads + h) * rows + from, &mut stats[..n]);
                row_dots(&douts[..n * d], &outs[..n * d], d, &mut delta[..n]);
                let dym = Mat::rows(&douts, d);
                let (pm, dpm) = (Mat::target(&mut p, pitch), Mat::target(&mut dp, pitch));
                // SAFETY: the matrices are inside checked views or in scratch that is long enough.
                unsafe {
                    multiply(n, keys, d, qm, km.t(), pm, false);
                    multiply(n, keys, d, dym, vm.t(), dpm, false);
                }
                let rows = p
                    .chunks_exact_mut(pitch)
                    .zip(dp.chunks_exact_mut(pitch))
                    .take(n);
                for (i, (p, dp)) in rows.enumerate() {
                    let seen = g.seen(b, from + i);
                    let before = seen.start - start;
                    g.kind
                        .modify(&mut p[..keys], &mut slopes, g, h, from + i, start);
                    p[..before].fill(f32::NEG_INFINITY);
                    dp[..before].fill(0.0);
                    attention_row_grad(p, dp, seen.end - start, rest, stats[i], delta[i]);
                    if g.kind.changes() {
                        // The derivative of the change, whose factor is the scale.
                        multiply_by(&mut dp[..keys], &slopes);
                        scale_rows(&mut dp[..keys], keys, &[scale]);
                    }
                }
                // SAFETY: as above.
                unsafe {
                    let (pm, dpm) = (Mat::rows(&p, pitch), Mat::rows(&dp, pitch));
                    let (dvs, dks) = (&mut dvs[start * d..], &mut dks[start * d..]);
                    multiply(keys, d, n, pm.t(), dym, Mat::target(dvs, d), true);
                    multiply(n, d, keys, dpm, km, Mat::target(&mut dqs, d), false);
                    multiply(keys, d, n, dpm.t(), qm, Mat::target(dks, d), true);
                }
                dq.store(b, h, from, &dqs[..n * d]);
            }
        }
        dk.store(b, kh, 0, &dks);
        dv.store(b, kh, 0, &dvs);
    }
}
