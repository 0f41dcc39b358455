//! Elementwise functions.

use super::signature::{Extent, Operand, Signature, full, operand};
use super::vjp::sum_to;
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{KernelClass, OpKind, Real, op};

const X: Operand = full("an input");
const Y: Operand = full("the output");

/// Returns the cost class of an elementwise kernel.
pub(super) fn elementwise(at: &Operands<'_>) -> KernelClass {
    if at.dense() {
        KernelClass::Pointwise
    } else {
        KernelClass::Strided
    }
}

/// A function that computes each element from the elements of its inputs at the same position.
/// Inputs are broadcast.
pub(super) trait Elementwise {
    /// Name of the kernel that does only this.
    const NAME: &'static str;
    /// Whether the function only occurs in backward passes.
    const BACKWARD: bool = false;
    /// Number of inputs.
    const INPUTS: usize;
    /// FLOPs per element.
    const FLOPS: u64;

    /// Emits the gradients, like [`OpDef::vjp`].
    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let _ = at;
        Contributions::new()
    }

    /// Returns whether input `n` can have a gradient, like [`OpDef::differentiable`].
    fn has_gradient(&self, n: usize) -> bool {
        let _ = n;
        true
    }
}

impl<T: Elementwise> OpDef for T {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X; 2][..Self::INPUTS], &[Y])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        Self::FLOPS * at.output_numel()
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        elementwise(at)
    }

    fn differentiable(&self, n: usize) -> bool {
        self.has_gradient(n)
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        self.gradients(at)
    }

    fn is_backward(&self) -> bool {
        Self::BACKWARD
    }
}

impl Elementwise for op::Add {
    const NAME: &'static str = "add";
    const INPUTS: usize = 2;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let mut out = Contributions::new();
        for i in [0, 1].into_iter().filter(|&i| at.needs[i]) {
            let shape = at.g.value(at.x(i)).shape.clone();
            out.push((i, sum_to(at.g, at.dy, &shape)));
        }
        out
    }
}

impl Elementwise for op::Sub {
    const NAME: &'static str = "sub";
    const INPUTS: usize = 2;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let mut out = Contributions::new();
        if at.needs[0] {
            out.push((0, at.dy));
        }
        if at.needs[1] {
            let shape = at.g.value(at.x(1)).shape.clone();
            let negative = at.g.unary(OpKind::Neg, at.dy);
            out.push((1, sum_to(at.g, negative, &shape)));
        }
        out
    }
}

impl Elementwise for op::Mul {
    const NAME: &'static str = "mul";
    const INPUTS: usize = 2;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let mut out = Contributions::new();
        for i in [1, 0].into_iter().filter(|&i| at.needs[i]) {
            let d = at.g.promoted(OpKind::Mul, at.dy, at.x(1 - i));
            let of = at.g.value(at.x(i));
            let (shape, dtype) = (of.shape.clone(), of.dtype);
            let d = sum_to(at.g, d, &shape);
            // Autograd casts gradients of operands that were promoted.
            out.push((i, at.g.cast(d, dtype)));
        }
        out
    }
}

impl Elementwise for op::Neg {
    const NAME: &'static str = "neg";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        Vjp::first(at.g.unary(OpKind::Neg, at.dy))
    }
}

impl Elementwise for op::Scale {
    const NAME: &'static str = "scale";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let kind = OpKind::Scale(*self);
        Vjp::first(at.g.unary(kind, at.dy))
    }
}

impl Elementwise for op::Shift {
    const NAME: &'static str = "shift";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        Vjp::first(at.dy)
    }
}

impl Elementwise for op::Pow {
    const NAME: &'static str = "pow";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 2;

    /// Emits `dy * (exponent * x^(exponent - 1))` in the three kernels of PyTorch.
    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, .. } = at;
        let exponent = Real(self.exponent.0 - 1.0);
        let power = g.unary(OpKind::Pow(Self { exponent }), op.inputs[0]);
        let kind = OpKind::Scale(op::Scale { by: self.exponent });
        let slope = g.unary(kind, power);
        Vjp::first(g.binary(OpKind::Mul, dy, slope))
    }
}

impl Elementwise for op::Rsqrt {
    const NAME: &'static str = "rsqrt";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 2;

    /// Emits `-dy / 2 * y^3` in the three kernels of PyTorch.
    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, .. } = at;
        let exponent = Real(3.0);
        let cube = g.unary(OpKind::Pow(op::Pow { exponent }), op.outputs[0]);
        let half = OpKind::Scale(op::Scale { by: Real(-0.5) });
        let dy = g.unary(half, dy);
        Vjp::first(g.binary(OpKind::Mul, dy, cube))
    }
}

impl Elementwise for op::Softcap {
    const NAME: &'static str = "softcap";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 8;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let y = at.y(0);
        at.unary(OpKind::SoftcapGrad(op::SoftcapGrad { cap: self.cap }), y)
    }
}

impl Elementwise for op::SoftcapGrad {
    const NAME: &'static str = "softcap_backward";
    const BACKWARD: bool = true;
    const INPUTS: usize = 2;
    const FLOPS: u64 = 4;
}

impl Elementwise for op::Silu {
    const NAME: &'static str = "silu";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 4;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let x = at.x(0);
        at.unary(OpKind::SiluGrad, x)
    }
}

impl Elementwise for op::SiluGrad {
    const NAME: &'static str = "silu_backward";
    const BACKWARD: bool = true;
    const INPUTS: usize = 2;
    const FLOPS: u64 = 8;
}

impl Elementwise for op::Gelu {
    const NAME: &'static str = "gelu";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 10;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let x = at.x(0);
        at.unary(OpKind::GeluGrad, x)
    }
}

impl Elementwise for op::GeluGrad {
    const NAME: &'static str = "gelu_backward";
    const BACKWARD: bool = true;
    const INPUTS: usize = 2;
    const FLOPS: u64 = 18;
}

impl Elementwise for op::GeluErf {
    const NAME: &'static str = "gelu_erf";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 8;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let x = at.x(0);
        at.unary(OpKind::GeluErfGrad, x)
    }
}

impl Elementwise for op::GeluErfGrad {
    const NAME: &'static str = "gelu_erf_backward";
    const BACKWARD: bool = true;
    const INPUTS: usize = 2;
    const FLOPS: u64 = 16;
}

impl Elementwise for op::Sigmoid {
    const NAME: &'static str = "sigmoid";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 3;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let y = at.y(0);
        at.unary(OpKind::SigmoidGrad, y)
    }
}

impl Elementwise for op::SigmoidGrad {
    const NAME: &'static str = "sigmoid_backward";
    const BACKWARD: bool = true;
    const INPUTS: usize = 2;
    const FLOPS: u64 = 3;
}

impl Elementwise for op::Relu {
    const NAME: &'static str = "relu";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let y = at.y(0);
        at.unary(OpKind::ReluGrad, y)
    }
}

impl Elementwise for op::ReluGrad {
    const NAME: &'static str = "relu_backward";
    const BACKWARD: bool = true;
    const INPUTS: usize = 2;
    const FLOPS: u64 = 1;
}

impl Elementwise for op::Clamp {
    const NAME: &'static str = "clamp";
    const INPUTS: usize = 1;
    const FLOPS: u64 = 2;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let (x, Self { min, max }) = (at.x(0), *self);
        at.unary(OpKind::ClampGrad(op::ClampGrad { min, max }), x)
    }
}

impl Elementwise for op::ClampGrad {
    const NAME: &'static str = "clamp_backward";
    const BACKWARD: bool = true;
    const INPUTS: usize = 2;
    const FLOPS: u64 = 2;
}

impl Elementwise for op::SquaredError {
    const NAME: &'static str = "squared_error";
    const INPUTS: usize = 2;
    const FLOPS: u64 = 3;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, .. } = at;
        let (x, target) = (op.inputs[0], op.inputs[1]);
        let zeros = g.fill_like(x, 0.0);
        let kind = OpKind::SquaredErrorGrad(op::SquaredErrorGrad { scale: self.scale });
        Vjp::first(g.compute_into(kind, &[dy, x, target, zeros], zeros))
    }

    fn has_gradient(&self, n: usize) -> bool {
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

    /// Counts nothing for the filled buffer, which is overwritten, not read.
    fn bytes_read(&self, _: &Operands<'_>, n: usize) -> Option<u64> {
        (n == 3).then_some(0)
    }

    fn is_backward(&self) -> bool {
        true
    }
}
