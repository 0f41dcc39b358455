//! Convolutions. Same-padded ones of images run in `exec`; those with strides and those over
//! positions are only planned and priced.

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

/// Returns the sizes of a convolution with strides like [`mnk`], given an operand with the shape of
/// the result, `[samples, out, positions ...]`, and one with the shape of the weight.
fn mnk_strided(result: &Value, weight: &Value) -> (u64, u64, u64) {
    let (y, w) = (&result.shape, &weight.shape);
    let positions: u64 = y[2..].iter().product();
    (y[0] * positions, w[0], w[1..].iter().product())
}

/// Defines a convolution with strides and its two gradients.
macro_rules! strided {
    ($Conv:ident $name:literal, $GradInput:ident $input_name:literal, $GradWeight:ident $weight_name:literal) => {
        impl OpDef for op::$Conv {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                let inputs = &[any("the input"), any("the weight")];
                Signature::new(inputs, &[any("the result")])
            }

            fn flops(&self, at: &Operands<'_>) -> u64 {
                flops(mnk_strided(at.output(0), at.input(1)))
            }

            fn class(&self, at: &Operands<'_>) -> KernelClass {
                class(mnk_strided(at.output(0), at.input(1)))
            }

            fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
                let (kernel, stride) = (self.kernel, self.stride);
                let (x, w, dy) = (at.x(0), at.x(1), at.dy);
                let mut out = Contributions::new();
                if at.needs[0] {
                    let kind = OpKind::$GradInput(op::$GradInput { kernel, stride });
                    out.push((0, at.like(kind, &[dy, w], x)));
                }
                if at.needs[1] {
                    let kind = OpKind::$GradWeight(op::$GradWeight { kernel, stride });
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

        strided!(@gradient $GradInput $input_name, "the weight" -> "the input's gradient", at => at.input(1));
        strided!(@gradient $GradWeight $weight_name, "the input" -> "the weight's gradient", at => at.output(0));
    };
    // `$weight` returns the operand with the shape of the weight.
    (@gradient $Op:ident $name:literal, $other:literal -> $made:literal, $at:ident => $weight:expr) => {
        impl OpDef for op::$Op {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                let inputs = &[any("the gradient"), any($other)];
                Signature::new(inputs, &[any($made)])
            }

            fn flops(&self, $at: &Operands<'_>) -> u64 {
                flops(mnk_strided($at.input(0), $weight))
            }

            fn class(&self, $at: &Operands<'_>) -> KernelClass {
                class(mnk_strided($at.input(0), $weight))
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

strided!(Conv1d "conv1d", Conv1dGradInput "conv1d_backward_input", Conv1dGradWeight "conv1d_backward_weight");
strided!(Conv2d "conv2d", Conv2dGradInput "conv2d_backward_input", Conv2dGradWeight "conv2d_backward_weight");
