//! Basis of a prediction, and the expected error.

use crate::units::thousands;
use serde::{Deserialize, Serialize};

/// Whether a prediction is based on measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BasisKind {
    /// The hardware profile was measured on machines like that of the mesh.
    Measured,
    /// The hardware profile comes from data sheets, or the mesh is outside the range of the
    /// measurements.
    Estimated,
}

impl BasisKind {
    /// Returns the word for tables and JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Estimated => "estimated",
        }
    }
}

/// Basis of a prediction's times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Basis {
    /// Whether the basis is a measurement.
    pub kind: BasisKind,
    /// The measured machine, or the reason why the prediction is an estimate.
    pub on: String,
    /// Errors of similar predictions; `None` if nothing similar was measured.
    pub band: Option<ErrorBand>,
}

/// Errors of predictions in the validation rows nearest to a prediction.
///
/// Each bound is the 90th percentile (nearest rank) of the absolute errors of those rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ErrorBand {
    /// Bound on the error of the step time, in percent; `None` if no such row has a measured time.
    pub step_percent: Option<f64>,
    /// Bound on the error of reserved memory, in percent; `None` if no such row has a measured
    /// peak.
    pub reserved_percent: Option<f64>,
    /// Number of these rows.
    pub rows: u32,
    /// Number of projects that measured them.
    #[serde(default)]
    pub projects: u32,
    /// What the rows have in common with the prediction.
    pub like: String,
}

/// Number of runs below which the bound of a band is the error of the worst of them.
const FEW_RUNS: u32 = 10;

impl Basis {
    /// Returns whether the prediction is an estimate.
    #[must_use]
    pub fn is_estimate(&self) -> bool {
        self.kind == BasisKind::Estimated
    }

    /// Returns the bound on the error of the step time in percent, if known.
    #[must_use]
    pub fn step_percent(&self) -> Option<f64> {
        self.band.as_ref()?.step_percent
    }

    /// Returns the bound on the error of the step time, with the number of runs if these are few:
    /// `± 4.0 %`, `± 2.2 % in 5 runs`; `None` if it is not known.
    #[must_use]
    pub fn step_error(&self) -> Option<String> {
        let bound = format!("± {}", bounded(self.step_percent()?));
        Some(match self.band.as_ref()?.rows {
            1 => format!("{bound} in 1 run"),
            rows if rows < FEW_RUNS => format!("{bound} in {rows} runs"),
            _ => bound,
        })
    }

    /// Returns the bound on the error of reserved memory in percent, if known.
    #[must_use]
    pub fn reserved_percent(&self) -> Option<f64> {
        self.band.as_ref()?.reserved_percent
    }

    /// Returns the basis in words: `measured on 4 x NVIDIA H200`.
    #[must_use]
    pub fn words(&self) -> String {
        match self.kind {
            BasisKind::Measured => format!("measured on {}", self.on),
            BasisKind::Estimated => format!("estimated: {}", self.on),
        }
    }

    /// Returns the basis with its error: `measured on 4 x NVIDIA H200; step time ± 4.0 %`.
    #[must_use]
    pub fn sentence(&self) -> String {
        let on = self.words();
        match self.step_error() {
            Some(error) => format!("{on}; step time {error}"),
            None => format!("{on}; error unknown"),
        }
    }
}

/// Formats a bound in percent, with one decimal below 10 and none above.
#[must_use]
pub fn bounded(percent: f64) -> String {
    // A bound is rounded up, because it must hold.
    let tenths = (percent * 10.0 - 1e-6).ceil() / 10.0;
    if tenths < 10.0 {
        format!("{tenths:.1} %")
    } else {
        format!("{:.0} %", (percent - 1e-6).ceil())
    }
}

/// Number of significant digits of an estimate.
const ESTIMATE_DIGITS: u32 = 3;

/// Formats a predicted number: with `decimals`, or as `~` and three significant digits if it is an
/// estimate.
#[must_use]
pub fn number(x: f64, decimals: usize, basis: Option<&Basis>) -> String {
    if basis.is_some_and(Basis::is_estimate) {
        format!("~{}", significant(x, ESTIMATE_DIGITS))
    } else {
        thousands(x, decimals)
    }
}

/// Formats a step time as [`number`] does, with two decimals and its unit.
#[must_use]
pub fn milliseconds(ms: f64, basis: Option<&Basis>) -> String {
    format!("{} ms", number(ms, 2, basis))
}

/// Formats a number with this many significant digits, without an exponent and with a comma between
/// thousands.
#[must_use]
pub fn significant(x: f64, digits: u32) -> String {
    if !x.is_finite() || x == 0.0 {
        return format!("{x:.0}");
    }
    let decimals = |x: f64| digits as i32 - 1 - x.abs().log10().floor() as i32;
    let unit = 10f64.powi(-decimals(x));
    let rounded = (x / unit).round() * unit;
    // Rounding up may add a digit before the point: 9.996 is 10.0.
    let decimals = decimals(rounded).max(0) as usize;
    thousands(rounded, decimals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_have_three_significant_digits() {
        let basis = |kind| Basis {
            kind,
            on: String::new(),
            band: None,
        };
        let estimated = basis(BasisKind::Estimated);
        for (ms, text) in [
            (8947.02, "~8,950 ms"),
            (1039.4, "~1,040 ms"),
            (104.26, "~104 ms"),
            (9.876, "~9.88 ms"),
            (9.996, "~10.0 ms"),
            (0.12345, "~0.123 ms"),
        ] {
            assert_eq!(milliseconds(ms, Some(&estimated)), text);
        }
        assert_eq!(
            milliseconds(1052.251, Some(&basis(BasisKind::Measured))),
            "1,052.25 ms"
        );
        assert_eq!(milliseconds(5.0, None), "5.00 ms");
    }

    #[test]
    fn bounds_are_rounded_up() {
        assert_eq!(bounded(1.23), "1.3 %");
        assert_eq!(bounded(2.0), "2.0 %");
        assert_eq!(bounded(13.8), "14 %");
        assert_eq!(bounded(9.98), "10 %");
    }

    #[test]
    fn a_basis_says_what_it_rests_on() {
        let mut basis = Basis {
            kind: BasisKind::Measured,
            on: "4 x NVIDIA H200".into(),
            band: None,
        };
        assert_eq!(
            basis.sentence(),
            "measured on 4 x NVIDIA H200; error unknown"
        );
        basis.band = Some(ErrorBand {
            step_percent: Some(3.42),
            reserved_percent: None,
            rows: 12,
            projects: 2,
            like: "same hardware and policy".into(),
        });
        assert_eq!(
            basis.sentence(),
            "measured on 4 x NVIDIA H200; step time ± 3.5 %"
        );
        basis.band = basis.band.map(|band| ErrorBand { rows: 5, ..band });
        assert_eq!(basis.step_error().unwrap(), "± 3.5 % in 5 runs");
    }
}
