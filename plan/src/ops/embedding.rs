//! Gathers of rows, and the scatter that is their gradient.

use super::signature::{Signature, any};
use super::{Contributions, OpDef, Operands, Vjp};
use crate::graph::Value;
use crate::ir::{DType, KernelClass, OpKind, op};

/// Returns the size in bytes of the table rows that the ids select.
fn touched(ids: &Value, table: &Value) -> u64 {
    ids.numel() * table.cols() * table.dtype.size()
}

impl OpDef for op::Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the ids"), any("the table")], &[any("the rows")])
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        let _ = n;
        inputs[1]
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Embedding
    }

    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        (n == 1).then(|| touched(at.input(0), at.input(1)))
    }

    fn differentiable(&self, n: usize) -> bool {
        n == 1
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, .. } = at;
        let (ids, table) = (op.inputs[0], op.inputs[1]);
        // The original ids are saved, and made contiguous again.
        let ids = match g.computed_by(ids) {
            Some((OpKind::Copy, copy)) => {
                let source = copy.inputs[0];
                g.make_contiguous(source)
            }
            _ => ids,
        };
        let zeros = g.fill_like(table, 0.0);
        let gradient = g.compute_into(OpKind::EmbeddingGrad, &[dy, ids, zeros], zeros);
        Contributions::from_slice(&[(1, gradient)])
    }
}

impl OpDef for op::EmbeddingGrad {
    fn name(&self) -> &'static str {
        "embedding_backward"
    }

    fn signature(&self) -> Signature {
        let inputs = &[
            any("the gradient"),
            any("the ids"),
            any("the table's gradient"),
        ];
        Signature::new(inputs, &[any("the table's gradient")]).optional_inputs(1)
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::EmbeddingGrad
    }

    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        (n == 2).then(|| touched(at.input(1), at.input(2)))
    }

    /// Counts only the selected rows of an existing table. Without one, a zero-filled table is
    /// written completely.
    fn bytes_written(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
        (at.inputs() > 2).then(|| touched(at.input(1), at.output(0)))
    }

    fn is_backward(&self) -> bool {
        true
    }
}
