//! Decoders: blocks of attention and a feed-forward layer on a residual stream, whose norms,
//! projections and positions are options.
//!
//! Family `llama` is the plain case: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.
//! Family `decoder` has all options.

mod attention;
mod embedding;
mod experts;
mod latent;
mod mlp;
mod names;
mod norm;
mod output;
mod router_losses;
pub(super) mod spec;
mod types;

use super::Forward;
use super::build::Builder;
use super::declare::{Declare, Order, ROOT};
use super::implementation;
use super::loss;
use super::rope::{Pairs, Rope};
use crate::config::{Family, LayerType, Model, NormPosition, PositionEmbedding, Residual};
use crate::graph::ValueId;
use crate::ir::{ModuleId, OpKind};
use attention::{Attention, Locals};
use embedding::Embedding;
use experts::Experts;
pub(super) use experts::width as expert_width;
use mlp::Mlp;
use norm::Norm;
use output::Output;
pub(super) use types::EXPERTS as EXPERT_TYPES;

pub(super) struct Decoder {
    embedding: Embedding,
    embedding_norm: Option<Norm>,
    blocks: Vec<Block>,
    /// `None` if the blocks end with a norm.
    norm: Option<Norm>,
    output: Output,
}

struct Block {
    module: ModuleId,
    layer: usize,
    /// `None` in a layer without attention.
    attention: Option<Attention>,
    /// `None` in a layer without a feed-forward layer.
    mlp: Option<FeedForward>,
}

enum FeedForward {
    Dense(Mlp),
    Experts(Experts),
}

impl FeedForward {
    fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let layer = d.layer() as u64;
        if m.family == Family::Moe && m.options.experts.has(layer) {
            Self::Experts(Experts::new(d, block, m))
        } else {
            Self::Dense(Mlp::new(d, block, m))
        }
    }

    fn module(&self) -> ModuleId {
        match self {
            Self::Dense(mlp) => mlp.module,
            Self::Experts(experts) => experts.module,
        }
    }

    /// Returns the norm of what it reads, and that of the sum.
    fn norms(&self) -> [Option<Norm>; 2] {
        match self {
            Self::Dense(mlp) => [mlp.norm, mlp.sum_norm],
            Self::Experts(experts) => [experts.norm, experts.sum_norm],
        }
    }

    /// Applies it to `y`; returns what it adds to the residual stream. Appends the logits of a
    /// router.
    fn forward(&self, b: &mut Builder<'_>, y: ValueId, routers: &mut Vec<ValueId>) -> ValueId {
        match self {
            Self::Dense(mlp) => mlp.forward(b, y),
            Self::Experts(experts) => {
                let (out, logits) = experts.forward(b, y);
                routers.push(logits);
                out
            }
        }
    }
}

/// The rotary embeddings of a model.
#[derive(Clone, Copy)]
struct Ropes {
    /// Of layers that see all positions.
    full: Rope,
    /// Of layers with a sliding window.
    sliding: Rope,
}

/// Returns the rotated dimensions of a head.
pub(super) fn rotated(m: &Model) -> u64 {
    let latent = &m.options.latent;
    if latent.is_used() {
        return latent.qk_rope_head_dim;
    }
    (m.head_dim as f64 * m.options.partial_rotary_factor) as u64
}

impl Decoder {
    pub(super) fn new(d: &mut Declare, m: &Model) -> Self {
        let o = &m.options;
        let names = names::of(o.model_type.as_deref());
        let embedding = Embedding::new(d, &names, m);
        let embedding_norm = o.embedding_norm.then(|| {
            let names = ("embedding_norm", names.embedding_norm);
            Norm::new(d, ROOT, names, m.hidden, m, Order::Declared)
        });
        if (1..m.layers as usize).any(|layer| m.layer_type(layer) != m.layer_type(0)) {
            d.blocks_differ();
        }
        let of = &o.experts;
        if m.family == Family::Moe && (of.aux_loss > 0.0 || of.z_loss > 0.0) {
            // The losses of all routers are added up after the last block.
            d.blocks_differ();
        }
        let blocks = d.blocks(m, names.blocks, |d, module, m| {
            let layer = d.layer();
            let m = &m.of_layer(layer);
            Block {
                module,
                layer,
                attention: (m.kv_heads > 0).then(|| Attention::new(d, module, m)),
                mlp: (m.ffn > 0).then(|| FeedForward::new(d, module, m)),
            }
        });
        let last = ("norm", names.norm);
        let norm = (o.norm_position != NormPosition::Sum)
            .then(|| Norm::new(d, ROOT, last, m.hidden, m, Order::Declared));
        let output = Output::new(d, embedding.tokens(), &names, m);
        Self {
            embedding,
            embedding_norm,
            blocks,
            norm,
            output,
        }
    }

    /// Declares the tables of the rotary embeddings.
    fn ropes(b: &mut Builder<'_>) -> Option<Ropes> {
        let m = &b.s.model;
        let pairs = match m.options.position_embedding {
            PositionEmbedding::Rotary => Pairs::Halves,
            PositionEmbedding::RotaryInterleaved => Pairs::Adjacent,
            PositionEmbedding::Learned | PositionEmbedding::Alibi => return None,
        };
        let dims = rotated(m);
        let local = m.options.rope_local_theta.is_some();
        let full = Rope::named(b, ["rope_cos", "rope_sin"], dims, pairs);
        let sliding = if local {
            Rope::named(b, ["rope_local_cos", "rope_local_sin"], dims, pairs)
        } else {
            full
        };
        Some(Ropes { full, sliding })
    }
}

impl Block {
    fn forward(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        ropes: Option<Ropes>,
        routers: &mut Vec<ValueId>,
    ) -> ValueId {
        match b.s.model.options.residual {
            Residual::Sequential => self.sequential(b, x, ropes, routers),
            Residual::Parallel | Residual::ParallelOneNorm => self.parallel(b, x, ropes, routers),
        }
    }

    /// Applies attention to normalized values; returns what it adds to the residual stream.
    fn attend(
        &self,
        b: &mut Builder<'_>,
        attention: &Attention,
        y: ValueId,
        ropes: Option<Ropes>,
    ) -> (ValueId, Locals) {
        let rope = match b.s.model.layer_type(self.layer) {
            LayerType::Full => ropes.map(|r| r.full),
            LayerType::Sliding => ropes.map(|r| r.sliding),
            LayerType::FullNoRope => None,
        };
        let window = b.s.model.window(self.layer, b.seq());
        attention.forward(b, y, rope, window)
    }

    /// Applies attention, then the feed-forward layer to the sum.
    fn sequential(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        ropes: Option<Ropes>,
        routers: &mut Vec<ValueId>,
    ) -> ValueId {
        let mut locals = Locals::new();
        let (mut x1, mut y1) = (x, None);
        if let Some(attention) = &self.attention {
            let y = attention.norm.map_or(x, |norm| norm.apply(b, x));
            let (o, of_attention) = self.attend(b, attention, y, ropes);
            x1 = b.within(attention.module, |b| b.g.binary(OpKind::Add, x, o));
            if let Some(norm) = attention.sum_norm {
                x1 = norm.apply(b, x1);
            }
            (y1, locals) = (Some(y), of_attention);
        }
        locals.extend([x, x1]);
        let mut out = x1;
        if let Some(mlp) = &self.mlp {
            let [norm, sum_norm] = mlp.norms();
            let y2 = norm.map_or(x1, |norm| norm.apply(b, x1));
            if let Some(y1) = y1 {
                b.g.release(y1);
            }
            let f = mlp.forward(b, y2, routers);
            out = b.within(mlp.module(), |b| b.g.binary(OpKind::Add, x1, f));
            if let Some(norm) = sum_norm {
                out = norm.apply(b, out);
            }
            locals.push(y2);
        }
        self.release(b, locals);
        out
    }

    /// Applies attention and the feed-forward layer to the same values.
    fn parallel(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        ropes: Option<Ropes>,
        routers: &mut Vec<ValueId>,
    ) -> ValueId {
        let (Some(attention), Some(mlp)) = (&self.attention, &self.mlp) else {
            return x;
        };
        let y1 = attention.norm.map_or(x, |norm| norm.apply(b, x));
        let (o, mut locals) = self.attend(b, attention, y1, ropes);
        let y2 = mlp.norms()[0].map_or(y1, |norm| norm.apply(b, x));
        let f = mlp.forward(b, y2, routers);
        let out = b.within(self.module, |b| {
            let sum = b.g.binary(OpKind::Add, o, f);
            b.g.binary(OpKind::Add, sum, x)
        });
        locals.extend([x, y1, y2]);
        self.release(b, locals);
        out
    }

    /// Ends the lives of the local variables of the block's forward.
    fn release(&self, b: &mut Builder<'_>, locals: Locals) {
        b.within(self.module, |b| {
            for v in locals {
                b.g.release(v);
            }
        });
    }
}

/// Returns `by * x`, without an op for a factor of 1.
fn scaled(b: &mut Builder<'_>, x: ValueId, by: f64) -> ValueId {
    match by {
        1.0 => x,
        by => b.scale(x, by),
    }
}

/// Returns whether what the blocks read, what they add, and the sum, is normalized.
fn normalized(m: &Model) -> [bool; 3] {
    match m.options.norm_position {
        NormPosition::Before => [true, false, false],
        NormPosition::After => [false, true, false],
        NormPosition::Both => [true, true, false],
        NormPosition::Sum => [false, false, true],
    }
}

/// Traces one micro-batch. The order of ops, views and local variables is that of the usual eager
/// PyTorch code.
impl Forward for Decoder {
    fn forward(&self, b: &mut Builder<'_>) {
        let (ids, labels) = match self.embedding {
            Embedding::Patches(_) => (None, None),
            _ => {
                let (ids, labels) = loss::tokens(b);
                (Some(ids), Some(labels))
            }
        };
        let ropes = Self::ropes(b);
        let multiplier = b.s.model.options.embedding_multiplier;
        let h = self.embedding.forward(b, ids);
        let mut h = b.within(ROOT, |b| scaled(b, h, multiplier));
        if let Some(norm) = self.embedding_norm {
            h = norm.apply(b, h);
        }
        implementation::mask(b);
        let ropes = ropes.map(|r| {
            let full = r.full.cast(b);
            let sliding = match b.s.model.options.rope_local_theta {
                Some(_) => r.sliding.cast(b),
                None => full,
            };
            Ropes { full, sliding }
        });
        let mut routers = Vec::new();
        for block in &self.blocks {
            h = block.forward(b, h, ropes, &mut routers);
        }
        let y = self.norm.map_or(h, |norm| norm.apply(b, h));
        self.output.forward(b, y, labels);
        router_losses::add(b, &routers);
    }
}
