//! Elementwise operations on blocks of floats.

use super::math::{exp, sigmoid, tanh};
use super::wide::wide;

/// `sqrt(2 / pi)` of the tanh approximation of GELU.
const GELU_C: f32 = 0.797_884_6;
const GELU_A: f32 = 0.044_715;

wide! {
    /// `a + b`.
    fn add(a: &[f32], b: &[f32], y: &mut [f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a + b;
        }
    }

    /// `a - b`.
    fn sub(a: &[f32], b: &[f32], y: &mut [f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a - b;
        }
    }

    /// `a * b`.
    fn mul(a: &[f32], b: &[f32], y: &mut [f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a * b;
        }
    }

    /// `-a`.
    fn neg(a: &[f32], y: &mut [f32]) {
        for (y, a) in y.iter_mut().zip(a) {
            *y = -a;
        }
    }

    /// `x * sigmoid(x)`.
    fn silu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x / (1.0 + exp(-x));
        }
    }

    /// Gradient of SiLU.
    fn silu_grad(dy: &[f32], x: &[f32], dx: &mut [f32]) {
        for ((d, &g), &x) in dx.iter_mut().zip(dy).zip(x) {
            let s = sigmoid(x);
            *d = g * (s * (1.0 + x * (1.0 - s)));
        }
    }

    /// GELU by the tanh approximation.
    fn gelu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            let t = tanh(GELU_C * (x + GELU_A * x * x * x));
            *y = 0.5 * x * (1.0 + t);
        }
    }

    /// Gradient of GELU.
    fn gelu_grad(dy: &[f32], x: &[f32], dx: &mut [f32]) {
        for ((d, &g), &x) in dx.iter_mut().zip(dy).zip(x) {
            let t = tanh(GELU_C * (x + GELU_A * x * x * x));
            let dt = (1.0 - t * t) * GELU_C * (1.0 + 3.0 * GELU_A * x * x);
            *d = g * (0.5 * (1.0 + t) + 0.5 * x * dt);
        }
    }

    /// `max(x, 0)`; NaN stays NaN.
    fn relu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x < 0.0 { 0.0 } else { x };
        }
    }

    /// Gradient of ReLU from its result.
    fn relu_grad(dy: &[f32], y: &[f32], dx: &mut [f32]) {
        for ((d, &g), &y) in dx.iter_mut().zip(dy).zip(y) {
            *d = if y <= 0.0 { 0.0 } else { g };
        }
    }

    /// `scale * (x - target)^2`.
    fn squared_error(x: &[f32], target: &[f32], scale: f32, y: &mut [f32]) {
        for ((y, x), t) in y.iter_mut().zip(x).zip(target) {
            let e = x - t;
            *y = scale * (e * e);
        }
    }

    /// `dy * 2 * scale * (x - target)`.
    fn squared_error_grad(dy: &[f32], x: &[f32], target: &[f32], scale: f32, dx: &mut [f32]) {
        for (((d, g), x), t) in dx.iter_mut().zip(dy).zip(x).zip(target) {
            *d = g * (2.0 * scale * (x - t));
        }
    }
}
