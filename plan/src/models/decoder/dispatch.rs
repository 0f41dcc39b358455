//! How tokens reach the ranks of their experts, and how results come back.
//!
//! Expert-parallel ranks gather the tokens of all, with their weights and choices. Each computes
//! the choices that fall on its experts, and adds up the results of a token; a reduce-scatter adds
//! these partial sums and returns them to the token's rank. All sizes are static: no count has to
//! reach the host, and collectives have the same size on all ranks. Rows are as many as there would
//! be if all tokens chose experts of one rank.

use crate::graph::ValueId;
use crate::ir::{AxisId, CollectiveKind, DeviceMesh, ModelCollective, OpKind, op};
use crate::models::build::Builder;

/// The ranks that divide the experts of a layer.
pub(super) struct Dispatch {
    ranks: u64,
    /// Experts of one rank.
    experts: u64,
}

/// Tokens and their choices.
pub(super) struct Routed {
    /// `[tokens, hidden]`.
    pub(super) x: ValueId,
    /// Weights of the choices, `[tokens, k]`.
    pub(super) weights: ValueId,
    /// Experts of the choices, `[tokens, k]`.
    pub(super) ids: ValueId,
}

impl Dispatch {
    pub(super) fn new(mesh: &DeviceMesh, experts: u64) -> Self {
        let ranks = u64::from(mesh.size(AxisId::EP));
        Self {
            ranks,
            experts: experts / ranks,
        }
    }

    /// Returns the number of experts of this rank.
    pub(super) const fn experts(&self) -> u64 {
        self.experts
    }

    /// Returns the maximum number of choices of `tokens` tokens of all ranks that fall on the
    /// experts of this one.
    pub(super) fn rows(&self, tokens: u64, k: u64) -> u64 {
        tokens * k.min(self.experts)
    }

    /// Returns the average of that number, if it is not the maximum: experts are equally popular.
    pub(super) fn routed(&self, tokens: u64, k: u64) -> Option<u64> {
        (self.ranks > 1).then(|| tokens / self.ranks * k)
    }

    /// Returns the tokens of all ranks, with their weights and the numbers that this rank's experts
    /// have here.
    pub(super) fn send(&self, b: &mut Builder<'_>, of: Routed) -> Routed {
        if self.ranks == 1 {
            return of;
        }
        let sent = {
            let &[tokens, k] = &b.g.value(of.ids).shape[..] else {
                unreachable!("routers choose k experts for each token");
            };
            let kind = OpKind::LocalExperts(op::LocalExperts {
                ranks: self.ranks,
                experts: self.experts,
            });
            b.compute(kind, &[of.ids], &[&[self.ranks * tokens, k]])[0]
        };
        let ids = self.exchange(b, CollectiveKind::AllToAll, sent);
        let weights = self.exchange(b, CollectiveKind::AllGather, of.weights);
        let x = self.exchange(b, CollectiveKind::AllGather, of.x);
        for v in [of.ids, of.weights, sent] {
            b.g.release(v);
        }
        Routed { x, weights, ids }
    }

    /// Returns to each rank its own tokens' results, added up in the order of ranks.
    pub(super) fn combine(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        if self.ranks == 1 {
            return y;
        }
        let all = self.exchange(b, CollectiveKind::ReduceScatter, y);
        b.g.release(y);
        all
    }

    fn exchange(&self, b: &mut Builder<'_>, kind: CollectiveKind, v: ValueId) -> ValueId {
        let mut shape = b.g.value(v).shape.clone();
        match kind {
            CollectiveKind::AllGather => shape[0] *= self.ranks,
            CollectiveKind::ReduceScatter => shape[0] /= self.ranks,
            CollectiveKind::AllReduce | CollectiveKind::AllToAll => {}
        }
        let axis = AxisId::EP;
        b.g.collective(ModelCollective { kind, axis }, v, &shape)
    }
}
