//! A Q-Former: learned rows that attend to each other, and in some layers to those of an image
//! (BLIP-2). Tokens of a text may follow them, with separate feed-forward layers (InstructBLIP).

use super::conformer::filled;
use super::norm::Norm;
use crate::config::{Activation, Model, Norm as Kind, Vision};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

pub(super) struct QFormer {
    module: ModuleId,
    queries: Layer,
    /// Tables of tokens and of positions of a text.
    text: Option<[Layer; 2]>,
    /// Norm of the queries and the text.
    norm: Norm,
    layers: Vec<Block>,
    /// Projection to the width of the language model.
    projection: Layer,
}

struct Block {
    attention: Attention,
    /// Attention to the rows of the image.
    cross: Option<Attention>,
    mlp: FeedForward,
    /// That of a text.
    text: Option<FeedForward>,
}

/// A feed-forward layer with a residual connection and an output norm.
struct FeedForward {
    module: ModuleId,
    up: Layer,
    down: Layer,
    norm: Norm,
}

/// Attention with a residual connection and an output norm.
struct Attention {
    module: ModuleId,
    qkv: [Layer; 3],
    output: Layer,
    norm: Norm,
}

impl Attention {
    /// Declares attention with `rows[0]` queries and `rows[1]` keys per sample. Keys and values are
    /// computed from rows of width `outer`.
    fn new(
        d: &mut Declare,
        at: ModuleId,
        name: &str,
        of: &Vision,
        (like, outer, rows): (&Model, u64, [u64; 2]),
    ) -> Self {
        d.rows(Some(rows[0]));
        let (h, module) = (of.latents.width, d.module(at, name, ModuleKind::Attention));
        let width = of.latents.heads[0] * of.latents.heads[2];
        let q = d.linear(module, ("q", ""), [width, h], true);
        d.rows(Some(rows[1]));
        let [k, v] = ["k", "v"].map(|name| d.linear(module, (name, ""), [width, outer], true));
        d.rows(Some(rows[0]));
        Self {
            module,
            qkv: [q, k, v],
            output: d.linear(module, ("o", ""), [h, width], true),
            norm: Norm::new(d, module, ("norm", ""), h, like, Order::Declared),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId, rows: ValueId) -> ValueId {
        let (heads, dim) = (of.latents.heads[0], of.latents.heads[2]);
        let batch = b.g.value(x).shape[0];
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
            let rows = b.g.value(x).shape[1];
            b.g.reshape(out, &[batch, rows, heads * dim])
        });
        let made = b.linear(self.output, attended);
        let sum = b.within(self.module, |b| b.g.binary(OpKind::Add, made, x));
        self.norm.apply(b, sum)
    }
}

impl FeedForward {
    fn new(d: &mut Declare, at: ModuleId, name: &str, of: &Vision, like: &Model) -> Self {
        let (h, ffn, module) = (
            of.latents.width,
            of.latents.ffn,
            d.module(at, name, ModuleKind::Mlp),
        );
        Self {
            module,
            up: d.linear(module, ("w1", ""), [ffn, h], true),
            down: d.linear(module, ("w2", ""), [h, ffn], true),
            norm: Norm::new(d, module, ("norm", ""), h, like, Order::Declared),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let up = b.linear(self.up, x);
        let up = b.within(self.module, |b| activate(b, Activation::Gelu, up));
        let down = b.linear(self.down, up);
        let sum = b.within(self.module, |b| b.g.binary(OpKind::Add, down, x));
        self.norm.apply(b, sum)
    }
}

impl Block {
    fn new(d: &mut Declare, parent: ModuleId, n: u64, of: &Vision, like: &Model) -> Self {
        let at = d.module(parent, &format!("layers.{n}"), ModuleKind::Layer);
        let (all, latents) = (of.latent_rows() * of.windows(), of.projected());
        let own = (like, of.latents.width, [all, all]);
        let image = (like, of.hidden, [latents, of.rows()]);
        let attention = Attention::new(d, at, "attention", of, own);
        let crosses = n.is_multiple_of(of.latents.cross.max(1));
        let cross = crosses.then(|| Attention::new(d, at, "cross_attention", of, image));
        d.rows(Some(latents));
        let mlp = FeedForward::new(d, at, "mlp", of, like);
        let text = (of.latents.vocab > 0).then(|| {
            d.rows(Some(of.latents.tokens));
            FeedForward::new(d, at, "text_mlp", of, like)
        });
        Self {
            attention,
            cross,
            mlp,
            text,
        }
    }

    /// Applies the layer to the learned rows and those of a text, in this order.
    fn forward(&self, b: &mut Builder<'_>, of: &Vision, x: ValueId, rows: ValueId) -> ValueId {
        let x = self.attention.forward(b, of, x, x);
        let (mut own, mut text) = (x, None);
        if let Some(layer) = &self.text {
            let [first, rest] = b.within(self.attention.module, |b| {
                let first = b.g.slice(x, 1, 0, of.latents.count);
                [first, b.g.slice(x, 1, of.latents.count, of.latents.tokens)]
            });
            own = first;
            text = Some((layer, rest));
        }
        if let Some(cross) = &self.cross {
            own = cross.forward(b, of, own, rows);
        }
        let own = self.mlp.forward(b, own);
        match text {
            Some((layer, rest)) => {
                let rest = layer.forward(b, rest);
                b.within(layer.module, |b| b.g.cat(&[own, rest], 1))
            }
            None => own,
        }
    }
}

impl QFormer {
    /// Declares the Q-Former; returns `None` for towers without one.
    pub(super) fn new(d: &mut Declare, at: ModuleId, of: &Vision, m: &Model) -> Option<Self> {
        if of.latents.width == 0 {
            return None;
        }
        let h = of.latents.width;
        let module = d.module(at, "qformer", ModuleKind::Layer);
        let mut like = of.model(m);
        like.options.norm = Kind::Layer;
        d.rows(Some(of.latents.count));
        let queries = d.module(module, "queries", ModuleKind::Layer);
        let queries = d.parameters(queries, "", &[1, of.latents.count, h], false);
        let text = (of.latents.vocab > 0).then(|| {
            [
                ("tokens", of.latents.vocab),
                ("positions", of.latents.positions),
            ]
            .map(|(name, rows)| d.table(module, (name, ""), ModuleKind::Layer, [rows, h]))
        });
        let norm = Norm::new(d, module, ("norm", ""), h, &like, Order::Declared);
        let layers = (0..of.latents.layers)
            .map(|n| Block::new(d, module, n, of, &like))
            .collect();
        d.rows(Some(of.projected()));
        Some(Self {
            module,
            queries,
            text,
            norm,
            layers,
            projection: d.linear(module, ("projection", ""), [m.hidden, h], true),
        })
    }

    /// Computes `[batch, windows * latents, hidden]` from the tower's rows.
    pub(super) fn forward(&self, b: &mut Builder<'_>, of: &Vision, rows: ValueId) -> ValueId {
        let (batch, windows, queries) = (b.batch(), of.windows(), b.weight(self.queries));
        let (queries, rows) = b.within(self.module, |b| {
            let shape = [batch * windows, of.latents.count, of.latents.width];
            let queries = b.g.expand(queries, &shape);
            if of.latents.window == 0 {
                return (queries, rows);
            }
            let rows = filled(b, rows, windows * of.latents.window);
            let shape = [batch * windows, of.latents.window, of.hidden];
            (queries, b.g.reshape(rows, &shape))
        });
        let x = match self.text {
            Some(tables) => self.with_text(b, of, queries, tables),
            None => queries,
        };
        let mut x = self.norm.apply(b, x);
        for layer in &self.layers {
            x = layer.forward(b, of, x, rows);
        }
        if self.text.is_some() {
            x = b.within(self.module, |b| b.g.slice(x, 1, 0, of.latents.count));
        }
        if windows > 1 {
            let shape = [batch, of.projected(), of.latents.width];
            x = b.within(self.module, |b| b.g.reshape(x, &shape));
        }
        b.linear(self.projection, x)
    }

    /// Puts the embedded tokens of a text after the learned rows.
    fn with_text(
        &self,
        b: &mut Builder<'_>,
        of: &Vision,
        queries: ValueId,
        [tokens, positions]: [Layer; 2],
    ) -> ValueId {
        let shape = [b.batch(), of.latents.tokens];
        let ids = b.constant("instruction_tokens", &shape, DType::I64, true);
        let places = b.constant("instruction_positions", &shape[1..], DType::I64, false);
        let tokens = b.embedding(tokens, ids);
        let positions = b.embedding(positions, places);
        b.within(self.module, |b| {
            let text = b.g.binary(OpKind::Add, tokens, positions);
            b.g.cat(&[queries, text], 1)
        })
    }
}
