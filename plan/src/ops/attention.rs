//! Softmax attention, plain and with changed scores.

use super::signature::{Signature, any};
use super::{Contributions, OpDef, Operands, Vjp};
use crate::ir::{AttentionShape, DType, KernelClass, OpKind, ScoreMod, op};
use smallvec::{SmallVec, smallvec};

/// FLOPs of a change of one score, as elementwise functions count them.
const SOFTCAP_FLOPS: u64 = 8;
const SLOPE_FLOPS: u64 = 2;

/// One kind of attention.
#[derive(Clone, Copy)]
struct Attention {
    causal: bool,
    score_mod: ScoreMod,
}

impl Attention {
    /// Returns the sizes from queries and keys, which start at input `q`.
    ///
    /// # Panics
    /// If they do not belong together; the model's code makes both.
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
        // Two matmuls make 4 FLOPs per score and component.
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

fn forward_signature(masked: bool) -> Signature {
    let inputs = &[any("q"), any("k"), any("v"), any("the mask")];
    let outputs = &[any("out"), any("lse"), any("the seed"), any("the offset")];
    let inputs = &inputs[..3 + usize::from(masked)];
    Signature::new(inputs, outputs).optional_outputs(2)
}

fn backward_signature(masked: bool) -> Signature {
    let plain = &[
        any("the gradient"),
        any("q"),
        any("k"),
        any("v"),
        any("out"),
        any("lse"),
        any("the seed"),
        any("the offset"),
    ];
    let outputs = &[any("d_q"), any("d_k"), any("d_v")];
    let mut signature = Signature::new(plain, outputs).optional_inputs(2);
    if masked {
        signature.inputs.insert(4, any("the mask"));
    }
    signature
}

fn result_type(n: usize, inputs: &[DType]) -> DType {
    match n {
        0 => inputs[0],
        1 => DType::F32,
        _ => DType::I64,
    }
}

/// Emits the gradients of queries, keys and values by one kernel.
fn gradients(at: Vjp<'_>, kind: OpKind) -> Contributions {
    let Vjp { g, op, dy, needs } = at;
    let [q, k, v] = [op.inputs[0], op.inputs[1], op.inputs[2]];
    let mut inputs: SmallVec<[_; 8]> = smallvec![dy];
    inputs.extend_from_slice(&op.inputs);
    inputs.extend_from_slice(&op.outputs);
    let gradients = g.compute_like(kind, &inputs, &[q, k, v]);
    (0..3)
        .filter(|&i| needs[i])
        .map(|i| (i, gradients[i]))
        .collect()
}

impl From<op::Attention> for Attention {
    fn from(op: op::Attention) -> Self {
        Self {
            causal: op.causal,
            score_mod: ScoreMod::NONE,
        }
    }
}

impl From<op::AttentionGrad> for Attention {
    fn from(op: op::AttentionGrad) -> Self {
        Self {
            causal: op.causal,
            score_mod: ScoreMod::NONE,
        }
    }
}

impl From<op::FlexAttention> for Attention {
    fn from(op: op::FlexAttention) -> Self {
        Self {
            causal: op.causal,
            score_mod: op.score_mod,
        }
    }
}

impl From<op::FlexAttentionGrad> for Attention {
    fn from(op: op::FlexAttentionGrad) -> Self {
        Self {
            causal: op.causal,
            score_mod: op.score_mod,
        }
    }
}

/// Sizes of attention with a mask: all scores are computed.
const MASKED: Attention = Attention {
    causal: false,
    score_mod: ScoreMod::NONE,
};

impl From<op::MaskedAttention> for Attention {
    fn from(_: op::MaskedAttention) -> Self {
        MASKED
    }
}

impl From<op::MaskedAttentionGrad> for Attention {
    fn from(_: op::MaskedAttentionGrad) -> Self {
        MASKED
    }
}

/// Defines a forward and a backward operation.
macro_rules! attention {
    ($Forward:ident $name:literal, $Grad:ident $grad_name:literal, masked $masked:literal, $($field:ident)+) => {
        impl OpDef for op::$Forward {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                forward_signature($masked)
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
                gradients(at, OpKind::$Grad(op::$Grad { $($field: self.$field),+ }))
            }

            fn saved_by_selective_recompute(&self) -> bool {
                true
            }

            fn takes_strides(&self) -> bool {
                true
            }

            /// No kernel here reads a mask.
            fn is_priced_only(&self) -> bool {
                $masked
            }
        }

        impl OpDef for op::$Grad {
            fn name(&self) -> &'static str {
                $grad_name
            }

            fn signature(&self) -> Signature {
                backward_signature($masked)
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

            /// No kernel here reads a mask.
            fn is_priced_only(&self) -> bool {
                $masked
            }

            fn is_backward(&self) -> bool {
                true
            }
        }
    };
}

attention!(Attention "attention", AttentionGrad "attention_backward", masked false, causal scale);
attention!(FlexAttention "flex_attention", FlexAttentionGrad "flex_attention_backward", masked false, causal scale score_mod);
attention!(MaskedAttention "masked_attention", MaskedAttentionGrad "masked_attention_backward", masked true, scale);

impl From<op::BiasedAttention> for Attention {
    fn from(op: op::BiasedAttention) -> Self {
        Self {
            causal: op.causal,
            score_mod: ScoreMod {
                window: op.window,
                ..ScoreMod::NONE
            },
        }
    }
}

impl From<op::BiasedAttentionGrad> for Attention {
    fn from(op: op::BiasedAttentionGrad) -> Self {
        Self {
            causal: op.causal,
            score_mod: ScoreMod {
                window: op.window,
                ..ScoreMod::NONE
            },
        }
    }
}

impl From<op::SinkAttention> for Attention {
    fn from(op: op::SinkAttention) -> Self {
        Self {
            causal: op.causal,
            score_mod: op.score_mod,
        }
    }
}

impl From<op::SinkAttentionGrad> for Attention {
    fn from(op: op::SinkAttentionGrad) -> Self {
        Self {
            causal: op.causal,
            score_mod: op.score_mod,
        }
    }
}

/// Emits the gradients of all inputs by one kernel.
fn all_gradients(at: Vjp<'_>, kind: OpKind) -> Contributions {
    let Vjp { g, op, dy, needs } = at;
    let mut inputs: SmallVec<[_; 8]> = smallvec![dy];
    inputs.extend_from_slice(&op.inputs);
    inputs.extend_from_slice(&op.outputs);
    let made = g.compute_like(kind, &inputs, &op.inputs);
    let all = made.iter().copied().enumerate();
    all.filter(|(n, _)| needs[*n]).collect()
}

/// Defines a forward and a backward operation with a fourth, learned input of the scores.
macro_rules! learned_scores {
    ($Forward:ident $name:literal, $Grad:ident $grad_name:literal, $input:literal $gradient:literal, priced_only $priced_only:literal, $($field:ident)+) => {
        impl OpDef for op::$Forward {
            fn name(&self) -> &'static str {
                $name
            }

            fn signature(&self) -> Signature {
                let inputs = &[any("q"), any("k"), any("v"), any($input)];
                Signature::new(inputs, &[any("out"), any("lse")])
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
                all_gradients(at, OpKind::$Grad(op::$Grad { $($field: self.$field),+ }))
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
                let inputs = &[
                    any("the gradient"),
                    any("q"),
                    any("k"),
                    any("v"),
                    any($input),
                    any("out"),
                    any("lse"),
                ];
                let outputs = &[any("d_q"), any("d_k"), any("d_v"), any($gradient)];
                Signature::new(inputs, outputs)
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

            fn is_backward(&self) -> bool {
                true
            }

            fn is_priced_only(&self) -> bool {
                $priced_only
            }
        }
    };
}

learned_scores!(BiasedAttention "biased_attention", BiasedAttentionGrad "biased_attention_backward", "the bias" "d_bias", priced_only true, causal scale window);
learned_scores!(SinkAttention "sink_attention", SinkAttentionGrad "sink_attention_backward", "the sinks" "d_sinks", priced_only false, causal scale score_mod);

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
