//! Elementwise operations as C expressions of one lane.

use super::{Refusal, float};
use shardlab_plan::model::OpKind;
use shardlab_plan::program::BodyOp;

/// Whether an operation's results are rounded to 16 bits, so that the fast functions will do.
pub(super) fn is_fast(op: &BodyOp) -> bool {
    op.outputs.iter().all(|s| s.dtype.size() == 2)
}

/// Whether an operation is elementwise for the generator.
pub(super) fn is_elementwise(op: OpKind) -> bool {
    matches!(
        op,
        OpKind::Add
            | OpKind::Sub
            | OpKind::LogProbs
            | OpKind::Mul
            | OpKind::Neg
            | OpKind::Silu
            | OpKind::SiluGrad
            | OpKind::Gelu
            | OpKind::GeluGrad
            | OpKind::Relu
            | OpKind::ReluGrad
            | OpKind::Copy
            | OpKind::Fill { .. }
            | OpKind::SquaredError { .. }
            | OpKind::SquaredErrorGrad { .. }
    )
}

/// How many of an elementwise operation's inputs it uses.
pub(super) fn used_inputs(op: OpKind) -> Result<usize, Refusal> {
    Ok(match op {
        OpKind::Fill { .. } => 0,
        OpKind::Neg | OpKind::Silu | OpKind::Gelu | OpKind::Relu | OpKind::Copy => 1,
        OpKind::Add
        | OpKind::Sub
        | OpKind::LogProbs
        | OpKind::Mul
        | OpKind::SiluGrad
        | OpKind::GeluGrad
        | OpKind::ReluGrad
        | OpKind::SquaredError { .. } => 2,
        OpKind::SquaredErrorGrad { .. } => 3,
        _ => return Err(Refusal::new(format!("`{}` is not elementwise", op.name()))),
    })
}

/// The result of one lane from its inputs.
pub(super) fn lane(op: &BodyOp, x: &[String]) -> Result<String, Refusal> {
    let fast = is_fast(op);
    let call = |name: &str, args: &[String]| format!("{name}<{fast}>({})", args.join(", "));
    let of = |i: usize| x.get(i).cloned().unwrap_or_default();
    let (a, b) = (of(0), of(1));
    Ok(match op.op {
        OpKind::Add => format!("{a} + {b}"),
        OpKind::Sub | OpKind::LogProbs => format!("{a} - {b}"),
        OpKind::Mul => format!("{a} * {b}"),
        OpKind::Neg => format!("-{a}"),
        OpKind::Copy => a,
        OpKind::Silu => call("silu_", x),
        OpKind::SiluGrad => call("silu_grad_", x),
        OpKind::Gelu => call("gelu_", x),
        OpKind::GeluGrad => call("gelu_grad_", x),
        OpKind::Relu => format!("relu_({a})"),
        OpKind::ReluGrad => format!("relu_grad_({a}, {b})"),
        OpKind::Fill { value } => float(value.0 as f32),
        OpKind::SquaredError { scale } => {
            format!("{} * (({a} - {b}) * ({a} - {b}))", float(scale.0 as f32))
        }
        OpKind::SquaredErrorGrad { scale } => {
            let twice = float(2.0 * scale.0 as f32);
            format!("{a} * ({twice} * ({b} - {}))", of(2))
        }
        _ => {
            return Err(Refusal::new(format!(
                "`{}` is not elementwise",
                op.op.name()
            )));
        }
    })
}
