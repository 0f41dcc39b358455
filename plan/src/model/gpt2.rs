//! GPT-2: LayerNorm with bias, learned positions, fused query-key-value projection, GELU, tied head.

use super::build::Builder;
use super::loss;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};

/// Forward of one micro-batch.
pub(super) fn forward(b: &mut Builder<'_>) {
    let (ids, labels) = loss::tokens(b);
    let positions = b.constant("positions", &[b.seq()], DType::I64, false);
    let embedding = b.tree.outer(ModuleKind::Embedding);
    let (wte, wpe) = (ModuleId(embedding.0 + 1), ModuleId(embedding.0 + 2));
    let mut h = b.within(embedding, |b| {
        let tokens = b.embedding(wte, ids);
        let places = b.embedding(wpe, positions);
        let sum = b.g.binary(OpKind::Add, tokens, places);
        b.g.release(tokens);
        b.g.release(places);
        sum
    });
    for layer in 0..b.tree.blocks.count {
        h = block(b, layer, h);
    }
    let norm = b.tree.outer(ModuleKind::Norm);
    let y = b.layer_norm(norm, h);
    loss::head_and_loss(b, y, labels);
}

fn block(b: &mut Builder<'_>, layer: u32, x: ValueId) -> ValueId {
    let [
        block,
        attention,
        ln1,
        c_attn,
        o_proj,
        mlp,
        ln2,
        c_fc,
        c_proj,
    ] = b.tree.block(layer);
    let (batch, seq) = (b.batch(), b.seq());
    let (heads, hd) = (b.s.model.heads, b.s.model.head_dim);

    let y = b.layer_norm(ln1, x);
    let x1 = b.within(attention, |b| {
        let qkv = b.linear(c_attn, y);
        let parts = b.g.split(qkv, 2, 3);
        let [q, k, v] = [parts[0], parts[1], parts[2]].map(|p| {
            let p = b.g.reshape(p, &[batch, seq, heads, hd]);
            b.g.transpose(p, 1, 2)
        });
        let a = b.attention(q, k, v, true);
        let t = b.g.transpose(a, 1, 2);
        let t = b.g.reshape(t, &[batch, seq, heads * hd]);
        let o = b.linear(o_proj, t);
        b.g.release(qkv);
        b.g.release(t);
        b.g.binary(OpKind::Add, x, o)
    });
    let y = b.layer_norm(ln2, x1);
    let out = b.within(mlp, |b| {
        let up = b.linear(c_fc, y);
        let act = b.g.unary(OpKind::Gelu, up);
        let down = b.linear(c_proj, act);
        b.g.binary(OpKind::Add, x1, down)
    });
    b.within(block, |b| {
        b.g.release(x);
        b.g.release(x1);
    });
    out
}
