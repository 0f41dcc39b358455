//! A Q-Former: learned rows that attend to each other, and in some layers to those of an image
//! (BLIP-2).

use super::norm::Norm;
use crate::config::{Activation, Model, Norm as Kind, Vision};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

pub(super) struct QFormer {
    module: ModuleId,
    queries: Layer,
    /// Norm of the queries.
    norm: Norm,
    layers: Vec<Block>,
    /// Makes rows of the language model.
    projection: Layer,
}

struct Block {
    attention: Attention,
    /// Attention to the rows of the image.
    cross: Option<Attention>,
    module: ModuleId,
    up: Layer,
    down: Layer,
    norm: Norm,
}

/// Attention whose sum with what it reads is normalized.
struct Attention {
    module: ModuleId,
    qkv: [Layer; 3],
    output: Layer,
    norm: Norm,
}

impl Attention {
    /// Declares it; keys and values read rows of width `outer`, of which a sample has `rows`.
    fn new(
        d: &mut Declare,
        at: ModuleId,
        name: &str,
        of: &Vision,
        (like, outer, rows): (&Model, u64, u64),
    ) -> Self {
        let (h, module) = (of.latent_width, d.module(at, name, ModuleKind::Attention));
        let width = of.latent_heads[0] * of.latent_heads[2];
        let q = d.linear(module, ("q", ""), [width, h], true);
        d.rows(Some(rows));
        let [k, v] = ["k", "v"].map(|name| d.linear(module, (name, ""), [width, outer], true));
        d.rows(Some(of.latents));
        Self {
            module,
            qkv: [q, k, v],
            output: d.linear(module, ("o", ""), [h, width], true),
            norm: Norm::new(d, module, ("norm", ""), h, like, Order::Declared),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId, rows: ValueId) -> ValueId {
        let (batch, heads, dim) = (b.batch(), of.latent_heads[0], of.latent_heads[2]);
        let [q, k, v] = [(0, x), (1, rows), (2, rows)].map(|(n, from)| {
            let made = b.linear(self.qkv[n], from);
            b.within(self.module, |b| {
                let rows = b.g.value(made).shape[1];
                let made = b.g.reshape(made, &[batch, rows, heads, dim]);
                b.g.transpose(made, 1, 2)
            })
        });
        let attended = b.within(self.module, |b| {
            let out = b.attention(q, k, v, false);
            let out = b.g.transpose(out, 1, 2);
            b.g.reshape(out, &[batch, of.latents, heads * dim])
        });
        let made = b.linear(self.output, attended);
        let sum = b.within(self.module, |b| b.g.binary(OpKind::Add, made, x));
        self.norm.apply(b, sum)
    }
}

impl Block {
    fn new(d: &mut Declare, parent: ModuleId, n: u64, of: &Vision, like: &Model) -> Self {
        let at = d.module(parent, &format!("layers.{n}"), ModuleKind::Layer);
        let h = of.latent_width;
        let crosses = n.is_multiple_of(of.latent_cross.max(1));
        let own = (like, h, of.latents);
        let image = (like, of.hidden, of.rows());
        let attention = Attention::new(d, at, "attention", of, own);
        let cross = crosses.then(|| Attention::new(d, at, "cross_attention", of, image));
        let module = d.module(at, "mlp", ModuleKind::Mlp);
        Self {
            attention,
            cross,
            module,
            up: d.linear(module, ("w1", ""), [of.latent_ffn, h], true),
            down: d.linear(module, ("w2", ""), [h, of.latent_ffn], true),
            norm: Norm::new(d, module, ("norm", ""), h, like, Order::Declared),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId, rows: ValueId) -> ValueId {
        let mut x = self.attention.forward(b, of, x, x);
        if let Some(cross) = &self.cross {
            x = cross.forward(b, of, x, rows);
        }
        let up = b.linear(self.up, x);
        let up = b.within(self.module, |b| activate(b, Activation::Gelu, up));
        let down = b.linear(self.down, up);
        let sum = b.within(self.module, |b| b.g.binary(OpKind::Add, down, x));
        self.norm.apply(b, sum)
    }
}

impl QFormer {
    /// Declares it; `None` for towers without one.
    pub(super) fn new(d: &mut Declare, at: ModuleId, of: &Vision, m: &Model) -> Option<Self> {
        if of.latent_width == 0 {
            return None;
        }
        let h = of.latent_width;
        let module = d.module(at, "qformer", ModuleKind::Layer);
        let mut like = of.model(m);
        like.options.norm = Kind::Layer;
        d.rows(Some(of.latents));
        let queries = d.module(module, "queries", ModuleKind::Layer);
        Some(Self {
            module,
            queries: d.parameters(queries, "", &[1, of.latents, h], false),
            norm: Norm::new(d, module, ("norm", ""), h, &like, Order::Declared),
            layers: (0..of.latent_layers)
                .map(|n| Block::new(d, module, n, of, &like))
                .collect(),
            projection: d.linear(module, ("projection", ""), [m.hidden, h], true),
        })
    }

    /// Makes `[batch, latents, hidden]` of the tower's rows.
    pub(super) fn forward(&self, b: &mut Builder<'_>, of: &Vision, rows: ValueId) -> ValueId {
        let (batch, queries) = (b.batch(), b.weight(self.queries));
        let queries = b.within(self.module, |b| {
            let shape = [batch, of.latents, of.latent_width];
            b.g.expand(queries, &shape)
        });
        let mut x = self.norm.apply(b, queries);
        for layer in &self.layers {
            x = layer.forward(b, of, x, rows);
        }
        b.linear(self.projection, x)
    }
}
