//! Convolutions. Two-dimensional ones run in `exec`; one-dimensional ones are only planned and
//! priced.

use super::signature::{Signature, any};
use super::{Contributions, OpDef, Operands, Vjp};
use crate::graph::Value;
use crate::ir::{KernelClass, OpKind, op};

/// Returns output positions, output channels and inner size of a convolution as an implicit GEMM,
/// given an operand with the shape of the images and one with the shape of the weight.
fn mnk(images: &Value, weight: &Value) -> (u64, u64, u64) {
    let (x, w) = (&images.shape, &weight.shape);
    (x[0] * x[2] * x[3], w[0], w[1] * w[2] * w[3])
}

fn flops((m, n, k): (u64, u64, u64)) -> u64 {
    2 * m * n * k
}

fn class((m, n, k): (u64, u64, u64)) -> KernelClass {
    KernelClass::Conv { m, n, k }
}

impl OpDef for op::Conv {
    fn name(&self) -> &'static str {
        "conv"
    }

    fn signature(&self) -> Signature {
        Signature::new(
            &[any("the images"), any("the weight")],
            &[any("the result")],
        )
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        flops(mnk(at.input(0), at.input(1)))
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        class(mnk(at.input(0), at.input(1)))
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let kernel = self.kernel;
        let (x, w, dy) = (at.x(0), at.x(1), at.dy);
        let mut out = Contributions::new();
        if at.needs[0] {
            let kind = OpKind::ConvGradInput(op::ConvGradInput { kernel });
            out.push((0, at.like(kind, &[dy, w], x)));
        }
        if at.needs[1] {
            let kind = OpKind::ConvGradWeight(op::ConvGradWeight { kernel });
            out.push((1, at.like(kind, &[dy, x], w)));
        }
        out
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }
}

impl OpDef for op::ConvGradInput {
    fn name(&self) -> &'static str {
        "conv_backward_input"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("the gradient"), any("the weight")];
        Signature::new(inputs, &[any("the images' gradient")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        flops(mnk(at.input(0), at.input(1)))
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        class(mnk(at.input(0), at.input(1)))
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::ConvGradWeight {
    fn name(&self) -> &'static str {
        "conv_backward_weight"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("the gradient"), any("the images")];
        Signature::new(inputs, &[any("the weight's gradient")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        flops(mnk(at.input(0), at.output(0)))
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        class(mnk(at.input(0), at.output(0)))
    }

    fn is_backward(&self) -> bool {
        true
    }
}

/// Returns the sizes of a one-dimensional convolution like [`mnk`], given an operand with the shape
/// of the result and one with the shape of the weight.
fn mnk_1d(result: &Value, weight: &Value) -> (u64, u64, u64) {
    let (y, w) = (&result.shape, &weight.shape);
    (y[0] * y[2], w[0], w[1] * w[2])
}

impl OpDef for op::Conv1d {
    fn name(&self) -> &'static str {
        "conv1d"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("the input"), any("the weight")];
        Signature::new(inputs, &[any("the result")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        flops(mnk_1d(at.output(0), at.input(1)))
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        class(mnk_1d(at.output(0), at.input(1)))
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (kernel, stride) = (self.kernel, self.stride);
        let (x, w, dy) = (at.x(0), at.x(1), at.dy);
        let mut out = Contributions::new();
        if at.needs[0] {
            let kind = OpKind::Conv1dGradInput(op::Conv1dGradInput { kernel, stride });
            out.push((0, at.like(kind, &[dy, w], x)));
        }
        if at.needs[1] {
            let kind = OpKind::Conv1dGradWeight(op::Conv1dGradWeight { kernel, stride });
            out.push((1, at.like(kind, &[dy, x], w)));
        }
        out
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }

    fn is_priced_only(&self) -> bool {
        true
    }
}

/// Defines a gradient of a one-dimensional convolution. `$weight` returns the operand with the
/// shape of the weight.
macro_rules! conv1d_gradient {
    ($Op:ident $name:literal, $other:literal -> $made:literal, $at:ident => $weight:expr) => {
        impl OpDef for op::$Op {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                let inputs = &[any("the gradient"), any($other)];
                Signature::new(inputs, &[any($made)])
            }

            fn flops(&self, $at: &Operands<'_>) -> u64 {
                flops(mnk_1d($at.input(0), $weight))
            }

            fn class(&self, $at: &Operands<'_>) -> KernelClass {
                class(mnk_1d($at.input(0), $weight))
            }

            fn is_backward(&self) -> bool {
                true
            }

            fn is_priced_only(&self) -> bool {
                true
            }
        }
    };
}

conv1d_gradient!(
    Conv1dGradInput "conv1d_backward_input", "the weight" -> "the input's gradient",
    at => at.input(1)
);
conv1d_gradient!(
    Conv1dGradWeight "conv1d_backward_weight", "the input" -> "the weight's gradient",
    at => at.output(0)
);
