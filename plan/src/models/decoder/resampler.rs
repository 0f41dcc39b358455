//! Learned queries that attend to the rows of an image and replace them (Idefics2).

use super::norm::Norm;
use crate::config::{Activation, Model, Norm as Kind, Vision};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

pub(super) struct Resampler {
    module: ModuleId,
    /// Projects the rows of the image.
    projection: Gated,
    latents: Layer,
    layers: Vec<Perceiver>,
    norm: Norm,
}

/// A feed-forward layer with a gate, without biases.
struct Gated {
    gate: Layer,
    up: Layer,
    down: Layer,
}

impl Gated {
    fn new(d: &mut Declare, at: ModuleId, name: &str, [input, ffn, output]: [u64; 3]) -> Self {
        let module = d.module(at, name, ModuleKind::Mlp);
        Self {
            gate: d.linear(module, ("w1", ""), [ffn, input], false),
            up: d.linear(module, ("w3", ""), [ffn, input], false),
            down: d.linear(module, ("w2", ""), [output, ffn], false),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let gate = b.linear(self.gate, x);
        let gate = b.within(self.gate.module(), |b| activate(b, Activation::Silu, gate));
        let up = b.linear(self.up, x);
        let y = b.within(self.up.module(), |b| b.g.binary(OpKind::Mul, gate, up));
        b.linear(self.down, y)
    }
}

/// One layer: latents attend to the rows and to themselves.
struct Perceiver {
    module: ModuleId,
    /// Norms of latents, of rows, and of the feed-forward layer's input.
    norms: [Norm; 3],
    /// Projections to queries, keys and values.
    qkv: [Layer; 3],
    output: Layer,
    mlp: Gated,
}

impl Perceiver {
    fn new(d: &mut Declare, at: ModuleId, of: &Vision, m: &Model) -> Self {
        let (h, rows) = (m.hidden, of.rows());
        let [q, kv] = [0, 1].map(|n| of.latents.heads[n] * of.latents.heads[2]);
        d.rows(Some(rows + of.latents.count));
        let [k, v] = ["k", "v"].map(|name| d.linear(at, (name, ""), [kv, h], false));
        d.rows(Some(of.latents.count));
        Self {
            module: at,
            norms: ["latent_norm", "row_norm", "mlp_norm"]
                .map(|name| Norm::new(d, at, (name, ""), h, m, Order::Declared)),
            qkv: [d.linear(at, ("q", ""), [q, h], false), k, v],
            output: d.linear(at, ("o", ""), [h, q], false),
            mlp: Gated::new(d, at, "mlp", [h, 4 * h, h]),
        }
    }

    fn forward(
        &self,
        b: &mut Builder<'_>,
        of: &Vision,
        latents: ValueId,
        rows: ValueId,
    ) -> ValueId {
        let batch = b.batch();
        let [of_latents, of_rows, of_mlp] = self.norms;
        let (x, rows) = (of_latents.apply(b, latents), of_rows.apply(b, rows));
        let both = b.within(self.module, |b| b.g.cat(&[rows, x], 1));
        let heads = [0, 1, 1].map(|n| of.latents.heads[n]);
        let [q, k, v] = [0, 1, 2].map(|n| {
            let made = b.linear(self.qkv[n], if n == 0 { x } else { both });
            b.within(self.module, |b| {
                let rows = b.g.value(made).shape[1];
                let made =
                    b.g.reshape(made, &[batch, rows, heads[n], of.latents.heads[2]]);
                b.g.transpose(made, 1, 2)
            })
        });
        let attended = b.within(self.module, |b| {
            let out = b.attention(q, k, v, false);
            let out = b.g.transpose(out, 1, 2);
            b.g.reshape(
                out,
                &[batch, of.latents.count, heads[0] * of.latents.heads[2]],
            )
        });
        let attended = b.linear(self.output, attended);
        let latents = b.within(self.module, |b| b.g.binary(OpKind::Add, latents, attended));
        let y = of_mlp.apply(b, latents);
        let y = self.mlp.forward(b, y);
        b.within(self.module, |b| b.g.binary(OpKind::Add, latents, y))
    }
}

impl Resampler {
    pub(super) fn new(d: &mut Declare, at: ModuleId, of: &Vision, m: &Model) -> Self {
        let module = d.module(at, "resampler", ModuleKind::Layer);
        let mut like = of.model(m);
        like.hidden = m.hidden;
        like.options.norm = Kind::Rms;
        d.rows(Some(of.rows()));
        let sizes = [of.hidden, of.latents.ffn, m.hidden];
        let projection = Gated::new(d, module, "projection", sizes);
        d.rows(Some(of.latents.count));
        let latents = d.module(module, "latents", ModuleKind::Layer);
        let latents = d.parameters(latents, "", &[of.latents.count, m.hidden], false);
        let layer = |n: u64| {
            let at = d.module(module, &format!("layers.{n}"), ModuleKind::Layer);
            Perceiver::new(d, at, of, &like)
        };
        let layers = (0..of.latents.layers).map(layer).collect();
        let norm = Norm::new(d, module, ("norm", ""), m.hidden, &like, Order::Declared);
        Self {
            module,
            projection,
            latents,
            layers,
            norm,
        }
    }

    /// Computes `[batch, latents, hidden]` from the tower's rows.
    pub(super) fn forward(&self, b: &mut Builder<'_>, of: &Vision, rows: ValueId) -> ValueId {
        let (batch, latents) = (b.batch(), b.weight(self.latents));
        let rows = self.projection.forward(b, rows);
        let mut x = b.within(self.module, |b| {
            let shape = [batch, of.latents.count, b.g.value(latents).cols()];
            b.g.expand(latents, &shape)
        });
        for layer in &self.layers {
            x = layer.forward(b, of, x, rows);
        }
        self.norm.apply(b, x)
    }
}
