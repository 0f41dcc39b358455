//! Losses of routers: programs with each kind of them pass, and faults planted in their gradients
//! are found.

use super::experts::{POLICIES, experts, only};
use super::{drop, find, passes};
use crate::check::{RuleId, check};
use crate::ir::*;
use crate::program::*;

/// Two expert layers with two losses each, in two micro-batches.
const LOSSES: u64 = 2 * 2 * 2;

const TWICE: &str = "train.grad_accum=2";

fn facts(p: &Program) -> u64 {
    let r = check(p);
    passes(&r, "losses of routers");
    let row = r.rules.iter().find(|x| x.id == RuleId::RouterLoss);
    row.expect("listed").checked
}

/// Returns the steady launches with an operation of this name, and their kernels.
fn launches(p: &Program, name: &str) -> Vec<(InstrId, KernelId)> {
    let kernel = |i: &Instr| match i.op {
        Op::Launch { kernel, .. } => Some(kernel),
        _ => None,
    };
    let named = |k: KernelId| {
        p.kernels[k.index()]
            .body
            .iter()
            .any(|op| op.op.name() == name)
    };
    let found = find(p, |i| kernel(i).is_some_and(named));
    let with = |i: InstrId| (i, kernel(&p.instrs[i.index()]).expect("a launch"));
    found.into_iter().map(with).collect()
}

#[test]
fn every_kind_of_loss_passes() {
    for (set, per_step) in [
        (&[TWICE][..], LOSSES),
        (&[TWICE, "model.aux_loss_kind=sequence"], LOSSES),
        // One loss for both layers.
        (&[TWICE, "model.aux_loss_kind=hf"], LOSSES - 2),
        (&[TWICE, "fsdp.per_token_loss=true"], LOSSES),
        (&[TWICE, "model.z_loss=0"], LOSSES / 2),
        (&[TWICE, "train.recompute=full"], LOSSES),
        // Backward reads copies of logits that were in host memory. The first layer is dense.
        (
            &[TWICE, "train.activation_offload=true", "model.layers=8"],
            7 * LOSSES / 2,
        ),
    ] {
        // Once when a loss is differentiated, and once when routers have used its gradient, in the
        // first step and in the steady one.
        assert_eq!(facts(&experts("native", set)), 4 * per_step, "{set:?}");
    }
    let none = ["model.z_loss=0", "model.aux_loss=0"];
    assert_eq!(facts(&experts("native", &none)), 0);
}

/// Megatron-LM #3672: every micro-batch adds the gradient of a whole step.
#[test]
fn a_gradient_that_forgets_the_micro_batches() {
    let mut q = experts("native", &[TWICE]);
    let mut planted = 0;
    for op in q.kernels.iter_mut().flat_map(|k| &mut k.body) {
        if let OpKind::Fill(fill) = &mut op.op
            && fill.value == Real(0.5)
        {
            fill.value = Real(1.0);
            planted += 1;
        }
    }
    assert_eq!(planted, 1);
    let v = only(&q, RuleId::RouterLoss, "seed");
    assert!(v.message.contains("starts from 1; expected 0.5"), "{v:?}");
}

/// Megatron-LM #5047: a coefficient is divided by the number of ranks once more on its way to the
/// gradient.
#[test]
fn a_coefficient_that_is_divided_by_ranks() {
    for policy in POLICIES {
        let mut q = experts(policy, &[]);
        for op in q.kernels.iter_mut().flat_map(|k| &mut k.body) {
            if let OpKind::ZLossGrad(of) = &mut op.op {
                of.scale = Real(of.scale.0 / 2.0);
            }
        }
        let v = only(&q, RuleId::RouterLoss, policy);
        let both = "with the coefficient 0.0005; expected 0.001";
        assert!(v.message.contains(both), "{policy}: {v:?}");
    }
}

/// A loss that is only logged: nothing adds its gradient to that of the logits.
#[test]
fn a_gradient_that_reaches_no_router() {
    for policy in POLICIES {
        let p = experts(policy, &[]);
        let mut found = 0;
        let grads = launches(&p, "load_balance_backward");
        assert_eq!(grads.len(), 2, "{policy}");
        for (grad, _) in grads {
            // The sum that follows.
            let later = find(&p, |_| true).into_iter().filter(|i| i.0 > grad.0);
            let sum = later
                .into_iter()
                .find(|i| launches(&p, "add").iter().any(|(add, _)| add == i));
            let mut q = p.clone();
            drop(&mut q, sum.expect("a sum"));
            let r = check(&q);
            let v = r.of(RuleId::RouterLoss).next();
            let v = v.unwrap_or_else(|| panic!("{policy}\n{r}"));
            assert!(v.message.contains("reaches no weight"), "{policy}: {v:?}");
            found += 1;
        }
        assert_eq!(found, 2);
        let mut q = p.clone();
        for (grad, _) in launches(&p, "z_loss_backward") {
            drop(&mut q, grad);
        }
        let r = check(&q);
        let v = r.of(RuleId::RouterLoss).next().expect("found");
        assert!(v.message.contains("does not differentiate"), "{v:?}");
    }
}

/// The loss of one layer is differentiated twice, and that of another layer not at all, as with
/// recomputation that repeats the side effects of forward.
#[test]
fn a_loss_that_is_differentiated_twice() {
    let p = experts("native", &[]);
    let [(first, _), (second, _)] = launches(&p, "z_loss_backward")[..] else {
        panic!("two layers")
    };
    let logits = |i: InstrId| match p.instrs[i.index()].op {
        Op::Launch { reads, .. } => reads as usize + 1,
        _ => unreachable!("a launch"),
    };
    let mut q = p.clone();
    q.accesses[logits(second)] = p.accesses[logits(first)];
    let r = check(&q);
    let mut again = (r.of(RuleId::RouterLoss)).filter(|v| v.message.contains("again after"));
    assert!(again.any(|v| v.instr == Some(second)), "{r}");
}
