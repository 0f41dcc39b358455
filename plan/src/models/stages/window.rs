//! Blocks with attention within windows, whose scores have a learned bias for each distance (Swin).
//!
//! Windows of shifted blocks are planned without the mask that separates what was not adjacent.

use crate::config::{Model, Stage, Stages};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;

pub(super) struct Windows {
    stage: Stage,
    attention: ModuleId,
    shifts: bool,
    norms: [Layer; 2],
    qkv: [Layer; 3],
    output: Layer,
    /// Biases by distance, `[distances, heads]`.
    bias: Layer,
    mlp: ModuleId,
    up: Layer,
    down: Layer,
}

impl Windows {
    pub(super) fn new(
        d: &mut Declare,
        at: ModuleId,
        m: &Model,
        of: &Stages,
        stage: Stage,
        shifts: bool,
    ) -> Self {
        let w = stage.width;
        let attention = d.module(at, "attention", ModuleKind::Attention);
        let first = d.norm(attention, ("norm", ""), w, true, Order::Declared);
        let qkv = ["q", "k", "v"].map(|name| d.linear(attention, (name, ""), [w, w], m.bias.qkv()));
        let output = d.linear(attention, ("o", ""), [w, w], true);
        let shape = [stage.distances(of.window), stage.heads];
        let bias = d.table(attention, ("bias", ""), ModuleKind::Layer, shape);
        let mlp = d.module(at, "mlp", ModuleKind::Mlp);
        let ffn = m.ffn * w / m.hidden;
        let second = d.norm(mlp, ("norm", ""), w, true, Order::Declared);
        Self {
            stage,
            attention,
            shifts,
            norms: [first, second],
            qkv,
            output,
            bias,
            mlp,
            up: d.linear(mlp, ("w1", ""), [ffn, w], true),
            down: d.linear(mlp, ("w2", ""), [w, ffn], true),
        }
    }

    /// Applies the block to `[batch, rows, width]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let y = b.layer_norm(self.norms[0], x);
        let y = b.within(self.attention, |b| self.divide(b, y));
        let made = self.attend(b, y);
        let x = b.within(self.attention, |b| {
            let made = self.join(b, made);
            b.g.binary(OpKind::Add, x, made)
        });
        let y = b.layer_norm(self.norms[1], x);
        let up = b.linear(self.up, y);
        let activation = defaults::activation(&b.s.model);
        let up = b.within(self.mlp, |b| activate(b, activation, up));
        let down = b.linear(self.down, up);
        b.within(self.mlp, |b| b.g.binary(OpKind::Add, down, x))
    }

    /// Moves the first rows and columns of `[batch, edge, edge, width]` to the end.
    fn shifted(&self, b: &mut Builder<'_>, mut x: ValueId, by: u64) -> ValueId {
        for axis in [1, 2] {
            let first = b.g.slice(x, axis, 0, by);
            let rest = b.g.slice(x, axis, by, self.stage.edge - by);
            x = b.g.cat(&[rest, first], axis);
        }
        x
    }

    /// Divides images into windows: `[batch * windows, rows of a window, width]`.
    fn divide(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let Stage {
            width,
            edge,
            window,
            ..
        } = self.stage;
        let batch = b.batch();
        let mut y = b.g.reshape(y, &[batch, edge, edge, width]);
        if self.shifts {
            y = self.shifted(b, y, window / 2);
        }
        let n = edge / window;
        let y = b.g.reshape(y, &[batch, n, window, n, window, width]);
        let y = b.g.transpose(y, 2, 3);
        b.g.reshape(y, &[batch * n * n, window * window, width])
    }

    /// Makes images of windows: `[batch, rows, width]`.
    fn join(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let Stage {
            width,
            edge,
            window,
            ..
        } = self.stage;
        let (batch, n) = (b.batch(), edge / window);
        let y = b.g.reshape(y, &[batch, n, n, window, window, width]);
        let y = b.g.transpose(y, 2, 3);
        let mut y = b.g.reshape(y, &[batch, edge, edge, width]);
        if self.shifts {
            y = self.shifted(b, y, edge - window / 2);
        }
        b.g.reshape(y, &[batch, edge * edge, width])
    }

    /// Applies attention within windows.
    fn attend(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let Stage { width, heads, .. } = self.stage;
        let (windows, rows) = (b.g.value(y).shape[0], self.stage.window_rows());
        let dim = width / heads;
        let qkv = self.qkv.map(|layer| {
            let made = b.linear(layer, y);
            b.within(self.attention, |b| {
                let made = b.g.reshape(made, &[windows, rows, heads, dim]);
                b.g.transpose(made, 1, 2)
            })
        });
        let pairs = b.constant("window_distances", &[rows * rows], DType::I64, false);
        let bias = b.embedding(self.bias, pairs);
        let made = b.within(self.attention, |b| {
            let bias = b.g.transpose(bias, 0, 1);
            let bias = b.g.reshape(bias, &[heads, rows, rows]);
            let kind = op::BiasedAttention {
                causal: false,
                scale: Real((dim as f64).powf(-0.5)),
                window: 0,
            };
            let made = b.biased_attention(qkv, bias, kind);
            let made = b.g.transpose(made, 1, 2);
            b.g.reshape(made, &[windows, rows, width])
        });
        b.linear(self.output, made)
    }
}
