//! A stack of post-norm `nn.TransformerEncoderLayer(batch_first=True, dropout=0)` with ReLU, then a
//! projection.

use super::build::Builder;
use super::declare::{Declare, Layer, Order, Weights};
use super::spec::{Conflict, Defaults, FamilySpec, Inputs, Mask};
use super::{Forward, loss};
use crate::config::{Bias, Family, Model};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};

pub(super) const SPEC: FamilySpec = FamilySpec {
    family: Family::Encoder,
    name: "encoder",
    keys: &["hidden", "heads", "ffn", "norm_eps"],
    defaults: Defaults {
        bias: Bias::All,
        tie_embeddings: false,
        ffn: |hidden| 4 * hidden,
        ffn_multiple: 1,
        max_seq_len: |_| None,
        seq_len: |_| 512,
    },
    inputs: Inputs::Features,
    attention: Some(Mask::Full),
    tensor_parallel: None,
    expert_parallel: None,
    torch_modules: true,
    keeps_type: false,
    weights: Weights::Uniform,
    hf: &[],
    dimensions: |m| vec![("hidden", m.hidden), ("ffn", m.ffn)],
    check: Conflict::packed_projections,
    declare: |d, m| Box::new(Encoder::new(d, m)),
};

struct Encoder {
    blocks: Vec<Block>,
    head: Layer,
}

struct Block {
    module: ModuleId,
    attention: ModuleId,
    in_proj: Layer,
    out_proj: Layer,
    norm1: Layer,
    mlp: ModuleId,
    linear1: Layer,
    linear2: Layer,
    norm2: Layer,
}

impl Encoder {
    fn new(d: &mut Declare, m: &Model) -> Self {
        Self {
            blocks: d.blocks(m, "", Block::new),
            head: d.head(("output", ""), [m.hidden, m.hidden], m.bias == Bias::All),
        }
    }
}

impl Block {
    fn new(d: &mut Declare, module: ModuleId, m: &Model) -> Self {
        let (h, ffn, bias) = (m.hidden, m.ffn, m.bias == Bias::All);
        let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
        let attention = d.module(module, "attention", ModuleKind::Attention);
        let in_proj = d.linear(attention, ("in_proj", ""), [q + 2 * kv, h], bias);
        let out_proj = d.linear(attention, ("out_proj", ""), [h, q], bias);
        let norm1 = d.norm(attention, ("norm1", ""), h, true, Order::Last);
        let mlp = d.module(module, "mlp", ModuleKind::Mlp);
        let linear1 = d.linear(mlp, ("linear1", ""), [ffn, h], bias);
        let linear2 = d.linear(mlp, ("linear2", ""), [h, ffn], bias);
        let norm2 = d.norm(mlp, ("norm2", ""), h, true, Order::Last);
        Self {
            module,
            attention,
            in_proj,
            out_proj,
            norm1,
            mlp,
            linear1,
            linear2,
            norm2,
        }
    }

    /// Traces attention in the order of `F.multi_head_attention_forward`: it works on `[seq, batch,
    /// hidden]`, so the input is copied into that order and each part of the packed projection is
    /// made contiguous.
    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let (batch, seq, d) = (b.batch(), b.seq(), b.s.model.hidden);
        let (heads, hd) = (b.s.model.heads, b.s.model.head_dim);
        let x1 = b.within(self.attention, |b| {
            let t = b.g.transpose(x, 0, 1);
            let packed = b.linear_unfused(self.in_proj, t);
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
            let o = b.linear(self.out_proj, a);
            // The function's local variables.
            b.g.release(parts);
            b.g.release(a);
            let o = b.g.reshape(o, &[seq, batch, d]);
            let o = b.g.transpose(o, 0, 1);
            b.g.binary(OpKind::Add, x, o)
        });
        let x1 = b.layer_norm(self.norm1, x1);
        let x2 = b.within(self.mlp, |b| {
            let up = b.linear(self.linear1, x1);
            let act = b.g.unary(OpKind::Relu, up);
            let down = b.linear(self.linear2, act);
            b.g.binary(OpKind::Add, x1, down)
        });
        let out = b.layer_norm(self.norm2, x2);
        b.within(self.module, |b| {
            b.g.release(x);
            b.g.release(x1);
        });
        out
    }
}

impl Forward for Encoder {
    fn forward(&self, b: &mut Builder<'_>) {
        let shape = [b.batch(), b.seq(), b.s.model.hidden];
        let mut h = b.input(&shape);
        for block in &self.blocks {
            if b.skips(block.module) {
                continue;
            }
            h = block.forward(b, h);
        }
        let out = b.linear(self.head, h);
        loss::mean_square(b, out);
    }
}
