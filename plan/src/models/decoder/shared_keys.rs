//! Attention with one head of keys that are also the values (DeepSeek-V4).
//!
//! Layers with a compressor have an additional key for every few positions. In the plan, these keys
//! replace the first keys, attention is priced with a window that includes them, and a sigmoid
//! weights positions, where DeepSeek-V4 has a softmax over them. The plan does not rotate results
//! back.

use super::norm::Norm;
use super::{normalized, scaled};
use crate::config::{IndexerType, Model, Norm as NormKind};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::rope::Rope;

pub(super) struct SharedKeys {
    pub(super) module: ModuleId,
    /// Input norm.
    pub(super) norm: Option<Norm>,
    q_down: Layer,
    q_norm: Norm,
    q_up: Layer,
    head_norm: Norm,
    kv: Layer,
    kv_norm: Norm,
    sinks: Layer,
    /// Projections of groups of heads, and what mixes their results.
    groups: Vec<Layer>,
    output: Layer,
    compressor: Option<Compressor>,
    indexer: Option<Indexer>,
}

/// Compression of several positions to one key.
struct Compressor {
    /// Positions of one key.
    rate: u64,
    /// Keys that a position takes part in.
    series: u64,
    kv: Layer,
    gate: Layer,
    positions: Layer,
    norm: Norm,
}

/// Chooses among compressed keys. Its choice has no gradient.
struct Indexer {
    keys: Compressor,
    q: Layer,
    weights: Layer,
}

impl SharedKeys {
    /// Declares the attention; returns `None` for models with another attention.
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Option<Self> {
        let o = &m.options;
        if o.attention.output_groups == 0 {
            return None;
        }
        let (h, hd, rank) = (m.hidden, m.head_dim, o.latent.q_lora_rank);
        let at = d.module(block, "attention", ModuleKind::Attention);
        let norm = normalized(m)[0].then(|| {
            let names = ("norm", "input_layernorm");
            Norm::new(d, at, names, h, m, Order::First)
        });
        let mut plain = m.clone();
        plain.options.norm = NormKind::RmsNoWeight;
        let q_down = d.linear(at, ("q_a", "self_attn.q_a_proj"), [rank, h], false);
        let own =
            |d: &mut Declare, name, width| Norm::new(d, at, (name, ""), width, m, Order::Declared);
        let q_norm = own(d, "q_a_norm", rank);
        let q_up = d.linear(
            at,
            ("q_b", "self_attn.q_b_proj"),
            [m.heads * hd, rank],
            false,
        );
        let head_norm = Norm::new(d, at, ("q_norm", ""), hd, &plain, Order::Declared);
        let kv = d.linear(at, ("kv", "self_attn.kv_proj"), [hd, h], false);
        let kv_norm = own(d, "kv_norm", hd);
        let sinks = d.module(at, "sinks", ModuleKind::Layer);
        let sinks = d.parameters(sinks, "", &[m.heads], false);
        let width = m.heads * hd / o.attention.output_groups;
        let group = |n: u64| {
            let name = format!("o_a_{n}");
            d.linear(at, (&name, ""), [o.attention.output_rank, width], false)
        };
        let groups: Vec<Layer> = (0..o.attention.output_groups).map(group).collect();
        let mixed = o.attention.output_groups * o.attention.output_rank;
        let output = d.linear(at, ("o_b", "self_attn.o_b_proj"), [h, mixed], false);
        let layer = d.layer();
        let rate = o.layers.compress_rates.get(layer).copied().unwrap_or(0);
        let chooses = o.latent.indexer_type(layer) == IndexerType::Full;
        let series = 1 + u64::from(chooses);
        let compressor =
            (rate > 0).then(|| Compressor::new(d, at, "compressor", [rate, series, hd], m));
        let indexer = (rate > 0 && chooses).then(|| {
            let (n, dim) = (o.latent.index_n_heads, o.latent.index_head_dim);
            let keys = Compressor::new(d, at, "indexer", [rate, series, dim], m);
            let q = d.linear(at, ("index_q", ""), [n * dim, rank], false);
            let weights = d.linear(at, ("index_weights", ""), [n, h], false);
            let norm = keys.norm.layer();
            let all = [keys.kv, keys.gate, keys.positions, q, weights];
            for layer in all.into_iter().chain(norm) {
                d.untrained(layer);
            }
            Indexer { keys, q, weights }
        });
        Some(Self {
            module: at,
            norm,
            q_down,
            q_norm,
            q_up,
            head_norm,
            kv,
            kv_norm,
            sinks,
            groups,
            output,
            compressor,
            indexer,
        })
    }

    /// Applies attention to `y`. Returns the residual update.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        rope: Option<Rope>,
        window: Option<u64>,
    ) -> ValueId {
        let (batch, seq) = (b.batch(), b.seq());
        let (heads, hd) = (b.s.model.heads, b.s.model.head_dim);
        let rotate = |b: &mut Builder<'_>, x| rope.map_or(x, |rope| rope.rotate(b, x));
        b.within(self.module, |b| {
            let small = b.linear(self.q_down, y);
            let small = self.q_norm.apply(b, small);
            if let Some(indexer) = &self.indexer {
                indexer.choose(b, y, small);
            }
            let q = b.linear(self.q_up, small);
            let q = b.g.reshape(q, &[batch, seq, heads, hd]);
            let q = self.head_norm.apply(b, q);
            let q = b.g.transpose(q, 1, 2);
            let q = rotate(b, q);
            let kv = b.linear(self.kv, y);
            let kv = self.kv_norm.apply(b, kv);
            let kv = b.g.reshape(kv, &[batch, 1, seq, hd]);
            let mut kv = rotate(b, kv);
            if let Some(compressor) = &self.compressor
                && let Some(more) = compressor.forward(b, y)
            {
                let n = b.g.value(more).shape[1];
                let more = b.g.reshape(more, &[batch, 1, n, hd]);
                let rest = b.g.slice(kv, 2, n, seq - n);
                kv = b.g.cat(&[more, rest], 2);
            }
            let kind = op::BiasedAttention {
                causal: true,
                scale: Real(1.0 / (hd as f64).sqrt()),
                window: window.unwrap_or(0),
            };
            let sinks = b.weight(self.sinks);
            let a = b.biased_attention([q, kv, kv], sinks, kind);
            let t = b.g.transpose(a, 1, 2);
            let t = b.g.reshape(t, &[batch, seq, heads * hd]);
            let width = heads * hd / self.groups.len() as u64;
            let of_group = |(n, &layer): (u64, &Layer)| {
                let part = b.g.slice(t, 2, n * width, width);
                let part = b.g.make_contiguous(part);
                b.linear(layer, part)
            };
            let parts: Vec<ValueId> = (0..).zip(&self.groups).map(of_group).collect();
            let all = b.g.cat(&parts, 2);
            let o = b.linear(self.output, all);
            scaled(b, o, b.s.model.options.residual_multiplier)
        })
    }
}

impl Compressor {
    fn new(
        d: &mut Declare,
        at: ModuleId,
        name: &str,
        [rate, series, width]: [u64; 3],
        m: &Model,
    ) -> Self {
        let (h, wide) = (m.hidden, series * width);
        let at = d.module(at, name, ModuleKind::Layer);
        let kv = d.linear(at, ("kv", ""), [wide, h], false);
        let gate = d.linear(at, ("gate", ""), [wide, h], false);
        let positions = d.module(at, "positions", ModuleKind::Layer);
        let positions = d.parameters(positions, "", &[rate, wide], false);
        let norm = Norm::new(d, at, ("norm", ""), width, m, Order::Declared);
        Self {
            rate,
            series,
            kv,
            gate,
            positions,
            norm,
        }
    }

    /// Returns the keys, `[batch, keys, width]`; `None` if the sequence has too few positions.
    fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> Option<ValueId> {
        let (batch, seq) = (b.batch(), b.seq());
        let (rate, n) = (self.rate, seq / self.rate);
        if n == 0 {
            return None;
        }
        let kv = b.linear(self.kv, y);
        let gate = b.linear(self.gate, y);
        let wide = b.g.value(kv).cols();
        let width = wide / self.series;
        let positions = b.weight(self.positions);
        let [kv, gate] = [kv, gate].map(|v| {
            let used = b.g.slice(v, 1, 0, n * rate);
            let used = b.g.make_contiguous(used);
            b.g.reshape(used, &[batch, n, rate, wide])
        });
        let gate = b.g.binary(OpKind::Add, gate, positions);
        let gate = b.g.unary(OpKind::Sigmoid, gate);
        let weighted = b.g.binary(OpKind::Mul, kv, gate);
        let first = b.g.transpose(weighted, 1, 2);
        let first = b.g.transpose(first, 0, 1);
        let first = b.g.make_contiguous(first);
        let sum = b.compute(OpKind::SumLeading, &[first], &[&[batch, n, wide]])[0];
        let sum = match self.series {
            1 => sum,
            _ => {
                let parts = b.g.split(sum, 2, self.series);
                b.g.binary(OpKind::Add, parts[0], parts[1])
            }
        };
        debug_assert_eq!(b.g.value(sum).cols(), width);
        Some(self.norm.apply(b, sum))
    }
}

impl Indexer {
    /// Chooses keys by compressed queries `small` and the input `y`.
    fn choose(&self, b: &mut Builder<'_>, y: ValueId, small: ValueId) {
        let (batch, seq) = (b.batch(), b.seq());
        let of = b.s.model.options.latent.clone();
        let (y, small) = (b.g.detach(y), b.g.detach(small));
        let Some(keys) = self.keys.forward(b, y) else {
            return;
        };
        let n = b.g.value(keys).shape[1];
        let q = b.linear(self.q, small);
        let q =
            b.g.reshape(q, &[batch, seq, of.index_n_heads, of.index_head_dim]);
        let weights = b.linear(self.weights, y);
        let top_k = of.index_topk.min(n);
        let kind = OpKind::Indexer(op::Indexer { top_k });
        b.compute(kind, &[q, keys, weights], &[&[batch, seq, top_k]]);
    }
}
