//! Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

use super::build::Builder;
use super::loss;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};

/// Forward of one micro-batch. The order of ops, views and local variables is that of the usual eager PyTorch code.
pub(super) fn forward(b: &mut Builder<'_>) {
    let (ids, labels) = loss::tokens(b);
    let root = b.tree.outer(ModuleKind::Root);
    let embedding = b.tree.outer(ModuleKind::Embedding);
    let (seq, half) = (b.seq(), b.s.model.head_dim / 2);
    let cos = b.constant("rope_cos", &[seq, half], DType::F32, false);
    let sin = b.constant("rope_sin", &[seq, half], DType::F32, false);
    let mut h = b.embedding(embedding, ids);
    let (cos, sin) = b.within(root, |b| (b.g.cast(cos, b.dtype), b.g.cast(sin, b.dtype)));
    for layer in 0..b.tree.blocks.count {
        h = block(b, layer, h, cos, sin);
    }
    let norm = b.tree.outer(ModuleKind::Norm);
    let y = b.rms_norm(norm, h);
    loss::head_and_loss(b, y, labels);
}

fn block(b: &mut Builder<'_>, layer: u32, x: ValueId, cos: ValueId, sin: ValueId) -> ValueId {
    let (attention_modules, norms, mlp_modules) = modules(b, layer);
    let [block, attention, norm1, q_, k_, v_, o_] = attention_modules;
    let [mlp, norm2, w1, w3, w2] = mlp_modules;
    let (batch, seq) = (b.batch(), b.seq());
    let (heads, kv, hd) = (b.s.model.heads, b.s.model.kv_heads, b.s.model.head_dim);

    let y1 = b.rms_norm(norm1, x);
    let (x1, locals) = b.within(attention, |b| {
        let project = |b: &mut Builder<'_>, m, heads, norm: Option<ModuleId>| {
            let p = b.linear(m, y1);
            let mut p = b.g.reshape(p, &[batch, seq, heads, hd]);
            if let Some(norm) = norm {
                p = b.rms_norm(norm, p);
            }
            b.g.transpose(p, 1, 2)
        };
        let q = project(b, q_, heads, norms.map(|n| n[0]));
        let k = project(b, k_, kv, norms.map(|n| n[1]));
        let v = project(b, v_, kv, None);
        let (q_rope, k_rope) = (rope(b, q, cos, sin), rope(b, k, cos, sin));
        // `q, k = rope(q), rope(k)`: the unrotated ones live until both are done.
        b.g.release(q);
        b.g.release(k);
        let a = b.attention(q_rope, k_rope, v, true);
        let t = b.g.transpose(a, 1, 2);
        let t = b.g.reshape(t, &[batch, seq, heads * hd]);
        let o = b.linear(o_, t);
        (b.g.binary(OpKind::Add, x, o), [q_rope, k_rope, v, a])
    });
    let y2 = b.rms_norm(norm2, x1);
    b.g.release(y1);
    let out = b.within(mlp, |b| {
        let gate = b.linear(w1, y2);
        let gate = b.g.unary(OpKind::Silu, gate);
        let up = b.linear(w3, y2);
        let product = b.g.binary(OpKind::Mul, gate, up);
        let down = b.linear(w2, product);
        b.g.binary(OpKind::Add, x1, down)
    });
    b.within(block, |b| {
        for v in locals.into_iter().chain([x, x1, y2]) {
            b.g.release(v);
        }
    });
    out
}

/// A block's modules: attention's up to its last product, the norms of queries and keys, the feed-forward layer's.
fn modules(b: &Builder<'_>, layer: u32) -> ([ModuleId; 7], Option<[ModuleId; 2]>, [ModuleId; 5]) {
    if b.s.model.qk_norm {
        let [b, a, n, q, k, v, o, qn, kn, mlp, n2, w1, w3, w2] = b.tree.block(layer);
        ([b, a, n, q, k, v, o], Some([qn, kn]), [mlp, n2, w1, w3, w2])
    } else {
        let [b, a, n, q, k, v, o, mlp, n2, w1, w3, w2] = b.tree.block(layer);
        ([b, a, n, q, k, v, o], None, [mlp, n2, w1, w3, w2])
    }
}

/// Rotates pairs of the two halves of the last dimension.
fn rope(b: &mut Builder<'_>, x: ValueId, cos: ValueId, sin: ValueId) -> ValueId {
    let g = &mut b.g;
    let halves = g.split(x, 3, 2);
    let (x1, x2) = (halves[0], halves[1]);
    let (a, c) = (
        g.binary(OpKind::Mul, x1, cos),
        g.binary(OpKind::Mul, x2, sin),
    );
    let first = g.binary(OpKind::Sub, a, c);
    let (a, c) = (
        g.binary(OpKind::Mul, x2, cos),
        g.binary(OpKind::Mul, x1, sin),
    );
    let second = g.binary(OpKind::Add, a, c);
    g.cat(&[first, second], 3)
}
