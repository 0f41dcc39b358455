//! Softmax and its relatives on rows of floats.

use super::math::{exp, max, sum1};
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

    /// Replaces a row of scores by `exp(scale * (score - max))`; returns the sum of these and the log-sum-exp of the scaled scores.
    fn attention_row(row: &mut [f32], scale: f32) -> (f32, f32) {
        let m = scale * max(row);
        for v in row.iter_mut() {
            *v = exp(scale * *v - m);
        }
        let total = sum1(row, |v| v);
        (total, m + total.ln())
    }

    /// Replaces a row of scores by its probabilities, given the log-sum-exp of the scaled scores.
    fn attention_row_again(row: &mut [f32], scale: f32, lse: f32) {
        for v in row {
            *v = exp(scale * *v - lse);
        }
    }

    /// `p * (dp - delta) * scale`, in place of `dp`.
    fn attention_row_grad(p: &[f32], dp: &mut [f32], delta: f32, scale: f32) {
        for (d, &p) in dp.iter_mut().zip(p) {
            *d = p * (*d - delta) * scale;
        }
    }
}
