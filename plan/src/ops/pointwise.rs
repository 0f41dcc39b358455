//! Elementwise functions.

use super::signature::{Extent, Operand, Signature, full, operand};
use super::vjp::{backward_only, sum_to};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{KernelClass, OpKind, op};

const X: Operand = full("an input");
const Y: Operand = full("the output");

/// The cost class of an elementwise kernel.
pub(super) fn elementwise(at: &Operands<'_>) -> KernelClass {
    if at.dense() {
        KernelClass::Pointwise
    } else {
        KernelClass::Strided
    }
}

impl OpDef for op::Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let mut out = Contributions::new();
        for i in [0, 1].into_iter().filter(|&i| at.needs[i]) {
            let shape = at.g.value(at.x(i)).shape.clone();
            out.push((i, sum_to(at.g, at.dy, &shape)));
        }
        out
    }
}

impl OpDef for op::Sub {
    fn name(&self) -> &'static str {
        "sub"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let mut out = Contributions::new();
        if at.needs[0] {
            out.push((0, at.dy));
        }
        if at.needs[1] {
            out.push((1, at.g.unary(OpKind::Neg, at.dy)));
        }
        out
    }
}

impl OpDef for op::Mul {
    fn name(&self) -> &'static str {
        "mul"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let mut out = Contributions::new();
        for i in [1, 0].into_iter().filter(|&i| at.needs[i]) {
            let d = at.g.binary(OpKind::Mul, at.dy, at.x(1 - i));
            let shape = at.g.value(at.x(i)).shape.clone();
            out.push((i, sum_to(at.g, d, &shape)));
        }
        out
    }
}

impl OpDef for op::Neg {
    fn name(&self) -> &'static str {
        "neg"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        Vjp::first(at.g.unary(OpKind::Neg, at.dy))
    }
}

impl OpDef for op::Silu {
    fn name(&self) -> &'static str {
        "silu"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        4 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let x = at.x(0);
        at.unary(OpKind::SiluGrad, x)
    }
}

impl OpDef for op::SiluGrad {
    fn name(&self) -> &'static str {
        "silu_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        8 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        backward_only()
    }
}

impl OpDef for op::Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        10 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let x = at.x(0);
        at.unary(OpKind::GeluGrad, x)
    }
}

impl OpDef for op::GeluGrad {
    fn name(&self) -> &'static str {
        "gelu_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        18 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        backward_only()
    }
}

impl OpDef for op::Relu {
    fn name(&self) -> &'static str {
        "relu"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let y = at.y(0);
        at.unary(OpKind::ReluGrad, y)
    }
}

impl OpDef for op::ReluGrad {
    fn name(&self) -> &'static str {
        "relu_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        backward_only()
    }
}

impl OpDef for op::SquaredError {
    fn name(&self) -> &'static str {
        "squared_error"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        3 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, .. } = at;
        let (x, target) = (op.inputs[0], op.inputs[1]);
        let zeros = g.fill_like(x, 0.0);
        let kind = OpKind::SquaredErrorGrad(op::SquaredErrorGrad { scale: self.scale });
        Vjp::first(g.compute_into(kind, &[dy, x, target, zeros], zeros))
    }

    fn differentiable(&self, n: usize) -> bool {
        n == 0
    }
}

impl OpDef for op::SquaredErrorGrad {
    fn name(&self) -> &'static str {
        "squared_error_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(
            &[X, X, X, operand("the filled buffer", Extent::Ignored)],
            &[Y],
        )
        .optional_inputs(1)
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        3 * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        backward_only()
    }

    /// The filled buffer is overwritten, not read.
    fn bytes_read(&self, _: &Operands<'_>, n: usize) -> Option<u64> {
        (n == 3).then_some(0)
    }
}
