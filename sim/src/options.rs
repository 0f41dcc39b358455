//! What to simulate beside the program.

/// Options of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Steady passes beyond the first step. 0: until time and memory repeat (at least two).
    pub steps: u32,
    /// Seed of the jitter.
    pub seed: u64,
    /// Standard deviation of kernel durations, relative.
    pub jitter: f64,
    /// Ranks whose kernels take longer, and how many times.
    pub stragglers: Vec<(u32, f64)>,
    /// Simulate every rank even though they are equal.
    pub full_ranks: bool,
    /// Keep spans, gaps, cost sources and the memory timeline of the last step.
    pub record: bool,
    /// Running tasks slow one another.
    pub contention: bool,
    /// Refuse what does not fit the device; otherwise memory is unlimited and the report compares.
    pub enforce_memory: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            steps: 0,
            seed: 0,
            jitter: 0.0,
            stragglers: Vec::new(),
            full_ranks: false,
            record: true,
            contention: true,
            enforce_memory: false,
        }
    }
}

impl Options {
    /// Whether ranks differ, so that each has to be simulated.
    pub(crate) fn every_rank(&self) -> bool {
        self.full_ranks || self.jitter > 0.0 || !self.stragglers.is_empty()
    }

    /// Says what is impossible.
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
                    "straggler rank {rank}: the world has {world} ranks"
                ));
            }
            if !(0.01..=1000.0).contains(&factor) {
                return Err(format!(
                    "straggler factor {factor} of rank {rank}: must be between 0.01 and 1000"
                ));
            }
        }
        Ok(())
    }
}
