//! Kernels of eager PyTorch code in place of fused attention, and dropout. They are planned and
//! priced, but `exec` does not run them.

use super::pointwise::elementwise;
use super::signature::{Operand, Signature, any, full};
use super::{Contributions, OpDef, Operands, Vjp};
use crate::graph::{Graph, ValueId};
use crate::ir::{DType, KernelClass, OpKind, op};

const X: Operand = full("an input");
const Y: Operand = full("the output");
const KEPT: Operand = full("the elements that are kept");

/// Multiplies `[n, rows, inner]` by `[n, inner, columns]`.
pub(crate) fn batched(g: &mut Graph, a: ValueId, b: ValueId) -> ValueId {
    let (x, y) = (g.value(a), g.value(b));
    let (shape, dtype) = ([x.shape[0], x.shape[1], y.shape[2]], x.dtype);
    g.compute(OpKind::BatchedGemm, &[a, b], &[(&shape, dtype)])[0]
}

impl op::BatchedGemm {
    /// Returns the number of matmuls, rows, columns and the inner dimension.
    fn sizes(at: &Operands<'_>) -> [u64; 4] {
        let (a, b) = (at.input(0), at.input(1));
        [a.shape[0], a.shape[1], b.shape[2], a.shape[2]]
    }
}

impl OpDef for op::BatchedGemm {
    fn name(&self) -> &'static str {
        "bmm"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("a"), any("b")], &[any("c")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        2 * Self::sizes(at).iter().product::<u64>()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        let [batch, m, n, k] = Self::sizes(at);
        KernelClass::Gemm { m, n, k, batch }
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, needs } = at;
        let (a, b) = (op.inputs[0], op.inputs[1]);
        let mut out = Contributions::new();
        // `BmmBackward0` computes the gradient of its second operand first.
        if needs[1] {
            let a = g.transpose(a, 1, 2);
            out.push((1, batched(g, a, dy)));
        }
        if needs[0] {
            let b = g.transpose(b, 1, 2);
            out.push((0, batched(g, dy, b)));
        }
        out
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }

    fn takes_strides(&self) -> bool {
        true
    }

    fn is_priced_only(&self) -> bool {
        true
    }
}

impl OpDef for op::Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[Y, KEPT])
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        match n {
            0 => inputs[0],
            _ => DType::U8,
        }
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        3 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (x, kept, dy) = (at.x(0), at.y(1), at.dy);
        let kind = OpKind::DropoutGrad(op::DropoutGrad { p: self.p });
        Vjp::first(at.like(kind, &[dy, kept], x))
    }

    fn is_priced_only(&self) -> bool {
        true
    }
}

impl OpDef for op::DropoutGrad {
    fn name(&self) -> &'static str {
        "dropout_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, KEPT], &[Y])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        2 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn is_backward(&self) -> bool {
        true
    }

    fn is_priced_only(&self) -> bool {
        true
    }
}
