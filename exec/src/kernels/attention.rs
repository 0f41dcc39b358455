//! Softmax attention, by blocks of query rows.
//!
//! A block's scores are a small GEMM over the keys it may see; nothing of the size of the whole
//! score matrix is kept. Backward recomputes the scores from the saved log-sum-exp.

use super::error::OperandError;
use super::gemm::{Mat, multiply};
use super::math::{LANES, exp, max, sum1, sum2};
use super::operands::{Operands, dims, same};
use super::parallel;
use super::scratch::Scratch;
use super::strides;
use super::view::View;
use super::wide::wide;
use shardlab_plan::ir::{AttentionShape, DType};
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
struct Geometry {
    batch: usize,
    heads: usize,
    kv: usize,
    seq: usize,
    d: usize,
    causal: bool,
}

impl From<AttentionShape> for Geometry {
    fn from(s: AttentionShape) -> Self {
        let [batch, heads, seq, d] = s.queries().map(|n| n as usize);
        Self {
            batch,
            heads,
            kv: s.kv_heads as usize,
            seq,
            d,
            causal: s.causal,
        }
    }
}

/// Multiplications below which more threads do not pay off.
const PARALLEL: usize = 1 << 20;

impl Geometry {
    /// Returns the minimum number of groups of heads per thread.
    fn step(self) -> usize {
        let groups = (self.batch * self.kv).max(1);
        let all = self.batch * self.heads * self.seq * self.seq * self.d;
        if all < PARALLEL { groups } else { 1 }
    }

    fn new(q: &Heads, k: &Heads, v: &Heads, causal: bool) -> Result<Self, OperandError> {
        v.like(k)?;
        let [of_q, of_k] = [q, k].map(|x| x.shape.map(|n| n as u64));
        let shape = AttentionShape::of(&of_q, &of_k, causal).ok_or_else(|| {
            OperandError::Shape(format!("queries {:?} with keys {:?}", q.shape, k.shape))
        })?;
        Ok(shape.into())
    }

    /// Returns the blocks of query rows: first row, number of rows, and how many keys the last row
    /// sees.
    fn blocks(self) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..self.seq).step_by(ROWS).map(move |from| {
            let n = ROWS.min(self.seq - from);
            (from, n, if self.causal { from + n } else { self.seq })
        })
    }

    /// Returns how many keys the `i`-th row of a block sees.
    fn seen(self, row: usize) -> usize {
        if self.causal { row + 1 } else { self.seq }
    }
}

/// Returns the log-sum-exp, whose rows may be padded.
fn statistics(view: &View, shape: [usize; 3], g: Geometry) -> Result<usize, OperandError> {
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
pub(super) fn forward(o: &Operands<'_>, causal: bool, scale: f32) -> Result<(), OperandError> {
    o.expect(3, 2)?;
    let [q, k, v] = [
        Heads::new(o, false, 0)?,
        Heads::new(o, false, 1)?,
        Heads::new(o, false, 2)?,
    ];
    let out = Heads::new(o, true, 0)?;
    let g = Geometry::new(&q, &k, &v, causal)?;
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
    parallel::split(g.batch * g.kv, g.step(), |part| {
        forward_heads(g, part, [&q, &k, &v], &out, (&lse, rows), scale);
        Ok::<(), OperandError>(())
    })?;
    for i in 2..o.op.outputs.len() {
        o.output(i)?.fill(0.0);
    }
    Ok(())
}

/// Computes forward of some pairs of sample and key head.
fn forward_heads(
    g: Geometry,
    part: Range<usize>,
    [q, k, v]: [&Heads; 3],
    out: &Heads,
    (lse, rows): (&View, usize),
    scale: f32,
) {
    let (seq, d) = (g.seq, g.d);
    let [mut keys, mut values, mut queries, mut result] =
        [seq * d, seq * d, ROWS * d, ROWS * d].map(Scratch::take);
    let mut scores = Scratch::take(ROWS * seq.next_multiple_of(LANES));
    let mut stats = [0.0; ROWS];
    let mut factors = [0.0; ROWS];
    for bk in part {
        let (b, kh) = (bk / g.kv, bk % g.kv);
        let km = k.matrix(b, kh, 0, seq, &mut keys);
        let vm = v.matrix(b, kh, 0, seq, &mut values);
        for h in kh * (g.heads / g.kv)..(kh + 1) * (g.heads / g.kv) {
            for (from, n, keys) in g.blocks() {
                let pitch = keys.next_multiple_of(LANES);
                let qm = q.matrix(b, h, from, n, &mut queries);
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
                    let (total, z) = attention_row(row, g.seen(from + i), scale);
                    (factors[i], stats[i]) = (1.0 / total, z);
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
pub(super) fn backward(o: &Operands<'_>, causal: bool, scale: f32) -> Result<(), OperandError> {
    o.expect(6, 3)?;
    let heads = |i| Heads::new(o, false, i);
    let [dy, q, k, v, y] = [heads(0)?, heads(1)?, heads(2)?, heads(3)?, heads(4)?];
    let [dq, dk, dv] = [
        Heads::new(o, true, 0)?,
        Heads::new(o, true, 1)?,
        Heads::new(o, true, 2)?,
    ];
    let g = Geometry::new(&q, &k, &v, causal)?;
    for (a, b) in [(&dy, &q), (&y, &q), (&dq, &q), (&dk, &k), (&dv, &k)] {
        a.like(b)?;
    }
    let lse = o.input(5)?;
    let rows = statistics(&lse, dims::<3>(o.slot(false, 5)?)?, g)?;
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
            scale,
        );
        Ok(())
    })
}

/// Computes backward of some pairs of sample and key head.
fn backward_heads(
    g: Geometry,
    part: Range<usize>,
    [dy, q, k, v, y]: [&Heads; 5],
    [dq, dk, dv]: [&Heads; 3],
    (lse, rows): (&View, usize),
    scale: f32,
) {
    let (seq, d) = (g.seq, g.d);
    let [mut keys, mut values, mut queries] = [seq * d, seq * d, ROWS * d].map(Scratch::take);
    let [mut douts, mut outs, mut dqs] = [ROWS * d, ROWS * d, ROWS * d].map(Scratch::take);
    let [mut dks, mut dvs] = [seq * d, seq * d].map(Scratch::take);
    let [mut p, mut dp] = [ROWS * seq.next_multiple_of(LANES); 2].map(Scratch::take);
    let (mut stats, mut delta) = ([0.0; ROWS], [0.0; ROWS]);
    for bk in part {
        let (b, kh) = (bk / g.kv, bk % g.kv);
        let km = k.matrix(b, kh, 0, seq, &mut keys);
        let vm = v.matrix(b, kh, 0, seq, &mut values);
        dks.fill(0.0);
        dvs.fill(0.0);
        for h in kh * (g.heads / g.kv)..(kh + 1) * (g.heads / g.kv) {
            for (from, n, keys) in g.blocks() {
                let pitch = keys.next_multiple_of(LANES);
                let qm = q.matrix(b, h, from, n, &mut queries);
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
                    let seen = g.seen(from + i);
                    attention_row_grad(p, dp, seen, scale, stats[i], delta[i]);
                }
                // SAFETY: as above.
                unsafe {
                    let (pm, dpm) = (Mat::rows(&p, pitch), Mat::rows(&dp, pitch));
                    multiply(keys, d, n, pm.t(), dym, Mat::target(&mut dvs, d), true);
                    multiply(n, d, keys, dpm, km, Mat::target(&mut dqs, d), false);
                    multiply(keys, d, n, dpm.t(), qm, Mat::target(&mut dks, d), true);
                }
                dq.store(b, h, from, &dqs[..n * d]);
            }
        }
        dk.store(b, kh, 0, &dks);
        dv.store(b, kh, 0, &dvs);
    }
}
