//! Attention with one learned query, which pools an image into one vector (SigLIP).

use super::norm::Norm;
use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;

/// `nn.MultiheadAttention` of the query to all rows, then a feed-forward layer with a residual
/// connection.
pub(super) struct Pooling {
    module: ModuleId,
    query: Layer,
    /// Projections to the query, and to keys and values. `nn.MultiheadAttention` keeps both in one
    /// matrix.
    q: Layer,
    kv: Layer,
    output: Layer,
    norm: Norm,
    mlp: [Layer; 2],
}

impl Pooling {
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model) -> Self {
        let (h, ffn) = (m.hidden, m.ffn);
        let module = d.module(at, "pooling", ModuleKind::Layer);
        let query = d.module(module, "query", ModuleKind::Layer);
        Self {
            module,
            query: d.parameters(query, "", &[1, 1, h], false),
            q: d.linear(module, ("q", ""), [h, h], true),
            kv: d.linear(module, ("kv", ""), [2 * h, h], true),
            output: d.linear(module, ("out", ""), [h, h], true),
            norm: Norm::new(d, module, ("norm", ""), h, m, Order::Declared),
            mlp: [
                d.linear(module, ("w1", ""), [ffn, h], true),
                d.linear(module, ("w2", ""), [h, ffn], true),
            ],
        }
    }

    /// Pools `[batch, rows, hidden]` to `[batch, hidden]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, rows: ValueId) -> ValueId {
        let (batch, h, heads) = (b.batch(), b.s.model.hidden, b.s.model.heads);
        let zeros = b.constant("zeros", &[batch, 1, h], DType::F32, false);
        let query = b.weight(self.query);
        let query = b.within(self.module, |b| {
            let zeros = b.as_activation(zeros);
            b.g.binary(OpKind::Add, zeros, query)
        });
        let queries = b.linear(self.q, query);
        let both = b.linear(self.kv, rows);
        let out = b.within(self.module, |b| {
            let keys = b.g.slice(both, 2, 0, h);
            let values = b.g.slice(both, 2, h, h);
            let [q, k, v] = [queries, keys, values].map(|x| {
                let n = b.g.value(x).shape[1];
                let x = b.g.reshape(x, &[batch, n, heads, h / heads]);
                b.g.transpose(x, 1, 2)
            });
            let out = b.attention(q, k, v, false);
            let out = b.g.transpose(out, 1, 2);
            b.g.reshape(out, &[batch, 1, h])
        });
        let out = b.linear(self.output, out);
        let y = self.norm.apply(b, out);
        let y = b.linear(self.mlp[0], y);
        let activation = defaults::activation(&b.s.model);
        let y = b.within(self.module, |b| activate(b, activation, y));
        let y = b.linear(self.mlp[1], y);
        b.within(self.module, |b| {
            let sum = b.g.binary(OpKind::Add, out, y);
            b.g.reshape(sum, &[batch, h])
        })
    }
}
