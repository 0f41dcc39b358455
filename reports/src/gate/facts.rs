//! The facts that a gate compares: exact numbers of one scenario, and the curves of runs.

use super::outline;
use crate::view::{HARDWARE, ProgramView, RunView, ScenarioView};
use serde::{Deserialize, Serialize};
use shardlab_plan::check::{Report, Severity};
use shardlab_plan::ir::UnitId;
use shardlab_plan::record::{Basis, Run};
use shardlab_plan::{Program, Scenario};
use std::collections::BTreeMap;

/// Maximum number of units listed in a peak's composition.
const MAX_UNITS: usize = 8;
/// Maximum number of violations listed.
const MAX_VIOLATIONS: usize = 8;

/// All facts of one scenario that a gate examines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Scenario name.
    pub scenario: String,
    /// Overrides from the command line.
    #[serde(default)]
    pub set: Vec<String>,
    /// Options of the resolved scenario as `section.key` and value, except the path of the profile
    /// and the gate's limits.
    #[serde(default, deserialize_with = "super::baseline::options::read")]
    pub options: BTreeMap<String, String>,
    /// Policy.
    pub policy: String,
    /// Hardware profile.
    pub hardware: String,
    /// Ranks.
    pub world_size: u32,
    /// Program.
    pub program: ProgramFacts,
    /// Predicted memory.
    pub memory: MemoryFacts,
    /// Predicted time.
    pub time: TimeFacts,
    /// Result of `shardlab check`.
    pub check: CheckFacts,
    /// Measured runs, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// The basis of the prediction. It is not part of a baseline.
    #[serde(skip)]
    pub basis: Option<Basis>,
}

/// Facts of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramFacts {
    /// Digest.
    pub digest: String,
    /// Number of instructions by section and kind.
    #[serde(default)]
    pub instructions: BTreeMap<String, BTreeMap<String, u32>>,
    /// Outline, see [`outline::outline`].
    pub outline: String,
}

/// Memory of a run, bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFacts {
    /// Peak of bytes allocated by the engine.
    pub allocated: u64,
    /// Peak of reserved bytes.
    pub reserved: u64,
    /// Peak of the whole device.
    pub device: u64,
    /// Capacity of the device; `None` if unknown. Not part of a baseline.
    #[serde(skip)]
    pub capacity: Option<u64>,
    /// Bytes that remain allocated between steps.
    pub persistent: u64,
    /// Place of the peak of allocated bytes, for example `backward layers.1`.
    pub at: String,
    /// Bytes by role at the peak.
    #[serde(default)]
    pub by_role: BTreeMap<String, u64>,
    /// Bytes at the peak of the largest units.
    #[serde(default)]
    pub by_unit: BTreeMap<String, u64>,
}

/// Predicted time, picoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimeFacts {
    /// Median step time.
    pub step_ps: u64,
    /// Host time per step.
    pub host_ps: u64,
    /// Time in which the compute stream has nothing to run, by cause.
    #[serde(default)]
    pub exposed_ps: BTreeMap<String, u64>,
}

/// Result of `shardlab check`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckFacts {
    /// Number of violations.
    pub errors: u64,
    /// Number of warnings.
    pub warnings: u64,
    /// The first violations, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub violations: Vec<String>,
}

/// Measured runs of one scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Device and versions, for information only.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Digest of the program that ran.
    pub digest: String,
    /// Memory; `None` for a run that ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryFacts>,
    /// One curve per seed.
    pub curves: Vec<Curve>,
}

/// Training curve of one seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// Seed.
    pub seed: u64,
    /// Losses, one per step.
    pub losses: Vec<f64>,
    /// Gradient norms, one per step.
    #[serde(default)]
    pub grad_norms: Vec<f64>,
    /// Reason why the run ended before its last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

impl Facts {
    /// Returns the facts of a scenario, without measured runs.
    #[must_use]
    pub fn new(
        scenario: &Scenario,
        set: &[String],
        program: &Program,
        predicted: &Run,
        check: &Report,
    ) -> Self {
        Self {
            scenario: scenario.name.clone(),
            set: set.to_vec(),
            options: options(scenario),
            policy: program.meta.policy.to_owned(),
            hardware: predicted.hardware.clone(),
            world_size: program.meta.mesh.world(),
            program: ProgramFacts::new(program),
            memory: MemoryFacts::new(predicted, |u| {
                program.units.get(u.index()).map_or("", |u| &u.name)
            }),
            time: TimeFacts::new(predicted),
            check: CheckFacts::new(check),
            measured: None,
            basis: predicted.basis.clone(),
        }
    }
}

/// Returns the options that a baseline contains: all except the path of the profile, which depends
/// on the working folder, and the limits of the gate, which do not affect the step.
fn options(scenario: &Scenario) -> BTreeMap<String, String> {
    let mut all = ScenarioView::new(scenario).settings;
    all.retain(|key, _| key != HARDWARE && !key.starts_with("gate."));
    all
}

impl ProgramFacts {
    /// Returns the facts of a program.
    #[must_use]
    pub fn new(program: &Program) -> Self {
        let view = ProgramView::new(program);
        Self {
            instructions: view
                .counts
                .into_iter()
                .map(|(section, counts)| (section.name().to_owned(), counts))
                .collect(),
            digest: view.digest,
            outline: outline::outline(program),
        }
    }
}

impl MemoryFacts {
    /// Returns the memory of a run; `unit` returns the names of its units.
    #[must_use]
    pub fn new<'a>(run: &Run, unit: impl Fn(UnitId) -> &'a str) -> Self {
        let m = &run.memory;
        Self {
            allocated: m.peak_allocated.0,
            reserved: m.peak_reserved.0,
            device: m.peak_device.0,
            capacity: m.capacity.map(|c| c.0),
            persistent: m.persistent.0,
            at: format!("{} {}", m.at.phase.name(), unit(m.at.unit)),
            by_role: m
                .by_role
                .iter()
                .map(|(r, b)| (r.name().to_owned(), b.0))
                .collect(),
            by_unit: m
                .by_unit
                .iter()
                .take(MAX_UNITS)
                .map(|(u, b)| (u.clone(), b.0))
                .collect(),
        }
    }
}

impl TimeFacts {
    fn new(run: &Run) -> Self {
        let mut samples: Vec<u64> = run.step_samples.iter().map(|t| t.0).collect();
        samples.sort_unstable();
        Self {
            step_ps: samples.get(samples.len() / 2).copied().unwrap_or(0),
            host_ps: run.host.0,
            exposed_ps: run
                .exposed
                .iter()
                .map(|(c, t)| (c.name().to_owned(), t.0))
                .collect(),
        }
    }
}

impl CheckFacts {
    fn new(report: &Report) -> Self {
        let errors = report
            .violations
            .iter()
            .filter(|v| v.rule.severity() == Severity::Error);
        Self {
            errors: report.errors(),
            warnings: report.warnings(),
            violations: errors
                .take(MAX_VIOLATIONS)
                .map(|v| format!("[{}] {}", v.rule, v.message))
                .collect(),
        }
    }
}

impl Measured {
    /// Returns the facts of measured runs of one scenario, one per seed; `None` without runs.
    #[must_use]
    pub fn new(views: &[RunView]) -> Option<Self> {
        let first = views.first()?;
        Some(Self {
            environment: lasting(&first.run.environment),
            digest: first.program.digest.clone(),
            memory: Some(MemoryFacts::new(&first.run, |u| first.unit(u))),
            curves: views.iter().map(Curve::new).collect(),
        })
    }
}

/// Returns the part of a run's environment that a baseline contains. It excludes the seed, since
/// each curve has its own, and facts that differ from call to call.
#[must_use]
pub fn lasting(environment: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let kept = [
        "device", "data", "driver", "cuda", "nccl", "cudnn", "kernels",
    ];
    environment
        .iter()
        .filter(|(k, _)| kept.contains(&k.as_str()))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect()
}

impl Curve {
    /// Returns the curve of a run.
    #[must_use]
    pub fn new(view: &RunView) -> Self {
        let run = &view.run;
        let seed = run.environment.get("seed").and_then(|s| s.parse().ok());
        Self {
            seed: seed.unwrap_or(0),
            losses: run.losses.clone(),
            grad_norms: run.reported_grad_norms().to_vec(),
            ended: view
                .interrupted
                .then(|| "the run was interrupted".to_owned()),
        }
    }
}
