//! Quantities with units: bytes, time, floating-point operations.
//!
//! Time is an integer number of picoseconds, so that sums never drift. 64 bits cover 213 days.
//! Conversions to floating-point numbers happen only in tables and JSON.

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

    /// Converts to mebibytes, for display.
    #[must_use]
    pub fn mib(self) -> f64 {
        self.0 as f64 / (1u64 << 20) as f64
    }

    /// Converts to gibibytes, for display.
    #[must_use]
    pub fn gib(self) -> f64 {
        self.0 as f64 / (1u64 << 30) as f64
    }

    /// Rounds up to a multiple of `step` (which must not be zero).
    #[must_use]
    pub(crate) fn round_up(self, step: u64) -> Self {
        Self(self.0.next_multiple_of(step))
    }
}

impl Picos {
    /// The origin of time, or an empty duration.
    pub const ZERO: Self = Self(0);
    /// A time that no run reaches.
    pub const MAX: Self = Self(u64::MAX);

    /// Converts from nanoseconds.
    #[must_use]
    pub const fn from_ns(ns: u64) -> Self {
        Self(ns * 1_000)
    }

    /// Converts from microseconds; negative and non-finite values become zero.
    #[must_use]
    pub fn from_us(us: f64) -> Self {
        Self((us * 1e6).round().max(0.0) as u64)
    }

    /// Converts from seconds; negative and non-finite values become zero.
    #[must_use]
    pub fn from_secs(s: f64) -> Self {
        Self((s * 1e12).round().max(0.0) as u64)
    }

    /// Converts to microseconds, for display.
    #[must_use]
    pub fn us(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Converts to milliseconds, for display.
    #[must_use]
    pub fn ms(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Formats the time in milliseconds without the unit: `1,052.25` with two decimals.
    #[must_use]
    pub fn show_ms(self, decimals: usize) -> String {
        thousands(self.ms(), decimals)
    }

    /// Converts to seconds.
    #[must_use]
    pub fn secs(self) -> f64 {
        self.0 as f64 / 1e12
    }

    /// Returns the difference, or zero if `other` is later.
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
                        .expect(concat!(stringify!($t), " overflow: a result beyond 2^64")),
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
        let unit = ByteUnit::of(*self);
        write!(f, "{} {}", unit.show(*self), unit.name())
    }
}

/// The unit of a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ByteUnit {
    /// Bytes.
    B,
    /// 2^10 bytes.
    Kib,
    /// 2^20 bytes.
    Mib,
    /// 2^30 bytes.
    Gib,
}

impl ByteUnit {
    /// Every unit, the largest first.
    const ALL: [Self; 4] = [Self::Gib, Self::Mib, Self::Kib, Self::B];

    /// Returns the largest unit that these bytes contain at least once.
    #[must_use]
    pub fn of(bytes: Bytes) -> Self {
        let fits = |unit: &Self| bytes.0 >= unit.size();
        Self::ALL.into_iter().find(fits).unwrap_or(Self::B)
    }

    /// Returns a common unit for numbers that are compared: that of the largest number, or a
    /// smaller one if the smallest number would be shown as zero.
    #[must_use]
    pub fn common(all: impl IntoIterator<Item = Bytes>) -> Self {
        let some = all.into_iter().filter(|b| b.0 > 0);
        let (least, most) = some.fold((u64::MAX, 0), |(a, b), x| (a.min(x.0), b.max(x.0)));
        // Two decimals are shown.
        let shows = |unit: &Self| *unit <= Self::of(Bytes(most)) && least >= unit.size() / 100;
        Self::ALL.into_iter().find(shows).unwrap_or(Self::B)
    }

    /// Returns the bytes of one unit.
    const fn size(self) -> u64 {
        match self {
            Self::B => 1,
            Self::Kib => 1 << 10,
            Self::Mib => 1 << 20,
            Self::Gib => 1 << 30,
        }
    }

    /// Returns the name, for example `GiB`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::B => "B",
            Self::Kib => "KiB",
            Self::Mib => "MiB",
            Self::Gib => "GiB",
        }
    }

    /// Returns the number of useful decimals.
    #[must_use]
    pub const fn decimals(self) -> usize {
        match self {
            Self::B => 0,
            Self::Kib | Self::Mib => 1,
            Self::Gib => 2,
        }
    }

    /// Converts bytes to this unit.
    #[must_use]
    pub fn count(self, bytes: Bytes) -> f64 {
        bytes.0 as f64 / self.size() as f64
    }

    /// Formats a number of bytes in this unit, without its name.
    #[must_use]
    pub fn show(self, bytes: Bytes) -> String {
        format!("{:.*}", self.decimals(), self.count(bytes))
    }
}

/// Inserts a comma between the thousands of a formatted number, as in `8,192.50`.
#[must_use]
pub(crate) fn commas(number: &str) -> String {
    let (whole, fraction) = number.split_at(number.find('.').unwrap_or(number.len()));
    let (sign, digits) = whole.split_at(usize::from(whole.starts_with(['-', '+'])));
    let mut out = sign.to_owned();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + fraction
}

/// Formats a number with these decimals and a comma between thousands; `-` if it is not finite. A
/// value that rounds to zero is not negative: a sum of no numbers is -0.
#[must_use]
pub fn thousands(x: f64, decimals: usize) -> String {
    if !x.is_finite() {
        return "-".into();
    }
    let text = format!("{x:.decimals$}");
    match text.strip_prefix('-') {
        Some(digits) if is_zero(digits) => digits.to_owned(),
        _ => commas(&text),
    }
}

/// Returns whether a number without a sign is written as zero.
fn is_zero(digits: &str) -> bool {
    digits.chars().all(|c| matches!(c, '0' | '.'))
}

/// Formats a count with a comma between thousands.
#[must_use]
pub fn count(n: u64) -> String {
    commas(&n.to_string())
}

/// Formats a count in a word or two: `8.03 B`, `160 M`, `41 k`.
#[must_use]
pub fn short_count(n: u64) -> String {
    match n as f64 {
        x if x >= 1e9 => format!("{:.2} B", x / 1e9),
        x if x >= 1e6 => format!("{:.0} M", x / 1e6),
        x if x >= 1e3 => format!("{:.0} k", x / 1e3),
        x => format!("{x:.0}"),
    }
}

/// Formats a difference with its sign; a value that rounds to zero is not negative.
#[must_use]
pub fn signed(x: f64, decimals: usize) -> String {
    let text = format!("{x:+.decimals$}");
    match text.strip_prefix('-') {
        Some(digits) if is_zero(digits) => format!("+{digits}"),
        _ => commas(&text),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_told_in_the_unit_of_their_size() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (510_976, "499.0 KiB"),
            (3 << 20, "3.0 MiB"),
            (5 << 29, "2.50 GiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        // A column must show its smallest entry, too.
        for (column, unit) in [
            (&[3 << 30, 1 << 30][..], ByteUnit::Gib),
            (&[3 << 30, 0], ByteUnit::Gib),
            (&[3 << 30, 1 << 20], ByteUnit::Mib),
            (&[512 << 10, 40 << 10], ByteUnit::Kib),
            (&[], ByteUnit::B),
        ] {
            let bytes = column.iter().map(|b| Bytes(*b));
            assert_eq!(ByteUnit::common(bytes), unit, "{column:?}");
        }
    }

    #[test]
    fn numbers_have_one_style() {
        assert_eq!(thousands(1_234_567.0, 0), "1,234,567");
        assert_eq!(thousands(-1234.5, 2), "-1,234.50");
        assert_eq!(thousands(999.6, 0), "1,000");
        assert_eq!(commas("+12345.6"), "+12,345.6");
        assert_eq!(thousands(f64::NAN, 1), "-");
        assert_eq!(count(u64::MAX), "18,446,744,073,709,551,615");
        assert_eq!(count(12), "12");
        for (n, text) in [
            (999, "999"),
            (41_400, "41 k"),
            (160_000_000, "160 M"),
            (8_030_000_000, "8.03 B"),
        ] {
            assert_eq!(short_count(n), text);
        }
    }

    #[test]
    fn nothing_has_no_minus() {
        for (x, text) in [
            (-0.0, "+0.00"),
            (-0.004, "+0.00"),
            (-0.006, "-0.01"),
            (1.0, "+1.00"),
        ] {
            assert_eq!(signed(x, 2), text);
        }
        assert_eq!(thousands(-0.0, 3), "0.000");
        assert_eq!(thousands(-0.04, 1), "0.0");
        assert_eq!(thousands(-0.06, 1), "-0.1");
        assert_eq!(signed(-0.2, 0), "+0");
        assert_eq!(signed(f64::NAN, 1), "NaN");
        assert_eq!(signed(-2755.6, 0), "-2,756");
    }
}
