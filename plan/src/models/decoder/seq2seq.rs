//! Encoders in front of a decoder, and learned biases of attention scores (T5).

use super::attention::Around;
use super::embedding::{Embedding, Tables};
use super::norm::Norm;
use super::{Block, Carried, Surroundings};
use crate::config::{Family, Model, NormPosition, Scenario};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order, ROOT};

/// Returns the encoder's blocks as a model: without a causal mask.
fn model(of: &Model) -> Model {
    let mut inner = of.clone();
    inner.family = Family::Bert;
    inner.layers = of.options.encoder_layers as u32;
    inner.options.encoder_layers = 0;
    inner
}

/// Returns the scenario that the encoder's code sees.
pub(super) fn scenario(s: &Scenario) -> Option<Scenario> {
    (s.model.options.encoder_layers > 0).then(|| {
        let mut inner = s.clone();
        inner.model = model(&s.model);
        inner
    })
}

/// Reads as many tokens as the decoder.
pub(super) struct Encoder {
    /// Tables of tokens and of positions, if positions are learned.
    embedding: Option<Tables>,
    embedding_norm: Option<Norm>,
    bias: Option<RelativeBias>,
    blocks: Vec<Block>,
    norm: Option<Norm>,
}

impl Encoder {
    /// Declares it; `embedding` is that of the decoder.
    pub(super) fn new(d: &mut Declare, embedding: &Embedding, m: &Model) -> Self {
        let inner = model(m);
        let module = d.module(ROOT, "encoder", ModuleKind::Layer);
        let embedding = embedding.of_encoder(d, module, m);
        let mut norm = |name| Norm::new(d, module, (name, ""), m.hidden, m, Order::Declared);
        let embedding_norm = m.options.embedding_norm.then(|| norm("embedding_norm"));
        let bias = RelativeBias::shared(d, module, m);
        let block = |n: u32| {
            let name = format!("layers.{n}");
            let at = d.module(module, &name, ModuleKind::Block);
            Block::new(d, at, &inner, n as usize)
        };
        let blocks = (0..inner.layers).map(block).collect();
        let norm = (m.options.norm_position != NormPosition::Sum)
            .then(|| Norm::new(d, module, ("norm", ""), m.hidden, m, Order::Declared));
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
        b.inside(|b| {
            if let Some(norm) = self.embedding_norm {
                x = norm.apply(b, x);
            }
            let around = Around {
                bias: self.bias.as_ref().map(|bias| bias.forward(b)),
                ..Around::default()
            };
            let surroundings = Surroundings {
                around,
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
pub(super) struct RelativeBias(Layer);

impl RelativeBias {
    /// Declares the table that all layers share, unless each has one.
    pub(super) fn shared(d: &mut Declare, parent: ModuleId, m: &Model) -> Option<Self> {
        match m.options.relative_bias_per_layer {
            true => None,
            false => Self::new(d, parent, m),
        }
    }

    /// Declares a table, if the model has any.
    pub(super) fn new(d: &mut Declare, parent: ModuleId, m: &Model) -> Option<Self> {
        let rows = m.options.relative_buckets;
        (rows > 0).then(|| {
            let names = ("relative_bias", "");
            Self(d.table(parent, names, ModuleKind::Layer, [rows, m.heads]))
        })
    }

    /// Looks up the biases of all pairs: `[heads, seq, seq]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>) -> ValueId {
        let (seq, heads) = (b.seq(), b.s.model.heads);
        let pairs = b.constant("relative_positions", &[seq * seq], DType::I64, false);
        let each = b.embedding(self.0, pairs);
        b.within(self.0.module(), |b| {
            let by_head = b.g.transpose(each, 0, 1);
            b.g.reshape(by_head, &[heads, seq, seq])
        })
    }
}
