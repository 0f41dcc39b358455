//! Which ranks of a world this process performs.

use crate::process::Peers;
use shardlab_plan::Program;
use std::ops::Range;
use std::sync::Arc;

/// The world of a session: all ranks, those of this process, and the way to the others.
#[derive(Clone, Debug)]
pub struct World {
    size: u32,
    local: Range<u32>,
    peers: Arc<Peers>,
}

impl World {
    /// All ranks of a program in this process.
    #[must_use]
    pub fn alone(program: &Program) -> Self {
        Self {
            size: program.meta.world,
            local: 0..program.meta.world,
            peers: Arc::new(Peers::alone()),
        }
    }

    /// This process's equal share of a program's ranks, in order of processes.
    ///
    /// # Errors
    /// In words, when the ranks cannot be shared equally.
    pub fn shared(program: &Program, peers: Arc<Peers>) -> Result<Self, String> {
        let (size, processes) = (program.meta.world, peers.processes());
        if processes == 0 || !size.is_multiple_of(processes) {
            return Err(format!(
                "{processes} processes cannot share {size} ranks equally: start {size} processes, one per rank of the mesh"
            ));
        }
        let share = size / processes;
        let first = share * peers.process();
        Ok(Self {
            size,
            local: first..first + share,
            peers,
        })
    }

    /// Ranks in all.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Ranks that this process performs.
    #[must_use]
    pub fn local(&self) -> Range<u32> {
        self.local.clone()
    }

    /// Place of a rank among those of this process.
    #[must_use]
    pub fn index(&self, rank: u32) -> Option<usize> {
        self.local
            .contains(&rank)
            .then(|| (rank - self.local.start) as usize)
    }

    /// Whether this process performs rank 0, which speaks for the run.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.local.start == 0
    }

    /// The way to the other processes; for a process alone, to itself.
    #[must_use]
    pub fn peers(&self) -> &Arc<Peers> {
        &self.peers
    }
}
