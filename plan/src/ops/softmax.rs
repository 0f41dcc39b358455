//! Softmax and its logarithm over the last dimension.

use super::pointwise::Elementwise;
use super::signature::{Extent, Operand, Reduced, Signature, full, operand};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{DType, KernelClass, OpKind, op};

const X: Operand = full("an input");
const Y: Operand = full("the output");

/// Emits the gradient of a softmax or its logarithm, from its result.
fn from_result(mut at: Vjp<'_>, kind: OpKind) -> Contributions {
    let (x, y, dy) = (at.x(0), at.y(0), at.dy);
    Vjp::first(at.like(kind, &[dy, y], x))
}

/// Emits the gradient of a softmax from its result and the elementwise product of result and `d_y`,
/// which PyTorch materializes (`softmax_backward_cuda_out`).
fn from_product(mut at: Vjp<'_>, kind: OpKind) -> Contributions {
    let (x, y, dy) = (at.x(0), at.y(0), at.dy);
    let product = at.like(OpKind::Mul, &[dy, y], x);
    Vjp::first(at.like(kind, &[product, y], x))
}

/// Defines a function over rows and its backward, which uses the result.
macro_rules! softmax {
    ($Forward:ident $name:literal, $Grad:ident $grad_name:literal by $vjp:ident, priced_only $priced_only:literal) => {
        impl OpDef for op::$Forward {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                Signature::new(&[X], &[Y]).reduces(Reduced::Input(0))
            }

            fn fusion(&self) -> Fusion {
                Fusion::Row
            }

            fn flops(&self, at: &Operands<'_>) -> u64 {
                5 * at.input_numel()
            }

            fn class(&self, _: &Operands<'_>) -> KernelClass {
                KernelClass::Softmax { backward: false }
            }

            fn vjp(&self, at: Vjp<'_>) -> Contributions {
                $vjp(at, OpKind::$Grad)
            }

            fn is_priced_only(&self) -> bool {
                $priced_only
            }
        }

        impl OpDef for op::$Grad {
            fn name(&self) -> &'static str {
                $grad_name
            }

            fn signature(&self) -> Signature {
                Signature::new(&[X, X], &[Y]).reduces(Reduced::Output(0))
            }

            fn fusion(&self) -> Fusion {
                Fusion::Row
            }

            fn flops(&self, at: &Operands<'_>) -> u64 {
                4 * at.input_numel()
            }

            fn class(&self, _: &Operands<'_>) -> KernelClass {
                KernelClass::Softmax { backward: true }
            }

            fn is_backward(&self) -> bool {
                true
            }

            fn is_priced_only(&self) -> bool {
                $priced_only
            }
        }
    };
}

softmax!(LogSoftmax "log_softmax", LogSoftmaxGrad "log_softmax_backward" by from_result, priced_only false);
softmax!(Softmax "softmax", SoftmaxGrad "softmax_backward" by from_product, priced_only true);

impl Elementwise for op::LogProbs {
    const NAME: &'static str = "log_probs";
    const INPUTS: usize = 2;
    const FLOPS: u64 = 1;

    fn gradients(&self, at: Vjp<'_>) -> Contributions {
        from_result(at, OpKind::LogSoftmaxGrad)
    }

    fn has_gradient(&self, n: usize) -> bool {
        n == 0
    }
}

impl OpDef for op::LogSumExp {
    fn name(&self) -> &'static str {
        "logsumexp"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X], &[operand("a norm's statistic", Extent::PerRow)])
            .reduces(Reduced::Input(0))
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        let _ = (n, inputs);
        DType::F32
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        3 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Softmax { backward: false }
    }
}
