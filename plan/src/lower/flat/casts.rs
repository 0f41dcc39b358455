//! Casts of gradients for an optimizer whose weights have another dtype.

use crate::ir::{BufferId, COMPUTE, DType, GroupId, Role, ShardOp, StreamId};
use crate::lower::emitter::Emitter;
use crate::lower::kernels::KernelLaunch;
use crate::lower::optimizer::ShardState;
use crate::program::{Phase, Rule};

/// Casts of gradients, with a buffer for each of the optimizer's tensors. They live from the cast,
/// usually at the start of the optimizer step, until the end of that step.
pub(crate) struct GradCasts {
    stream: StreamId,
    /// Buffers by group, once allocated.
    made: Vec<Vec<BufferId>>,
}

impl GradCasts {
    /// Creates casts on the compute stream.
    pub(crate) fn new(groups: usize) -> Self {
        Self::on(groups, COMPUTE)
    }

    /// Creates casts on a stream.
    pub(crate) fn on(groups: usize, stream: StreamId) -> Self {
        Self {
            stream,
            made: vec![Vec::new(); groups],
        }
    }

    /// Casts the gradients of `states`, which are one per trained group with flat gradients in
    /// this order, to `dtype`, and makes the states refer to the casts.
    pub(crate) fn cast(
        &mut self,
        out: &mut Emitter<'_>,
        dtype: DType,
        groups: &[GroupId],
        states: &mut [ShardState],
    ) {
        let trained = groups
            .iter()
            .filter(|g| out.inputs.group(**g).requires_grad && !out.inputs.group(**g).ignored);
        let trained: Vec<GroupId> = trained.copied().collect();
        for (state, g) in states.iter_mut().zip(trained) {
            let made = &mut self.made[g.index()];
            if made.is_empty() {
                made.extend(state.items.iter().map(|item| {
                    let bytes = item.numel * dtype.size();
                    out.of_group(Role::ReduceOutput, bytes, dtype, self.stream, g)
                }));
            }
            for (item, id) in state.items.iter_mut().zip(made) {
                out.b.alloc(Rule::Optimizer, *id);
                let whole = out.b.whole(*id);
                out.run(KernelLaunch {
                    rule: Rule::Optimizer,
                    op: ShardOp::Copy,
                    elements: item.numel,
                    dtype,
                    stream: self.stream,
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
