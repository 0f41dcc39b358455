//! Norms over the last dimension.

use super::signature::{Extent, Operand, Reduced, Signature, any, full, operand};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::graph::ValueId;
use crate::ir::{DType, KernelClass, OpKind, op};
use smallvec::SmallVec;

const X: Operand = full("an input");
const Y: Operand = full("the output");
const PARAMETER: Operand = operand("a norm's parameter", Extent::PerColumn);
const STATISTIC: Operand = operand("a norm's statistic", Extent::PerRow);

impl OpDef for op::RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, PARAMETER], &[Y, STATISTIC]).reduces(Reduced::Input(0))
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        if n == 0 { inputs[0] } else { DType::F32 }
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        4 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Norm { backward: false }
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (x, w, rstd, dy) = (at.x(0), at.x(1), at.y(1), at.dy);
        let mut out = Contributions::new();
        if at.needs[0] {
            out.push((0, at.like(OpKind::RmsNormGrad, &[dy, x, w, rstd], x)));
        }
        if at.needs[1] {
            out.push((1, at.like(OpKind::RmsNormWeightGrad, &[dy, x, rstd], w)));
        }
        out
    }
}

impl OpDef for op::RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X, PARAMETER, STATISTIC], &[Y]).reduces(Reduced::Output(0))
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        8 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Norm { backward: true }
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::RmsNormWeightGrad {
    fn name(&self) -> &'static str {
        "rms_norm_weight_backward"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("the gradient"), any("x"), any("the statistic")];
        Signature::new(inputs, &[any("the weight's gradient")]).reduces(Reduced::Input(1))
    }

    fn fusion(&self) -> Fusion {
        Fusion::Column
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        3 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::ColumnReduce
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, PARAMETER, PARAMETER], &[Y, STATISTIC, STATISTIC])
            .optional_inputs(1)
            .reduces(Reduced::Input(0))
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        if n == 0 { inputs[0] } else { DType::F32 }
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        7 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Norm { backward: false }
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, needs } = at;
        let (x, mean, rstd) = (&op.inputs, op.outputs[1], op.outputs[2]);
        let dy = g.make_contiguous(dy);
        let mut out = Contributions::new();
        if needs[0] {
            let inputs = [dy, x[0], x[1], mean, rstd];
            out.push((
                0,
                g.compute_like(OpKind::LayerNormGrad, &inputs, &[x[0]])[0],
            ));
        }
        if needs[1] || needs.get(2) == Some(&true) {
            let like: SmallVec<[ValueId; 2]> = x[1..].iter().copied().collect();
            let d = g.compute_like(OpKind::LayerNormParamGrad, &[dy, x[0], mean, rstd], &like);
            let wanted = (1..).zip(d).filter(|&(i, _)| needs[i]);
            out.extend(wanted);
        }
        out
    }
}

impl OpDef for op::LayerNormGrad {
    fn name(&self) -> &'static str {
        "layer_norm_backward"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[X, X, PARAMETER, STATISTIC, STATISTIC], &[Y]).reduces(Reduced::Output(0))
    }

    fn fusion(&self) -> Fusion {
        Fusion::Row
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        11 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Norm { backward: true }
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::LayerNormParamGrad {
    fn name(&self) -> &'static str {
        "layer_norm_param_backward"
    }

    /// Makes the bias' gradient optional.
    fn signature(&self) -> Signature {
        let inputs = &[
            any("the gradient"),
            any("x"),
            any("the mean"),
            any("the statistic"),
        ];
        let outputs = &[any("the weight's gradient"), any("the bias' gradient")];
        Signature::new(inputs, outputs)
            .optional_outputs(1)
            .reduces(Reduced::Input(1))
    }

    fn fusion(&self) -> Fusion {
        Fusion::Column
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        5 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::ColumnReduce
    }

    fn is_backward(&self) -> bool {
        true
    }
}
