//! Biases of routers that steps move, as torchtitan does it
//! (`build_optimizers_with_moe_load_balancing`): they are buffers of the model, which `fully_shard`
//! does not manage. Each micro-batch adds its choices of experts to a counter. Before the
//! optimizer, one all-reduce adds up the counters of all layers over all data-parallel ranks, on
//! the compute stream, and each rank moves its own biases.
//!
//! torchtitan copies the counters into one tensor for the all-reduce. Here, the all-reduce has one
//! part per layer.

use super::Fsdp2;
use crate::ir::{AxisId, AxisSet, COMPUTE, CollectiveKind, CommId, DType, Part, ReduceOp};
use crate::lower::builder::CollectiveLaunch;
use crate::lower::emitter::{Comms, Emitter};
use crate::program::Rule;
use smallvec::SmallVec;

/// Returns the communicator of all data-parallel ranks; `None` if there is one, or if no step moves
/// biases. Without replicas, these are the ranks that shard.
pub(super) fn communicator(out: &mut Emitter<'_>, comms: &Comms) -> Option<CommId> {
    let trained = |group: &crate::shard::Group| group.router_biases && group.requires_grad;
    if !out.inputs.groups.iter().any(trained) {
        return None;
    }
    match comms.outer {
        None => comms.along(AxisId::DP_SHARD).gather,
        Some(_) => out.communicator("data", AxisSet::DATA, false),
    }
}

impl Fsdp2 {
    /// Adds up the step's choices of experts over all data-parallel ranks.
    pub(super) fn add_up_choices(&self, out: &mut Emitter<'_>) {
        let Some(comm) = self.over_data else {
            return;
        };
        let ids = out.inputs.group_ids();
        let biases = ids.filter(|g| out.inputs.group(*g).router_biases);
        let counts = biases.flat_map(|g| self.ignored_gradients(out, g));
        let parts = counts.map(|(_, counts)| {
            let whole = out.b.whole(counts);
            Part {
                input: whole,
                output: whole,
            }
        });
        // Parts are in the order of their buffers.
        let mut parts: SmallVec<[Part; 1]> = parts.collect();
        parts.sort_unstable_by_key(|part| part.input.buffer);
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
}
