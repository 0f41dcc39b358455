//! Float32 functions that vectorise, and reductions with a fixed order; see Note [Order of sums].
//!
//! Everything here is marked for inlining, so that it is compiled for the vector level of its
//! caller.

/// Number of lanes of a reduction.
pub(super) const LANES: usize = 16;

/// Computes `e^x` to about two units in the last place; 0 below the range of normal floats,
/// infinity above.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LO: f32 = -87.336_54;
    const HI: f32 = 88.376_26;
    // Adding it leaves the nearest integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    // ln 2 in two parts, so that the remainder is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let c = if x > HI { HI } else { x };
    let c = if c < LO { LO } else { c };
    let t = c * std::f32::consts::LOG2_E + MAGIC;
    let n = t - MAGIC;
    let r = c - n * LN2_HI - n * LN2_LO;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5.000_000_3e-1;
    let p = p * (r * r) + r + 1.0;
    let power = t.to_bits().wrapping_sub(MAGIC.to_bits()).wrapping_add(127) << 23;
    let y = p * f32::from_bits(power);
    let y = if x > HI { f32::INFINITY } else { y };
    if x < LO { 0.0 } else { y }
}

/// Computes `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the hyperbolic tangent, to about 1e-7.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// Adds up the lanes pairwise.
#[inline(always)]
fn fold(mut acc: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            acc[i] = f(acc[i], acc[i + half]);
        }
        half /= 2;
    }
    acc[0]
}

/// Sums `f` over elements.
#[inline(always)]
pub(super) fn sum1(a: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut acc = [0.0; LANES];
    let mut chunks = a.chunks_exact(LANES);
    for c in &mut chunks {
        for (s, &v) in acc.iter_mut().zip(c) {
            *s += f(v);
        }
    }
    for (s, &v) in acc.iter_mut().zip(chunks.remainder()) {
        *s += f(v);
    }
    fold(acc, |x, y| x + y)
}

/// Sums `f` over pairs.
#[inline(always)]
pub(super) fn sum2(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut acc = [0.0; LANES];
    let (mut ca, mut cb) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (x, y) in (&mut ca).zip(&mut cb) {
        for ((s, &v), &w) in acc.iter_mut().zip(x).zip(y) {
            *s += f(v, w);
        }
    }
    for ((s, &v), &w) in acc.iter_mut().zip(ca.remainder()).zip(cb.remainder()) {
        *s += f(v, w);
    }
    fold(acc, |x, y| x + y)
}

/// Sums `f` over triples.
#[inline(always)]
pub(super) fn sum3(a: &[f32], b: &[f32], c: &[f32], f: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut acc = [0.0; LANES];
    let (mut ca, mut cb, mut cc) = (
        a.chunks_exact(LANES),
        b.chunks_exact(LANES),
        c.chunks_exact(LANES),
    );
    for ((x, y), z) in (&mut ca).zip(&mut cb).zip(&mut cc) {
        for (((s, &u), &v), &w) in acc.iter_mut().zip(x).zip(y).zip(z) {
            *s += f(u, v, w);
        }
    }
    let rest = ca
        .remainder()
        .iter()
        .zip(cb.remainder())
        .zip(cc.remainder());
    for (s, ((&u, &v), &w)) in acc.iter_mut().zip(rest) {
        *s += f(u, v, w);
    }
    fold(acc, |x, y| x + y)
}

/// Returns the largest element; NaN if there is one.
#[inline(always)]
pub(super) fn max(a: &[f32]) -> f32 {
    // A NaN is taken, and then kept: comparisons with it are false.
    let pick = |x: f32, y: f32| if x.is_nan() || x > y { x } else { y };
    let mut acc = [f32::NEG_INFINITY; LANES];
    let mut chunks = a.chunks_exact(LANES);
    for c in &mut chunks {
        for (s, &v) in acc.iter_mut().zip(c) {
            *s = pick(v, *s);
        }
    }
    for (s, &v) in acc.iter_mut().zip(chunks.remainder()) {
        *s = pick(v, *s);
    }
    fold(acc, pick)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_good_to_two_units() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -87.3 + 175.6 * (i as f32) / 200_000.0;
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / want - 1.0).abs());
        }
        // A unit in the last place is at most 1.2e-7.
        assert!(worst < 2.4e-7, "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!((exp(f32::NEG_INFINITY), exp(-90.0)), (0.0, 0.0));
        assert_eq!(
            (exp(f32::INFINITY), exp(89.0)),
            (f32::INFINITY, f32::INFINITY)
        );
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_and_sigmoid_are_close() {
        for i in -4000..4000 {
            let x = i as f32 / 200.0;
            assert!(
                (f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 3e-7,
                "{x}"
            );
            let s = 1.0 / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(sigmoid(x)) / s - 1.0).abs() < 5e-7, "{x}");
        }
    }

    #[test]
    fn reductions_see_every_element() {
        for n in 0..70 {
            let x: Vec<f32> = (0..n).map(|i| i as f32 - 3.0).collect();
            let ones = vec![1.0; n];
            let total: f32 = x.iter().sum();
            assert_eq!(sum1(&x, |v| v), total);
            assert_eq!(sum2(&x, &ones, |a, b| a * b), total);
            assert_eq!(sum3(&ones, &x, &ones, |a, b, c| a * b * c), total);
            assert_eq!(max(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
            for i in 0..n {
                let mut y = x.clone();
                y[i] = f32::NAN;
                assert!(max(&y).is_nan(), "{n} {i}");
            }
        }
    }
}
