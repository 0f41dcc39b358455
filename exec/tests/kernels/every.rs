//! Every operation's CPU kernel against float64.

use super::case::{Arg, Case, arg};
use super::examples::{Example, operands};
use super::memory::Rng;
use super::semantics;
use shardlab_plan::ir::{BodyOp, DType, OpKind, Place, Slot, op};

fn operand(e: &Example, dtype: DType) -> Arg {
    let arg = match e.ids {
        Some(below) => arg(&e.shape, DType::I64).ids(below),
        None => arg(&e.shape, dtype),
    };
    match &e.values {
        Some(values) => arg.values(values),
        None => arg,
    }
}

fn slot(e: &Example) -> Slot {
    Slot {
        place: Place::Register(0),
        offset: 0,
        shape: e.shape[..].into(),
        strides: Default::default(),
        dtype: DType::F32,
    }
}

/// Returns the forward operation of an attention backward.
fn forward_of(kind: &OpKind) -> Option<OpKind> {
    match *kind {
        OpKind::AttentionGrad(op::AttentionGrad { causal, scale }) => {
            Some(OpKind::Attention(op::Attention { causal, scale }))
        }
        OpKind::FlexAttentionGrad(op::FlexAttentionGrad {
            causal,
            scale,
            score_mod,
        }) => Some(OpKind::FlexAttention(op::FlexAttention {
            causal,
            scale,
            score_mod,
        })),
        OpKind::DocumentAttentionGrad(op::DocumentAttentionGrad {
            causal,
            scale,
            score_mod,
        }) => Some(OpKind::DocumentAttention(op::DocumentAttention {
            causal,
            scale,
            score_mod,
        })),
        OpKind::SinkAttentionGrad(op::SinkAttentionGrad {
            causal,
            scale,
            score_mod,
        }) => Some(OpKind::SinkAttention(op::SinkAttention {
            causal,
            scale,
            score_mod,
        })),
        _ => None,
    }
}

/// Returns inputs of an attention backward: its result and log-sum-exp are those of forward.
fn forward(op: OpKind, inputs: &[Example], rng: &mut Rng) -> Vec<Vec<f64>> {
    let mut values: Vec<Vec<f64>> = inputs
        .iter()
        .map(|e| {
            let n = e.shape.iter().product::<u64>();
            let random = |_| f64::from(rng.next() as f32);
            e.values
                .clone()
                .unwrap_or_else(|| (0..n).map(random).collect())
        })
        .collect();
    // The gradient comes first, then the inputs and outputs of forward.
    let end = 1 + op.def().signature().inputs.len();
    let body = BodyOp {
        op,
        inputs: inputs[1..end].iter().map(slot).collect(),
        outputs: inputs[end..end + 2].iter().map(slot).collect(),
    };
    let made = semantics::apply(&body, &values[1..end]);
    values[end].clone_from(&made[0]);
    values[end + 1].clone_from(&made[1]);
    values
}

#[test]
fn every_operation_equals_float64() {
    for &kind in OpKind::ALL.iter().filter(|k| !k.def().is_priced_only()) {
        let (inputs, outputs) = operands(&kind);
        let mut rng = Rng(17);
        for dtype in DType::ALL.into_iter().filter(|d| d.is_float()) {
            let mut ins: Vec<Arg> = inputs.iter().map(|e| operand(e, dtype)).collect();
            let mut outs: Vec<Arg> = outputs.iter().map(|e| operand(e, dtype)).collect();
            if let Some(of) = forward_of(&kind) {
                ins = inputs.iter().map(|e| operand(e, DType::F32)).collect();
                outs = outputs.iter().map(|e| operand(e, DType::F32)).collect();
                let values = forward(of, &inputs, &mut rng);
                let with = |(a, v): (Arg, &Vec<f64>)| a.values(v);
                ins = ins.into_iter().zip(&values).map(with).collect();
            }
            Case::new(kind, &ins, &outs, &mut rng).check();
        }
    }
}
