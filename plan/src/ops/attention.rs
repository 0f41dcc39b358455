//! Softmax attention.

use super::signature::{Signature, any};
use super::vjp::backward_only;
use super::{Contributions, Fusion, OpDef, Operands, Vjp};
use crate::graph::{Value, ValueId};
use crate::ir::{DType, KernelClass, OpKind, op};
use smallvec::{SmallVec, smallvec};

/// Two matmuls of `seq x seq x head_dim` per head; half of each under a causal mask.
fn flops(q: &Value, causal: bool) -> u64 {
    let full = 4 * q.shape[0] * q.shape[1] * q.shape[2] * q.shape[2] * q.shape[3];
    if causal { full / 2 } else { full }
}

fn class(q: &Value, k: &Value, causal: bool, backward: bool) -> KernelClass {
    KernelClass::Attention {
        batch: q.shape[0],
        heads: q.shape[1],
        kv_heads: k.shape[1],
        seq: q.shape[2],
        head_dim: q.shape[3],
        causal,
        backward,
    }
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
        flops(at.input(0), self.causal)
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        class(at.input(0), at.input(1), self.causal, false)
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

    /// Five matmuls where forward has two.
    fn flops(&self, at: &Operands<'_>) -> u64 {
        flops(at.input(1), self.causal) / 2 * 5
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        class(at.input(1), at.input(2), self.causal, true)
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
