//! Softmax attention, plain and with modified scores.

use super::signature::{Operand, Signature, any};
use super::{Contributions, OpDef, Operands, Vjp};
use crate::ir::{AttentionShape, DType, KernelClass, OpKind, ScoreMod, op};
use smallvec::{SmallVec, smallvec};

/// FLOPs to modify one score, counted as for elementwise functions.
const SOFTCAP_FLOPS: u64 = 8;
const SLOPE_FLOPS: u64 = 2;

/// One kind of attention.
#[derive(Clone, Copy)]
struct Attention {
    causal: bool,
    score_mod: ScoreMod,
}

impl Attention {
    /// Returns the sizes of attention, from queries and keys, which start at input `q`.
    ///
    /// # Panics
    /// Panics if their shapes do not match. The model's code creates both.
    fn shape(self, at: &Operands<'_>, q: usize) -> AttentionShape {
        let shape =
            AttentionShape::between(&at.input(q).shape, &at.input(q + 1).shape, self.causal);
        let shape = shape.expect("queries and keys of one attention");
        shape
            .windowed(self.score_mod.window)
            .within(self.score_mod.documents)
    }

    fn flops(self, at: &Operands<'_>, q: usize, backward: bool) -> u64 {
        let shape = self.shape(at, q);
        let capped = self.score_mod.softcap.0 != 0.0;
        let each =
            SOFTCAP_FLOPS * u64::from(capped) + SLOPE_FLOPS * u64::from(self.score_mod.alibi);
        // Two matmuls need 4 FLOPs per score and head dimension.
        let scores = shape.flops(false) / (4 * shape.head_dim.max(1));
        shape.flops(backward) + each * scores
    }

    fn class(self, at: &Operands<'_>, q: usize, backward: bool) -> KernelClass {
        KernelClass::Attention {
            shape: self.shape(at, q),
            backward,
        }
    }
}

/// An optional fourth input.
#[derive(Clone, Copy)]
enum Extra {
    None,
    Mask,
    /// First positions of documents.
    Documents,
    /// Learned scores and their gradient.
    Learned(&'static str, &'static str),
}

impl Extra {
    fn forward(self) -> Signature {
        let mut inputs = vec![any("q"), any("k"), any("v")];
        inputs.extend(self.input());
        let outputs = &[any("out"), any("lse"), any("the seed"), any("the offset")];
        match self {
            Self::Learned(..) => Signature::new(&inputs, &outputs[..2]),
            _ => Signature::new(&inputs, outputs).optional_outputs(2),
        }
    }

    fn backward(self) -> Signature {
        let mut inputs = vec![any("the gradient"), any("q"), any("k"), any("v")];
        inputs.extend(self.input());
        inputs.extend([any("out"), any("lse")]);
        let mut outputs = vec![any("d_q"), any("d_k"), any("d_v")];
        if let Self::Learned(_, gradient) = self {
            outputs.push(any(gradient));
            return Signature::new(&inputs, &outputs);
        }
        inputs.extend([any("the seed"), any("the offset")]);
        Signature::new(&inputs, &outputs).optional_inputs(2)
    }

    fn input(self) -> Option<Operand> {
        match self {
            Self::None => None,
            Self::Mask => Some(any("the mask")),
            Self::Documents => Some(any("the starts")),
            Self::Learned(input, _) => Some(any(input)),
        }
    }

    /// Returns the number of inputs that have gradients.
    const fn differentiated(self) -> usize {
        3 + matches!(self, Self::Learned(..)) as usize
    }
}

fn result_type(n: usize, inputs: &[DType]) -> DType {
    match n {
        0 => inputs[0],
        1 => DType::F32,
        _ => DType::I64,
    }
}

/// Emits the gradients of the first `n` inputs as one kernel.
fn gradients(at: Vjp<'_>, kind: OpKind, n: usize) -> Contributions {
    let Vjp { g, op, dy, needs } = at;
    let mut inputs: SmallVec<[_; 8]> = smallvec![dy];
    inputs.extend_from_slice(&op.inputs);
    inputs.extend_from_slice(&op.outputs);
    let made = g.compute_like(kind, &inputs, &op.inputs[..n]);
    let all = made.iter().copied().enumerate();
    all.filter(|(n, _)| needs[*n]).collect()
}

/// Defines a forward and a backward operation.
macro_rules! attention {
    ($Forward:ident $name:literal, $Grad:ident $grad_name:literal, $($field:ident)+, $extra:expr, priced_only $priced_only:literal, |$op:pat_param| $sizes:expr) => {
        impl From<op::$Forward> for Attention {
            fn from($op: op::$Forward) -> Self {
                $sizes
            }
        }

        impl From<op::$Grad> for Attention {
            fn from($op: op::$Grad) -> Self {
                $sizes
            }
        }

        impl OpDef for op::$Forward {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                $extra.forward()
            }

            fn result(&self, n: usize, inputs: &[DType]) -> DType {
                result_type(n, inputs)
            }

            fn flops(&self, at: &Operands<'_>) -> u64 {
                Attention::from(*self).flops(at, 0, false)
            }

            fn class(&self, at: &Operands<'_>) -> KernelClass {
                Attention::from(*self).class(at, 0, false)
            }

            fn vjp(&self, at: Vjp<'_>) -> Contributions {
                let kind = OpKind::$Grad(op::$Grad { $($field: self.$field),+ });
                gradients(at, kind, $extra.differentiated())
            }

            fn saved_by_selective_recompute(&self) -> bool {
                true
            }

            fn takes_strides(&self) -> bool {
                true
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
                $extra.backward()
            }

            fn flops(&self, at: &Operands<'_>) -> u64 {
                Attention::from(*self).flops(at, 1, true)
            }

            fn class(&self, at: &Operands<'_>) -> KernelClass {
                Attention::from(*self).class(at, 1, true)
            }

            fn takes_strides(&self) -> bool {
                true
            }

            fn is_priced_only(&self) -> bool {
                $priced_only
            }

            fn is_backward(&self) -> bool {
                true
            }
        }
    };
}

/// Returns attention whose scores are only scaled.
const fn plain(causal: bool) -> Attention {
    Attention {
        causal,
        score_mod: ScoreMod::NONE,
    }
}

attention!(Attention "attention", AttentionGrad "attention_backward", causal scale, Extra::None, priced_only false, |op| plain(op.causal));
attention!(FlexAttention "flex_attention", FlexAttentionGrad "flex_attention_backward", causal scale score_mod, Extra::None, priced_only false, |op| Self {
    causal: op.causal,
    score_mod: op.score_mod,
});
attention!(DocumentAttention "document_attention", DocumentAttentionGrad "document_attention_backward", causal scale score_mod, Extra::Documents, priced_only false, |op| Self {
    causal: op.causal,
    score_mod: op.score_mod,
});
// No kernel here reads a mask, so all scores are computed.
attention!(MaskedAttention "masked_attention", MaskedAttentionGrad "masked_attention_backward", scale, Extra::Mask, priced_only true, |_| plain(false));
attention!(BiasedAttention "biased_attention", BiasedAttentionGrad "biased_attention_backward", causal scale window, Extra::Learned("the bias", "d_bias"), priced_only true, |op| Self {
    causal: op.causal,
    score_mod: ScoreMod {
        window: op.window,
        ..ScoreMod::NONE
    },
});
attention!(SinkAttention "sink_attention", SinkAttentionGrad "sink_attention_backward", causal scale score_mod, Extra::Learned("the sinks", "d_sinks"), priced_only false, |op| Self {
    causal: op.causal,
    score_mod: op.score_mod,
});

impl OpDef for op::Indexer {
    fn name(&self) -> &'static str {
        "indexer"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("q"), any("k"), any("the weights")];
        Signature::new(inputs, &[any("the ids")])
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::I64
    }

    /// Counts half of all pairs of positions.
    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input(0).numel() * at.input(0).shape[1]
    }

    fn class(&self, at: &Operands<'_>) -> KernelClass {
        let q = &at.input(0).shape;
        KernelClass::Gemm {
            m: q[1],
            n: q[1],
            k: (q[2] * q[3]).div_ceil(2),
            batch: q[0],
        }
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }

    fn vjp(&self, _: Vjp<'_>) -> Contributions {
        Contributions::new()
    }

    fn saved_by_selective_recompute(&self) -> bool {
        true
    }

    fn is_priced_only(&self) -> bool {
        true
    }
}
