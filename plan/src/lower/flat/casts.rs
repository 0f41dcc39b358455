//! Gradients cast for an optimizer whose weights have another type.

use crate::ir::{Access, BufferId, COMPUTE, DType, GroupId, Role, ShardOp};
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::lower::optimizer::ShardState;
use crate::program::{Phase, Rule};

/// Casts of gradients, which live from the start of the optimizer's step to its end.
pub(crate) struct GradCasts {
    /// By group, once made.
    made: Vec<Option<BufferId>>,
}

impl GradCasts {
    pub(crate) fn new(groups: usize) -> Self {
        Self {
            made: vec![None; groups],
        }
    }

    /// Casts the gradients of `states`, one of each trained group in order, to `dtype`, and lets
    /// the states refer to the casts.
    pub(crate) fn cast(&mut self, out: &mut Emitter<'_>, dtype: DType, states: &mut [ShardState]) {
        let trained: Vec<GroupId> = out
            .inputs
            .group_ids()
            .filter(|g| out.inputs.group(*g).requires_grad)
            .collect();
        for (state, g) in states.iter_mut().zip(trained) {
            let numel = state.items.iter().map(|i| i.numel).sum::<u64>();
            let bytes = numel * dtype.size();
            let id = *self.made[g.index()].get_or_insert_with(|| {
                out.transient_on(Role::ReduceOutput, bytes, dtype, COMPUTE, g)
            });
            out.b.alloc(Rule::Optimizer, id);
            let whole = out.b.whole(id);
            let grads: Vec<Access> = state.items.iter().map(|i| i.grad).collect();
            out.run(KernelLaunch {
                rule: Rule::Optimizer,
                op: ShardOp::Copy,
                elements: numel,
                dtype,
                stream: COMPUTE,
                reads: &grads,
                writes: &[whole],
            });
            let mut offset = 0;
            for item in &mut state.items {
                let bytes = item.numel * dtype.size();
                item.grad = Access {
                    buffer: id,
                    offset,
                    bytes,
                    per_rank: None,
                };
                offset += bytes;
            }
        }
    }

    /// Frees the casts of this step.
    pub(crate) fn free(&self, out: &mut Emitter<'_>) {
        for g in out.inputs.group_ids() {
            if let Some(id) = self.made[g.index()] {
                out.b.at(out.inputs.group(g).unit, Phase::Optimizer);
                out.b.free(Rule::ZeroGrad, id);
            }
        }
    }
}
