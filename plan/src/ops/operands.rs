//! The operands of one call of an operation.

use crate::graph::{Graph, Op, Value};
use crate::ir::strides;

/// The inputs and outputs of one op of a graph.
#[derive(Clone, Copy)]
pub struct Operands<'g> {
    graph: &'g Graph,
    op: &'g Op,
}

impl<'g> Operands<'g> {
    /// Creates the operands of an op in a graph.
    #[must_use]
    pub fn new(graph: &'g Graph, op: &'g Op) -> Self {
        Self { graph, op }
    }

    /// Returns the number of inputs.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.op.inputs.len()
    }

    /// Returns the `n`-th input.
    ///
    /// # Panics
    /// Panics if there is no such input.
    #[must_use]
    pub fn input(&self, n: usize) -> &'g Value {
        self.graph.value(self.op.inputs[n])
    }

    /// Returns the `n`-th output.
    ///
    /// # Panics
    /// Panics if there is no such output.
    #[must_use]
    pub fn output(&self, n: usize) -> &'g Value {
        self.graph.value(self.op.outputs[n])
    }

    /// Returns the number of elements of the first input; 0 without inputs.
    #[must_use]
    pub(crate) fn input_numel(&self) -> u64 {
        let first = self.op.inputs.first();
        first.map_or(0, |&v| self.graph.value(v).numel())
    }

    /// Returns the number of elements of the first output; 0 without outputs.
    #[must_use]
    pub(crate) fn output_numel(&self) -> u64 {
        let first = self.op.outputs.first();
        first.map_or(0, |&v| self.graph.value(v).numel())
    }

    /// Returns whether all operands are dense and have the same memory order, so that a kernel can
    /// work on flat memory.
    #[must_use]
    pub fn dense(&self) -> bool {
        let Some(&out) = self.op.outputs.first() else {
            return false;
        };
        let out = self.graph.value(out);
        let inputs = self.op.inputs.iter().map(|&v| self.graph.value(v));
        inputs.chain([out]).all(|v| {
            let whole = strides::extent(&v.shape, &v.strides) == v.numel()
                && strides::distinct(&v.shape, &v.strides) == v.numel();
            let same = v.shape == out.shape && v.strides == out.strides
                || v.is_contiguous() && out.is_contiguous();
            v.numel() == 1 || whole && same && v.numel() == out.numel()
        })
    }
}
