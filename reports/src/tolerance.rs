//! The relative difference up to which two values count as equal.

use serde::Serialize;
use shardlab_plan::record::Basis;
use std::fmt;
use std::str::FromStr;

/// The relative difference up to which two values count as equal.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Tolerance(f64);

impl Tolerance {
    /// 0.5 %. This is less than repeated measurements of one program can distinguish, and far below
    /// the error of a prediction.
    pub const DEFAULT: Self = Self(0.005);
    /// Only equal values tie.
    pub const EXACT: Self = Self(0.0);

    /// Returns the tolerance for a share, for example 0.005 for 0.5 %; `None` unless the share is
    /// at least 0 and below 1.
    #[must_use]
    pub fn new(share: f64) -> Option<Self> {
        (0.0..1.0).contains(&share).then_some(Self(share))
    }

    /// Returns the tolerance for predictions with these bases: the default, or the largest error
    /// band of the estimates among them, in whole percent. Estimates without a band use the
    /// default.
    #[must_use]
    pub fn of_bases<'a>(bases: impl Iterator<Item = Option<&'a Basis>>) -> Self {
        let estimates = bases.flatten().filter(|b| b.is_estimate());
        let bands = estimates.filter_map(|b| Self::new(b.step_percent()?.ceil() / 100.0));
        bands.fold(Self::DEFAULT, |a, b| if b > a { b } else { a })
    }

    /// Returns the share, for example 0.005.
    #[must_use]
    pub const fn share(self) -> f64 {
        self.0
    }

    /// Returns the tolerance of memory that goes with this tolerance of time. Predictions of memory
    /// are so exact that it never exceeds the default.
    #[must_use]
    pub const fn of_memory(self) -> Self {
        Self(self.0.min(Self::DEFAULT.0))
    }

    /// Returns whether `a` is less than `b` by more than the tolerance; `false` for NaN.
    #[must_use]
    pub fn less(self, a: f64, b: f64) -> bool {
        a * (1.0 + self.0) < b
    }

    /// Returns whether two values are equal within the tolerance; `false` for NaN.
    #[must_use]
    pub fn ties(self, a: f64, b: f64) -> bool {
        !a.is_nan() && !b.is_nan() && !self.less(a, b) && !self.less(b, a)
    }
}

impl Default for Tolerance {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for Tolerance {
    /// Formats `0.5 %`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Fractions of a percent have no exact binary representation.
        write!(f, "{} %", (1e5 * self.0).round() / 1e3)
    }
}

/// The error for a text that is not a tolerance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a percentage from 0% to below 100%, for example 0.5%")]
pub struct NotATolerance;

impl FromStr for Tolerance {
    type Err = NotATolerance;

    /// Parses `0.5%`, or the share 0.005.
    fn from_str(text: &str) -> Result<Self, NotATolerance> {
        let (number, unit) = match text.strip_suffix('%') {
            Some(percent) => (percent.trim_end(), 100.0),
            None => (text, 1.0),
        };
        let number: f64 = number.parse().map_err(|_| NotATolerance)?;
        Self::new(number / unit).ok_or(NotATolerance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::record::{BasisKind, ErrorBand};

    #[test]
    fn a_tolerance_is_read_and_written() {
        for (text, shown) in [
            ("0.5%", "0.5 %"),
            ("0.005", "0.5 %"),
            ("0", "0 %"),
            ("12 %", "12 %"),
        ] {
            assert_eq!(text.parse::<Tolerance>().unwrap().to_string(), shown);
        }
        for text in ["", "%", "100%", "1", "-1%", "nan", "inf", "0.5 GiB"] {
            assert_eq!(text.parse::<Tolerance>(), Err(NotATolerance), "{text}");
        }
    }

    #[test]
    fn estimates_are_equal_within_their_error() {
        let basis = |kind, percent: Option<f64>| Basis {
            kind,
            on: String::new(),
            band: percent.map(|p| ErrorBand {
                step_percent: Some(p),
                reserved_percent: None,
                rows: 9,
                projects: 2,
                like: String::new(),
            }),
        };
        let measured = basis(BasisKind::Measured, Some(5.0));
        let estimated = basis(BasisKind::Estimated, Some(11.4));
        let unknown = basis(BasisKind::Estimated, None);
        let of = |all: &[Option<&Basis>]| Tolerance::of_bases(all.iter().copied());
        assert_eq!(of(&[]), Tolerance::DEFAULT);
        assert_eq!(
            of(&[None, Some(&measured), Some(&unknown)]),
            Tolerance::DEFAULT
        );
        assert_eq!(of(&[Some(&measured), Some(&estimated)]).share(), 0.12);
    }
}
