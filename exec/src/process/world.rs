//! The ranks of a session that this process runs.

use super::ProcessGroup;
use shardlab_plan::Program;
use std::ops::Range;
use std::sync::Arc;

/// World of a session: all ranks, those of this process, and the process group.
#[derive(Clone, Debug)]
pub struct World {
    size: u32,
    local: Range<u32>,
    group: Arc<ProcessGroup>,
}

impl World {
    /// Runs all ranks of a program in this process.
    #[must_use]
    pub fn single_process(program: &Program) -> Self {
        Self {
            size: program.meta.mesh.world(),
            local: 0..program.meta.mesh.world(),
            group: Arc::new(ProcessGroup::single()),
        }
    }

    /// Divides the ranks of a program evenly among the processes of a group, in order.
    ///
    /// # Errors
    /// Returns a message if the number of ranks is not a multiple of the number of processes.
    pub fn shared(program: &Program, group: Arc<ProcessGroup>) -> Result<Self, String> {
        let (size, processes) = (program.meta.mesh.world(), group.processes());
        if processes == 0 || !size.is_multiple_of(processes) {
            return Err(format!(
                "{processes} processes cannot share {size} ranks equally: start {size} processes, one per rank of the mesh"
            ));
        }
        let share = size / processes;
        let first = share * group.process();
        Ok(Self {
            size,
            local: first..first + share,
            group,
        })
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the ranks of this process.
    #[must_use]
    pub fn local(&self) -> Range<u32> {
        self.local.clone()
    }

    /// Returns a rank's index among those of this process; `None` if another process runs it.
    #[must_use]
    pub fn index(&self, rank: u32) -> Option<usize> {
        self.local
            .contains(&rank)
            .then(|| (rank - self.local.start) as usize)
    }

    /// Returns whether this process runs rank 0, which reports for the run.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.local.start == 0
    }

    /// Returns the process group.
    #[must_use]
    pub fn process_group(&self) -> &Arc<ProcessGroup> {
        &self.group
    }
}
