//! Attention whose query and output projections are experts (JetMoE).
//!
//! A token's queries come from the experts that it chooses, a set of heads from each. All of them
//! attend to the same keys. The expert that computed a set of queries also projects its results.

use super::dispatch::Dispatch;
use super::norm::Norm;
use super::{names, normalized};
use crate::config::{Family, Model, Router};
use crate::graph::ValueId;
use crate::ir::{Indexing, ModuleId, ModuleKind, OpKind, Real, ScoreMod, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::implementation::{self, Masks, Scores};
use crate::models::rope::Rope;

pub(super) struct RoutedAttention {
    pub(super) module: ModuleId,
    /// Input norm.
    pub(super) norm: Option<Norm>,
    router: Layer,
    dispatch: Dispatch,
    /// `[experts, kv_heads * head_dim, hidden]`.
    queries: Layer,
    /// `[experts, hidden, kv_heads * head_dim]`.
    output: Layer,
    bias: Layer,
    /// `[2 * kv_heads * head_dim, hidden]`.
    keys: Layer,
}

impl RoutedAttention {
    /// Declares the attention; returns `None` for models with another attention.
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Option<Self> {
        let of = &m.options.experts;
        if m.family != Family::Moe || !of.routed_attention {
            return None;
        }
        let names = names::of(m);
        let (h, width) = (m.hidden, m.kv_heads * m.head_dim);
        let at = d.module(block, "attention", ModuleKind::Attention);
        let norm = normalized(m)[0].then(|| {
            let names = ("norm", names.attention_norm);
            Norm::new(d, at, names, h, m, Order::First)
        });
        let router = d.linear(at, ("router", ""), [of.experts, h], false);
        let all = d.module(at, "experts", ModuleKind::Layer);
        let mut stack = |name, shape: [u64; 3]| {
            let module = d.module(all, name, ModuleKind::Layer);
            d.parameters(module, "", &shape, false)
        };
        let queries = stack("queries", [of.experts, width, h]);
        let output = stack("output", [of.experts, h, width]);
        let bias = d.module(at, "sum_bias", ModuleKind::Layer);
        let bias = d.parameters(bias, "", &[h], false);
        let keys = d.linear(at, ("kv", "self_attention.kv_proj"), [2 * width, h], false);
        Some(Self {
            module: at,
            norm,
            router,
            dispatch: Dispatch::none(of.experts),
            queries,
            output,
            bias,
            keys,
        })
    }

    /// Applies attention to `y`. Returns the residual update and the router's logits,
    /// `[tokens, experts]`, in float32.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        rope: Option<Rope>,
        masks: Masks,
    ) -> (ValueId, ValueId) {
        b.within(self.module, |b| {
            let shape = b.g.value(y).shape.clone();
            let (tokens, hidden) = (b.g.value(y).rows(), b.g.value(y).cols());
            let flat = b.g.reshape(y, &[tokens, hidden]);
            let chosen = self.choose(b, flat);
            let choices = b.g.value(chosen.place).rows();
            let sorted = b.permute(Indexing::Own, [flat, chosen.position], choices);
            let queries = matmul(b, self.queries, sorted, chosen.offsets);
            let queries = b.unpermute(Indexing::Own, [queries, chosen.place], choices);
            let made = self.attend(b, y, queries, (rope, masks));
            let made = b.permute(Indexing::Own, [made, chosen.place], choices);
            let each = b.g.reshape(chosen.weights, &[choices, 1]);
            let weight = b.permute(Indexing::Own, [each, chosen.place], choices);
            let made = b.g.binary(OpKind::ScaleRows, made, weight);
            let out = matmul(b, self.output, made, chosen.offsets);
            let sum = b.unpermute(Indexing::Own, [out, chosen.position], tokens);
            let bias = b.weight(self.bias);
            let sum = b.g.binary(OpKind::Add, sum, bias);
            (b.g.reshape(sum, &shape), chosen.logits)
        })
    }

    /// Chooses the experts of rows, `[tokens, hidden]`.
    fn choose(&self, b: &mut Builder<'_>, rows: ValueId) -> Chosen {
        let of = b.s.model.options.experts.clone();
        let (tokens, k) = (b.g.value(rows).rows(), of.top_k);
        let route = OpKind::Route(op::Route {
            k,
            sigmoid: of.router == Router::Sigmoid,
            normalize: of.normalizes(),
            scale: Real(of.route_scale),
            groups: 1,
            kept: 1,
            bias: false,
            // Experts of attention are not those of `[moe]`.
            forced: None,
        });
        let logits = b.linear(self.router, rows);
        let logits = b.as_operand(route, 0, logits);
        let chosen = b.compute(route, &[logits], &[&[tokens, k], &[tokens, k]]);
        let [offsets, position] = self.dispatch.sort(b, chosen[1], 1);
        Chosen {
            logits,
            weights: chosen[0],
            offsets,
            position,
            place: b.g.reshape(position, &[tokens * k, 1]),
        }
    }

    /// Attends to keys and values of `y` by the queries of choices, `[choices, kv_heads *
    /// head_dim]`; returns rows like these.
    fn attend(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        queries: ValueId,
        (rope, masks): (Option<Rope>, Masks),
    ) -> ValueId {
        let (batch, seq) = (b.batch(), b.seq());
        let rows = b.g.value(queries).shape.clone();
        let m = &b.s.model;
        let (heads, kv, hd) = (m.heads, m.kv_heads, m.head_dim);
        let scale = m.options.attention.attention_multiplier;
        let scale = scale.unwrap_or(1.0 / (hd as f64).sqrt());
        let both = b.linear(self.keys, y);
        let both = b.g.reshape(both, &[batch, seq, 2, kv, hd]);
        let [keys, values] = [0, 1].map(|n| {
            let part = b.g.slice(both, 2, n, 1);
            let part = b.g.reshape(part, &[batch, seq, kv, hd]);
            b.g.transpose(part, 1, 2)
        });
        let q = b.g.reshape(queries, &[batch, seq, heads, hd]);
        let q = b.g.transpose(q, 1, 2);
        let rope = rope.map(|rope| rope.of_layer(b));
        let [q, keys] = [q, keys].map(|v| rope.map_or(v, |rope| rope.rotate(b, v)));
        let score_mod = ScoreMod::NONE;
        let scores = Scores {
            causal: true,
            scale,
            score_mod,
            mask: masks.of_layer(false),
        };
        let made = match b.is_transformers() {
            true => implementation::attention(b, [q, keys, values], scores),
            false => b.flex_attention([q, keys, values], true, scale, score_mod),
        };
        let made = b.g.transpose(made, 1, 2);
        b.g.reshape(made, &rows)
    }
}

/// The experts that rows choose.
struct Chosen {
    /// `[tokens, experts]`.
    logits: ValueId,
    /// `[tokens, k]`.
    weights: ValueId,
    /// Where the rows of each expert start.
    offsets: ValueId,
    /// The row of each choice, `[tokens, k]`.
    position: ValueId,
    /// `position` as `[choices, 1]`.
    place: ValueId,
}

/// Multiplies the rows of each expert by its matrix.
fn matmul(b: &mut Builder<'_>, stack: Layer, rows: ValueId, offsets: ValueId) -> ValueId {
    let weights = b.weight(stack);
    let (n, width) = (b.g.value(rows).rows(), b.g.value(weights).shape[1]);
    let kind = OpKind::GroupedGemm(op::GroupedGemm {
        tb: true,
        routed: None,
    });
    b.within(stack.module(), |b| {
        b.compute(kind, &[rows, weights, offsets], &[&[n, width]])[0]
    })
}
