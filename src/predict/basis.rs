//! The basis of a prediction, and the errors of similar predictions.
//!
//! The error band comes from the validation rows closest to the prediction: those with the same
//! hardware profile, policy and model size if there are enough of them, otherwise those of wider
//! classes. `shardlab validate --residuals` derives the table of errors, `residuals.csv`, from the
//! measured tables.

use serde::{Deserialize, Serialize};
use shardlab_plan::Program;
use shardlab_plan::record::{Basis, BasisKind, ErrorBand};
use shardlab_sim::Profile;
use std::sync::OnceLock;

/// Errors of all validation rows, written by `shardlab validate --residuals`.
const TABLE: &str = include_str!("residuals.csv");
/// Minimum number of rows for a class to be used.
const MIN_ROWS: usize = 4;
/// Minimum number of rows for predictions across nodes, since fewer of these were measured.
const MIN_ROWS_ACROSS_NODES: usize = 2;
/// Maximum ratio of parameter counts for models to count as the same size.
const SIZE_FACTOR: f64 = 3.0;
/// Share of the rows whose errors are within a bound.
const COVERED: f64 = 0.9;

/// One validation row: the setting that was predicted, and the error of the prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Residual {
    /// Hardware profile.
    pub hardware: String,
    /// Whether the prediction was based on measurements.
    pub basis: BasisKind,
    /// Policy.
    pub policy: String,
    /// Ranks.
    pub world_size: u32,
    /// Nodes.
    pub nodes: u32,
    /// Parameters of the model.
    pub parameters: u64,
    /// Error of the predicted step time, percent of the measured time.
    pub step_percent: Option<f64>,
    /// Error of the predicted peak of reserved memory, percent of the measured peak.
    pub reserved_percent: Option<f64>,
}

impl Residual {
    /// Describes a prediction as a row whose errors are not known yet.
    #[must_use]
    pub fn of(program: &Program, profile: &Profile) -> Self {
        let world = program.meta.mesh.world();
        Self {
            // Steps with 8-bit matmuls were not measured, and the measured steps of the profile
            // differ from them.
            hardware: if program.has_scaled_gemms() {
                format!("{} in 8 bits", profile.name)
            } else {
                profile.name.clone()
            },
            basis: kind(program, profile).0,
            policy: program.meta.policy.to_owned(),
            world_size: world,
            nodes: program.meta.nodes(),
            parameters: program.meta.parameters.total,
            step_percent: None,
            reserved_percent: None,
        }
    }

    fn across_nodes(&self) -> bool {
        self.nodes > 1
    }

    fn same_size(&self, other: &Self) -> bool {
        let (a, b) = (
            self.parameters.max(1) as f64,
            other.parameters.max(1) as f64,
        );
        a.max(b) <= SIZE_FACTOR * a.min(b)
    }
}

/// Determines whether a prediction is based on measurements. Also returns which ones, or the reason
/// why it is not.
fn kind(program: &Program, profile: &Profile) -> (BasisKind, String) {
    let world = program.meta.mesh.world();
    match &profile.measured {
        None if program.meta.nodes() > 1 => (
            BasisKind::Estimated,
            "partly from data sheets, no step across nodes was measured".to_owned(),
        ),
        None => (BasisKind::Estimated, "partly from data sheets".to_owned()),
        Some(m) if program.meta.nodes() > 1 => (
            BasisKind::Estimated,
            format!("kernels measured on {}, no step across nodes was", m.on),
        ),
        Some(m) if world > m.gpus => (
            BasisKind::Estimated,
            format!("measured on {}, extrapolated to {world} GPUs", m.on),
        ),
        Some(m) if program.has_scaled_gemms() && !profile.measures_float8_of(program) => (
            BasisKind::Estimated,
            format!("measured on {}, but no 8-bit matmuls", m.on),
        ),
        Some(m) => (BasisKind::Measured, m.on.clone()),
    }
}

/// Returns the basis of a scenario's prediction.
#[must_use]
pub(super) fn basis(program: &Program, profile: &Profile) -> Basis {
    let (kind, on) = kind(program, profile);
    let row = Residual::of(program, profile);
    Basis {
        kind,
        on,
        band: band(&row, residuals()),
    }
}

/// Returns the errors of all validation rows.
fn residuals() -> &'static [Residual] {
    static ROWS: OnceLock<Vec<Residual>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let mut reader = csv::Reader::from_reader(TABLE.as_bytes());
        reader
            .deserialize()
            .collect::<Result<_, _>>()
            .expect("the embedded table is checked by a test")
    })
}

/// A class of rows: its name, and what its rows have in common with a prediction.
type Class = (&'static str, fn(&Residual, &Residual) -> bool);

/// Classes of rows for step times, closest first. All of them distinguish one node from several.
const TIME: [Class; 4] = [
    ("same hardware, policy and model size", |a, b| {
        a.hardware == b.hardware && a.policy == b.policy && a.same_size(b)
    }),
    ("same hardware and policy", |a, b| {
        a.hardware == b.hardware && a.policy == b.policy
    }),
    ("same hardware", |a, b| a.hardware == b.hardware),
    // Used for hardware without measured rows: other profiles of the same kind.
    ("other hardware of the same basis", |a, b| {
        a.basis == b.basis
    }),
];

/// Classes of rows for memory, which does not depend on the speed of the hardware.
const MEMORY: [Class; 3] = [
    ("same policy, ranks and model size", |a, b| {
        a.policy == b.policy && a.world_size == b.world_size && a.same_size(b)
    }),
    ("same policy and model size", |a, b| {
        a.policy == b.policy && a.same_size(b)
    }),
    ("same policy", |a, b| a.policy == b.policy),
];

fn band(of: &Residual, rows: &[Residual]) -> Option<ErrorBand> {
    let near = |a: &Residual, b: &Residual| a.across_nodes() == b.across_nodes();
    let enough = match of.across_nodes() {
        true => MIN_ROWS_ACROSS_NODES,
        false => MIN_ROWS,
    };
    let step = nearest(of, rows, &TIME, enough, |r| {
        near(of, r).then_some(r.step_percent).flatten()
    });
    let reserved = nearest(of, rows, &MEMORY, MIN_ROWS, |r| r.reserved_percent);
    let (like, errors) = step.as_ref().or(reserved.as_ref())?;
    Some(ErrorBand {
        step_percent: step.as_ref().map(|(_, errors)| bound(errors)),
        reserved_percent: reserved.as_ref().map(|(_, errors)| bound(errors)),
        rows: errors.len() as u32,
        like: (*like).to_owned(),
    })
}

/// Returns the absolute errors of the first class with enough rows, in ascending order.
fn nearest(
    of: &Residual,
    rows: &[Residual],
    classes: &[Class],
    enough: usize,
    error: impl Fn(&Residual) -> Option<f64>,
) -> Option<(&'static str, Vec<f64>)> {
    classes.iter().find_map(|(name, same)| {
        let rows = rows.iter().filter(|row| same(of, row));
        let mut errors: Vec<f64> = rows.filter_map(|row| Some(error(row)?.abs())).collect();
        errors.sort_by(f64::total_cmp);
        (errors.len() >= enough).then_some((*name, errors))
    })
}

/// Returns the 90th percentile (nearest rank) of errors in ascending order.
fn bound(errors: &[f64]) -> f64 {
    let rank = (COVERED * errors.len() as f64).ceil() as usize;
    errors[rank.clamp(1, errors.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(hardware: &str, policy: &str, nodes: u32, parameters: u64, step: f64) -> Residual {
        Residual {
            hardware: hardware.into(),
            basis: BasisKind::Measured,
            policy: policy.into(),
            world_size: 4 * nodes,
            nodes,
            parameters,
            step_percent: Some(step),
            reserved_percent: None,
        }
    }

    #[test]
    fn the_nearest_class_with_enough_rows_decides() {
        let mut rows: Vec<Residual> = (1..=10)
            .map(|i| row("a", "fsdp2", 1, 1_000, f64::from(i)))
            .collect();
        let asked = row("a", "fsdp2", 1, 2_000, 0.0);
        // Nine of ten errors are at most 9.
        let found = band(&asked, &rows).unwrap();
        assert_eq!((found.step_percent, found.rows), (Some(9.0), 10));
        assert_eq!(found.like, "same hardware, policy and model size");
        // A model of another size.
        let large = row("a", "fsdp2", 1, 1_000_000, 0.0);
        assert_eq!(
            band(&large, &rows).unwrap().like,
            "same hardware and policy"
        );
        // Signs do not matter.
        rows[0].step_percent = Some(-20.0);
        assert_eq!(band(&asked, &rows).unwrap().step_percent, Some(10.0));
        // There are no measurements across nodes.
        assert_eq!(band(&row("a", "fsdp2", 2, 1_000, 0.0), &rows), None);
        // Hardware without measured rows.
        let other = band(&row("b", "native", 1, 1_000, 0.0), &rows).unwrap();
        assert_eq!(other.like, "other hardware of the same basis");
    }

    #[test]
    fn the_embedded_table_is_whole() {
        assert!(residuals().len() > 100);
        assert!(residuals().iter().any(Residual::across_nodes));
        let finite = |e: Option<f64>| e.is_none_or(f64::is_finite);
        assert!(
            residuals()
                .iter()
                .all(|r| finite(r.step_percent) && finite(r.reserved_percent))
        );
    }
}
