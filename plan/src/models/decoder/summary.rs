//! Sums of positions, which are additional keys for the attention of an encoder (LongT5).

use super::norm::Norm;
use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{ModuleId, OpKind};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Order};

/// Norm of the sums. The plan puts the sums in place of the first positions, and prices attention
/// by a window that has room for their keys and values.
pub(super) struct Summary(Norm);

impl Summary {
    /// Declares the norm of the sums, if the model has any.
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model) -> Option<Self> {
        let names = ("summary_norm", "");
        (m.summaries(u64::MAX) > 0)
            .then(|| Self(Norm::new(d, at, names, m.hidden, m, Order::Declared)))
    }

    /// Returns the input of keys and values, `[batch, seq, hidden]` like `y`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let (batch, seq, width) = (b.batch(), b.seq(), b.g.value(y).cols());
        let block = (b.s.model.options.context.encoder.as_ref()).map_or(0, |of| of.summary_block);
        let n = b.s.model.summaries(seq);
        let used = b.g.slice(y, 1, 0, n * block);
        let used = b.g.make_contiguous(used);
        let blocks = b.g.reshape(used, &[batch, n, block, width]);
        let first = b.g.transpose(blocks, 1, 2);
        let first = b.g.transpose(first, 0, 1);
        let first = b.g.make_contiguous(first);
        let sum = b.compute(OpKind::SumLeading, &[first], &[&[batch, n, width]])[0];
        let sum = self.0.apply(b, sum);
        let rest = b.g.slice(y, 1, n, seq - n);
        b.g.cat(&[sum, rest], 1)
    }
}
