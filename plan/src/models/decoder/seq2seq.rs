//! Encoders in front of a decoder, and learned biases of attention scores (T5).

use super::attention::Around;
use super::embedding::{Embedding, Tables};
use super::norm::Norm;
use super::{Block, Carried, Decoder, Surroundings};
use crate::config::{Model, NormPosition, Scenario};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use crate::models::build::{Builder, Part};
use crate::models::declare::{Declare, Layer, Order, ROOT};

/// Returns the scenario that the encoder's code sees.
pub(super) fn scenario(s: &Scenario) -> Option<Scenario> {
    let model = s.model.text_encoder()?;
    let mut inner = s.clone();
    inner.model = model;
    Some(inner)
}

/// Reads as many tokens as the decoder.
pub(super) struct Encoder {
    /// Tables of tokens and of positions, if it has one of its own.
    embedding: Option<Tables>,
    embedding_norm: Option<Norm>,
    bias: Option<RelativeBias>,
    blocks: Vec<Block>,
    norm: Option<Norm>,
}

impl Encoder {
    /// Declares it; `embedding` is that of the decoder, `inner` the encoder as a model.
    pub(super) fn new(d: &mut Declare, embedding: &Embedding, inner: &Model) -> Self {
        let module = d.module(ROOT, "encoder", ModuleKind::Layer);
        let embedding = embedding.of_encoder(d, module, inner);
        let width = inner.hidden;
        let norm =
            |d: &mut Declare, name| Norm::new(d, module, (name, ""), width, inner, Order::Declared);
        let embedding_norm =
            (inner.options.embedding.embedding_norm).then(|| norm(d, "embedding_norm"));
        let bias = RelativeBias::shared(d, module, inner);
        let block = |n: u32| {
            let name = format!("layers.{n}");
            let at = d.module(module, &name, ModuleKind::Block);
            Block::new(d, at, inner, n as usize)
        };
        let blocks = (0..inner.layers).map(block).collect();
        let normalizes = inner.options.norm_position != NormPosition::Sum;
        let norm = normalizes.then(|| norm(d, "norm"));
        // What it computes is used by all blocks of the decoder.
        d.blocks_differ();
        Self {
            embedding,
            embedding_norm,
            bias,
            blocks,
            norm,
        }
    }

    /// Returns the tables that it has apart from the decoder's.
    pub(super) fn embedding(&self) -> Option<&Tables> {
        self.embedding.as_ref()
    }

    /// Encodes embedded tokens, `[batch, seq, hidden]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, mut x: ValueId) -> ValueId {
        b.inside(Part::First, |b| {
            if let Some(norm) = self.embedding_norm {
                x = norm.apply(b, x);
            }
            let around = Around {
                bias: self.bias.as_ref().map(|bias| bias.forward(b)),
                ..Around::default()
            };
            let ropes = Decoder::ropes(b, ["encoder_rope_cos", "encoder_rope_sin"]);
            let surroundings = Surroundings {
                around,
                ropes: ropes.map(|r| r.cast(b)),
                ..Surroundings::default()
            };
            for block in &self.blocks {
                x = block.forward(b, x, surroundings, &mut Carried::default());
            }
            self.norm.map_or(x, |norm| norm.apply(b, x))
        })
    }
}

/// A table of biases for each head, by distance.
pub(super) struct RelativeBias {
    table: Layer,
    /// Table for sums of positions.
    summaries: Option<Layer>,
}

impl RelativeBias {
    /// Declares the table that all layers share, unless each has one.
    pub(super) fn shared(d: &mut Declare, parent: ModuleId, m: &Model) -> Option<Self> {
        match m.options.positions.relative_bias_per_layer {
            true => None,
            false => Self::new(d, parent, m),
        }
    }

    /// Declares a table, if the model has any.
    pub(super) fn new(d: &mut Declare, parent: ModuleId, m: &Model) -> Option<Self> {
        let rows = m.options.positions.relative_buckets;
        let mut table = |name| d.table(parent, (name, ""), ModuleKind::Layer, [rows, m.heads]);
        (rows > 0).then(|| Self {
            table: table("relative_bias"),
            summaries: (m.summaries(u64::MAX) > 0).then(|| table("summary_bias")),
        })
    }

    /// Looks up the biases of all pairs: `[heads, seq, seq]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>) -> ValueId {
        let (seq, heads) = (b.seq(), b.s.model.heads);
        let pairs = b.constant("relative_positions", &[seq * seq], DType::I64, false);
        let each = match self.summaries {
            None => b.embedding(self.table, pairs),
            Some(more) => {
                let tables = [self.table, more].map(|table| b.weight(table));
                b.within(self.table.module(), |b| {
                    let both = b.g.cat(&tables, 0);
                    b.compute(OpKind::Embedding, &[pairs, both], &[&[seq * seq, heads]])[0]
                })
            }
        };
        b.within(self.table.module(), |b| {
            let by_head = b.g.transpose(each, 0, 1);
            b.g.reshape(by_head, &[heads, seq, seq])
        })
    }
}
