//! Compares runs: what differs, and why.
//!
//! Two runs of one program are aligned instruction by instruction. Runs of different programs are
//! aligned by unit, phase, micro-batch and kernel, in order of launch. Many runs form a [`Matrix`].

mod align;
mod breakdown;
mod comparable;
mod curves;
mod matrix;
mod memory;
mod places;
pub mod ties;
mod typical;
mod units;
mod waits;
mod why;

pub use crate::tolerance::Tolerance;
pub use align::{Aligned, Alignment, Change, KindError, Prediction};
pub use breakdown::{Breakdown, Part};
pub use comparable::{Comparable, Level};
pub use curves::{CurvePair, Difference as CurveDifference};
pub use matrix::{Matrix, Metric, Row, Unit};
pub use memory::{MemoryPair, PlacePeak, Sized};
pub use units::{UnitCause, UnitTime};
pub use waits::{CauseTime, Wait, WaitKey};
pub(crate) use why::tokens;

use crate::stats::{self, Options, Samples};
use crate::view::{Difference, RunView, differences};
use serde::Serialize;
use shardlab_plan::ir::ParameterCount;
use std::collections::BTreeMap;

/// A run with a short name for tables and sentences.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Name, for example `A`.
    pub label: &'a str,
    /// Run.
    pub run: &'a RunView,
    /// Step times to compare instead of the run's own: medians of several runs, milliseconds.
    pub medians: &'a [f64],
}

impl<'a> Side<'a> {
    /// Returns a run that is compared by its own step times.
    #[must_use]
    pub fn new(label: &'a str, run: &'a RunView) -> Self {
        Self {
            label,
            run,
            medians: &[],
        }
    }

    /// Returns step times in milliseconds, and whether they are exact.
    fn samples(&self) -> (Vec<f64>, bool) {
        if !self.medians.is_empty() {
            return (self.medians.to_vec(), false);
        }
        let noisy =
            self.run.run.kind.is_measured() || self.run.run.environment.contains_key("jitter");
        if noisy {
            (self.run.samples_ms(), false)
        } else {
            (vec![self.run.step_ms()], true)
        }
    }
}

/// Identifies a run in the head of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Head {
    /// Name in this comparison.
    pub label: String,
    /// Scenario.
    pub scenario: String,
    /// `sim`, `exec` or `import`.
    pub kind: &'static str,
    /// Policy.
    pub policy: String,
    /// Hardware.
    pub hardware: String,
    /// Ranks.
    pub world_size: u32,
    /// Digest of the program.
    pub program_digest: String,
    /// Numbers of parameters, unless they are unknown, as in a gate's baseline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<ParameterCount>,
}

impl Head {
    fn of(side: Side<'_>) -> Self {
        let run = &side.run.run;
        Self {
            label: side.label.to_owned(),
            scenario: side.run.scenario.name.clone(),
            kind: side.run.kind(),
            policy: run.policy.clone(),
            hardware: run.hardware.clone(),
            world_size: run.world_size,
            program_digest: side.run.program.digest.clone(),
            parameters: side.run.program.parameter_count,
        }
    }
}

/// A comparison of two runs. Pairs are values of A and B. Times are in picoseconds if their type
/// says so.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// The runs.
    pub runs: [Head; 2],
    /// Whether they can be compared, and why.
    pub comparable: Comparable,
    /// Reasons for not drawing conclusions, such as a recorded step that is an outlier.
    pub warnings: Vec<String>,
    /// Options that differ.
    pub options: Vec<Difference>,
    /// Facts of the environments that differ: machine, versions, revision, seeds.
    pub environment: BTreeMap<String, [Option<String>; 2]>,
    /// How instructions were aligned.
    pub alignment: Alignment,
    /// Step time; `None` if a run has no steady steps, or if times are not compared.
    pub step: Option<stats::Comparison>,
    /// Main numbers.
    pub metrics: Vec<Metric>,
    /// Step time by its parts.
    pub breakdown: Breakdown,
    /// Instructions or groups with the largest changes in time.
    pub changes: Vec<Change>,
    /// Errors of the prediction, if one run is predicted and the other measured.
    pub prediction: Option<Prediction>,
    /// Predicted and measured time by unit, if one run is predicted and the other measured.
    pub units: Vec<UnitTime>,
    /// Exposed time by cause.
    pub exposed: Vec<CauseTime>,
    /// Exposed time by what the compute stream waited for, largest change first.
    pub waits: Vec<Wait>,
    /// Memory.
    pub memory: MemoryPair,
    /// Losses; `None` unless both runs have some.
    pub losses: Option<CurvePair>,
    /// Gradient norms; `None` unless both runs have some.
    pub grad_norms: Option<CurvePair>,
    /// Conclusions, one sentence each.
    pub why: Vec<String>,
}

impl Pair {
    /// Returns the sentence on the step times, if they are compared.
    #[must_use]
    pub fn verdict(&self) -> Option<&str> {
        let predicted = self.prediction.as_ref().map(|p| p.step_error);
        let judged = self.step.is_some() || predicted.is_some_and(f64::is_finite);
        self.why.first().filter(|_| judged).map(String::as_str)
    }

    /// Returns the sentences after the verdict.
    #[must_use]
    pub fn reasons(&self) -> &[String] {
        &self.why[usize::from(self.verdict().is_some())..]
    }
}

/// Compares two runs.
#[must_use]
pub fn pair(a: Side<'_>, b: Side<'_>, options: &Options) -> Pair {
    let sides = [a.run, b.run];
    let aligned = Aligned::new(a.run, b.run);
    let comparable = Comparable::new(&sides);
    let times = comparable.times();
    let mut pair = Pair {
        runs: [Head::of(a), Head::of(b)],
        comparable,
        warnings: [a, b].into_iter().filter_map(typical::warning).collect(),
        options: differences(&[&a.run.scenario, &b.run.scenario]),
        environment: environment(sides),
        step: step(a, b, options),
        metrics: matrix::metrics(&sides),
        breakdown: Breakdown::new(sides),
        changes: aligned.changes(),
        prediction: times.then(|| aligned.prediction()).flatten(),
        alignment: aligned.into_alignment(),
        units: Vec::new(),
        exposed: waits::causes(sides),
        waits: waits::waits(sides),
        memory: MemoryPair::new(sides),
        losses: CurvePair::new(&a.run.run.losses, &b.run.run.losses),
        grad_norms: CurvePair::new(
            a.run.run.reported_grad_norms(),
            b.run.run.reported_grad_norms(),
        ),
        why: Vec::new(),
    };
    if let Some(p) = &pair.prediction {
        pair.units = units::units(sides[1 - p.measured], sides[p.measured]);
    }
    pair.why = why::sentences(&pair, sides);
    pair
}

/// Compares the step times of two runs; `None` if they are not comparable.
fn step(a: Side<'_>, b: Side<'_>, options: &Options) -> Option<stats::Comparison> {
    if !Comparable::new(&[a.run, b.run]).times() {
        return None;
    }
    let ((x, x_exact), (y, y_exact)) = (a.samples(), b.samples());
    // Medians of runs are independent of each other; steps of a run are not.
    let block = |side: Side<'_>, n| {
        if side.medians.is_empty() {
            Options::block_of(n)
        } else {
            1
        }
    };
    let options = Options {
        block: block(a, x.len()).max(block(b, y.len())),
        ..*options
    };
    let x = if x_exact {
        Samples::Exact(x[0])
    } else {
        Samples::Measured(&x)
    };
    let y = if y_exact {
        Samples::Exact(y[0])
    } else {
        Samples::Measured(&y)
    };
    stats::compare(x, y, &options).ok()
}

fn environment(sides: [&RunView; 2]) -> BTreeMap<String, [Option<String>; 2]> {
    // A baseline contains few facts, so missing ones do not count as different.
    let all = !sides.iter().any(|s| s.is_baseline());
    let [a, b] = sides.map(|s| &s.run.environment);
    a.keys()
        .chain(b.keys())
        .filter(|key| all || a.contains_key(*key) && b.contains_key(*key))
        .filter(|key| a.get(*key) != b.get(*key))
        .map(|key| (key.clone(), [a.get(key).cloned(), b.get(key).cloned()]))
        .collect()
}
