//! Pareto fronts and the best of several points.

pub use shardlab_reports::compare::ties::{Point, Tolerance, best, front};

use shardlab_plan::record::Basis;

/// Returns the tolerance within which predictions on these bases are equal: the default, or the largest error band of those that
/// are estimates. Where an estimate has no band, the default has to do.
#[must_use]
pub fn tolerance<'a>(bases: impl Iterator<Item = Option<&'a Basis>>) -> Tolerance {
    let estimates = bases.flatten().filter(|b| b.is_estimate());
    let bands = estimates.filter_map(|b| Tolerance::new(b.step_percent()? / 100.0));
    bands.fold(Tolerance::DEFAULT, |a, b| if b > a { b } else { a })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::record::{BasisKind, ErrorBand};

    #[test]
    fn estimates_are_equal_within_their_error() {
        let basis = |kind, percent: Option<f64>| Basis {
            kind,
            on: String::new(),
            band: percent.map(|p| ErrorBand {
                step_percent: Some(p),
                reserved_percent: None,
                rows: 9,
                like: String::new(),
            }),
        };
        let measured = basis(BasisKind::Measured, Some(5.0));
        let estimated = basis(BasisKind::Estimated, Some(12.0));
        let unknown = basis(BasisKind::Estimated, None);
        let of = |all: &[Option<&Basis>]| tolerance(all.iter().copied());
        assert_eq!(of(&[]), Tolerance::DEFAULT);
        assert_eq!(
            of(&[None, Some(&measured), Some(&unknown)]),
            Tolerance::DEFAULT
        );
        assert_eq!(of(&[Some(&measured), Some(&estimated)]).share(), 0.12);
    }
}
