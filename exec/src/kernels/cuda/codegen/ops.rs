//! Elementwise operations as C expressions of one lane.

use super::{Refusal, float};
use shardlab_plan::ir::{BodyOp, OpKind, op};
use shardlab_plan::ops::Fusion;

/// Whether an operation's results are rounded to 16 bits, so that the fast functions will do.
pub(super) fn is_fast(op: &BodyOp) -> bool {
    op.outputs.iter().all(|s| s.dtype.size() == 2)
}

/// Whether an operation is elementwise for the generator.
pub(super) fn is_elementwise(op: OpKind) -> bool {
    let signature = op.def().signature();
    op.fusion() == Fusion::Pointwise && signature.reduced.is_none() && !signature.variadic
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
        OpKind::Fill(op::Fill { value }) => float(value.0 as f32),
        OpKind::SquaredError(op::SquaredError { scale }) => {
            format!("{} * (({a} - {b}) * ({a} - {b}))", float(scale.0 as f32))
        }
        OpKind::SquaredErrorGrad(op::SquaredErrorGrad { scale }) => {
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
