//! Conversions of operands in a finished forward graph.

use super::{Act, Graph};
use crate::ir::{DType, OpKind};

impl Graph {
    /// Converts operands right before the operation that reads them: input `n` of `op` to the dtype
    /// `wanted(op, n)`. Does not convert operands that an operation writes to.
    pub(crate) fn convert_operands(&mut self, wanted: impl Fn(&OpKind, usize) -> Option<DType>) {
        let ops = std::mem::take(&mut self.ops);
        let values = self.values.len();
        let (module, node) = (self.module.take(), self.node.take());
        let stage = self.stage.take();
        let mut moved = Vec::with_capacity(ops.len());
        for mut op in ops {
            if let Act::Compute(kind) = op.act {
                (self.module, self.stage) = (Some(op.module), op.stage);
                for n in 0..op.inputs.len() {
                    let root = self.value(op.inputs[n]).root;
                    let in_place = op.outputs.iter().any(|&v| self.value(v).root == root);
                    if let (Some(dtype), false) = (wanted(&kind, n), in_place) {
                        op.inputs[n] = self.cast(op.inputs[n], dtype);
                    }
                }
            }
            moved.push(self.ops.len() as u32);
            self.ops.push(op);
        }
        (self.module, self.stage, self.node) = (module, stage, node);
        let place = |at: &mut u32| {
            if let Some(&to) = moved.get(*at as usize) {
                *at = to;
            }
        };
        self.producer[..values].iter_mut().for_each(place);
        self.holds.iter_mut().for_each(|(op, _)| place(op));
    }
}
