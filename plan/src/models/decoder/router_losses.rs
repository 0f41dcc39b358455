//! Losses of the routers of experts.

use super::experts::Logits;
use crate::config::{AuxLoss, Router};
use crate::ir::{OpKind, Real, op};
use crate::models::build::Builder;

/// Adds the losses of the routers to what backward differentiates.
pub(super) fn add(b: &mut Builder<'_>, logits: &[Logits]) {
    let of = b.s.model.options.experts.clone();
    let batch = b.batch();
    let module = b.tree.loss();
    let mut terms = Vec::new();
    if of.aux_loss > 0.0 {
        let (parts, sequences, coefficient) = match of.aux_loss_kind {
            AuxLoss::Pooled => {
                let all = logits.iter().map(|l| l.value).collect::<Vec<_>>();
                let all = match all[..] {
                    [one] => one,
                    _ => b.within(module, |b| b.g.cat(&all, 0)),
                };
                let pooled = Logits { module, value: all };
                (vec![pooled], 1, of.aux_loss)
            }
            AuxLoss::Layer => (logits.to_vec(), 1, of.aux_loss / of.top_k as f64),
            AuxLoss::Sequence => (logits.to_vec(), batch, of.aux_loss / of.top_k as f64),
        };
        let kind = OpKind::LoadBalance(op::LoadBalance {
            k: of.top_k,
            sequences,
            sigmoid: of.router == Router::Sigmoid,
            scale: Real(coefficient),
        });
        let counts = [sequences, of.experts];
        for part in parts {
            let of_part = b.within(part.module, |b| {
                b.compute(kind, &[part.value], &[&[], &counts])
            });
            terms.push(of_part[0]);
        }
    }
    if of.z_loss > 0.0 {
        let kind = OpKind::ZLoss(op::ZLoss {
            scale: Real(of.z_loss),
        });
        for part in logits {
            let z = b.within(part.module, |b| b.compute(kind, &[part.value], &[&[]]));
            terms.push(z[0]);
        }
    }
    for term in terms {
        b.add_to_objective(term);
    }
}
