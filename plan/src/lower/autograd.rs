//! Gradients that autograd allocates: one per parameter, when the first kernel writes to it.

use super::emitter::Emitter;
use super::kernels::KernelLaunch;
use super::reduction;
use super::walk::Location;
use crate::ir::{BufferId, COMPUTE, DType, ParamId, Role, ShardOp};
use crate::program::Rule;

/// Gradient of a parameter.
#[derive(Clone, Copy, Debug, Default)]
struct Grad {
    /// Gradient of this backward, until it is taken.
    live: Option<BufferId>,
    /// Sum over micro-batches that were not reduced (`unsharded_accumulated_grad`, or `.grad`
    /// itself if the dtypes agree).
    sum: Option<BufferId>,
    /// Buffers in the compute dtype and in the dtype of sums, once allocated. If the dtypes agree,
    /// the gradient of the first micro-batch becomes the sum, and later gradients need another
    /// buffer.
    made: [Option<BufferId>; 2],
}

/// Parameters that have a gradient now, with the buffers that hold them in every micro-batch.
#[derive(Clone, Debug)]
pub(crate) struct AutogradGrads {
    grads: Vec<Grad>,
    /// Dtype of sums, in which gradients are reduced; `None`: the one in which they arrive.
    sums: Option<DType>,
    /// Role of a parameter's first gradient in a step.
    first: Role,
}

impl AutogradGrads {
    pub(crate) fn new(params: usize, sums: DType) -> Self {
        Self {
            grads: vec![Grad::default(); params],
            sums: Some(sums),
            first: Role::FullGrad,
        }
    }

    /// Returns gradients that the optimizer reads as autograd leaves them, in the dtype in which
    /// they arrive.
    pub(crate) fn at_rest(params: usize) -> Self {
        Self {
            grads: vec![Grad::default(); params],
            sums: None,
            first: Role::MainGrad,
        }
    }

    /// Returns the dtype of sums if it is not the one in which the gradient of `p` arrives.
    fn other_sums(&self, out: &Emitter<'_>, p: ParamId) -> Option<DType> {
        self.sums
            .filter(|sums| *sums != out.inputs.graph_type_of(p))
    }

    fn made(&mut self, out: &mut Emitter<'_>, p: ParamId, which: usize, dtype: DType) -> BufferId {
        let role = match which {
            0 => self.first,
            _ => Role::FullGrad,
        };
        *self.grads[p.index()].made[which].get_or_insert_with(|| {
            let bytes = out.inputs.tape.params[p.index()].numel() * dtype.size();
            out.of_param(role, bytes, dtype, COMPUTE, p)
        })
    }

    /// Returns where a kernel writes the gradient of `p`. Allocates the gradient if there is none.
    pub(crate) fn location(&mut self, out: &mut Emitter<'_>, p: ParamId) -> Location {
        let dtype = out.inputs.graph_type_of(p);
        let grad = self.grads[p.index()];
        let buffer = grad.live.unwrap_or_else(|| {
            let taken = grad.sum.is_some() && grad.sum == grad.made[0];
            let id = self.made(out, p, usize::from(taken), dtype);
            out.b.alloc(Rule::Grad, id);
            self.grads[p.index()].live = Some(id);
            id
        });
        Location {
            buffer,
            offset: 0,
            element: dtype.size(),
        }
    }

    /// Returns whether earlier micro-batches have left a gradient of `p`.
    pub(crate) fn has_sum(&self, p: ParamId) -> bool {
        self.sum(p).is_some()
    }

    /// Returns the sum of the gradients of `p` that were kept.
    pub(crate) fn sum(&self, p: ParamId) -> Option<BufferId> {
        self.grads[p.index()].sum
    }

    /// Creates a gradient of zeros if `p` is trained.
    pub(crate) fn zero(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        if !out.inputs.tape.params[p.index()].requires_grad {
            return;
        }
        let at = self.location(out, p);
        let whole = out.b.whole(at.buffer);
        out.zero(Rule::Grad, &[whole]);
    }

    /// Completes a gradient in the dtype of sums: autograd adds it to the gradient of earlier
    /// micro-batches.
    pub(crate) fn accumulate_alike(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        if self.other_sums(out, p).is_none() {
            self.accumulate(out, p);
        }
    }

    /// Adds the gradient to the sum of earlier micro-batches, if there is one
    /// (`accumulate_unsharded_grad_if_needed`).
    pub(crate) fn accumulate(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        let grad = &mut self.grads[p.index()];
        if let Some(sum) = grad.sum
            && let Some(live) = grad.live.take()
        {
            let (from, to) = (out.b.whole(live), out.b.whole(sum));
            reduction::accumulate(out, Rule::Accumulate, from, &[to], COMPUTE);
            out.b.free(Rule::Grad, live);
        }
    }

    /// Keeps the gradient of the first micro-batch, in the dtype of sums, so that later ones are
    /// added to it.
    pub(crate) fn keep(&mut self, out: &mut Emitter<'_>, p: ParamId) {
        let Some(live) = self.grads[p.index()].live.take() else {
            return;
        };
        let Some(dtype) = self.other_sums(out, p) else {
            self.grads[p.index()].sum = Some(live);
            return;
        };
        let sum = self.made(out, p, 1, dtype);
        out.b.alloc(Rule::Accumulate, sum);
        let (from, to) = (out.b.whole(live), out.b.whole(sum));
        let n = to.bytes / dtype.size();
        let copy = ShardOp::Copy;
        out.run(KernelLaunch {
            rule: Rule::Accumulate,
            op: copy,
            elements: n,
            dtype,
            stream: COMPUTE,
            reads: &[from],
            writes: &[to],
        });
        out.b.free(Rule::Grad, live);
        self.grads[p.index()].sum = Some(sum);
    }

    /// Takes the gradient, or the sum over the step's micro-batches. The caller copies and frees
    /// it.
    pub(crate) fn take(&mut self, p: ParamId) -> Option<BufferId> {
        let grad = &mut self.grads[p.index()];
        grad.sum.take().or_else(|| grad.live.take())
    }
}
