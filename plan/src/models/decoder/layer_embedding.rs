//! Token embeddings of each layer (Gemma 3n, Gemma 4).

use super::norm::Norm;
use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order, ROOT};
use crate::models::defaults;
use std::f64::consts::FRAC_1_SQRT_2;

/// Computes the rows of all layers from a table and from a projection of the embedded tokens.
pub(super) struct LayerEmbedding {
    module: ModuleId,
    table: Layer,
    projection: Layer,
    norm: Norm,
}

impl LayerEmbedding {
    pub(super) fn new(d: &mut Declare, m: &Model) -> Option<Self> {
        let of = &m.options.per_layer;
        let width = of.layer_embedding_width;
        if width == 0 {
            return None;
        }
        // Each block reads rows of its own.
        d.blocks_differ();
        let all = u64::from(m.layers) * width;
        let module = d.module(ROOT, "layer_embeddings", ModuleKind::Layer);
        let rows = of.layer_embedding_rows.unwrap_or(m.vocab);
        let table = ("table", "model.embed_tokens_per_layer");
        let projection = ("projection", "model.per_layer_model_projection");
        let norm = ("norm", "model.per_layer_projection_norm");
        Some(Self {
            module,
            table: d.table(module, table, ModuleKind::Layer, [rows, all]),
            projection: d.linear(module, projection, [all, m.hidden], false),
            norm: Norm::new(d, module, norm, width, m, Order::Declared),
        })
    }

    /// Returns the rows of all layers, `[batch, seq, layers, width]`, from token ids and embedded
    /// tokens.
    pub(super) fn forward(&self, b: &mut Builder<'_>, ids: ValueId, tokens: ValueId) -> ValueId {
        let m = &b.s.model;
        let (layers, width) = (
            u64::from(m.layers),
            m.options.per_layer.layer_embedding_width,
        );
        let hidden = m.hidden as f64;
        let shape = [b.batch(), b.seq(), layers, width];
        let own = b.embedding(self.table, ids);
        let own = b.within(self.module, |b| {
            let own = b.scale(own, (width as f64).sqrt());
            b.g.reshape(own, &shape)
        });
        let made = b.linear(self.projection, tokens);
        let made = b.within(self.module, |b| {
            let made = b.scale(made, hidden.powf(-0.5));
            b.g.reshape(made, &shape)
        });
        let made = self.norm.apply(b, made);
        b.within(self.module, |b| {
            let sum = b.g.binary(OpKind::Add, made, own);
            b.scale(sum, FRAC_1_SQRT_2)
        })
    }
}

/// Returns the rows of one layer, `[batch, seq, width]`, of those of all.
pub(super) fn of_layer(b: &mut Builder<'_>, all: ValueId, layer: usize) -> ValueId {
    let (batch, seq, width) = (b.batch(), b.seq(), b.g.value(all).cols());
    b.within(ROOT, |b| {
        let own = b.g.slice(all, 2, layer as u64, 1);
        b.g.reshape(own, &[batch, seq, width])
    })
}

/// The layers that add a block's own token embeddings to the residual stream.
pub(super) struct LayerInput {
    module: ModuleId,
    gate: Layer,
    projection: Layer,
    norm: Norm,
}

impl LayerInput {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Option<Self> {
        let width = m.options.per_layer.layer_embedding_width;
        let module = (width > 0).then(|| d.module(block, "layer_input", ModuleKind::Layer))?;
        let norm = ("norm", "post_per_layer_input_norm");
        Some(Self {
            module,
            gate: d.linear(
                module,
                ("gate", "per_layer_input_gate"),
                [width, m.hidden],
                false,
            ),
            projection: d.linear(
                module,
                ("projection", "per_layer_projection"),
                [m.hidden, width],
                false,
            ),
            norm: Norm::new(d, module, norm, m.hidden, m, Order::Declared),
        })
    }

    /// Returns the residual update of `x` by the block's `rows` of the table.
    pub(super) fn forward(&self, b: &mut Builder<'_>, x: ValueId, rows: ValueId) -> ValueId {
        let activation = defaults::activation(&b.s.model);
        let gate = b.linear(self.gate, x);
        let gated = b.within(self.module, |b| {
            let gate = activate(b, activation, gate);
            b.g.binary(OpKind::Mul, gate, rows)
        });
        let y = b.linear(self.projection, gated);
        self.norm.apply(b, y)
    }
}
