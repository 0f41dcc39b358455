//! Attention of a decoder.

use super::bias_gate::BiasGate;
use super::differential::Differential;
use super::indexer::Indexer;
use super::latent::Latent;
use super::norm::Norm;
use super::summary::Summary;
use super::{disentangled, names, normalized, scaled};
use crate::config::{
    AttentionGate, LayerType, Model, Norm as NormKind, PackedQkv, PositionEmbedding, QkNorm,
    Residual, Vision,
};
use crate::graph::ValueId;
use crate::ir::{Documents, Init, ModuleId, ModuleKind, OpKind, Real, ScoreMod, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::implementation::{self, Masks, Scores};
use crate::models::rope::Rope;
use crate::models::spec::Mask;
use smallvec::SmallVec;

pub(super) struct Attention {
    pub(super) module: ModuleId,
    kv_heads: u64,
    head_dim: u64,
    /// Width of a head's output.
    value_width: u64,
    /// Input norm.
    pub(super) norm: Option<Norm>,
    projections: Projections,
    /// Additional rows that separate projections of keys and values read.
    summary: Option<Summary>,
    /// Chooses the positions that attention with separate projections sees.
    indexer: Option<Indexer>,
    /// One more score for each head.
    sinks: Option<Layer>,
    differential: Option<Differential>,
    /// Projections of relative positions, unless queries and keys share theirs.
    relative: Option<[Layer; 2]>,
    /// Multiplies biases of scores.
    bias_gate: Option<BiasGate>,
    /// Projection to a gate per element of the output.
    gate: Option<Layer>,
    /// Projection to a gate per head.
    head_gate: Option<Layer>,
    output: Layer,
    /// Norms of queries and of keys.
    qk_norms: [Option<HeadNorm>; 2],
    value_norm: Option<Norm>,
    /// Norm before the output projection.
    sub_norm: Option<Norm>,
    /// Output norm, before the residual connection.
    post_norm: Option<Norm>,
    /// Norm of the sum.
    pub(super) sum_norm: Option<Norm>,
}

/// Projections to queries, keys and values.
enum Projections {
    /// Without a projection of values, these are the keys before their norm.
    Separate {
        q: Layer,
        k: Layer,
        v: Option<Layer>,
    },
    Packed {
        layer: Layer,
        packed: PackedQkv,
        /// Biases of queries and values, if keys have none.
        biases: Option<[Layer; 2]>,
    },
    Latent(Latent),
    /// Keys and values are those of an earlier layer.
    Queries(Layer),
}

/// Norm of queries or keys.
#[derive(Clone, Copy)]
enum HeadNorm {
    /// Of the model's kind, over a head or over all of them.
    Plain(Norm),
    /// LayerNorm with a weight for each head.
    Each(Layer),
}

impl Projections {
    /// Declares the projections. Keys and values are computed from rows of width `source`: `rows`
    /// per sample, or one per token if `rows` is `None`.
    fn new(d: &mut Declare, at: ModuleId, m: &Model, (rows, source): (Option<u64>, u64)) -> Self {
        let names = names::of(m);
        let (h, bias) = (m.hidden, m.bias.qkv());
        let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
        match m.options.attention.packed_qkv {
            _ if m.options.latent.is_used() => Self::Latent(Latent::new(d, at, &names, m)),
            PackedQkv::None if rows.is_none() && m.keys_of(d.layer()).is_some() => {
                Self::Queries(d.linear(at, ("q", names.q), [q, h], bias))
            }
            PackedQkv::None => {
                let q = d.linear(at, ("q", names.q), [q * query_parts(m), h], bias);
                let outer = rows.map(|rows| d.rows(Some(rows)));
                let key_bias = bias && m.options.attention.key_bias;
                let k = d.linear(at, ("k", names.k), [kv, source], key_bias);
                let v = (!takes_keys(d, m)).then(|| {
                    let shape = [m.kv_heads * value_width(m), source];
                    d.linear(at, ("v", names.v), shape, bias)
                });
                if let Some(outer) = outer {
                    d.rows(outer);
                }
                Self::Separate { q, k, v }
            }
            packed => {
                let whole = bias && m.options.attention.key_bias;
                let layer = d.linear(at, ("qkv", names.qkv), [q + 2 * kv, h], whole);
                let vector = |d: &mut Declare, (name, width)| {
                    let module = d.module(at, name, ModuleKind::Layer);
                    d.parameters(module, "", &[width], false)
                };
                let biases = (bias && !whole)
                    .then(|| [("q_bias", q), ("v_bias", kv)].map(|of| vector(d, of)));
                Self::Packed {
                    layer,
                    packed,
                    biases,
                }
            }
        }
    }
}

/// Declares the unused projections for global positions (Longformer).
fn global_projections(d: &mut Declare, at: ModuleId, m: &Model) {
    let names = names::of(m);
    let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
    for (name, hf, width) in [
        ("q_global", names.q, q),
        ("k_global", names.k, kv),
        ("v_global", names.v, kv),
    ] {
        let hf = [hf, "_global"].concat();
        let unused = d.linear(at, (name, &hf), [width, m.hidden], m.bias.qkv());
        d.untrained(unused);
    }
}

impl HeadNorm {
    /// Declares the norms of queries and keys, if the model has any. Keys of an earlier layer are
    /// already normalized.
    fn of_queries_and_keys(
        d: &mut Declare,
        at: ModuleId,
        m: &Model,
        has_keys: bool,
    ) -> [Option<Self>; 2] {
        if m.options.attention.qk_norm == QkNorm::None {
            return [None, None];
        }
        let names = names::of(m);
        let mut inner = m.with_inner_norm();
        if m.options.attention.qk_norm == QkNorm::AfterRopeNoWeight {
            inner.options.norm = NormKind::RmsNoWeight;
        }
        let hd = m.head_dim;
        let mut norm = |names, heads: u64| {
            let width = match m.options.attention.qk_norm {
                QkNorm::EachHead => return Self::Each(d.head_norms(at, names, [heads, hd])),
                QkNorm::Full => heads * hd,
                _ => hd,
            };
            Self::Plain(Norm::new(d, at, names, width, &inner, Order::Declared))
        };
        let queries = norm(("q_norm", names.q_norm), m.heads);
        let keys = has_keys.then(|| norm(("k_norm", names.k_norm), m.kv_heads));
        [Some(queries), keys]
    }
}

/// Values that live until the block's forward returns.
pub(super) type Locals = SmallVec<[ValueId; 4]>;

/// Queries, keys and values, each `[batch, heads, seq, head_dim]`.
type Qkv = [ValueId; 3];

/// Results of the projections of attention.
struct Projected {
    qkv: Qkv,
    /// Result of a packed projection.
    packed: Option<ValueId>,
    /// Gate of the output of attention, `[batch, seq, heads * head_dim]`, before the sigmoid.
    gate: Option<ValueId>,
}

/// Returns the number of outputs of the query projection: queries, and possibly a gate.
fn query_parts(m: &Model) -> u64 {
    1 + u64::from(m.options.attention.attention_gate == AttentionGate::Element)
}

/// Inputs of attention in addition to the hidden states.
#[derive(Clone, Copy, Default)]
pub(super) struct Around {
    /// Learned biases of the scores, `[heads, seq, seq]`.
    pub(super) bias: Option<ValueId>,
    /// Table of relative positions, `[rows, hidden]`, from which biases of the scores are computed.
    pub(super) relative: Option<ValueId>,
    /// Input of keys and values, if it differs from that of queries: `[batch, rows, hidden]`.
    pub(super) memory: Option<ValueId>,
    /// Masks of the model.
    pub(super) masks: Masks,
    /// Mask of the layer.
    pub(super) mask: Option<ValueId>,
    /// Rotated keys, and values, of an earlier layer.
    pub(super) keys: Option<[ValueId; 2]>,
    /// Documents as the layer sees them, if these are not those of sequences.
    pub(super) documents: Option<Documents>,
    /// Factors of queries, `[seq, 1]`.
    pub(super) temperature: Option<ValueId>,
}

impl Attention {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        Self::named(d, block, "attention", m, (None, m.hidden))
    }

    /// Declares a block's attention to the output of an encoder or a tower.
    pub(super) fn to_memory(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let rows = m.options.context.tower_memory().map(Vision::tokens);
        Self::named(d, block, "cross_attention", m, (rows, m.memory_width()))
    }

    /// Declares attention named `name`. Keys and values are computed from rows of width `source`:
    /// `rows` per sample, or the tokens if `rows` is `None`.
    fn named(
        d: &mut Declare,
        block: ModuleId,
        name: &str,
        m: &Model,
        (rows, source): (Option<u64>, u64),
    ) -> Self {
        let names = names::of(m);
        let (h, hd) = (m.hidden, m.head_dim);
        let at = d.module(block, name, ModuleKind::Attention);
        let [before, after, sum] = normalized(m);
        let normed = m.options.plain_first_block && d.layer() == 0;
        let norm = (before && !normed).then(|| {
            let names = ("norm", names.attention_norm);
            Norm::new(d, at, names, h, m, Order::First)
        });
        let shares = rows.is_none() && m.keys_of(d.layer()).is_some();
        let projections = Projections::new(d, at, m, (rows, source));
        if m.options.attention.global_projections && rows.is_none() {
            global_projections(d, at, m);
        }
        let summary = Summary::new(d, at, m);
        let latent = &m.options.latent;
        let chooses = !latent.is_used() && latent.has_indexer(d.layer());
        let indexer = chooses.then(|| Indexer::of_input(d, at, m));
        let has_sinks = m
            .options
            .attention
            .attention_sinks
            .has(m.layer_type(d.layer()));
        let sinks = has_sinks.then(|| {
            let module = d.module(at, "sinks", ModuleKind::Layer);
            d.parameter(module, (names.sinks, false), &[m.heads], Init::Normal)
        });
        let differential = Differential::new(d, at, m);
        let relative = disentangled::projections(d, at, m);
        let bias_gate = BiasGate::new(d, at, m);
        let width = m.heads * value_width(m);
        let gates = m.options.attention.attention_gate;
        let gate = (gates == AttentionGate::Separate)
            .then(|| d.linear(at, ("gate", "self_attn.gate_proj"), [width, h], false));
        let head_gate = (gates == AttentionGate::Head)
            .then(|| d.linear(at, ("gate", "self_attn.g_proj"), [m.heads, h], false));
        let output = d.linear(at, ("o", names.o), [h, width], m.bias.attention_output());
        let qk_norms = HeadNorm::of_queries_and_keys(d, at, m, !shares);
        let sub_norm = m.options.sub_norms.then(|| {
            let names = ("sub_norm", "self_attn.attn_sub_norm");
            Norm::new(d, at, names, width, m, Order::Declared)
        });
        let value_norm = (m.options.attention.value_norm && !shares).then(|| {
            let mut like = m.clone();
            like.options.norm = NormKind::RmsNoWeight;
            Norm::new(d, at, ("v_norm", ""), hd, &like, Order::Declared)
        });
        let post_norm = after.then(|| {
            let names = ("post_norm", names.attention_post_norm);
            Norm::new(d, at, names, h, m, Order::Declared)
        });
        let sum_norm = sum.then(|| {
            let names = ("norm", names.attention_norm);
            Norm::new(d, at, names, h, m, Order::Declared)
        });
        Self {
            module: at,
            kv_heads: m.kv_heads,
            head_dim: hd,
            value_width: value_width(m),
            norm,
            projections,
            summary,
            indexer,
            sinks,
            differential,
            relative,
            bias_gate,
            gate,
            head_gate,
            output,
            qk_norms,
            value_norm,
            sub_norm,
            post_norm,
            sum_norm,
        }
    }

    /// Applies attention to `y`, `[batch, seq, hidden]`. Returns the residual update, of the same
    /// shape, and values that live until the block's forward returns.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        rope: Option<Rope>,
        window: Option<u64>,
        around: Around,
    ) -> (ValueId, Locals) {
        b.within(self.module, |b| {
            if let Some(indexer) = &self.indexer {
                indexer.choose(b, y, y);
            }
            let Projected { qkv, packed, gate } = self.project(b, y, around, rope);
            let qkv = self.place(b, qkv, around, rope);
            let a = self.attend(b, (y, qkv), window, around);
            let mut t = self.join_heads(b, y, a, gate);
            if let Some(norm) = self.sub_norm {
                t = norm.apply(b, t);
            }
            let o = b.linear(self.output, t);
            let mut o = match implementation::drops_attention(b) {
                true => b.dropout(o, b.s.model.options.dropout),
                false => o,
            };
            if b.is_transformers() {
                // The module's `forward` returns; what follows is part of the block's.
                for v in qkv.into_iter().chain(packed) {
                    b.g.release(v);
                }
            }
            if let Some(norm) = self.post_norm {
                o = norm.apply(b, o);
            }
            let o = scaled(b, o, b.s.model.options.residual_multiplier);
            (o, qkv.into_iter().chain([a]).chain(packed).collect())
        })
    }

    /// Rotates queries and keys, unless the projections did, applies norms that follow the
    /// rotation, and multiplies queries by their temperature.
    fn place(&self, b: &mut Builder<'_>, mut qkv: Qkv, around: Around, rope: Option<Rope>) -> Qkv {
        let latent = matches!(self.projections, Projections::Latent(_));
        if let Some(rope) = rope.filter(|_| !latent) {
            let [q, k, v] = qkv;
            let rope = rope.of_layer(b);
            let rotated = rope.rotate(b, q);
            qkv = match around.keys {
                Some(keys) => [rotated, keys[0], keys[1]],
                None => [rotated, rope.rotate(b, k), v],
            };
            // `q, k = rope(q), rope(k)`: the unrotated ones live until both are done.
            b.g.release(q);
            if around.keys.is_none() {
                b.g.release(k);
            }
        }
        if b.s.model.options.attention.qk_norm.follows_rope() {
            let norms = self.qk_norms;
            let [q, k, v] = qkv;
            qkv = [
                self.normalize(b, norms, 0, q),
                self.normalize(b, norms, 1, k),
                v,
            ];
        }
        if let Some(factors) = around.temperature {
            qkv[0] = tempered(b, qkv[0], factors);
        }
        qkv
    }

    /// Applies attention to queries, keys and values of the input `y`. Returns
    /// `[batch, heads, seq, head_dim]`.
    fn attend(
        &self,
        b: &mut Builder<'_>,
        (y, qkv): (ValueId, Qkv),
        window: Option<u64>,
        around: Around,
    ) -> ValueId {
        let options = &b.s.model.options;
        let scale = options.attention.attention_multiplier;
        let scale = scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt());
        let score_mod = ScoreMod {
            softcap: Real(options.attention.attention_softcap.unwrap_or(0.0)),
            alibi: options.positions.position_embedding == PositionEmbedding::Alibi,
            window: window.unwrap_or(0),
            documents: around.documents.unwrap_or(Documents::NONE),
        };
        let causal = b.s.model.family.spec().attention == Some(Mask::Causal);
        let causal = causal && around.memory.is_none();
        let (bias, sinks) = self.score_weights(b, y, around);
        let scores = Scores {
            causal,
            scale,
            score_mod,
            mask: around.mask.filter(|_| around.memory.is_none()),
        };
        let attend = |b: &mut Builder<'_>, qkv| match (bias, sinks) {
            (None, Some(sinks)) => implementation::with_sinks(b, qkv, sinks, scores),
            (Some(bias), _) if b.is_transformers() => implementation::biased(b, qkv, bias, scores),
            (Some(bias), _) => {
                let (window, scale) = (score_mod.window, Real(scale));
                let kind = op::BiasedAttention {
                    causal,
                    scale,
                    window,
                };
                b.biased_attention(qkv, bias, kind)
            }
            (None, None) if b.is_transformers() => implementation::attention(b, qkv, scores),
            (None, None) => b.flex_attention(qkv, causal, scale, score_mod),
        };
        match &self.differential {
            Some(differential) => {
                let [q, k, v] = qkv;
                let halves = Differential::values(b, v);
                let made = halves.map(|half| attend(b, [q, k, half]));
                differential.combine(b, made)
            }
            None => attend(b, qkv),
        }
    }

    /// Returns the biases of scores, or else the sinks, `[heads]`, if there are
    /// any.
    fn score_weights(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        around: Around,
    ) -> (Option<ValueId>, Option<ValueId>) {
        let of_table = match (around.relative, self.relative, &self.projections) {
            (Some(table), Some([q, k]), _)
            | (Some(table), None, &Projections::Separate { q, k, .. }) => {
                Some(disentangled::biases(b, table, q, k))
            }
            _ => None,
        };
        let bias = around.bias.or(of_table);
        let sinks = self.sinks.filter(|_| bias.is_none());
        let sinks = sinks.map(|sinks| b.weight(sinks));
        let bias = match (bias, &self.bias_gate) {
            (Some(bias), Some(gate)) => Some(gate.apply(b, y, bias)),
            (bias, _) => bias,
        };
        (bias, sinks)
    }

    /// Puts the results `a` of heads next to one another, `[batch, seq, heads * value_width]`, and
    /// applies the gates: those of heads, and `gate` or the layer's own.
    fn join_heads(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        a: ValueId,
        gate: Option<ValueId>,
    ) -> ValueId {
        let (batch, seq, heads) = (b.batch(), b.seq(), b.s.model.heads);
        let width = self.value_width;
        let values = match self.head_dim > width {
            true => b.g.slice(a, 3, 0, width),
            false => a,
        };
        let mut t = b.g.transpose(values, 1, 2);
        if let Some(layer) = self.head_gate {
            let gate = b.linear(layer, y);
            let gate = b.g.reshape(gate, &[batch * seq * heads, 1]);
            let gate = b.g.unary(OpKind::Sigmoid, gate);
            let rows = b.g.reshape(t, &[batch * seq * heads, width]);
            t = b.g.binary(OpKind::ScaleRows, rows, gate);
        }
        let t = b.g.reshape(t, &[batch, seq, heads * width]);
        let gate = gate.or_else(|| self.gate.map(|layer| b.linear(layer, y)));
        if b.is_transformers() {
            // `attn_output` is assigned again, with heads next to one another.
            b.g.release(a);
        }
        match gate {
            Some(gate) => {
                let gate = b.g.unary(OpKind::Sigmoid, gate);
                b.g.binary(OpKind::Mul, t, gate)
            }
            None => t,
        }
    }

    /// Computes queries, keys and values. Only latent attention rotates them here.
    fn project(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        around: Around,
        rope: Option<Rope>,
    ) -> Projected {
        let memory = around.memory;
        let (batch, seq) = (b.batch(), b.seq());
        let m = &b.s.model;
        let (heads, kv, hd) = (m.heads, self.kv_heads, self.head_dim);
        let before = match m.options.attention.qk_norm {
            QkNorm::AfterRope | QkNorm::AfterRopeNoWeight => [None; 2],
            _ => self.qk_norms,
        };
        let whole = m.options.attention.qk_norm == QkNorm::Full;
        let values = self.value_width;
        // Splits a projection into heads, which are normalized before or after that.
        let split = |b: &mut Builder<'_>, n: usize, mut p: ValueId, heads| {
            if whole {
                p = self.normalize(b, before, n, p);
            }
            let width = if n == 2 { values } else { hd };
            let rows = b.g.value(p).shape[1];
            p = b.g.reshape(p, &[batch, rows, heads, width]);
            if !whole {
                p = self.normalize(b, before, n, p);
            }
            if let Some(norm) = self.value_norm.filter(|_| n == 2) {
                p = norm.apply(b, p);
            }
            b.g.transpose(p, 1, 2)
        };
        match &self.projections {
            Projections::Latent(latent) => Projected {
                qkv: latent.project(b, y, rope),
                packed: None,
                gate: None,
            },
            &Projections::Separate { q, k, v } => {
                let parts = query_parts(m);
                let (mut queries, mut gate) = (b.linear(q, y), None);
                if parts > 1 {
                    // Query and gate of each head.
                    let both = b.g.reshape(queries, &[batch, seq, heads, parts * hd]);
                    let both = b.g.split(both, 3, parts);
                    queries = both[0];
                    gate = Some(b.g.reshape(both[1], &[batch, seq, heads * hd]));
                }
                let queries = split(b, 0, queries, heads);
                let from = match &self.summary {
                    Some(summary) => summary.forward(b, y),
                    None => memory.unwrap_or(y),
                };
                let projected = b.linear(k, from);
                let keys = split(b, 1, projected, kv);
                let values = v.map_or(projected, |v| b.linear(v, from));
                let mut values = split(b, 2, values, kv);
                let missing = hd - b.g.value(values).cols();
                if missing > 0 {
                    // As wide as keys, as FlashAttention needs it.
                    let like = b.g.slice(keys, 3, 0, missing);
                    let zeros = b.g.fill_like(like, 0.0);
                    values = b.g.cat(&[values, zeros], 3);
                }
                Projected {
                    qkv: [queries, keys, values],
                    packed: None,
                    gate,
                }
            }
            &Projections::Queries(q) => {
                let queries = b.linear(q, y);
                let queries = split(b, 0, queries, heads);
                let [keys, values] = around.keys.expect("the check of the model has found them");
                Projected {
                    qkv: [queries, keys, values],
                    packed: None,
                    gate: None,
                }
            }
            &Projections::Packed {
                layer,
                packed,
                biases,
            } => {
                let p = b.linear(layer, y);
                let parts = unpack(b, p, packed, kv, hd);
                let [mut q, k, mut v] = parts;
                if let Some(biases) = biases {
                    let [of_q, of_v] = biases.map(|layer| b.weight(layer));
                    let mut biased = |x: ValueId, bias: ValueId| {
                        let shape = b.g.value(x).shape[2..].to_vec();
                        let bias = b.g.reshape(bias, &shape);
                        b.g.binary(OpKind::Add, x, bias)
                    };
                    (q, v) = (biased(q, of_q), biased(v, of_v));
                }
                let qkv = [
                    split(b, 0, q, heads),
                    split(b, 1, k, kv),
                    split(b, 2, v, kv),
                ];
                Projected {
                    qkv,
                    packed: Some(p),
                    gate: None,
                }
            }
        }
    }

    /// Applies the norm of queries (0) or keys (1), if there is one; values have none.
    fn normalize(
        &self,
        b: &mut Builder<'_>,
        norms: [Option<HeadNorm>; 2],
        n: usize,
        x: ValueId,
    ) -> ValueId {
        match norms.get(n).copied().flatten() {
            None => x,
            Some(HeadNorm::Plain(norm)) => norm.apply(b, x),
            Some(HeadNorm::Each(layer)) => {
                let width = b.g.value(x).cols();
                let ones = b.ones(layer.module(), width);
                let y = b.layer_norm_by(layer.module(), x, ones, None);
                let w = b.weight(layer);
                b.within(layer.module(), |b| b.g.binary(OpKind::Mul, y, w))
            }
        }
    }
}

/// Splits the result of a packed projection, `[batch, seq, width]`, into three parts that can be
/// reshaped to heads.
fn unpack(b: &mut Builder<'_>, p: ValueId, packed: PackedQkv, kv: u64, hd: u64) -> Qkv {
    let (batch, seq) = (b.batch(), b.seq());
    let heads = b.s.model.heads;
    match packed {
        PackedQkv::PerHead => {
            let p = b.g.reshape(p, &[batch, seq, heads, 3 * hd]);
            let parts = b.g.split(p, 3, 3);
            [parts[0], parts[1], parts[2]]
        }
        PackedQkv::PerGroup => {
            let group = heads / kv;
            let p = b.g.reshape(p, &[batch, seq, kv, group + 2, hd]);
            let of = |b: &mut Builder<'_>, start, n| b.g.slice(p, 3, start, n);
            [of(b, 0, group), of(b, group, 1), of(b, group + 1, 1)]
        }
        PackedQkv::Concatenated | PackedQkv::None => {
            let of = |b: &mut Builder<'_>, start, n| b.g.slice(p, 2, start * hd, n * hd);
            [of(b, 0, heads), of(b, heads, kv), of(b, heads + kv, kv)]
        }
    }
}

/// Framework calls that make the factors of one layer's queries in the code of Llama 4: `arange`,
/// six operations on its positions, and views.
const TEMPERATURE_CALLS: u8 = 11;

/// Multiplies queries, `[batch, heads, seq, head_dim]`, by the factors of their positions, in the
/// type of the factors.
fn tempered(b: &mut Builder<'_>, q: ValueId, factors: ValueId) -> ValueId {
    let dtype = b.g.value(q).dtype;
    let scaled = b.g.promoted(OpKind::Mul, q, factors);
    if b.is_transformers() {
        b.g.dispatches(TEMPERATURE_CALLS);
    }
    let scaled = b.g.cast(scaled, dtype);
    b.g.release(q);
    scaled
}

/// Returns whether the attention that is declared takes keys for values.
fn takes_keys(d: &Declare, m: &Model) -> bool {
    m.options.attention.keys_as_values && m.layer_type(d.layer()) != LayerType::Sliding
}

/// Returns the output width of a head.
fn value_width(m: &Model) -> u64 {
    let latent = &m.options.latent;
    match latent.is_used() {
        true => latent.v_head_dim,
        false => m.options.attention.value_head_dim.unwrap_or(m.head_dim),
    }
}

/// Returns whether the feed-forward layer has a separate input norm.
pub(super) fn mlp_reads_norm(m: &Model) -> bool {
    normalized(m)[0] && m.options.residual != Residual::ParallelOneNorm
}
