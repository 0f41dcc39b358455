//! Collectives between ranks that are threads of one process or, for functional tests, processes of
//! one run (`remote`).
//!
//! A communicator instance ([`Group`]) runs its collectives one after another in host launch order:
//! each rank numbers its launches, and a rank may enter number `n` only after `n - 1` has
//! completed. Every rank contributes its ranges. When all have arrived, their descriptors are
//! compared, and each rank moves its own share of the data directly from its peers' memory. See
//! Note [Order of sums].

// Note [Order of sums]
//
// A run produces the same bits every time, with any number of threads and processes, although ranks
// and streams arrive in any order. Floating-point addition is not associative, so every sum has an
// order that depends only on shapes and rank numbers:
//
// - a collective adds its inputs in rank order, in float32, after all ranks have arrived; a rank's
//   data are never added on arrival. `ShardOp::SumPieces` adds in the same order, so an all-to-all
//   with a local sum has the same bits as a reduce-scatter;
// - a reduction within a kernel has a fixed number of lanes and a fixed tree, for any width of the
//   vector instructions and any number of threads (`kernels/math.rs`, `kernels/parallel.rs`);
// - norms of the whole state are added in the order of spans, for any distribution over processes
//   (`train/state.rs`).
//
// NCCL and cuDNN choose their own orders, so a GPU run is reproducible if these are.

pub(crate) mod check;
mod counted;
mod group;
mod moves;
mod reduce;
mod remote;

pub(crate) use counted::counted;
pub use group::{Arrival, Call, CommError, Group};

use crate::base::abort::{Abort, Wake};
use crate::process::ProcessGroup;
use shardlab_plan::ir::CommId;
use shardlab_plan::program::Program;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// All communicator instances of a session.
#[derive(Debug)]
pub(crate) struct Communicators {
    /// By communicator: instances by their first member.
    groups: Vec<BTreeMap<u32, Arc<Group>>>,
    /// By communicator and rank: first member of the instance, and position in it.
    positions: Vec<Vec<(u32, u32)>>,
}

impl Communicators {
    /// Creates the instances of every communicator of a program.
    #[must_use]
    pub(crate) fn new(program: &Program, abort: &Arc<Abort>) -> Self {
        Self::with(program, abort, None)
    }

    /// Creates the instances for a world in which every rank is a process.
    #[must_use]
    pub(crate) fn between_processes(
        program: &Program,
        abort: &Arc<Abort>,
        peers: &Arc<ProcessGroup>,
    ) -> Self {
        Self::with(program, abort, Some(peers))
    }

    fn with(program: &Program, abort: &Arc<Abort>, peers: Option<&Arc<ProcessGroup>>) -> Self {
        let world = program.meta.mesh.world();
        let mut all = Self {
            groups: Vec::new(),
            positions: Vec::new(),
        };
        for comm in &program.communicators {
            let mut groups = BTreeMap::new();
            let mut positions = Vec::new();
            for rank in 0..world {
                let ranks: Vec<u32> = comm.ranks.members(rank).collect();
                let first = ranks[0];
                groups.entry(first).or_insert_with(|| {
                    let mut group = Group::new(&comm.name, ranks, Arc::clone(abort));
                    if let Some(peers) = peers {
                        group = group.between_processes(Arc::clone(peers));
                    }
                    let group = Arc::new(group);
                    let waker: Weak<Group> = Arc::downgrade(&group);
                    let waker: Weak<dyn Wake> = waker;
                    abort.register(waker);
                    group
                });
                positions.push((first, comm.ranks.position(rank)));
            }
            all.groups.push(groups);
            all.positions.push(positions);
        }
        all
    }

    /// Returns the instance that a rank belongs to, and the rank's position in it.
    #[must_use]
    pub(crate) fn group(&self, comm: CommId, rank: u32) -> Option<(&Arc<Group>, u32)> {
        let &(first, position) = self.positions.get(comm.index())?.get(rank as usize)?;
        Some((self.groups[comm.index()].get(&first)?, position))
    }
}

#[cfg(test)]
mod tests;
