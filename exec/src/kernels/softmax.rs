//! Softmax and its relatives on rows of floats.

use super::math::{LANES, exp, max, sum1};
use super::wide::wide;

wide! {
    /// Log-sum-exp of each row of length `d`.
    fn log_sum_exp(x: &[f32], d: usize, out: &mut [f32]) {
        for (x, o) in x.chunks_exact(d).zip(out) {
            let m = max(x);
            *o = m + sum1(x, |v| exp(v - m)).ln();
        }
    }

    /// `x - lse` of each row of length `d`.
    fn log_softmax(x: &[f32], d: usize, y: &mut [f32]) {
        for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
            let m = max(x);
            let z = m + sum1(x, |v| exp(v - m)).ln();
            for (y, &x) in y.iter_mut().zip(x) {
                *y = x - z;
            }
        }
    }

    /// Gradient of [`log_softmax`] from its result.
    fn log_softmax_grad(dy: &[f32], y: &[f32], d: usize, dx: &mut [f32]) {
        let rows = dy.chunks_exact(d).zip(y.chunks_exact(d));
        for ((dy, y), dx) in rows.zip(dx.chunks_exact_mut(d)) {
            let total = sum1(dy, |v| v);
            for ((dx, &g), &y) in dx.iter_mut().zip(dy).zip(y) {
                *dx = g - exp(y) * total;
            }
        }
    }

    /// Replaces a row of logits by `scale * softmax` and returns its log-sum-exp.
    fn scaled_softmax(row: &mut [f32], scale: f32) -> f32 {
        let m = max(row);
        let z = m + sum1(row, |v| exp(v - m)).ln();
        for v in row {
            *v = scale * exp(*v - z);
        }
        z
    }

    /// Replaces the first `seen` scores of a row by `exp(scale * (score - max))` and the others by 0; returns the sum of these and
    /// the log-sum-exp of the scaled scores. The row is a multiple of [`LANES`] long.
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

    /// Replaces the first `seen` scores of a row by their probabilities, given the log-sum-exp of the scaled scores, and the others
    /// by 0; `dp` becomes `p * (dp - delta) * scale`. Both are a multiple of [`LANES`] long.
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
}
