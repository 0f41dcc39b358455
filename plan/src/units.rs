//! Quantities with units: bytes, time, floating-point operations.
//!
//! Time is an integer number of picoseconds, so that sums never drift: 64 bits hold 213 days. Every conversion to a
//! floating-point number happens at the edge (tables, JSON).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};

/// A number of bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A point in time or a duration, in picoseconds.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Picos(pub u64);

/// A number of floating-point operations (a multiply-add counts as two).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Flops(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// Mebibytes, for display.
    #[must_use]
    pub fn mib(self) -> f64 {
        self.0 as f64 / (1u64 << 20) as f64
    }

    /// Gibibytes, for display.
    #[must_use]
    pub fn gib(self) -> f64 {
        self.0 as f64 / (1u64 << 30) as f64
    }

    /// Rounds up to a multiple of `step` (which must not be zero).
    #[must_use]
    pub fn round_up(self, step: u64) -> Self {
        Self(self.0.next_multiple_of(step))
    }
}

impl Picos {
    /// The origin of time, or an empty duration.
    pub const ZERO: Self = Self(0);
    /// A time that no run reaches.
    pub const MAX: Self = Self(u64::MAX);

    /// From nanoseconds.
    #[must_use]
    pub const fn from_ns(ns: u64) -> Self {
        Self(ns * 1_000)
    }

    /// From microseconds; negative and non-finite values become zero.
    #[must_use]
    pub fn from_us(us: f64) -> Self {
        Self((us * 1e6).round().max(0.0) as u64)
    }

    /// From seconds; negative and non-finite values become zero.
    #[must_use]
    pub fn from_secs(s: f64) -> Self {
        Self((s * 1e12).round().max(0.0) as u64)
    }

    /// Microseconds, for display.
    #[must_use]
    pub fn us(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Milliseconds, for display.
    #[must_use]
    pub fn ms(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Seconds.
    #[must_use]
    pub fn secs(self) -> f64 {
        self.0 as f64 / 1e12
    }

    /// Difference, or zero when `other` is later.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

macro_rules! quantity {
    ($t:ident) => {
        impl Add for $t {
            type Output = Self;
            fn add(self, o: Self) -> Self {
                Self(
                    self.0
                        .checked_add(o.0)
                        .expect(concat!(stringify!($t), " overflow: a sum beyond 2^64")),
                )
            }
        }
        impl AddAssign for $t {
            fn add_assign(&mut self, o: Self) {
                *self = *self + o;
            }
        }
        impl Sub for $t {
            type Output = Self;
            fn sub(self, o: Self) -> Self {
                Self(
                    self.0
                        .checked_sub(o.0)
                        .expect(concat!(stringify!($t), " underflow: a negative difference")),
                )
            }
        }
        impl SubAssign for $t {
            fn sub_assign(&mut self, o: Self) {
                *self = *self - o;
            }
        }
        impl Mul<u64> for $t {
            type Output = Self;
            fn mul(self, k: u64) -> Self {
                Self(
                    self.0
                        .checked_mul(k)
                        .expect(concat!(stringify!($t), " overflow: a product beyond 2^64")),
                )
            }
        }
        impl Sum for $t {
            fn sum<I: Iterator<Item = Self>>(it: I) -> Self {
                it.fold(Self(0), |a, b| a + b)
            }
        }
    };
}
quantity!(Bytes);
quantity!(Picos);
quantity!(Flops);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            b if b < 1 << 10 => write!(f, "{b} B"),
            b if b < 1 << 20 => write!(f, "{:.1} KiB", b as f64 / 1024.0),
            b if b < 1 << 30 => write!(f, "{:.1} MiB", self.mib()),
            _ => write!(f, "{:.2} GiB", self.gib()),
        }
    }
}

impl fmt::Display for Picos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            t if t < 1_000_000 => write!(f, "{:.1} ns", t as f64 / 1e3),
            t if t < 1_000_000_000 => write!(f, "{:.1} us", self.us()),
            t if t < 1_000_000_000_000 => write!(f, "{:.2} ms", self.ms()),
            _ => write!(f, "{:.3} s", self.secs()),
        }
    }
}

/// Element type of a tensor or buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 64-bit integer (token ids).
    I64,
    /// Raw byte.
    U8,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::I64 => 8,
            Self::U8 => 1,
        }
    }

    /// The name used in scenario files and program text.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::I64 => "i64",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
