//! Formats predicted numbers according to their basis.

use crate::predict::Prediction;
use shardlab_plan::record::Basis;
pub use shardlab_plan::record::basis::number;
use shardlab_plan::record::basis::{bounded, significant};
use shardlab_plan::units::signed;

/// Significant digits of a step time in a verdict, if it is not an estimate.
const DIGITS: u32 = 4;
/// Significant digits of an estimate.
const ESTIMATE_DIGITS: u32 = 3;

fn is_estimate(basis: Option<&Basis>) -> bool {
    basis.is_some_and(Basis::is_estimate)
}

/// Returns the step time of a verdict with its error: `1,052 ms`, `1,052 ms ± 2.0 %`, `~8,950 ms`.
#[must_use]
pub fn step_time(ms: f64, basis: Option<&Basis>) -> String {
    let band = basis.and_then(Basis::step_percent);
    let band = band.map_or_else(String::new, |percent| format!(" ± {}", bounded(percent)));
    let (mark, digits) = if is_estimate(basis) {
        ("~", ESTIMATE_DIGITS)
    } else {
        ("", DIGITS)
    };
    format!("{mark}{} ms{band}", significant(ms, digits))
}

/// Returns a difference with its sign and `decimals`. Differences of estimates are rounded.
#[must_use]
pub fn difference(x: f64, decimals: usize, basis: Option<&Basis>) -> String {
    // Small differences already have few digits.
    if !is_estimate(basis) || x.abs() < 1.0 {
        return signed(x, decimals);
    }
    let sign = if x < 0.0 { '-' } else { '+' };
    format!("{sign}{}", significant(x.abs(), ESTIMATE_DIGITS))
}

/// Returns the share of busy time (0 to 1) whose price comes from measured tables; `None` if
/// nothing was recorded.
#[must_use]
pub(crate) fn measured_share(p: &Prediction) -> Option<f64> {
    let costs = &p.run.costs;
    let all = (costs.measured + costs.modelled).ms();
    (all > 0.0).then(|| costs.measured.ms() / all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::record::{BasisKind, ErrorBand};

    fn basis(kind: BasisKind, step_percent: Option<f64>) -> Basis {
        Basis {
            kind,
            on: "4 x NVIDIA H200".into(),
            band: step_percent.map(|percent| ErrorBand {
                step_percent: Some(percent),
                reserved_percent: None,
                rows: 9,
                projects: 2,
                like: "same hardware".into(),
            }),
        }
    }

    #[test]
    fn numbers_have_the_digits_that_their_basis_allows() {
        assert_eq!(step_time(1052.246, None), "1,052 ms");
        assert_eq!(step_time(5.3634, None), "5.363 ms");
        assert_eq!(number(1052.246, 2, None), "1,052.25");
        assert_eq!(difference(-12.344, 2, None), "-12.34");
        let measured = basis(BasisKind::Measured, Some(2.0));
        assert_eq!(step_time(1052.246, Some(&measured)), "1,052 ms ± 2.0 %");
        assert_eq!(measured.words(), "measured on 4 x NVIDIA H200");
        let estimate = basis(BasisKind::Estimated, Some(14.2));
        let estimate = Some(&estimate);
        assert_eq!(step_time(8947.02, estimate), "~8,950 ms ± 15 %");
        assert_eq!(number(8947.02, 2, estimate), "~8,950");
        assert_eq!(number(0.0, 2, estimate), "~0");
        assert_eq!(difference(2644.61, 2, estimate), "+2,640");
        assert_eq!(difference(-0.004, 2, estimate), "+0.00");
        assert_eq!(
            step_time(8947.02, Some(&basis(BasisKind::Estimated, None))),
            "~8,950 ms"
        );
    }
}
