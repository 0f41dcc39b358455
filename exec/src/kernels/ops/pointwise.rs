//! Elementwise functions.

use super::{Elementwise, float};
use crate::kernels::math::{exp, sigmoid, tanh};
use crate::kernels::wide::wide;
use shardlab_plan::ir::{Real, op};
use std::f32::consts::FRAC_1_SQRT_2;

/// `sqrt(2 / pi)` of the tanh approximation of GELU.
const GELU_C: f32 = 0.797_884_6;
const GELU_A: f32 = 0.044_715;
/// `1 / sqrt(2 pi)`, the factor of the normal density.
const FRAC_1_SQRT_2PI: f32 = 0.398_942_3;

wide! {
    /// Computes `a + b`.
    fn add(a: &[f32], b: &[f32], y: &mut [f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a + b;
        }
    }

    /// Computes `a - b`.
    fn sub(a: &[f32], b: &[f32], y: &mut [f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a - b;
        }
    }

    /// Computes `a * b`.
    fn mul(a: &[f32], b: &[f32], y: &mut [f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a * b;
        }
    }

    /// Computes `-a`.
    fn neg(a: &[f32], y: &mut [f32]) {
        for (y, a) in y.iter_mut().zip(a) {
            *y = -a;
        }
    }

    /// Computes `by * x`.
    fn scale(x: &[f32], by: f32, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = by * x;
        }
    }

    /// Computes `x + by`.
    fn shift(x: &[f32], by: f32, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x + by;
        }
    }

    /// Computes `x^exponent`.
    fn pow(x: &[f32], exponent: f32, y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if exponent == 1.0 {
                x
            } else if exponent == 2.0 {
                x * x
            } else if exponent == 3.0 {
                x * x * x
            } else {
                libm::powf(x, exponent)
            };
        }
    }

    /// Computes `1 / sqrt(x)`.
    fn rsqrt(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = 1.0 / x.sqrt();
        }
    }

    /// Computes `cap * tanh(x / cap)`.
    fn softcap(x: &[f32], cap: f32, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = cap * tanh(x / cap);
        }
    }

    /// Computes the gradient of a soft cap from its result.
    fn softcap_grad(dy: &[f32], y: &[f32], cap: f32, dx: &mut [f32]) {
        for ((d, g), y) in dx.iter_mut().zip(dy).zip(y) {
            *d = g * (1.0 - (y / cap) * (y / cap));
        }
    }

    /// Computes `x * sigmoid(x)`.
    fn silu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x / (1.0 + exp(-x));
        }
    }

    /// Computes the gradient of SiLU.
    fn silu_grad(dy: &[f32], x: &[f32], dx: &mut [f32]) {
        for ((d, &g), &x) in dx.iter_mut().zip(dy).zip(x) {
            let s = sigmoid(x);
            *d = g * (s * (1.0 + x * (1.0 - s)));
        }
    }

    /// Computes GELU by the tanh approximation.
    fn gelu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            let t = tanh(GELU_C * (x + GELU_A * x * x * x));
            *y = 0.5 * x * (1.0 + t);
        }
    }

    /// Computes the gradient of GELU.
    fn gelu_grad(dy: &[f32], x: &[f32], dx: &mut [f32]) {
        for ((d, &g), &x) in dx.iter_mut().zip(dy).zip(x) {
            let t = tanh(GELU_C * (x + GELU_A * x * x * x));
            let dt = (1.0 - t * t) * GELU_C * (1.0 + 3.0 * GELU_A * x * x);
            *d = g * (0.5 * (1.0 + t) + 0.5 * x * dt);
        }
    }

    /// Computes the exact GELU.
    fn gelu_erf(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * (0.5 + 0.5 * libm::erff(x * FRAC_1_SQRT_2));
        }
    }

    /// Computes the gradient of the exact GELU.
    fn gelu_erf_grad(dy: &[f32], x: &[f32], dx: &mut [f32]) {
        for ((d, &g), &x) in dx.iter_mut().zip(dy).zip(x) {
            let cdf = 0.5 + 0.5 * libm::erff(x * FRAC_1_SQRT_2);
            *d = g * (cdf + x * (FRAC_1_SQRT_2PI * exp(-0.5 * x * x)));
        }
    }

    /// Computes the logistic function.
    fn logistic(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = sigmoid(x);
        }
    }

    /// Computes the gradient of the logistic function from its result.
    fn logistic_grad(dy: &[f32], y: &[f32], dx: &mut [f32]) {
        for ((d, g), y) in dx.iter_mut().zip(dy).zip(y) {
            *d = g * (y * (1.0 - y));
        }
    }

    /// Computes `max(x, 0)`; NaN stays NaN.
    fn relu(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x < 0.0 { 0.0 } else { x };
        }
    }

    /// Computes the gradient of ReLU from its result.
    fn relu_grad(dy: &[f32], y: &[f32], dx: &mut [f32]) {
        for ((d, &g), &y) in dx.iter_mut().zip(dy).zip(y) {
            *d = if y <= 0.0 { 0.0 } else { g };
        }
    }

    /// Computes `min(max(x, low), high)`; NaN stays NaN.
    fn clamp(x: &[f32], low: f32, high: f32, y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x < low {
                low
            } else if x > high {
                high
            } else {
                x
            };
        }
    }

    /// Computes the gradient of a clamp, which is that of `x` at both bounds.
    fn clamp_grad(dy: &[f32], x: &[f32], low: f32, high: f32, dx: &mut [f32]) {
        for ((d, &g), &x) in dx.iter_mut().zip(dy).zip(x) {
            *d = if x < low || x > high { 0.0 } else { g };
        }
    }

    /// Computes `scale * (x - target)^2`.
    fn squared_error(x: &[f32], target: &[f32], scale: f32, y: &mut [f32]) {
        for ((y, x), t) in y.iter_mut().zip(x).zip(target) {
            let e = x - t;
            *y = scale * (e * e);
        }
    }

    /// Computes `dy * 2 * scale * (x - target)`.
    fn squared_error_grad(dy: &[f32], x: &[f32], target: &[f32], scale: f32, dx: &mut [f32]) {
        for (((d, g), x), t) in dx.iter_mut().zip(dy).zip(x).zip(target) {
            *d = g * (2.0 * scale * (x - t));
        }
    }
}

impl Elementwise for op::Add {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        add(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("{} + {}", x[0], x[1])
    }
}

impl Elementwise for op::Sub {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        sub(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("{} - {}", x[0], x[1])
    }
}

impl Elementwise for op::Mul {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        mul(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("{} * {}", x[0], x[1])
    }
}

impl Elementwise for op::Neg {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        neg(x[0], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("-{}", x[0])
    }
}

impl Elementwise for op::Scale {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        scale(x[0], self.by.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("{} * {}", float(self.by.0 as f32), x[0])
    }
}

impl Elementwise for op::Shift {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        shift(x[0], self.by.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("{} + {}", x[0], float(self.by.0 as f32))
    }
}

impl Elementwise for op::Pow {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        pow(x[0], self.exponent.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        match self.exponent.0 {
            1.0 => x[0].clone(),
            2.0 => format!("{0} * {0}", x[0]),
            3.0 => format!("{0} * {0} * {0}", x[0]),
            other => format!("powf({}, {})", x[0], float(other as f32)),
        }
    }
}

impl Elementwise for op::Rsqrt {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        rsqrt(x[0], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("1.0f / sqrtf({})", x[0])
    }
}

impl Elementwise for op::Softcap {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        softcap(x[0], self.cap.0 as f32, y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        let cap = float(self.cap.0 as f32);
        format!("{cap} * tanh_<{fast}>({} / {cap})", x[0])
    }
}

impl Elementwise for op::SoftcapGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        softcap_grad(x[0], x[1], self.cap.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        let (cap, y) = (float(self.cap.0 as f32), &x[1]);
        format!("{} * (1.0f - ({y} / {cap}) * ({y} / {cap}))", x[0])
    }
}

impl Elementwise for op::Silu {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        silu(x[0], y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        format!("silu_<{fast}>({})", x[0])
    }
}

impl Elementwise for op::SiluGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        silu_grad(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        format!("silu_grad_<{fast}>({}, {})", x[0], x[1])
    }
}

impl Elementwise for op::Gelu {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        gelu(x[0], y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        format!("gelu_<{fast}>({})", x[0])
    }
}

impl Elementwise for op::GeluGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        gelu_grad(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        format!("gelu_grad_<{fast}>({}, {})", x[0], x[1])
    }
}

impl Elementwise for op::GeluErf {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        gelu_erf(x[0], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("{0} * (0.5f + 0.5f * erff({0} * 0.70710678f))", x[0])
    }
}

impl Elementwise for op::GeluErfGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        gelu_erf_grad(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        format!(
            "{} * (0.5f + 0.5f * erff({1} * 0.70710678f) + {1} * 0.39894228f * exp_<{fast}>(-0.5f * {1} * {1}))",
            x[0], x[1]
        )
    }
}

impl Elementwise for op::Sigmoid {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        logistic(x[0], y);
    }

    fn lane(&self, x: &[String], fast: bool) -> String {
        format!("sigmoid_<{fast}>({})", x[0])
    }
}

impl Elementwise for op::SigmoidGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        logistic_grad(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        let (dy, y) = (&x[0], &x[1]);
        format!("{dy} * ({y} * (1.0f - {y}))")
    }
}

impl Elementwise for op::Relu {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        relu(x[0], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("relu_({})", x[0])
    }
}

impl Elementwise for op::ReluGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        relu_grad(x[0], x[1], y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        format!("relu_grad_({}, {})", x[0], x[1])
    }
}

/// Returns the lower bound of a clamp; without one, minus infinity.
fn low(min: Option<Real>) -> f32 {
    min.map_or(f32::NEG_INFINITY, |min| min.0 as f32)
}

/// Returns the C condition that `x` is below the lower bound, followed by `then`; nothing without a
/// bound.
fn below(x: &str, min: Option<Real>, then: impl Fn(&str) -> String) -> String {
    min.map_or_else(String::new, |min| {
        let low = float(min.0 as f32);
        format!("{x} < {low}{}", then(&low))
    })
}

impl Elementwise for op::Clamp {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        clamp(x[0], low(self.min), self.max.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        let (x, high) = (&x[0], float(self.max.0 as f32));
        let below = below(x, self.min, |low| format!(" ? {low} : "));
        format!("({below}{x} > {high} ? {high} : {x})")
    }
}

impl Elementwise for op::ClampGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        clamp_grad(x[0], x[1], low(self.min), self.max.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        let (dy, x, high) = (&x[0], &x[1], float(self.max.0 as f32));
        let below = below(x, self.min, |_| " || ".to_owned());
        format!("({below}{x} > {high} ? 0.0f : {dy})")
    }
}

impl Elementwise for op::SquaredError {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        squared_error(x[0], x[1], self.scale.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        let (a, b) = (&x[0], &x[1]);
        format!(
            "{} * (({a} - {b}) * ({a} - {b}))",
            float(self.scale.0 as f32)
        )
    }
}

impl Elementwise for op::SquaredErrorGrad {
    fn block(&self, x: &[&[f32]], y: &mut [f32]) {
        squared_error_grad(x[0], x[1], x[2], self.scale.0 as f32, y);
    }

    fn lane(&self, x: &[String], _: bool) -> String {
        let twice = float(2.0 * self.scale.0 as f32);
        format!("{} * ({twice} * ({} - {}))", x[0], x[1], x[2])
    }
}
