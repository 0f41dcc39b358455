//! Parameters that the engine does not manage: no unit gathers them, copies them out or reduces
//! their gradients. Kernels read the parameters themselves, and autograd accumulates their
//! gradients, in their dtype, in `.grad`.

pub(crate) mod router_biases;

use super::autograd::AutogradGrads;
use super::emitter::Emitter;
use super::inputs::LoweringInputs;
use super::optimizer::{Moments, OptimizerItem, ShardState, rule};
use super::walk::Location;
use crate::ir::{Access, BufferId, CommId, GroupId, ParamId};
use crate::program::Rule;

/// Gradients of these parameters, and counts of choices that move the biases of routers.
pub(crate) struct Unmanaged {
    grads: AutogradGrads,
    /// Communicator that adds up counts of choices, if several ranks have any.
    over_data: Option<CommId>,
}

impl Unmanaged {
    /// Creates the state; `over_data` is the communicator that adds up counts of choices.
    pub(crate) fn new(inputs: &LoweringInputs<'_>, over_data: Option<CommId>) -> Self {
        Self {
            grads: AutogradGrads::at_rest(inputs.tape.params.len()),
            over_data,
        }
    }

    /// Returns whether the engine does not manage a parameter.
    pub(crate) fn has(inputs: &LoweringInputs<'_>, p: ParamId) -> bool {
        let (g, _) = inputs.home[p.index()];
        inputs.group(g).ignored
    }

    /// Returns where a kernel writes the gradient of `p`. Allocates the gradient if there is none.
    pub(crate) fn location(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        self.grads.location(out, p)
    }

    /// Completes the gradient of `p` in this micro-batch: the first one of a step becomes `.grad`,
    /// and later ones are added to it.
    pub(crate) fn accumulate(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        self.grads.accumulate(out, p);
        self.grads.keep(out, p);
    }

    /// Returns the parameters of a group that have a gradient, with their gradients.
    pub(crate) fn gradients(
        &self,
        inputs: &LoweringInputs<'_>,
        g: GroupId,
    ) -> Vec<(ParamId, BufferId)> {
        let params = inputs.group(g).params.iter();
        params
            .filter_map(|p| Some((*p, self.grads.sum(*p)?)))
            .collect()
    }

    /// Returns a group's state for the optimizer; `None` without gradients. `of` returns a
    /// parameter's weight and moments.
    pub(crate) fn state(
        &self,
        out: &Emitter<'_>,
        g: GroupId,
        of: impl Fn(ParamId) -> (Access, Option<Moments>),
    ) -> Option<ShardState> {
        let item = |(p, grad): (ParamId, BufferId)| {
            let (weight, state) = of(p);
            OptimizerItem {
                weight,
                grad: out.b.whole(grad),
                numel: out.inputs.tape.params[p.index()].numel(),
                state,
            }
        };
        let grads = self.gradients(out.inputs, g).into_iter();
        let items: Vec<OptimizerItem> = grads.map(item).collect();
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
    pub(crate) fn free(&mut self, out: &mut Emitter<'_>, g: GroupId) {
        for p in out.inputs.group(g).params.clone() {
            if let Some(grad) = self.grads.take(p) {
                out.b.free(Rule::ZeroGrad, grad);
            }
        }
    }
}
