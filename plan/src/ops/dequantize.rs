//! Dequantization of packed weights for matmuls.

use super::signature::{Signature, any};
use super::{OpDef, Operands};
use crate::graph::{Graph, ValueId};
use crate::ir::{KernelClass, OpKind, Packed, PackedFormat, PackedScales, op};

impl OpDef for op::Dequantize {
    fn name(&self) -> &'static str {
        match self.format {
            PackedFormat::Nf4 | PackedFormat::Nf4F32 => "dequantize_4bit",
            PackedFormat::Int8 => "dequantize_int8",
        }
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the stored weight")], &[any("the weight")])
    }

    /// Counts one multiplication per element.
    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Copy
    }

    /// Counts scales, too, if they are not stored with the weight.
    fn bytes_read(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
        let packed = Packed {
            shape: at.output(0).shape.clone(),
            format: self.format,
            scales: self.scales,
        };
        Some(packed.code_bytes() + packed.scale_bytes())
    }

    /// The stored weight is never trained.
    fn differentiable(&self, _: usize) -> bool {
        false
    }

    /// Scales that are not parameters have no values in `exec`.
    fn is_priced_only(&self) -> bool {
        self.scales == PackedScales::Replicated
    }
}

/// Returns the weight that a backward operation multiplies by, given that of the forward operation.
/// A packed weight is dequantized again (`MatMul4Bit.backward` and `MatMul8bitLt.backward` of
/// bitsandbytes, and `LinearNF4.backward` of torchao, which save the packed weight).
pub(super) fn again(g: &mut Graph, w: ValueId) -> ValueId {
    let Some((kind @ OpKind::Dequantize(_), op)) = g.computed_by(w) else {
        return w;
    };
    let (stored, dispatches) = (op.inputs[0], op.dispatches);
    let (shape, dtype) = (g.value(w).shape.clone(), g.value(w).dtype);
    let again = g.compute(kind, &[stored], &[(&shape, dtype)])[0];
    g.dispatches(dispatches);
    again
}
