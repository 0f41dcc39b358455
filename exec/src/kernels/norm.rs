//! RMS norm and layer norm on rows of floats.

use super::math::{sum1, sum2, sum3};
use super::wide::wide;

wide! {
    /// `y = x * rstd * w` by rows of `w`'s length.
    fn rms_norm(x: &[f32], w: &[f32], eps: f64, y: &mut [f32], rstd: &mut [f32]) {
        let d = w.len();
        for ((x, y), r) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
            let square = sum1(x, |v| v * v);
            let s = (1.0 / (f64::from(square) / d as f64 + eps).sqrt()) as f32;
            *r = s;
            for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
                *y = x * s * w;
            }
        }
    }

    /// Gradient of [`rms_norm`] with respect to `x`.
    fn rms_norm_grad(dy: &[f32], x: &[f32], w: &[f32], rstd: &[f32], dx: &mut [f32]) {
        let d = w.len();
        let rows = dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(rstd);
        for (((dy, x), &s), dx) in rows.zip(dx.chunks_exact_mut(d)) {
            let dot = sum3(dy, w, x, |g, w, x| g * w * x);
            let c = s * s * s * (dot / d as f32);
            for (((dx, &g), &w), &x) in dx.iter_mut().zip(dy).zip(w).zip(x) {
                *dx = s * (g * w) - c * x;
            }
        }
    }

    /// Adds `dy * x * rstd` of the rows to `acc`.
    fn rms_norm_weight_grad(dy: &[f32], x: &[f32], rstd: &[f32], acc: &mut [f32]) {
        let d = acc.len();
        for ((dy, x), &s) in dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(rstd) {
            for ((a, &g), &x) in acc.iter_mut().zip(dy).zip(x) {
                *a += g * (x * s);
            }
        }
    }

    /// `y = (x - mean) * rstd * w + b` by rows of `w`'s length; an empty `b` is none.
    fn layer_norm(x: &[f32], w: &[f32], b: &[f32], eps: f64, y: &mut [f32], mean: &mut [f32], rstd: &mut [f32]) {
        let d = w.len();
        let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d));
        for ((x, y), (mean, rstd)) in rows.zip(mean.iter_mut().zip(rstd)) {
            let m = sum1(x, |v| v) / d as f32;
            let var = sum1(x, |v| (v - m) * (v - m));
            let s = (1.0 / (f64::from(var) / d as f64 + eps).sqrt()) as f32;
            (*mean, *rstd) = (m, s);
            for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
                *y = (x - m) * s * w;
            }
            for (y, &b) in y.iter_mut().zip(b) {
                *y += b;
            }
        }
    }

    /// Gradient of [`layer_norm`] with respect to `x`.
    fn layer_norm_grad(dy: &[f32], x: &[f32], w: &[f32], mean: &[f32], rstd: &[f32], dx: &mut [f32]) {
        let d = w.len();
        let rows = dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(mean.iter().zip(rstd));
        for (((dy, x), (&m, &s)), dx) in rows.zip(dx.chunks_exact_mut(d)) {
            let m1 = sum2(dy, w, |g, w| g * w) / d as f32;
            let m2 = sum3(dy, w, x, |g, w, x| g * w * ((x - m) * s)) / d as f32;
            for (((dx, &g), &w), &x) in dx.iter_mut().zip(dy).zip(w).zip(x) {
                *dx = s * (g * w - m1 - (x - m) * s * m2);
            }
        }
    }

    /// Adds `dy * (x - mean) * rstd` of the rows to `dw`, and `dy` to `db` unless that is empty.
    fn layer_norm_param_grad(dy: &[f32], x: &[f32], mean: &[f32], rstd: &[f32], dw: &mut [f32], db: &mut [f32]) {
        let d = dw.len();
        let rows = dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(mean.iter().zip(rstd));
        for ((dy, x), (&m, &s)) in rows {
            for ((a, &g), &x) in dw.iter_mut().zip(dy).zip(x) {
                *a += g * ((x - m) * s);
            }
            for (a, &g) in db.iter_mut().zip(dy) {
                *a += g;
            }
        }
    }
}
