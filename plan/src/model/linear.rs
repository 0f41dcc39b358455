//! A stack of `Linear(hidden, hidden)` with ReLU on `micro_batch * seq_len` rows.

use super::build::Builder;
use super::loss;
use crate::ir::OpKind;

/// Forward of one micro-batch.
pub(super) fn forward(b: &mut Builder<'_>) {
    let rows = b.batch() * b.seq();
    let mut x = b.constant("input", &[rows, b.s.model.hidden], b.dtype, true);
    for layer in 0..b.tree.blocks.count {
        let [block] = b.tree.block(layer);
        let y = b.linear(block, x);
        let y = b.within(block, |b| b.g.unary(OpKind::Relu, y));
        b.g.release(x);
        x = y;
    }
    loss::mean_square(b, x);
}
