//! A stack of post-norm `nn.TransformerEncoderLayer(batch_first=True, dropout=0)` with ReLU, then a projection.

use super::build::Builder;
use super::loss;
use crate::graph::ValueId;
use crate::ir::{ModuleKind, OpKind};

/// Forward of one micro-batch, as `F.multi_head_attention_forward` orders it: attention works on `[seq, batch, hidden]`, so the
/// input is copied into that order and the packed projection is made contiguous by part.
pub(super) fn forward(b: &mut Builder<'_>) {
    let (batch, seq, d) = (b.batch(), b.seq(), b.s.model.hidden);
    let mut h = b.constant("input", &[batch, seq, d], b.dtype, true);
    for layer in 0..b.tree.blocks.count {
        h = block(b, layer, h);
    }
    let head = b.tree.outer(ModuleKind::Head);
    let out = b.linear(head, h);
    loss::mean_square(b, out);
}

fn block(b: &mut Builder<'_>, layer: u32, x: ValueId) -> ValueId {
    let [
        block,
        attention,
        in_proj,
        out_proj,
        norm1,
        mlp,
        linear1,
        linear2,
        norm2,
    ] = b.tree.block(layer);
    let (batch, seq, d) = (b.batch(), b.seq(), b.s.model.hidden);
    let (heads, hd) = (b.s.model.heads, b.s.model.head_dim);

    let x1 = b.within(attention, |b| {
        let t = b.g.transpose(x, 0, 1);
        let packed = b.linear_unfused(in_proj, t);
        let parts = b.g.reshape(packed, &[seq * batch, 3, d]);
        let parts = b.g.transpose(parts, 0, 1);
        let parts = b.g.make_contiguous(parts);
        let qkv = b.g.split(parts, 0, 3);
        let [q, k, v] = [qkv[0], qkv[1], qkv[2]].map(|p| {
            let p = b.g.reshape(p, &[seq, batch * heads, hd]);
            let p = b.g.transpose(p, 0, 1);
            b.g.reshape(p, &[batch, heads, seq, hd])
        });
        let a = b.attention(q, k, v, false);
        let a = b.g.transpose(a, 0, 2);
        let a = b.g.transpose(a, 1, 2);
        let a = b.g.reshape(a, &[seq * batch, d]);
        let o = b.linear(out_proj, a);
        // The function's local variables.
        b.g.release(parts);
        b.g.release(a);
        let o = b.g.reshape(o, &[seq, batch, d]);
        let o = b.g.transpose(o, 0, 1);
        b.g.binary(OpKind::Add, x, o)
    });
    let x1 = b.layer_norm(norm1, x1);
    let x2 = b.within(mlp, |b| {
        let up = b.linear(linear1, x1);
        let act = b.g.unary(OpKind::Relu, up);
        let down = b.linear(linear2, act);
        b.g.binary(OpKind::Add, x1, down)
    });
    let out = b.layer_norm(norm2, x2);
    b.within(block, |b| {
        b.g.release(x);
        b.g.release(x1);
    });
    out
}
