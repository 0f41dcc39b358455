//! The basis of a prediction, and the errors of similar predictions.
//!
//! The error band comes from the validation rows closest to the prediction: those with the same
//! hardware profile, policy and model size if there are enough of them, otherwise those of wider
//! classes. Code of transformers and steps that the host limits have errors of their own, so all
//! classes but the widest separate them from others. Rows of one project have much in common, such
//! as the machine and the code of the training loop, so every project counts equally, however many
//! rows it published. Predictions that rest on estimates need rows of several projects. `shardlab
//! validate --residuals` derives the table of errors, `residuals.csv`, from the measured tables.

use super::Prediction;
use serde::{Deserialize, Serialize};
use shardlab_plan::Program;
use shardlab_plan::config::Implementation;
use shardlab_plan::record::{Basis, BasisKind, Cause, ErrorBand};
use shardlab_sim::Profile;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Errors of all validation rows, written by `shardlab validate --residuals`.
const TABLE: &str = include_str!("residuals.csv");
/// Minimum number of rows for a class to be used.
const MIN_ROWS: usize = 4;
/// Minimum number of rows for predictions across nodes, since fewer of these were measured.
const MIN_ROWS_ACROSS_NODES: usize = 2;
/// Minimum number of projects whose rows have to be in a class, for predictions that rest on
/// estimates.
const MIN_PROJECTS: usize = 2;
/// Maximum ratio of parameter counts for models to count as the same size.
const SIZE_FACTOR: f64 = 3.0;
/// Share of a step above which the wait for the host limits it.
const HOST_LIMITED: f64 = 0.05;
/// Share of the rows, weighted by project, whose errors are within a bound.
const COVERED: f64 = 0.9;

/// One validation row: the setting that was predicted, and the error of the prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Residual {
    /// Project that measured the row; empty for a prediction.
    pub project: String,
    /// Hardware profile.
    pub hardware: String,
    /// Whether the prediction was based on measurements.
    pub basis: BasisKind,
    /// Policy.
    pub policy: String,
    /// Code of the model.
    pub implementation: Implementation,
    /// Whether the GPU is predicted to wait for the host.
    pub host_limited: bool,
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
    pub fn of(p: &Prediction) -> Self {
        let (program, profile) = (&p.program, &*p.profile);
        let world = program.meta.mesh.world();
        let step = p.run.recorded_to.saturating_sub(p.run.recorded_from);
        let host = p.run.exposed.get(&Cause::Host).copied().unwrap_or_default();
        Self {
            project: String::new(),
            // Steps with 8-bit matmuls were not measured, and the measured steps of the profile
            // differ from them.
            hardware: if program.has_scaled_gemms() {
                format!("{} in 8 bits", profile.name)
            } else {
                profile.name.clone()
            },
            basis: kind(program, profile).0,
            policy: program.meta.policy.to_owned(),
            implementation: p.scenario.implementation(),
            host_limited: host.0 as f64 > HOST_LIMITED * step.0 as f64,
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

    /// Returns whether both are of transformers' code, or neither.
    fn same_code(&self, other: &Self) -> bool {
        let theirs = |r: &Self| r.implementation == Implementation::Transformers;
        theirs(self) == theirs(other)
    }

    fn same_limit(&self, other: &Self) -> bool {
        self.same_code(other) && self.host_limited == other.host_limited
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

/// Returns the basis of a prediction.
#[must_use]
pub(super) fn basis(p: &Prediction) -> Basis {
    let (kind, on) = kind(&p.program, &p.profile);
    let band = band(&Residual::of(p), residuals());
    Basis { kind, on, band }
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
        a.same_limit(b) && a.hardware == b.hardware && a.policy == b.policy && a.same_size(b)
    }),
    ("same hardware and policy", |a, b| {
        a.same_limit(b) && a.hardware == b.hardware && a.policy == b.policy
    }),
    ("same hardware", |a, b| {
        a.same_limit(b) && a.hardware == b.hardware
    }),
    // Used for hardware without measured rows: other profiles of the same kind.
    ("other hardware of the same basis", |a, b| {
        a.basis == b.basis
    }),
];

/// Classes of rows for memory, which does not depend on the speed of the hardware.
const MEMORY: [Class; 4] = [
    ("same policy, ranks and model size", |a, b| {
        let same = a.policy == b.policy && a.world_size == b.world_size;
        a.same_code(b) && same && a.same_size(b)
    }),
    ("same policy and model size", |a, b| {
        a.same_code(b) && a.policy == b.policy && a.same_size(b)
    }),
    ("same policy", |a, b| a.same_code(b) && a.policy == b.policy),
    ("same policy, other code", |a, b| a.policy == b.policy),
];

fn band(of: &Residual, rows: &[Residual]) -> Option<ErrorBand> {
    let near = |row: &Residual| of.across_nodes() == row.across_nodes();
    let enough = match of.across_nodes() {
        true => MIN_ROWS_ACROSS_NODES,
        false => MIN_ROWS,
    };
    let time = |row: &Residual| near(row).then_some(row.step_percent).flatten();
    let step = nearest(of, rows, &TIME, enough, time);
    let reserved = nearest(of, rows, &MEMORY, MIN_ROWS, |row| row.reserved_percent);
    let (like, errors) = step.as_ref().or(reserved.as_ref())?;
    let projects = projects(errors).len();
    Some(ErrorBand {
        step_percent: step.as_ref().map(|(_, errors)| bound(errors)),
        reserved_percent: reserved.as_ref().map(|(_, errors)| bound(errors)),
        rows: u32::try_from(errors.len()).unwrap_or(u32::MAX),
        projects: u32::try_from(projects).unwrap_or(u32::MAX),
        like: (*like).to_owned(),
    })
}

/// An absolute error in percent, and the project that measured the row.
type OfProject<'r> = (f64, &'r str);

/// Returns the errors of the first class with enough rows, of enough projects, in ascending order.
/// If every class has too few projects, returns those of the widest class.
fn nearest<'r>(
    of: &Residual,
    rows: &'r [Residual],
    classes: &[Class],
    enough: usize,
    error: impl Fn(&Residual) -> Option<f64>,
) -> Option<(&'static str, Vec<OfProject<'r>>)> {
    let in_class = |(name, same): &Class| {
        let rows = rows.iter().filter(|row| same(of, row));
        let errors = rows.filter_map(|row| Some((error(row)?.abs(), row.project.as_str())));
        let mut errors: Vec<OfProject<'r>> = errors.collect();
        errors.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        (errors.len() >= enough).then_some((*name, errors))
    };
    let needed = match of.basis {
        BasisKind::Estimated => MIN_PROJECTS,
        BasisKind::Measured => 1,
    };
    let mut found = classes.iter().filter_map(in_class);
    let wide = classes.iter().rev().find_map(in_class);
    found
        .find(|(_, errors)| projects(errors).len() >= needed)
        .or(wide)
}

/// Returns the number of rows of each project.
fn projects<'r>(errors: &[OfProject<'r>]) -> BTreeMap<&'r str, usize> {
    let mut rows = BTreeMap::new();
    for (_, project) in errors {
        *rows.entry(*project).or_default() += 1;
    }
    rows
}

/// Returns the 90th percentile (nearest rank) of errors in ascending order, in which every project
/// has the same weight.
fn bound(errors: &[OfProject<'_>]) -> f64 {
    let rows = projects(errors);
    let whole = COVERED * rows.len() as f64;
    let mut covered = 0.0;
    let reached = errors.iter().find(|(_, project)| {
        covered += 1.0 / rows[project] as f64;
        // Sums of fractions may be short by rounding.
        covered >= whole - 1e-9
    });
    reached.or(errors.last()).map_or(0.0, |(error, _)| *error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(hardware: &str, policy: &str, nodes: u32, parameters: u64, step: f64) -> Residual {
        Residual {
            project: "p".into(),
            hardware: hardware.into(),
            basis: BasisKind::Measured,
            policy: policy.into(),
            implementation: Implementation::Torchtitan,
            host_limited: false,
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

    /// Of 30 rows of one project and one of another, the latter has half of the weight.
    #[test]
    fn every_project_has_the_same_weight() {
        let mut rows: Vec<Residual> = (0..30).map(|_| row("a", "fsdp2", 1, 1_000, 1.0)).collect();
        let mut asked = row("a", "fsdp2", 1, 1_000, 0.0);
        let percent = |asked: &Residual, rows: &[Residual]| {
            let found = band(asked, rows).unwrap();
            (found.step_percent.unwrap(), found.projects)
        };
        assert_eq!(percent(&asked, &rows), (1.0, 1));
        let other = Residual {
            project: "q".into(),
            ..row("a", "fsdp2", 1, 1_000_000, -8.0)
        };
        rows.push(other);
        // The other project's model has another size, and one machine was measured.
        assert_eq!(percent(&asked, &rows), (1.0, 1));
        // Estimates need several projects.
        asked.basis = BasisKind::Estimated;
        assert_eq!(percent(&asked, &rows), (8.0, 2));
        assert_eq!(
            band(&asked, &rows).unwrap().like,
            "same hardware and policy"
        );
        // With ten projects, a tenth of the weight may be above the bound.
        let many = (1..=10).map(|i| Residual {
            project: format!("r{i}"),
            ..row("a", "fsdp2", 1, 1_000, f64::from(i))
        });
        assert_eq!(percent(&asked, &many.collect::<Vec<_>>()), (9.0, 10));
    }

    /// Published rows, with a band from the rows of all other projects: nearly nine of ten errors
    /// are within it.
    #[test]
    fn bands_hold_for_projects_that_they_do_not_know() {
        let published = [
            "llm-foundry",
            "torchtitan",
            "fms-fsdp",
            "KempnerForge",
            "lightning-thunder",
            "torchtune",
        ];
        let asked = residuals()
            .iter()
            .filter(|row| published.contains(&row.project.as_str()));
        let within = asked.filter_map(|row| {
            let others = residuals().iter().filter(|r| r.project != row.project);
            let found = band(row, &others.cloned().collect::<Vec<_>>())?;
            Some(row.step_percent?.abs() <= found.step_percent?)
        });
        let within: Vec<bool> = within.collect();
        let inside = within.iter().filter(|&&w| w).count();
        assert!(within.len() > 130, "{}", within.len());
        let share = inside as f64 / within.len() as f64;
        assert!(
            (0.87..0.97).contains(&share),
            "{inside} of {}",
            within.len()
        );
    }

    /// Each row of transformers, with a band from the other rows.
    #[test]
    fn bands_hold_for_jobs_of_transformers() {
        let asked = residuals()
            .iter()
            .enumerate()
            .filter(|(_, row)| row.implementation == Implementation::Transformers);
        let within = asked.filter_map(|(n, row)| {
            let others = residuals().iter().enumerate().filter(|(m, _)| *m != n);
            let others: Vec<Residual> = others.map(|(_, r)| r.clone()).collect();
            let found = band(row, &others)?;
            let step = row.step_percent?.abs() <= found.step_percent?;
            let reserved = row.reserved_percent.zip(found.reserved_percent);
            Some([step, reserved.is_none_or(|(is, most)| is.abs() <= most)])
        });
        let within: Vec<[bool; 2]> = within.collect();
        assert!(within.len() > 90, "{}", within.len());
        for metric in [0, 1] {
            let inside = within.iter().filter(|w| w[metric]).count();
            let share = inside as f64 / within.len() as f64;
            assert!(
                (0.84..0.97).contains(&share),
                "{metric}: {inside} of {}",
                within.len()
            );
        }
    }

    /// The host's code determines the steps that it limits, and its errors are larger.
    #[test]
    fn rows_that_another_part_limits_are_not_comparable() {
        let mut rows: Vec<Residual> = (0..4).map(|_| row("a", "fsdp2", 1, 1_000, 1.0)).collect();
        rows.extend((0..4).map(|_| Residual {
            host_limited: true,
            ..row("a", "fsdp2", 1, 1_000, 20.0)
        }));
        rows.extend((0..4).map(|_| Residual {
            implementation: Implementation::Transformers,
            ..row("a", "fsdp2", 1, 1_000, 4.0)
        }));
        let percent = |asked: &Residual| band(asked, &rows).unwrap().step_percent;
        let mut asked = row("a", "fsdp2", 1, 1_000, 0.0);
        assert_eq!(percent(&asked), Some(1.0));
        asked.host_limited = true;
        assert_eq!(percent(&asked), Some(20.0));
        asked.host_limited = false;
        asked.implementation = Implementation::Transformers;
        assert_eq!(percent(&asked), Some(4.0));
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
