//! Gradients cast for an optimizer whose weights have another type.

use crate::ir::{BufferId, COMPUTE, DType, GroupId, Holds, Role, ShardOp};
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::lower::optimizer::ShardState;
use crate::program::{Phase, Rule};

/// Casts of gradients, a buffer for each tensor of the optimizer. They live from the start of the
/// optimizer's step to its end.
pub(crate) struct GradCasts {
    /// By group, once made.
    made: Vec<Vec<BufferId>>,
}

impl GradCasts {
    pub(crate) fn new(groups: usize) -> Self {
        Self {
            made: vec![Vec::new(); groups],
        }
    }

    /// Casts the gradients of `states`, one of each trained group in this order, to `dtype`, and
    /// lets the states refer to the casts.
    pub(crate) fn cast(
        &mut self,
        out: &mut Emitter<'_>,
        dtype: DType,
        groups: &[GroupId],
        states: &mut [ShardState],
    ) {
        let trained = groups
            .iter()
            .filter(|g| out.inputs.group(**g).requires_grad);
        let trained: Vec<GroupId> = trained.copied().collect();
        for (state, g) in states.iter_mut().zip(trained) {
            let made = &mut self.made[g.index()];
            if made.is_empty() {
                let unit = out.inputs.group(g).unit;
                let cast = |numel: u64, out: &mut Emitter<'_>| {
                    let bytes = numel * dtype.size();
                    out.persistent(Role::ReduceOutput, bytes, dtype, unit, Holds::Group(g))
                };
                made.extend(state.items.iter().map(|item| cast(item.numel, out)));
            }
            for (item, id) in state.items.iter_mut().zip(made) {
                out.b.alloc(Rule::Optimizer, *id);
                let whole = out.b.whole(*id);
                out.run(KernelLaunch {
                    rule: Rule::Optimizer,
                    op: ShardOp::Copy,
                    elements: item.numel,
                    dtype,
                    stream: COMPUTE,
                    reads: &[item.grad],
                    writes: &[whole],
                });
                item.grad = whole;
            }
        }
    }

    /// Frees the casts of this step.
    pub(crate) fn free(&self, out: &mut Emitter<'_>) {
        for g in out.inputs.groups_by_param() {
            for id in &self.made[g.index()] {
                out.b.at(out.inputs.group(g).unit, Phase::Optimizer);
                out.b.free(Rule::ZeroGrad, *id);
            }
        }
    }
}
