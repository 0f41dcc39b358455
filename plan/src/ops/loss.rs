//! Losses over a vocabulary.

use super::signature::{Extent, Operand, Reduced, Signature, any, full, operand};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::ir::{DType, KernelClass, OpKind, op};

const X: Operand = full("an input");
const LABELS: Operand = operand("the labels", Extent::PerRow);
const LOSS: Operand = operand("the loss", Extent::Scalar);

impl OpDef for op::NllLoss {
    fn name(&self) -> &'static str {
        "nll_loss"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, LABELS], &[LOSS, LOSS]).reduces(Reduced::Input(0))
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        let _ = (n, inputs);
        DType::F32
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input(0).rows()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Strided
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, .. } = at;
        let zeros = g.fill_like(op.inputs[0], 0.0);
        let inputs = [dy, op.inputs[1], op.outputs[1], zeros];
        Vjp::first(g.compute_into(OpKind::NllLossGrad, &inputs, zeros))
    }

    /// Counts one gathered element per row.
    fn bytes_read(&self, at: &Operands<'_>, n: usize) -> Option<u64> {
        let x = at.input(0);
        (n == 0).then(|| x.rows() * x.dtype.size())
    }

    fn differentiable(&self, n: usize) -> bool {
        n == 0
    }
}

impl OpDef for op::NllLossGrad {
    fn name(&self) -> &'static str {
        "nll_loss_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[LOSS, LABELS, LOSS, X], &[full("the output")]).reduces(Reduced::Output(0))
    }

    fn fusion(&self) -> Fusion {
        Fusion::Pointwise
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input(1).numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Strided
    }

    /// Counts nothing for the filled buffer, which is overwritten, not read.
    fn bytes_read(&self, _: &Operands<'_>, n: usize) -> Option<u64> {
        (n == 3).then_some(0)
    }

    /// Counts one scattered element per row.
    fn bytes_written(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
        let dx = at.output(0);
        Some(dx.rows() * dx.dtype.size())
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("the logits"), any("the labels"), any("the loss")];
        Signature::new(inputs, &[any("the logits"), any("the loss")])
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        if n == 0 { inputs[0] } else { DType::F32 }
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        9 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Softmax { backward: false }
    }
}
