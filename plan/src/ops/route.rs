//! Routers: the choice of experts for each token, their weights, and load-balancing losses.

use super::signature::{Signature, any};
use super::{Contributions, OpDef, Operands, Vjp};
use crate::ir::{DType, KernelClass, OpKind, op};

const ROUTER: KernelClass = KernelClass::Softmax { backward: false };
const ROUTER_GRAD: KernelClass = KernelClass::Softmax { backward: true };

impl OpDef for op::Route {
    fn name(&self) -> &'static str {
        "route"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("the logits"), any("the bias")];
        let outputs = &[any("the weights"), any("the ids")];
        Signature::new(&inputs[..1 + usize::from(self.bias)], outputs)
    }

    fn result(&self, n: usize, inputs: &[DType]) -> DType {
        if n == 0 { inputs[0] } else { DType::I64 }
    }

    /// Counts the scores, and a comparison per column and choice.
    fn flops(&self, at: &Operands<'_>) -> u64 {
        (5 + self.k) * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        ROUTER
    }

    /// The weights do not depend on the bias. If steps update the biases, their gradient is
    /// replaced by the number of choices of each expert ([`UpdateRule::RouterBias`]).
    ///
    /// [`UpdateRule::RouterBias`]: crate::ir::UpdateRule::RouterBias
    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (logits, ids, dy) = (at.x(0), at.y(1), at.dy);
        let mut gradients = Contributions::new();
        if at.needs[0] {
            let kind = OpKind::RouteGrad(op::RouteGrad {
                sigmoid: self.sigmoid,
                normalize: self.normalize,
                scale: self.scale,
            });
            gradients.push((0, at.like(kind, &[dy, logits, ids], logits)));
        }
        if at.needs.get(1) == Some(&true) {
            let bias = at.x(1);
            gradients.push((1, at.like(OpKind::CountExperts, &[ids], bias)));
        }
        gradients
    }

    /// The choice of experts is not recomputed.
    fn saved_by_selective_recompute(&self) -> bool {
        true
    }
}

impl OpDef for op::RouteGrad {
    fn name(&self) -> &'static str {
        "route_backward"
    }

    fn signature(&self) -> Signature {
        let inputs = &[
            any("the gradient of the weights"),
            any("the logits"),
            any("the ids"),
        ];
        Signature::new(inputs, &[any("the gradient of the logits")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        6 * at.output_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        ROUTER_GRAD
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::CountExperts {
    fn name(&self) -> &'static str {
        "count_experts"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the ids")], &[any("the counts")])
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::F32
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        ROUTER
    }

    fn differentiable(&self, _: usize) -> bool {
        false
    }
}

impl OpDef for op::LoadBalance {
    fn name(&self) -> &'static str {
        "load_balance"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the logits")], &[any("the loss"), any("the counts")])
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::F32
    }

    /// Counts the probabilities, the choice and the sums.
    fn flops(&self, at: &Operands<'_>) -> u64 {
        (7 + self.k) * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        ROUTER
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (logits, counts, dy) = (at.x(0), at.y(1), at.dy);
        let kind = OpKind::LoadBalanceGrad(op::LoadBalanceGrad {
            sigmoid: self.sigmoid,
            scale: self.scale,
        });
        Vjp::first(at.like(kind, &[dy, logits, counts], logits))
    }
}

impl OpDef for op::LoadBalanceGrad {
    fn name(&self) -> &'static str {
        "load_balance_backward"
    }

    fn signature(&self) -> Signature {
        let inputs = &[
            any("the gradient of the loss"),
            any("the logits"),
            any("the counts"),
        ];
        Signature::new(inputs, &[any("the gradient of the logits")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        9 * at.output_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        ROUTER_GRAD
    }

    fn is_backward(&self) -> bool {
        true
    }
}

impl OpDef for op::ZLoss {
    fn name(&self) -> &'static str {
        "z_loss"
    }

    fn signature(&self) -> Signature {
        Signature::new(&[any("the logits")], &[any("the loss")])
    }

    fn result(&self, _: usize, _: &[DType]) -> DType {
        DType::F32
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        3 * at.input_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        ROUTER
    }

    fn vjp(&self, mut at: Vjp<'_>) -> Contributions {
        let (logits, dy) = (at.x(0), at.dy);
        let kind = OpKind::ZLossGrad(op::ZLossGrad { scale: self.scale });
        Vjp::first(at.like(kind, &[dy, logits], logits))
    }
}

impl OpDef for op::ZLossGrad {
    fn name(&self) -> &'static str {
        "z_loss_backward"
    }

    fn signature(&self) -> Signature {
        let inputs = &[any("the gradient of the loss"), any("the logits")];
        Signature::new(inputs, &[any("the gradient of the logits")])
    }

    fn flops(&self, at: &Operands<'_>) -> u64 {
        5 * at.output_numel()
    }

    fn class(&self, _: &Operands<'_>) -> KernelClass {
        ROUTER_GRAD
    }

    fn is_backward(&self) -> bool {
        true
    }
}
