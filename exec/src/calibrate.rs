//! Measures this machine and produces a hardware profile of the CPU device, in the format that
//! `sim` reads.
//!
//! Kernels are timed within training steps of small models from every family. GEMMs and attention
//! are also timed on a grid of sizes, and collectives between rank threads by kind, size and number
//! of ranks. The costs of issue, start, events and allocations come from the recorded issue times
//! and spans of the same steps. Every time is a median of several measurements, just as runs report
//! the median of their steps, so the machine should be idle.

mod collectives;
#[cfg(feature = "cuda")]
mod cuda;
mod grid;
mod machine;
mod render;
mod single;
mod steps;
mod user_scenario;

#[cfg(feature = "cuda")]
pub use cuda::{Base, add_kernels_cuda, calibrate_cuda};
pub use user_scenario::{AddedKernels, UserScenario};

use crate::train::TrainError;
use shardlab_plan::Program;
use shardlab_plan::units::Picos;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What to measure, and for how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the profile.
    pub name: String,
    /// Maximum number of ranks whose collectives are measured.
    pub ranks: u32,
    /// Approximate time for all measurements.
    pub budget: Duration,
    /// Scenarios whose kernels are measured as well, before all others.
    pub user_scenarios: Vec<UserScenario>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "cpu".to_owned(),
            ranks: 4,
            budget: Duration::from_secs(90),
            user_scenarios: Vec::new(),
        }
    }
}

/// Measurements; [`render`] formats them as a profile.
#[derive(Debug, Default)]
struct Measured {
    machine: machine::Machine,
    steps: steps::Totals,
    gemm: Vec<grid::GemmTable>,
    attention: Vec<grid::AttentionRows>,
    collectives: Vec<collectives::Table>,
}

/// A measured machine. The contention between ranks on shared cores is visible only in whole steps.
/// A caller that can predict steps compares its predictions with [`Calibration::trials`] and passes
/// the best fit to [`Calibration::profile`].
#[derive(Debug)]
pub struct Calibration {
    name: String,
    measured: Measured,
}

/// A run of several ranks on this machine.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Program that the ranks ran.
    pub program: Arc<Program>,
    /// Median duration of its steps.
    pub step: Picos,
}

/// Contention between ranks on shared cores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Together {
    /// Share of its rate that work loses when every core is busy.
    pub shared_loss: f64,
    /// Like `shared_loss`, if there are more ranks than cores.
    pub turn_loss: f64,
    /// Time from the first rank's arrival at a collective to the last rank's arrival, in
    /// microseconds.
    pub wait_us: f64,
}

impl Calibration {
    /// Returns the number of cores that ranks share.
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.measured.machine.cores
    }

    /// Returns the runs of several ranks.
    #[must_use]
    pub fn trials(&self) -> &[Trial] {
        &self.measured.steps.trials
    }

    /// Returns the text of the profile.
    #[must_use]
    pub fn profile(&self, together: Together) -> String {
        render::profile(&self.name, &self.measured, together)
    }
}

/// Measures this machine. Calls `note` with the name of each part.
///
/// # Errors
/// Returns [`TrainError`] if a calibration step cannot be planned or run.
pub fn calibrate(options: &Options, note: &mut dyn FnMut(&str)) -> Result<Calibration, TrainError> {
    let share = |x: f64| options.budget.mul_f64(x);
    let begin = Instant::now();
    let mut m = Measured {
        machine: machine::Machine::measure(),
        ..Measured::default()
    };
    note("kernels within steps");
    m.steps = steps::measure(share(0.7), m.machine.cores, &options.user_scenarios, note)?;
    note("GEMMs");
    m.gemm = grid::gemm(share(0.1));
    note("attention");
    m.attention = grid::attention(share(0.08));
    note("collectives");
    m.collectives = collectives::measure(options.ranks, share(0.12));
    note(&format!("done in {:.0?}", begin.elapsed()));
    Ok(Calibration {
        name: options.name.clone(),
        measured: m,
    })
}

/// Number of layers of a scenario that are run to time its kernels.
const USER_LAYERS: u32 = 2;

/// Measures only the kernels of `options.user_scenarios` on one rank, for the profile of a machine
/// with the same number of cores. Calls `note` with the name of each part.
///
/// # Errors
/// Returns [`TrainError`] if a scenario cannot be planned or run, or if the machine has a different
/// number of cores.
pub fn add_kernels(
    options: &Options,
    cores: u32,
    note: &mut dyn FnMut(&str),
) -> Result<AddedKernels, TrainError> {
    let machine = machine::Machine::measure();
    if machine.cores != cores {
        return Err(TrainError::Plan(format!(
            "the profile is for a machine with {cores} cores, but this one has {}",
            machine.cores
        )));
    }
    let each = options.budget / (options.user_scenarios.len() as u32).max(1);
    let mut all = Vec::new();
    for scenario in &options.user_scenarios {
        note(&scenario.name());
        let observed = steps::user_scenario(scenario, each)?;
        let mut totals = steps::Totals::default();
        totals.add_all(observed.kernels());
        all.push((totals, observed.trial()));
    }
    Ok(AddedKernels {
        source: machine.source("within steps"),
        all,
    })
}

/// Returns the median time of repeated calls, in microseconds. Makes a warm-up call, then at least
/// three calls, and more until `time` has passed.
fn typical(time: Duration, mut call: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut times = Vec::new();
    call();
    while times.len() < 3 || begin.elapsed() < time {
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    quantile(times, 0.5)
}

/// Returns a quantile of the numbers; 0 if there are none.
fn quantile(mut numbers: Vec<f64>, share: f64) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let at = (numbers.len() as f64 * share) as usize;
    numbers
        .get(at.min(numbers.len().saturating_sub(1)))
        .copied()
        .unwrap_or(0.0)
}
