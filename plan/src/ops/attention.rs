//! Softmax attention.

use super::signature::{Signature, any};
use super::vjp::backward_only;
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::graph::{Value, ValueId};
use crate::ir::{AttentionShape, DType, KernelClass, OpKind, op};
use smallvec::{SmallVec, smallvec};

/// Returns the sizes of attention from its queries and keys.
///
/// # Panics
/// If they do not belong together; the model's code makes both.
fn shape(q: &Value, k: &Value, causal: bool) -> AttentionShape {
    let shape = AttentionShape::of(&q.shape, &k.shape, causal);
    shape.expect("queries and keys of one attention")
}

impl OpDef for op::Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn signature(&self) -> Signature {
        let outputs = &[any("out"), any("lse"), any("the seed"), any("the offset")];
        Signature::new(&[any("q"), any("k"), any("v")], outputs).optional_outputs(2)
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        match n {
            0 => inputs[0],
            1 => DType::F32,
            _ => DType::I64,
        }
    }

    fn fusion(&self) -> Fusion {
        Fusion::Extern
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        shape(at.input(0), at.input(1), self.causal).flops(false)
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        KernelClass::Attention {
            shape: shape(at.input(0), at.input(1), self.causal),
            backward: false,
        }
    }

    fn vjp(&self, at: Vjp<'_>) -> Contributions {
        let Vjp { g, op, dy, needs } = at;
        let [q, k, v] = [op.inputs[0], op.inputs[1], op.inputs[2]];
        let mut inputs: SmallVec<[ValueId; 8]> = smallvec![dy, q, k, v];
        inputs.extend_from_slice(&op.outputs);
        let kind = OpKind::AttentionGrad(op::AttentionGrad {
            causal: self.causal,
            scale: self.scale,
        });
        let gradients = g.compute_like(kind, &inputs, &[q, k, v]);
        (0..3)
            .filter(|&i| needs[i])
            .map(|i| (i, gradients[i]))
            .collect()
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }

    fn takes_strides(&self) -> bool {
        true
    }
}

impl OpDef for op::AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn signature(&self) -> Signature {
        let inputs = &[
            any("the gradient"),
            any("q"),
            any("k"),
            any("v"),
            any("out"),
            any("lse"),
            any("the seed"),
            any("the offset"),
        ];
        Signature::new(inputs, &[any("d_q"), any("d_k"), any("d_v")]).optional_inputs(2)
    }

    fn fusion(&self) -> Fusion {
        Fusion::Extern
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        shape(at.input(1), at.input(2), self.causal).flops(true)
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        KernelClass::Attention {
            shape: shape(at.input(1), at.input(2), self.causal),
            backward: true,
        }
    }

    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        backward_only()
    }

    fn takes_strides(&self) -> bool {
        true
    }

    fn is_backward(&self) -> bool {
        true
    }
}
