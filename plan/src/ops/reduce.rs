//! Sums over many rows.

use super::signature::{Signature, any};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{KernelClass, op};

/// Emits the gradient of a sum: repeated for every element that was added up.
fn expand(at: Vjp<'_>) -> Contributions {
    let shape = at.g.value(at.x(0)).shape.clone();
    Vjp::first(at.g.expand(at.dy, &shape))
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
