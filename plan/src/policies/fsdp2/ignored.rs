//! Parameters that `fully_shard` does not manage (`ignored_params`), such as the experts of NeMo
//! Automodel if no two ranks have the same expert (`apply_fsdp` of its MoE parallelizer).
//!
//! No unit gathers them, copies them out or reduces their gradients: forward and backward read the
//! parameters themselves, and autograd accumulates their gradients, in their dtype, in `.grad`. The
//! gradients of experts are sums over the ranks that send them tokens. They become means over all
//! data-parallel ranks after backward, in place (`scale_grads_and_clip_grad_norm`).

use super::reduce::divide;
use super::{Fsdp2, GroupState};
use crate::ir::{Access, BufferId, COMPUTE, GroupId, Holds, ParamId, Role};
use crate::lower::emitter::Emitter;
use crate::lower::optimizer::{OptimizerItem, ShardState, moments, rule};
use crate::program::Rule;
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
    /// Returns whether the policy does not manage a parameter.
    pub(super) fn ignores(out: &Emitter<'_>, p: ParamId) -> bool {
        let (g, _) = out.inputs.home[p.index()];
        out.inputs.group(g).ignored
    }

    /// Accumulates a complete gradient: the first one of a step becomes `.grad`.
    pub(super) fn accumulate_ignored(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        self.ignored.accumulate(out, p);
        self.ignored.keep(out, p);
    }

    /// Returns the trained parameters of a group that have a gradient, by their indices in the
    /// group, with their gradients.
    pub(super) fn ignored_gradients(
        &self,
        out: &Emitter<'_>,
        g: GroupId,
    ) -> Vec<(usize, BufferId)> {
        let params = out.inputs.group(g).params.iter().enumerate();
        params
            .filter_map(|(i, p)| Some((i, self.ignored.sum(*p)?)))
            .collect()
    }

    /// Multiplies the step's gradients by the factor that reductions apply to all others.
    pub(super) fn scale_ignored(&self, out: &mut Emitter<'_>) {
        let fsdp = &out.inputs.scenario.fsdp;
        let divisor = match fsdp.gradient_scaling_factor {
            Some(factor) => 1.0 / factor,
            None if fsdp.per_token_loss => 1.0,
            None => f64::from(out.inputs.data_ranks()),
        };
        let (phase, at) = (out.b.phase(), out.b.unit());
        // Counts of choices have no factor.
        let ids = out.inputs.group_ids();
        let gradients = ids.filter(|g| !out.inputs.group(*g).router_biases);
        for g in gradients {
            out.b.at(out.inputs.group(g).unit, phase);
            for (_, grad) in self.ignored_gradients(out, g) {
                let dtype = out.b.program().buffers[grad.index()].dtype;
                divide(out, out.b.whole(grad), divisor, dtype, COMPUTE);
            }
        }
        out.b.at(at, phase);
    }

    /// Returns a group's state for the optimizer; `None` without gradients.
    pub(super) fn ignored_state(&self, out: &Emitter<'_>, g: GroupId) -> Option<ShardState> {
        let state = &self.groups[g.index()];
        let item = |(i, grad): (usize, BufferId)| {
            let weight: Access = out.b.whole(state.shards[i]);
            let of_weight = out.b.program().buffers[weight.buffer.index()].dtype;
            let at = state.trained.iter().position(|n| *n == i)?;
            Some(OptimizerItem {
                weight,
                grad: out.b.whole(grad),
                numel: weight.bytes / of_weight.size(),
                state: state.moments[at],
            })
        };
        let grads = self.ignored_gradients(out, g).into_iter();
        let items: Vec<OptimizerItem> = grads.filter_map(item).collect();
        (!items.is_empty()).then(|| ShardState {
            unit: out.inputs.group(g).unit,
            rule: rule(out.inputs, g),
            divided: out.inputs.divided(g),
            items,
            compute: Vec::new(),
            pieces: None,
            maxima: None,
            rows: None,
        })
    }

    /// Frees the gradients of a group (`zero_grad(set_to_none=True)`).
    pub(super) fn free_ignored(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        for p in out.inputs.group(g).params.clone() {
            if let Some(grad) = self.ignored.take(p) {
                out.b.free(Rule::ZeroGrad, grad);
            }
        }
    }
}
