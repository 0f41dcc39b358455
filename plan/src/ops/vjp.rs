//! Shared parts of the derivative rules of operations.

use crate::graph::{Graph, Op, ValueId};
use crate::ir::{OpKind, Real, op};
use smallvec::SmallVec;

/// Gradients by input position, in the order in which PyTorch computes them.
pub(crate) type Contributions = SmallVec<[(usize, ValueId); 4]>;

/// One op of a forward graph, and the gradient of its first output.
pub struct Vjp<'g> {
    /// The graph, to which the rule adds operations.
    pub(crate) g: &'g mut Graph,
    /// The op.
    pub(crate) op: &'g Op,
    /// Gradient of its first output.
    pub(crate) dy: ValueId,
    /// Whether each input needs a gradient.
    pub(crate) needs: &'g [bool],
}

impl Vjp<'_> {
    /// Returns the `n`-th input.
    pub(super) fn x(&self, n: usize) -> ValueId {
        self.op.inputs[n]
    }

    /// Returns the `n`-th output.
    pub(super) fn y(&self, n: usize) -> ValueId {
        self.op.outputs[n]
    }

    /// Emits an op whose only result has the layout of `like`.
    pub(super) fn like(&mut self, kind: OpKind, inputs: &[ValueId], like: ValueId) -> ValueId {
        self.g.compute_like(kind, inputs, &[like])[0]
    }

    /// Emits the gradient of the only input: `kind` applied to the output's gradient and `saved`.
    pub(super) fn unary(mut self, kind: OpKind, saved: ValueId) -> Contributions {
        let x = self.x(0);
        let dx = self.like(kind, &[self.dy, saved], x);
        Contributions::from_slice(&[(0, dx)])
    }

    /// Returns `gradient` as the gradient of input 0.
    pub(super) fn first(gradient: ValueId) -> Contributions {
        Contributions::from_slice(&[(0, gradient)])
    }
}

/// Sums a gradient over the dimensions along which an operand was broadcast.
pub(crate) fn sum_to(g: &mut Graph, d: ValueId, shape: &[u64]) -> ValueId {
    let v = g.value(d);
    if v.shape.as_slice() == shape {
        return d;
    }
    let dtype = v.dtype;
    let leading = v.shape.len().saturating_sub(1);
    let rows = shape.len() == v.shape.len()
        && shape[leading..] == [1]
        && shape[..leading] == v.shape[..leading];
    let channels = shape.len() == 4 && shape[1] == v.shape[1] && shape[0] == 1;
    let kind = if shape.is_empty() {
        OpKind::SumAll
    } else if rows {
        OpKind::RowSum(op::RowSum { scale: Real(1.0) })
    } else if channels {
        OpKind::SumChannels
    } else {
        let kept = shape.iter().skip_while(|n| **n == 1).count();
        debug_assert!(
            v.shape.ends_with(&shape[shape.len() - kept..]),
            "{shape:?} is broadcast along its leading dimensions only"
        );
        OpKind::SumLeading
    };
    g.compute(kind, &[d], &[(shape, dtype)])[0]
}

/// Returns a matmul without bias that does not accumulate.
pub(super) const fn gemm(ta: bool, tb: bool) -> OpKind {
    OpKind::Gemm(op::Gemm {
        ta,
        tb,
        bias: false,
        accumulate: false,
    })
}
