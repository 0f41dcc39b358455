//! Biases of routers that steps move, in engines that do not manage them
//! ([`RouterBiases::Apart`](crate::lower::RouterBiases::Apart)), because they are buffers of the
//! model. Each micro-batch adds its choices of experts to a counter. After backward, one all-reduce
//! adds up the counters of all layers over all data-parallel ranks, on the compute stream, and each
//! rank moves its own biases.
//!
//! The frameworks copy the counters into one tensor for the all-reduce. Here, the all-reduce has
//! one part per layer.

use super::Unmanaged;
use crate::ir::{
    Access, AxisId, AxisSet, BufferId, COMPUTE, CollectiveKind, CommId, DType, GroupId, ParamId,
    Part, ReduceOp,
};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::{Comms, Emitter};
use crate::lower::inputs::LoweringInputs;
use crate::lower::optimizer::ShardState;
use crate::program::{Phase, Rule};
use smallvec::SmallVec;

/// Returns the groups of biases that steps move.
fn moved(inputs: &LoweringInputs<'_>) -> impl Iterator<Item = GroupId> {
    let ids = inputs.group_ids();
    ids.filter(|g| inputs.group(*g).router_biases && inputs.group(*g).requires_grad)
}

/// Returns the communicator of all data-parallel ranks, which torchtitan's mesh has already if
/// there are no replicas; `None` if there is one rank, or if no step moves biases.
pub(crate) fn communicator_of_mesh(out: &mut Emitter<'_>, comms: &Comms) -> Option<CommId> {
    match comms.outer {
        None => moved(out.inputs)
            .next()
            .and(comms.along(AxisId::DP_SHARD).gather),
        Some(_) => own_communicator(out),
    }
}

/// Adds a communicator of all data-parallel ranks for the counts alone; returns `None` if there is
/// one rank, or if no step moves biases.
pub(crate) fn own_communicator(out: &mut Emitter<'_>) -> Option<CommId> {
    moved(out.inputs).next()?;
    out.communicator("data", AxisSet::DATA, false)
}

impl Unmanaged {
    /// Adds up the step's choices of experts over all data-parallel ranks.
    pub(crate) fn add_up_choices(&self, out: &mut Emitter<'_>) {
        let Some(comm) = self.over_data else {
            return;
        };
        let counts = moved(out.inputs).flat_map(|g| self.gradients(out.inputs, g));
        let mut counts: Vec<BufferId> = counts.map(|(_, counts)| counts).collect();
        // Parts are in the order of their buffers.
        counts.sort_unstable();
        if counts.is_empty() {
            return;
        }
        let part = |counts: BufferId| {
            let whole = out.b.whole(counts);
            Part {
                input: whole,
                output: whole,
            }
        };
        let parts: SmallVec<[Part; 1]> = counts.into_iter().map(part).collect();
        out.collective(CollectiveLaunch {
            rule: Rule::Reduce,
            stream: COMPUTE,
            kind: CollectiveKind::AllReduce,
            comm,
            reduce: ReduceOp::Sum,
            dtype: DType::F32,
            parts,
            sent: None,
        });
    }

    /// Returns the optimizer's states with those of the biases, which are moved first, as in the
    /// frameworks. `weight` returns the range of a bias.
    pub(crate) fn states_with(
        &self,
        out: &Emitter<'_>,
        others: Vec<ShardState>,
        weight: impl Fn(ParamId) -> Access,
    ) -> Vec<ShardState> {
        let state = |g| self.state(out, g, |p| (weight(p), None));
        let biases = moved(out.inputs).filter_map(state);
        biases.chain(others).collect()
    }

    /// Frees the step's counts of choices.
    pub(crate) fn free_choices(&mut self, out: &mut Emitter<'_>) {
        for g in moved(out.inputs) {
            out.b.at(out.inputs.group(g).unit, Phase::Optimizer);
            self.free(out, g);
        }
    }
}
