//! Blocks of attention and a feed-forward layer that several layers share (Zamba 2). Their input is
//! the residual stream concatenated with the embedded tokens, and each layer has separate adapters
//! for them. Their output is added to the input of the layer's state-space part.

use super::norm::Norm;
use crate::config::{Model, SharedBlock as Sizes};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, ScoreMod};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;
use crate::models::rope::Rope;

pub(super) struct SharedBlock {
    shared: Shared,
    /// Adapters of queries, keys and values.
    attention: Option<[Adapter; 3]>,
    /// Adapter of gate and up.
    mlp: Adapter,
    /// Output projection.
    output: Layer,
}

/// Weights that layers share.
struct Shared {
    module: ModuleId,
    norm: Norm,
    /// Queries, keys and values.
    qkv: [Layer; 3],
    o: Layer,
    mlp_norm: Norm,
    gate_up: Layer,
    down: Layer,
}

/// Two projections with a small width between them.
struct Adapter([Layer; 2]);

impl Shared {
    fn new(d: &mut Declare, block: ModuleId, m: &Model, of: &Sizes) -> Self {
        let (h, wide) = (m.hidden, 2 * m.hidden);
        let [q, kv] = [m.heads, m.kv_heads].map(|n| n * m.head_dim);
        let module = d.module(block, "shared", ModuleKind::Attention);
        let norm = Norm::new(d, module, ("norm", ""), wide, m, Order::First);
        let mut linear = |name, hf: &str, shape, bias| {
            let hf = ["shared_transformer.", hf].concat();
            d.linear(module, (name, &hf), shape, bias)
        };
        let qkv = [
            linear("q", "self_attn.q_proj", [q, wide], false),
            linear("k", "self_attn.k_proj", [kv, wide], false),
            linear("v", "self_attn.v_proj", [kv, wide], false),
        ];
        let o = linear("o", "self_attn.o_proj", [h, q], false);
        let gate_up = linear("w13", "feed_forward.gate_up_proj", [2 * of.ffn, h], of.bias);
        let down = linear("w2", "feed_forward.down_proj", [h, of.ffn], of.bias);
        Self {
            module,
            norm,
            qkv,
            o,
            mlp_norm: Norm::new(d, module, ("mlp_norm", ""), h, m, Order::Declared),
            gate_up,
            down,
        }
    }
}

impl Adapter {
    fn new(d: &mut Declare, at: ModuleId, name: &str, [input, rank, output]: [u64; 3]) -> Self {
        let [first, second] = ["a", "b"].map(|part| format!("{name}_{part}"));
        Self([
            d.linear(at, (&first, ""), [rank, input], false),
            d.linear(at, (&second, ""), [output, rank], false),
        ])
    }

    /// Adds the adapter's output for `x` to `y`.
    fn add(&self, b: &mut Builder<'_>, x: ValueId, y: ValueId) -> ValueId {
        let small = b.linear(self.0[0], x);
        let more = b.linear(self.0[1], small);
        b.g.binary(OpKind::Add, y, more)
    }
}

impl SharedBlock {
    /// Declares that of a layer as the first modules of its block; `None` for layers without one.
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model, layer: usize) -> Option<Self> {
        if !m.layer_type(layer).has_shared_block() {
            return None;
        }
        let of = m.options.shared_block.as_ref()?;
        let from = m.block_of(layer);
        let shared = d.sharing(from, |d| Shared::new(d, block, m, of));
        let (h, wide, rank) = (m.hidden, 2 * m.hidden, of.adapter_rank);
        let [q, kv] = [m.heads, m.kv_heads].map(|n| n * m.head_dim);
        let at = d.module(block, "adapters", ModuleKind::Layer);
        Some(Self {
            shared,
            attention: of.attention_adapters.then(|| {
                [("q", q), ("k", kv), ("v", kv)]
                    .map(|(name, width)| Adapter::new(d, at, name, [wide, rank, width]))
            }),
            mlp: Adapter::new(d, at, "gate_up", [h, rank, 2 * of.ffn]),
            output: d.linear(block, ("linear", "linear"), [h, h], false),
        })
    }

    /// Returns the update of the layer's input `x`. `tokens` are the embedded tokens.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        tokens: ValueId,
        rope: Option<Rope>,
    ) -> ValueId {
        let of = &self.shared;
        let (batch, seq, hd) = (b.batch(), b.seq(), b.s.model.head_dim);
        let activation = defaults::activation(&b.s.model);
        let both = b.within(of.module, |b| b.g.cat(&[x, tokens], 2));
        let y = of.norm.apply(b, both);
        let made = b.within(of.module, |b| {
            let [q, k, v] = [0, 1, 2].map(|n| {
                let mut made = b.linear(of.qkv[n], y);
                if let Some(adapters) = &self.attention {
                    made = adapters[n].add(b, y, made);
                }
                let heads = b.g.value(made).cols() / hd;
                let made = b.g.reshape(made, &[batch, seq, heads, hd]);
                b.g.transpose(made, 1, 2)
            });
            let [q, k] = [q, k].map(|x| rope.map_or(x, |rope| rope.rotate(b, x)));
            let scale = (hd as f64 / 2.0).powf(-0.5);
            let a = b.flex_attention([q, k, v], true, scale, ScoreMod::NONE);
            let a = b.g.transpose(a, 1, 2);
            let width = b.s.model.heads * hd;
            let a = b.g.reshape(a, &[batch, seq, width]);
            b.linear(of.o, a)
        });
        let y = of.mlp_norm.apply(b, made);
        b.within(of.module, |b| {
            let both = b.linear(of.gate_up, y);
            let both = self.mlp.add(b, y, both);
            let parts = b.g.split(both, 2, 2);
            let gate = activate(b, activation, parts[0]);
            let inner = b.g.binary(OpKind::Mul, gate, parts[1]);
            let y = b.linear(of.down, inner);
            b.linear(self.output, y)
        })
    }
}
