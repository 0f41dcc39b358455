//! Options of a simulation, in addition to the program.

use crate::part::{Part, SCALES};
use shardlab_plan::units::Picos;

/// Options of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Number of steady passes after the first step. With 0, the simulation runs until time and
    /// memory repeat (at least two passes).
    pub steps: u32,
    /// Seed of the jitter.
    pub seed: u64,
    /// Standard deviation of kernel durations, as a share of the durations.
    pub jitter: f64,
    /// Ranks whose kernels take longer, with the factor for each.
    pub stragglers: Vec<(u32, f64)>,
    /// Parts of every rank's machine that take longer than the profile says (including its
    /// `[scale]`), with the factor for each.
    pub slower: Vec<(Part, f64)>,
    /// Simulates every rank even if they are identical.
    pub full_ranks: bool,
    /// Keeps spans, gaps, cost sources and the memory timeline of the last step.
    pub record: bool,
    /// Lets running tasks slow each other down.
    pub contention: bool,
    /// Measured durations of the program's first kernels, instead of the profile's.
    pub kernel_times: Vec<Picos>,
    /// Rejects a program that does not fit the device. Otherwise memory is unlimited, and the
    /// report compares it with the device.
    pub enforce_memory: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            steps: 0,
            seed: 0,
            jitter: 0.0,
            stragglers: Vec::new(),
            slower: Vec::new(),
            full_ranks: false,
            record: true,
            contention: true,
            kernel_times: Vec::new(),
            enforce_memory: false,
        }
    }
}

impl Options {
    /// Returns whether ranks differ, so that each one has to be simulated.
    pub(crate) fn every_rank(&self) -> bool {
        self.full_ranks || self.jitter > 0.0 || !self.stragglers.is_empty()
    }

    /// Returns the factor by which a part is slower than the profile says.
    pub(crate) fn times(&self, part: Part) -> f64 {
        let found = self.slower.iter().find(|s| s.0 == part);
        found.map_or(1.0, |s| s.1)
    }

    /// Checks the options for a world of this size.
    pub(crate) fn check(&self, world: u32) -> Result<(), String> {
        if !(0.0..=0.5).contains(&self.jitter) {
            return Err(format!(
                "jitter = {}: must be between 0 and 0.5",
                self.jitter
            ));
        }
        for (i, &(rank, factor)) in self.stragglers.iter().enumerate() {
            if self.stragglers[..i].iter().any(|s| s.0 == rank) {
                return Err(format!("straggler rank {rank} is given twice"));
            }
            if rank >= world {
                return Err(format!(
                    "straggler rank {rank}: the ranks of the mesh are 0 to {}",
                    world.saturating_sub(1)
                ));
            }
            in_range(factor, || {
                format!("straggler factor {factor} of rank {rank}")
            })?;
        }
        for (i, &(part, factor)) in self.slower.iter().enumerate() {
            let name = part.name();
            if self.slower[..i].iter().any(|s| s.0 == part) {
                return Err(format!("scale {name} is given twice"));
            }
            in_range(factor, || format!("scale {name}, factor {factor}"))?;
        }
        Ok(())
    }
}

/// Checks that durations may be multiplied by a factor.
fn in_range(factor: f64, what: impl Fn() -> String) -> Result<(), String> {
    if SCALES.contains(&factor) {
        return Ok(());
    }
    Err(format!("{}: must be between 0.01 and 1000", what()))
}
