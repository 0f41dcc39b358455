//! Losses of the routers of experts.

use crate::config::{AuxLoss, Router};
use crate::graph::ValueId;
use crate::ir::{OpKind, Real, op};
use crate::models::build::Builder;

/// Adds the losses of the routers to the objective of backward, from their logits,
/// `[tokens, experts]` each. They are computed after the last block, by the module of the loss: the
/// blocks' own backward begins later, once.
pub(super) fn add(b: &mut Builder<'_>, logits: &[ValueId]) {
    let module = b.tree.loss();
    b.within(module, |b| {
        for term in terms(b, logits) {
            b.add_to_objective(term);
        }
    });
}

fn terms(b: &mut Builder<'_>, logits: &[ValueId]) -> Vec<ValueId> {
    let of = b.s.model.options.experts.clone();
    let mut terms = Vec::new();
    if of.aux_loss > 0.0 {
        let per_choice = of.aux_loss / of.top_k as f64;
        let (parts, sequences, coefficient) = match of.aux_loss_kind {
            AuxLoss::Pooled => {
                let all = match logits {
                    &[one] => one,
                    _ => b.g.cat(logits, 0),
                };
                (vec![all], 1, of.aux_loss)
            }
            AuxLoss::Layer => (logits.to_vec(), 1, per_choice),
            AuxLoss::Sequence => (logits.to_vec(), b.batch(), per_choice),
        };
        let kind = OpKind::LoadBalance(op::LoadBalance {
            k: of.top_k,
            sequences,
            sigmoid: of.router == Router::Sigmoid,
            scale: Real(coefficient),
        });
        let counts = [sequences, of.experts];
        terms.extend(
            parts
                .into_iter()
                .map(|part| b.compute(kind, &[part], &[&[], &counts])[0]),
        );
    }
    if of.z_loss > 0.0 {
        let scale = Real(of.z_loss);
        let kind = OpKind::ZLoss(op::ZLoss { scale });
        terms.extend(logits.iter().map(|&l| b.compute(kind, &[l], &[&[]])[0]));
    }
    terms
}
