//! 8-bit floating point: the two formats, and the factors that scale numbers.
//!
//! Casts round to nearest (ties to even) and saturate, like the conversions of CUDA's
//! `cuda_fp8.hpp` with `__NV_SATFINITE`, and like torchao's clamping.

/// Facts of a format.
struct Format {
    /// Bits of the mantissa.
    mantissa: u32,
    /// Exponent field of float32 for the smallest normal number.
    normal: u32,
    /// Code of the largest finite number.
    most: u32,
}

const E4M3: Format = Format {
    mantissa: 3,
    normal: 127 - 6,
    most: 0x7e,
};
const E5M2: Format = Format {
    mantissa: 2,
    normal: 127 - 14,
    most: 0x7b,
};

impl Format {
    /// Returns the code nearest to a number. Branches do not depend on the size of the number, so
    /// that loops over this function compile to vector instructions.
    #[inline(always)]
    const fn encode(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
        let exponent = magnitude >> 23;
        // Below the smallest normal number, codes are multiples of the smallest number.
        let below = self.normal.saturating_sub(exponent);
        let shift = 23 - self.mantissa + if below > 8 { 8 } else { below };
        let normal = magnitude.wrapping_sub((self.normal - 1) << 23);
        let subnormal = magnitude & 0x007f_ffff | 0x0080_0000;
        let exact = if below == 0 { normal } else { subnormal };
        let rounded = (exact + (1 << (shift - 1)) - 1 + (exact >> shift & 1)) >> shift;
        let finite = if rounded < self.most {
            rounded
        } else {
            self.most
        };
        let code = if magnitude > 0x7f80_0000 {
            0x7f
        } else {
            finite
        };
        (sign | code) as u8
    }

    /// Returns the number that a code represents.
    const fn decode(&self, code: u8) -> f32 {
        let (sign, magnitude) = ((code as u32 & 0x80) << 24, code as u32 & 0x7f);
        let exponent = magnitude >> self.mantissa;
        let mantissa = magnitude & ((1 << self.mantissa) - 1);
        let bits = if magnitude > self.most {
            // E5M2 has one infinity; all larger codes are NaN.
            match magnitude {
                0x7c => 0x7f80_0000,
                _ => 0x7fc0_0000,
            }
        } else if exponent > 0 {
            (exponent + self.normal - 1) << 23 | mantissa << (23 - self.mantissa)
        } else {
            // Subnormal numbers of the format are normal in float32.
            let smallest = f32::from_bits((self.normal - self.mantissa) << 23);
            (mantissa as f32 * smallest).to_bits()
        };
        f32::from_bits(sign | bits)
    }

    const fn table(&self) -> [f32; 256] {
        let mut table = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            table[code] = self.decode(code as u8);
            code += 1;
        }
        table
    }
}

static NUMBERS_E4M3: [f32; 256] = E4M3.table();
static NUMBERS_E5M2: [f32; 256] = E5M2.table();

/// 4 bits of exponent, 3 of mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct F8E4m3(u8);

/// 5 bits of exponent, 2 of mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct F8E5m2(u8);

macro_rules! float8 {
    ($type:ident, $format:expr, $numbers:ident) => {
        impl $type {
            /// Returns the nearest number: ties to even, saturated; NaN stays NaN.
            #[inline(always)]
            pub(crate) const fn round(x: f32) -> Self {
                Self($format.encode(x))
            }

            /// Returns the number as float32.
            #[inline(always)]
            pub(crate) fn widen(self) -> f32 {
                $numbers[usize::from(self.0)]
            }
        }

        // SAFETY: a byte, of which every value is a code.
        unsafe impl bytemuck::Zeroable for $type {}
        // SAFETY: as above.
        unsafe impl bytemuck::Pod for $type {}
    };
}

float8!(F8E4m3, E4M3, NUMBERS_E4M3);
float8!(F8E5m2, E5M2, NUMBERS_E5M2);

/// Returns the factor that scales `amax`, the largest absolute value of a tensor, to `most`, the
/// largest number of a format. It is 1 for tensors of zeros and for those with infinities, and the
/// largest float32 instead of infinity. (Transformer Engine: `compute_scale_from_amax`.)
#[inline(always)]
pub(crate) fn scale(most: f32, amax: f32) -> f32 {
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    (most / amax).min(f32::MAX)
}

/// Returns the largest power of two that is at most a positive factor.
#[inline(always)]
pub(crate) fn power_of_two(scale: f32) -> f32 {
    f32::from_bits(scale.to_bits() & 0xff80_0000)
}

/// Returns the exponent, plus 127, of the smallest power of two by which division brings numbers up
/// to `amax` to at most `most`. (Transformer Engine: `float_to_e8m0`. Rounding down, as in the Open
/// Compute Project's specification, would saturate the largest numbers.) 255 is NaN.
#[inline(always)]
pub(crate) fn e8m0(amax: f32, most: f32) -> u8 {
    let x = amax * (1.0 / most);
    if x.is_nan() {
        return 0xff;
    }
    if x.is_infinite() {
        return 0xfe;
    }
    let (exponent, mantissa) = ((x.to_bits() >> 23) as u8, x.to_bits() & 0x7f_ffff);
    // Subnormal numbers up to 2^-127 have exponent 0.
    let up = mantissa > 0 && exponent < 0xfe && (exponent > 0 || mantissa > 0x40_0000);
    exponent + u8::from(up)
}

/// Returns the factor by which a cast multiplies, for an exponent of [`e8m0`]. It is 1 for blocks
/// of zeros and for blocks of only subnormal numbers.
#[inline(always)]
pub(crate) fn e8m0_scale(exponent: u8) -> f32 {
    match exponent {
        0 => 1.0,
        0xff => f32::NAN,
        // 2^(127 - exponent).
        0xfe => f32::from_bits(0x0040_0000),
        e => f32::from_bits((254 - u32::from(e)) << 23),
    }
}

/// Returns the power of two that an exponent represents.
#[inline(always)]
pub(crate) fn e8m0_number(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(0x0040_0000),
        0xff => f32::NAN,
        e => f32::from_bits(u32::from(e) << 23),
    }
}

/// Returns a number times a factor. Infinities become NaN, so that casts do not hide them.
#[inline(always)]
pub(crate) fn scaled(x: f32, scale: f32) -> f32 {
    if x.is_finite() { x * scale } else { f32::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares both encoders with those of the crate `float8`. All NaN codes count as equal.
    fn compare(x: f32) {
        let same = |ours: u8, theirs: u8, nan: fn(u8) -> bool| {
            assert!(
                ours == theirs || nan(ours) && nan(theirs),
                "{x:?} ({:#x}): {ours:#x}, not {theirs:#x}",
                x.to_bits()
            );
        };
        let e4m3 = float8::F8E4M3::from_f32(x).to_bits();
        same(F8E4m3::round(x).0, e4m3, |c| c & 0x7f == 0x7f);
        let e5m2 = float8::F8E5M2::from_f32(x).to_bits();
        same(F8E5m2::round(x).0, e5m2, |c| c & 0x7f > 0x7c);
    }

    /// Every upper half of a float32, with the lower halves around ties and two in between. This
    /// includes every bfloat16.
    #[test]
    fn casts_equal_those_of_cuda_near_all_ties() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x1234, 0x7fff, 0x8000, 0x8001, 0xbeef, 0xffff] {
                compare(f32::from_bits(u32::from(high) << 16 | low));
            }
        }
    }

    /// Every bfloat16 times 64 scales: the quotients of both formats for maxima of all magnitudes.
    /// The exact result fits float64.
    #[test]
    fn scaled_casts_equal_those_of_cuda_for_every_bfloat16() {
        let maxima = (0..32).map(|i| 1.37 * f32::powi(16.0, i - 16));
        for scale in maxima.flat_map(|amax| [448.0, 57344.0].map(|most| scale(most, amax))) {
            for bits in 0..=u16::MAX {
                let x = f32::from_bits(u32::from(bits) << 16);
                let product = scaled(x, scale);
                if x.is_finite() {
                    assert_eq!(product, (f64::from(x) * f64::from(scale)) as f32);
                }
                compare(product);
            }
        }
    }

    #[test]
    #[ignore = "takes a minute: every float32"]
    fn casts_equal_those_of_cuda_for_every_float() {
        for bits in 0..=u32::MAX {
            compare(f32::from_bits(bits));
        }
    }

    #[test]
    fn codes_are_the_numbers_of_the_format() {
        for code in 0..=u8::MAX {
            let pairs = [
                (
                    F8E4m3(code).widen(),
                    float8::F8E4M3::from_bits(code).to_f32(),
                ),
                (
                    F8E5m2(code).widen(),
                    float8::F8E5M2::from_bits(code).to_f32(),
                ),
            ];
            for (ours, theirs) in pairs {
                let same = ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan();
                assert!(same, "{code:#x}: {ours} is not {theirs}");
            }
        }
        let (e4m3, e5m2) = (F8E4m3::round(f32::INFINITY), F8E5m2::round(1e9));
        assert_eq!((e4m3.widen(), e5m2.widen()), (448.0, 57344.0));
    }

    /// A float64 division that is rounded to float32 gives the same result (torchao).
    #[test]
    fn scales_are_the_quotient_rounded_once() {
        for bits in 0x2a00..0x7f80u16 {
            let amax = f32::from_bits(u32::from(bits) << 16);
            for most in [448.0f32, 57344.0] {
                let wide = (f64::from(most) / f64::from(amax)) as f32;
                assert_eq!(scale(most, amax), wide, "{amax}");
                let power = power_of_two(wide);
                assert!(power <= wide && wide < 2.0 * power, "{amax}");
                assert_eq!(power.log2().fract(), 0.0);
            }
        }
        assert_eq!(scale(448.0, 0.0), 1.0);
        assert_eq!(scale(448.0, f32::INFINITY), 1.0);
        assert_eq!(scale(448.0, 1e-40), f32::MAX);
    }

    /// For the exponents of every bfloat16, the power of two is large enough, and half of it is
    /// not.
    #[test]
    fn exponents_are_those_of_the_smallest_power_of_two() {
        for bits in 0x0600..0x7f80u16 {
            let amax = f32::from_bits(u32::from(bits) << 16);
            let exponent = e8m0(amax, 448.0);
            let number = e8m0_number(exponent);
            assert!(amax / number <= 448.0, "{amax}: {exponent}");
            assert!(amax / (number / 2.0) > 448.0, "{amax}: {exponent}");
            assert_eq!(e8m0_scale(exponent) * number, 1.0, "{amax}");
        }
        assert_eq!(e8m0(0.0, 448.0), 0);
        assert_eq!((e8m0(448.0, 448.0), e8m0(449.0, 448.0)), (127, 128));
        assert_eq!(e8m0(f32::INFINITY, 448.0), 0xfe);
        assert!(e8m0_number(e8m0(f32::NAN, 448.0)).is_nan());
        assert_eq!(e8m0_scale(0), 1.0);
        assert_eq!(e8m0_number(0).log2(), -127.0);
    }

    #[test]
    fn infinities_do_not_go_unnoticed() {
        assert!(scaled(f32::INFINITY, 1.0).is_nan());
        assert!(
            F8E4m3::round(scaled(f32::NEG_INFINITY, 0.5))
                .widen()
                .is_nan()
        );
        assert_eq!(scaled(3.0, 2.0), 6.0);
    }
}
