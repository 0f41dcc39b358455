//! Parameters that `fully_shard` does not manage (`ignored_params`), such as the experts of NeMo
//! Automodel if no two ranks have the same expert (`apply_fsdp` of its MoE parallelizer).
//!
//! The gradients of experts are sums over the ranks that send them tokens. They become means over
//! all data-parallel ranks after backward, in place (`scale_grads_and_clip_grad_norm`). Biases of
//! routers that steps move are not managed, either (`register_moe_load_balancing_hook` of
//! torchtitan).

use super::reduce::divide;
use super::{Fsdp2, GroupState};
use crate::ir::{COMPUTE, GroupId, Holds, Role};
use crate::lower::emitter::Emitter;
use crate::lower::optimizer::{ShardState, moments, rule};
use crate::shard::PerParamLayout;

/// Returns the state of a group that the policy does not manage.
pub(super) fn state(out: &mut Emitter<'_>, g: GroupId, layout: &PerParamLayout) -> GroupState {
    let group = out.inputs.group(g).clone();
    let types = out.inputs.types;
    let mut state = GroupState::default();
    for (i, item) in layout.items.iter().enumerate() {
        let (holds, param) = (Holds::Param(item.param), item.param.index());
        // Biases of routers are float32 buffers.
        let kept = match group.router_biases {
            true => out.inputs.graph_type_of(item.param),
            false => types.shard(&out.inputs.tape.params[param]),
        };
        let bytes = item.numel * kept.size();
        let weight = out.persistent(Role::MainWeight, bytes, kept, group.unit, holds);
        state.shards.push(weight);
        state.full.push(weight);
        if out.inputs.tape.params[param].requires_grad {
            let of = (group.unit, rule(out.inputs, g));
            state
                .moments
                .push(moments(out, of, item.numel, holds, true));
            state.trained.push(i);
        }
    }
    state
}

impl Fsdp2 {
    /// Multiplies the step's gradients by the factor that reductions apply to all others.
    pub(super) fn scale_ignored(&self, out: &mut Emitter<'_>) {
        let fsdp = &out.inputs.scenario.fsdp;
        let divisor = match fsdp.gradient_scaling_factor {
            Some(factor) => 1.0 / factor,
            None if fsdp.per_token_loss => 1.0,
            None => f64::from(out.inputs.data_ranks()),
        };
        // Counts of choices have no factor.
        let ids = out.inputs.group_ids();
        let gradients = ids.filter(|g| !out.inputs.group(*g).router_biases);
        for g in gradients {
            out.within_unit(out.inputs.group(g).unit, |out| {
                for (_, grad) in self.ignored.gradients(out.inputs, g) {
                    let dtype = out.b.program().buffers[grad.index()].dtype;
                    divide(out, out.b.whole(grad), divisor, dtype, COMPUTE);
                }
            });
        }
    }

    /// Returns a group's state for the optimizer; `None` without gradients.
    pub(super) fn ignored_state(&self, out: &Emitter<'_>, g: GroupId) -> Option<ShardState> {
        let state = &self.groups[g.index()];
        self.ignored.state(out, g, |p| {
            let (_, i) = out.inputs.home[p.index()];
            let at = state.trained.iter().position(|n| *n == i as usize);
            let moments = at.and_then(|at| state.moments[at]);
            (out.b.whole(state.shards[i as usize]), moments)
        })
    }
}
