//! Projections of multi-head latent attention (DeepSeek).
//!
//! Keys and values are compressed to `kv_lora_rank` numbers per token, and expanded again for each
//! head. A part of each key, which all heads share, comes from the input directly and is rotated.
//! Values are narrower than queries: they are padded with zeros, which FlashAttention requires, and
//! the result is truncated.

use super::indexer::Indexer;
use super::names::Names;
use super::norm::Norm;
use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::ModuleId;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::rope::Rope;

/// Projections to queries, keys and values.
pub(super) struct Latent {
    query: Query,
    /// `[kv_lora_rank + qk_rope_head_dim, hidden]`.
    kv_down: Layer,
    kv_norm: Norm,
    /// `[heads * (head_dim - qk_rope_head_dim + v_head_dim), kv_lora_rank]`.
    kv_up: Layer,
    indexer: Option<Indexer>,
}

enum Query {
    Whole(Layer),
    Compressed { down: Layer, norm: Norm, up: Layer },
}

impl Latent {
    pub(super) fn new(d: &mut Declare, at: ModuleId, names: &Names, m: &Model) -> Self {
        let (h, of, bias) = (m.hidden, &m.options.latent, m.bias.qkv());
        let (q, rope) = (m.heads * m.head_dim, of.qk_rope_head_dim);
        let query = match of.q_lora_rank {
            0 => Query::Whole(d.linear(at, ("q", names.q), [q, h], false)),
            rank => Query::Compressed {
                down: d.linear(at, ("q_a", "self_attn.q_a_proj"), [rank, h], bias),
                norm: {
                    let names = ("q_a_norm", "self_attn.q_a_layernorm");
                    Norm::new(d, at, names, rank, m, Order::Declared)
                },
                up: d.linear(at, ("q_b", "self_attn.q_b_proj"), [q, rank], false),
            },
        };
        let rank = of.kv_lora_rank;
        let down = ("kv_a", "self_attn.kv_a_proj_with_mqa");
        let kv_down = d.linear(at, down, [rank + rope, h], bias);
        let norm = ("kv_a_norm", "self_attn.kv_a_layernorm");
        let kv_norm = Norm::new(d, at, norm, rank, m, Order::Declared);
        let width = m.heads * (m.head_dim - rope + of.v_head_dim);
        let kv_up = d.linear(at, ("kv_b", "self_attn.kv_b_proj"), [width, rank], false);
        Self {
            query,
            kv_down,
            kv_norm,
            kv_up,
            indexer: (of.has_indexer(d.layer())).then(|| Indexer::of_latent(d, at, m)),
        }
    }

    /// Returns queries, keys and values of `y`, each `[batch, heads, seq, head_dim]`, rotated.
    pub(super) fn project(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        rope: Option<Rope>,
    ) -> [ValueId; 3] {
        let (batch, seq) = (b.batch(), b.seq());
        let m = &b.s.model;
        let (heads, hd, of) = (m.heads, m.head_dim, m.options.latent.clone());
        let (rotated, plain) = (of.qk_rope_head_dim, hd - of.qk_rope_head_dim);
        let rotate = |b: &mut Builder<'_>, x| rope.map_or(x, |rope| rope.rotate(b, x));

        let q = match &self.query {
            Query::Whole(layer) => b.linear(*layer, y),
            Query::Compressed { down, norm, up } => {
                let small = b.linear(*down, y);
                let small = norm.apply(b, small);
                if let Some(indexer) = &self.indexer {
                    indexer.choose(b, y, small);
                }
                b.linear(*up, small)
            }
        };
        let q = b.g.reshape(q, &[batch, seq, heads, hd]);
        let q = b.g.transpose(q, 1, 2);
        let q_plain = b.g.slice(q, 3, 0, plain);
        let q_rotated = b.g.slice(q, 3, plain, rotated);
        let q_rotated = rotate(b, q_rotated);
        let query = b.g.cat(&[q_plain, q_rotated], 3);

        let both = b.linear(self.kv_down, y);
        let small = b.g.slice(both, 2, 0, of.kv_lora_rank);
        let small = self.kv_norm.apply(b, small);
        let kv = b.linear(self.kv_up, small);
        let kv = b.g.reshape(kv, &[batch, seq, heads, plain + of.v_head_dim]);
        let kv = b.g.transpose(kv, 1, 2);
        let k_plain = b.g.slice(kv, 3, 0, plain);
        let mut value = b.g.slice(kv, 3, plain, of.v_head_dim);
        let shared = b.g.slice(both, 2, of.kv_lora_rank, rotated);
        let shared = b.g.reshape(shared, &[batch, seq, 1, rotated]);
        let shared = b.g.transpose(shared, 1, 2);
        let shared = rotate(b, shared);
        // The gradient of a broadcast sums leading dimensions only.
        let shared = b.g.reshape(shared, &[batch, seq, rotated]);
        let shared = b.g.expand(shared, &[heads, batch, seq, rotated]);
        let shared = b.g.transpose(shared, 0, 1);
        let key = b.g.cat(&[k_plain, shared], 3);
        if hd > of.v_head_dim {
            let like = b.g.slice(query, 3, 0, hd - of.v_head_dim);
            let zeros = b.g.fill_like(like, 0.0);
            value = b.g.cat(&[value, zeros], 3);
        }
        [query, key, value]
    }
}
