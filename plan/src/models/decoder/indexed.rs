//! Experts with the calls of PyTorch that torchtitan and transformers use: rows are copied by
//! indices, and results of experts are saved for the gradients of the weights of choices.

use super::dispatch::Routed;
use super::experts::{Experts, Rows, scores_before, weighted};
use crate::graph::ValueId;
use crate::ir::{DType, Indexing, MoeStage, OpKind, Real, op};
use crate::models::build::Builder;

/// The number of rows of an expert is rounded up to a multiple of this for `torch._grouped_mm`
/// (`TOKEN_GROUP_ALIGN_SIZE_M` of torchtitan, for bf16).
const ALIGN: u64 = 8;

/// Calls of `grouped_mm_experts_forward` of transformers around those that the graph has: `arange`,
/// `argsort` and its inverse, `histc`, `cumsum`, indices of tokens and weights.
const TRANSFORMERS_CALLS: u8 = 10;

/// Calls for the mask of rows, without the one that is in the graph: `clamp_` of the numbers of
/// experts.
const MASK_CALLS: u8 = 1;

impl Experts {
    /// Computes the weighted sum of the routed experts' results, `[tokens, hidden]`, as
    /// `grouped_mm_experts_forward` does: rows are sorted by expert, and results, multiplied by
    /// their weights, sorted back and added up.
    pub(super) fn of_transformers(&self, b: &mut Builder<'_>, of: Routed) -> ValueId {
        let Routed { x, weights, ids } = of;
        let &[tokens, k] = &b.g.value(ids).shape[..] else {
            unreachable!("tokens have k choices each");
        };
        let ([offsets, position], place, x) = self.dispatch().locally(b, |b| {
            let sorted = self.dispatch().sort(b, ids, TRANSFORMERS_CALLS);
            let place = b.g.reshape(sorted[1], &[tokens * k, 1]);
            let x = b.permute(Indexing::Index, [x, sorted[1]], tokens * k);
            (sorted, place, x)
        });
        let mask = row_mask(b, tokens * k);
        let x = match mask {
            Some(mask) => b.g.compute_into(OpKind::MaskRows, &[x, mask], x),
            None => x,
        };
        let weigh = |b: &mut Builder<'_>, rows| {
            let each = b.g.reshape(weights, &[tokens * k, 1]);
            weighted(b, Indexing::Index, rows, [each, place])
        };
        let before = scores_before(b);
        let at = Rows {
            x: if before { weigh(b, x) } else { x },
            place,
            offsets,
            used: None,
            mask,
        };
        let mut out = self.matmuls(b, &at, None);
        if !before {
            out = weigh(b, out);
        }
        // `weighted_out[inv_perm].view(tokens, k, hidden).sum(dim=1)`: the rows are in the order of
        // the choices before they are added up.
        let each = b.unpermute(Indexing::Index, [out, place], tokens * k);
        let order = b.constant("rows", &[tokens * k], DType::I64, false);
        let order = b.g.reshape(order, &[tokens, k]);
        let y = b.unpermute(Indexing::Own, [each, order], tokens);
        let inputs = [weights, ids, offsets, position, x].into_iter();
        for v in inputs.chain(mask) {
            b.g.release(v);
        }
        y
    }

    /// Does so as `MoE.forward` of torchtitan: each token is copied once per choice, the copies are
    /// exchanged and sorted by expert, with room for the alignment of [`ALIGN`] rows; results take
    /// the same way back and are added up. Either the copies or what comes back is multiplied by
    /// weights (`score_before_experts`).
    pub(super) fn of_torchtitan(&self, b: &mut Builder<'_>, of: Routed) -> ValueId {
        let (tokens, choices) = (b.g.value(of.ids).shape[0], b.g.value(of.ids).numel());
        let (placed, mut each) = b.in_stage(MoeStage::Preprocess, |b| {
            let placed = self.dispatch().place(b, self.module, of.ids);
            let each = b.permute(Indexing::Index, [of.x, placed.position], placed.rows);
            (placed, each)
        });
        let (rows, position) = (placed.rows, placed.position);
        let weigh = |b: &mut Builder<'_>, rows| {
            let each = b.g.reshape(of.weights, &[choices, 1]);
            let to = b.g.reshape(position, &[choices, 1]);
            weighted(b, Indexing::Index, rows, [each, to])
        };
        let before = scores_before(b);
        if before {
            each = weigh(b, each);
        }
        let got = self.dispatch().exchange_rows(b, &placed, each, None);
        let [offsets, place] = self.dispatch().sort(b, got.ids, placed.calls);
        let padded = rows + self.dispatch().experts() * ALIGN;
        let x = b.permute(Indexing::IndexCopy, [got.x, place], padded);
        b.g.release(got.x);
        let at = Rows {
            x,
            place,
            offsets,
            used: Some(placed.used),
            mask: None,
        };
        let out = self.matmuls(b, &at, None);
        let y = b.unpermute(Indexing::Index, [out, place], rows);
        b.g.release(out);
        let back = self.dispatch().return_rows(b, y, got.counts);
        let made = if before { back } else { weigh(b, back) };
        let y = b.unpermute(Indexing::IndexAdd, [made, position], tokens);
        for v in [
            of.weights, of.ids, got.ids, offsets, place, position, x, back,
        ] {
            b.g.release(v);
        }
        y
    }
}

/// Returns the mask of the rows of experts that other ranks have, `[rows, 1]`, if there is one. The
/// ranks of a plan have all experts then.
fn row_mask(b: &mut Builder<'_>, rows: u64) -> Option<ValueId> {
    b.s.model.options.experts.mask_expert_rows.then(|| {
        let zero = OpKind::Fill(op::Fill { value: Real(0.0) });
        let mask = b.g.compute(zero, &[], &[(&[rows, 1], DType::U8)])[0];
        b.g.dispatches(MASK_CALLS);
        mask
    })
}
