//! Measures this machine: a hardware profile of the CPU device, in the format that `sim` reads.
//!
//! Kernels are timed where they run, within training steps of small models of every family, and matrix products and
//! attention also on a grid of sizes; collectives between rank threads by kind, size and ranks; issue, start, event and
//! allocation costs from the recorded issue times and spans of the same steps. Every time is the shortest of several, so
//! that other work on the machine disturbs little.

mod collectives;
#[cfg(feature = "cuda")]
mod cuda;
mod grid;
mod machine;
mod render;
mod steps;

#[cfg(feature = "cuda")]
pub use cuda::calibrate_cuda;

use crate::train::TrainError;
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
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "cpu".to_owned(),
            ranks: 4,
            budget: Duration::from_secs(90),
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

/// Measures this machine; the profile's text. `note` hears what is being measured.
///
/// # Errors
/// [`TrainError`] when a calibration step cannot be planned or performed.
pub fn calibrate(options: &Options, note: &mut dyn FnMut(&str)) -> Result<String, TrainError> {
    let share = |x: f64| options.budget.mul_f64(x);
    let begin = Instant::now();
    let mut m = Measured {
        machine: machine::Machine::measure(),
        ..Measured::default()
    };
    note("kernels within steps");
    m.steps = steps::measure(share(0.62), m.machine.cores, note)?;
    note("matrix products");
    m.gemm = grid::gemm(share(0.12));
    note("attention");
    m.attention = grid::attention(share(0.1));
    note("collectives");
    m.collectives = collectives::measure(options.ranks, share(0.16));
    note(&format!("done in {:.0?}", begin.elapsed()));
    Ok(render::profile(&options.name, &m))
}

/// Shortest time of repeated calls, microseconds: at least three calls, and more until `time` is over.
fn shortest(time: Duration, mut call: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    for i in 0.. {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed().as_secs_f64() * 1e6);
        if i >= 2 && begin.elapsed() >= time {
            break;
        }
    }
    best
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
