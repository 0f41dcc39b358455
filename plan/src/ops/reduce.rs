//! Sums over each row, and over many rows.

use super::signature::{Extent, Reduced, Signature, any, full, operand};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{KernelClass, OpKind, op};

/// Emits the gradient of a sum: broadcast to all summed elements.
fn expand(at: Vjp<'_>) -> Contributions {
    let shape = at.g.value(at.x(0)).shape.clone();
    Vjp::first(at.g.expand(at.dy, &shape))
}

impl OpDef for op::RowSum {
    fn name(&self) -> &'static str {
        "row_sum"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[full("x")], &[operand("the sum", Extent::PerRow)])
            .reduces(Reduced::Input(0))
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Norm { backward: false }
    }

    /// Emits the gradient of a row for each of its elements, scaled unless the factor is 1.
    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let x = at.g.value(at.x(0));
        let (shape, dtype) = (x.shape.clone(), x.dtype);
        let each = at.g.expand(at.dy, &shape);
        if self.scale.0 == 1.0 {
            return Vjp::first(each);
        }
        let kind = OpKind::Scale(op::Scale { by: self.scale });
        Vjp::first(at.g.compute(kind, &[each], &[(&shape, dtype)])[0])
    }
}

impl OpDef for op::SumLeading {
    fn name(&self) -> &'static str {
        "sum_leading"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("x")], &[any("the sum")])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Alone
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::ColumnReduce
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        expand(at)
    }
}

impl OpDef for op::SumChannels {
    fn name(&self) -> &'static str {
        "sum_channels"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("x")], &[any("the sum")])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Alone
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::ColumnReduce
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        expand(at)
    }
}

impl OpDef for op::SumAll {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("x")], &[any("the sum")])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Alone
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::FullReduce
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        expand(at)
    }
}
