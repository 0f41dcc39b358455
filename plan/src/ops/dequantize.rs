//! Weights in four bits, as matmuls read them.

use super::signature::{Signature, any};
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::graph::{Graph, ValueId};
use crate::ir::{KernelClass, Nf4, Nf4Scales, OpKind, op};

impl OpDef for op::DequantizeNf4 {
    fn name(&self) -> &'static str {
        "dequantize_4bit"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the stored weight")], &[any("the weight")])
    }

    fn fusion(&self) -> Fusion {
        Fusion::Extern
    }

    /// A multiplication per element.
    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.output_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        KernelClass::Copy
    }

    /// Scales that are not among the stored bytes are read, too.
    fn bytes_read(&self, at: &Operands<'_>, _: usize) -> Option<u64> {
        let nf4 = Nf4 {
            shape: at.output(0).shape.clone(),
            scales: self.scales,
            double: self.double,
        };
        Some(nf4.code_bytes() + nf4.scale_bytes())
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }

    /// The stored weight is never trained.
    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        Contributions::new()
    }

    /// Scales that are no parameters have no values in `exec`.
    fn is_priced_only(&self) -> bool {
        self.scales == Nf4Scales::Replicated
    }
}

/// Returns the factor that a backward operation multiplies by, given that of the forward operation:
/// a weight in four bits is dequantized again (`MatMul4Bit.backward` of bitsandbytes, and
/// `LinearNF4.backward` of torchao, which save the stored weight).
pub(super) fn again(g: &mut Graph, w: ValueId) -> ValueId {
    let Some((kind @ OpKind::DequantizeNf4(_), op)) = g.computed_by(w) else {
        return w;
    };
    let (stored, dispatches) = (op.inputs[0], op.dispatches);
    let (shape, dtype) = (g.value(w).shape.clone(), g.value(w).dtype);
    let again = g.compute(kind, &[stored], &[(&shape, dtype)])[0];
    g.dispatches(dispatches);
    again
}
