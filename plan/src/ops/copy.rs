//! Copies, concatenation, fills.

use super::signature::{Extent, Signature, full, operand};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{KernelClass, op};

impl OpDef for op::Copy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn signature(&self) -> Signature {
        Signature::new(
            &[operand("the copy's source", Extent::Exact)],
            &[full("the output")],
        )
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        if at.dense() {
            KernelClass::Copy
        } else {
            KernelClass::Strided
        }
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let (shape, dtype) = {
            let x = at.g.value(at.x(0));
            (x.shape.clone(), x.dtype)
        };
        let d = at.g.cast(at.dy, dtype);
        Vjp::first(at.g.reshape(d, &shape))
    }
}

impl OpDef for op::Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn signature(&self) -> Signature {
        Signature::new(
            &[operand("a part", Extent::Part)],
            &[operand("the concatenation", Extent::Part)],
        )
        .variadic()
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Strided
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let axis = usize::from(self.axis);
        let mut out = Contributions::new();
        let mut start = 0;
        for (i, &part) in at.op.inputs.iter().enumerate() {
            let len = at.g.value(part).shape[axis];
            if at.needs[i] {
                out.push((i, at.g.slice(at.dy, axis, start, len)));
            }
            start += len;
        }
        out
    }
}

impl OpDef for op::Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[], &[full("the output")])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, _: &Operands<'_>) -> u64 {
        0
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Fill
    }
}
