//! Measures this machine: a hardware profile of the CPU device, in the format that `sim` reads.
//!
//! Kernels are timed where they run, within training steps of small models of every family, and matrix products and
//! attention also on a grid of sizes; collectives between rank threads by kind, size and ranks; issue, start, event and
//! allocation costs from the recorded issue times and spans of the same steps. Every time is the middle one of several, as
//! runs report the middle of their steps: measure on an idle machine.

mod collectives;
#[cfg(feature = "cuda")]
mod cuda;
mod grid;
mod machine;
mod own;
mod render;
mod single;
mod steps;

#[cfg(feature = "cuda")]
pub use cuda::{Base, add_kernels_cuda, calibrate_cuda};
pub use own::{Added, Own};

use crate::train::TrainError;
use shardlab_plan::Program;
use shardlab_plan::units::Picos;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What to measure, and how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of the profile.
    pub name: String,
    /// Most ranks whose collectives are measured.
    pub ranks: u32,
    /// Time for all of it, roughly.
    pub budget: Duration,
    /// Scenarios whose kernels are measured too, before all others.
    pub own: Vec<Own>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "cpu".to_owned(),
            ranks: 4,
            budget: Duration::from_secs(90),
            own: Vec::new(),
        }
    }
}

/// What was measured; [`render`] makes a profile of it.
#[derive(Debug, Default)]
struct Measured {
    machine: machine::Machine,
    steps: steps::Totals,
    gemm: Vec<grid::GemmTable>,
    attention: Vec<grid::AttentionRows>,
    collectives: Vec<collectives::Table>,
}

/// A measured machine. What several ranks on shared cores lose to one another shows in whole steps only: whoever can predict
/// steps compares its predictions with [`Calibration::trials`], and gives [`Calibration::profile`] what fits.
#[derive(Debug)]
pub struct Calibration {
    name: String,
    measured: Measured,
}

/// A run of several ranks on this machine.
#[derive(Clone, Debug)]
pub struct Trial {
    /// What they performed.
    pub program: Arc<Program>,
    /// Their middle step.
    pub step: Picos,
}

/// What ranks on shared cores lose to one another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Together {
    /// Share of its rate that work loses when every core is busy.
    pub shared_loss: f64,
    /// The same when there are more ranks than cores.
    pub turn_loss: f64,
    /// From the first rank's arrival at a collective to the last one's, microseconds.
    pub wait_us: f64,
}

impl Calibration {
    /// Cores that ranks share.
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.measured.machine.cores
    }

    /// Runs of several ranks.
    #[must_use]
    pub fn trials(&self) -> &[Trial] {
        &self.measured.steps.trials
    }

    /// The profile's text.
    #[must_use]
    pub fn profile(&self, together: Together) -> String {
        render::profile(&self.name, &self.measured, together)
    }
}

/// Measures this machine. `note` hears what is being measured.
///
/// # Errors
/// [`TrainError`] when a calibration step cannot be planned or performed.
pub fn calibrate(options: &Options, note: &mut dyn FnMut(&str)) -> Result<Calibration, TrainError> {
    let share = |x: f64| options.budget.mul_f64(x);
    let begin = Instant::now();
    let mut m = Measured {
        machine: machine::Machine::measure(),
        ..Measured::default()
    };
    note("kernels within steps");
    m.steps = steps::measure(share(0.7), m.machine.cores, &options.own, note)?;
    note("matrix products");
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

/// Layers of a scenario that are run to time its kernels.
const OWN_LAYERS: u32 = 2;

/// Measures the kernels of `options.own` alone, on one rank, for a profile of a machine with as many cores. `note` hears what is being measured.
///
/// # Errors
/// [`TrainError`] when one of them cannot be planned or performed, or when the machine has another number of cores.
pub fn add_kernels(
    options: &Options,
    cores: u32,
    note: &mut dyn FnMut(&str),
) -> Result<Added, TrainError> {
    let machine = machine::Machine::measure();
    if machine.cores != cores {
        return Err(TrainError::Plan(format!(
            "the profile is for a machine with {cores} cores, but this one has {}",
            machine.cores
        )));
    }
    let each = options.budget / (options.own.len() as u32).max(1);
    let mut all = Vec::new();
    for own in &options.own {
        note(&own.name());
        let observed = steps::own(own, each)?;
        let mut totals = steps::Totals::default();
        totals.add_all(observed.kernels());
        all.push((totals, observed.trial()));
    }
    Ok(Added {
        source: machine.source("within steps"),
        all,
    })
}

/// Middle time of repeated calls, microseconds: at least three calls after a first one that is not counted, and more until
/// `time` is over.
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

/// The value below which a share of the numbers lies; 0 of none.
fn quantile(mut numbers: Vec<f64>, share: f64) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let at = (numbers.len() as f64 * share) as usize;
    numbers
        .get(at.min(numbers.len().saturating_sub(1)))
        .copied()
        .unwrap_or(0.0)
}
