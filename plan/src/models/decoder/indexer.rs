//! An indexer chooses the positions that a query attends to (DeepSeek-V3.2, MiniMax-M3). Its choice
//! has no gradient.

use super::norm::Norm;
use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, OpKind, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

pub(super) struct Indexer {
    q: Layer,
    k: Layer,
    norms: Norms,
    /// Projection to the weights of its heads; `None`: all heads have the same weight.
    weights: Option<Layer>,
}

enum Norms {
    /// A LayerNorm of keys.
    Keys(Layer),
    /// Norms of the model's kind, of queries and keys.
    Both(Norm, Norm),
}

impl Indexer {
    /// Declares that of latent attention, whose queries are made of compressed ones.
    pub(super) fn of_latent(d: &mut Declare, at: ModuleId, m: &Model) -> Self {
        let (h, of) = (m.hidden, &m.options.latent);
        let (n, dim) = (of.index_n_heads, of.index_head_dim);
        let new = Self {
            q: d.linear(
                at,
                ("index_q", "self_attn.indexer.wq_b"),
                [n * dim, of.q_lora_rank],
                false,
            ),
            k: d.linear(at, ("index_k", "self_attn.indexer.wk"), [dim, h], false),
            norms: Norms::Keys({
                let names = ("index_k_norm", "self_attn.indexer.k_norm");
                d.norm(at, names, dim, true, Order::Declared)
            }),
            weights: Some(d.linear(
                at,
                ("index_weights", "self_attn.indexer.weights_proj"),
                [n, h],
                false,
            )),
        };
        new.untrained(d)
    }

    /// Declares that of attention with separate projections, which reads what attention reads.
    pub(super) fn of_input(d: &mut Declare, at: ModuleId, m: &Model) -> Self {
        let (h, of) = (m.hidden, &m.options.latent);
        let (n, dim) = (of.index_n_heads, of.index_head_dim);
        let q = ("index_q", "self_attn.indexer.q_proj");
        let k = ("index_k", "self_attn.indexer.k_proj");
        let new = Self {
            q: d.linear(at, q, [n * dim, h], false),
            k: d.linear(at, k, [dim, h], false),
            norms: {
                let mut norm = |names| Norm::new(d, at, names, dim, m, Order::Declared);
                Norms::Both(
                    norm(("index_q_norm", "self_attn.indexer.q_norm")),
                    norm(("index_k_norm", "self_attn.indexer.k_norm")),
                )
            },
            weights: None,
        };
        new.untrained(d)
    }

    /// Marks its parameters.
    fn untrained(self, d: &mut Declare) -> Self {
        let norms = match self.norms {
            Norms::Keys(k) => [Some(k), None],
            Norms::Both(q, k) => [q.layer(), k.layer()],
        };
        let layers = [Some(self.q), Some(self.k), self.weights];
        for layer in layers.into_iter().chain(norms).flatten() {
            d.untrained(layer);
        }
        self
    }

    /// Chooses positions by `queries`, of which its queries are made, and the input `y`.
    pub(super) fn choose(&self, b: &mut Builder<'_>, y: ValueId, queries: ValueId) {
        let (batch, seq) = (b.batch(), b.seq());
        let of = b.s.model.options.latent.clone();
        let same = y == queries;
        let y = b.g.detach(y);
        let queries = if same { y } else { b.g.detach(queries) };
        let mut q = b.linear(self.q, queries);
        q =
            b.g.reshape(q, &[batch, seq, of.index_n_heads, of.index_head_dim]);
        let mut k = b.linear(self.k, y);
        match &self.norms {
            Norms::Keys(norm) => k = b.layer_norm(*norm, k),
            Norms::Both(of_q, of_k) => (q, k) = (of_q.apply(b, q), of_k.apply(b, k)),
        }
        let weights = match self.weights {
            Some(layer) => b.linear(layer, y),
            None => {
                let shape = [batch, seq, of.index_n_heads];
                let ones = b.constant("ones", &shape, DType::F32, false);
                b.as_activation(ones)
            }
        };
        let top_k = of.index_topk.min(seq);
        let kind = OpKind::Indexer(op::Indexer { top_k });
        b.compute(kind, &[q, k, weights], &[&[batch, seq, top_k]]);
    }
}
