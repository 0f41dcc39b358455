//! Blocks with attention within windows, whose scores have a learned bias for each distance (Swin).
//!
//! Windows of shifted blocks are planned without the mask that separates patches that were not
//! adjacent.

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
    /// Rows of a table of distances.
    distances: u64,
    scores: Scores,
    mlp: ModuleId,
    up: Layer,
    down: Layer,
}

/// What scores have in addition to those of queries and keys.
enum Scores {
    /// Biases by distance, `[distances, heads]`.
    Table(Layer),
    /// They are cosines, times learned factors, and a network makes biases (Swin V2).
    Cosine {
        first: Layer,
        second: Layer,
        factors: Layer,
    },
}

/// Width of the network that makes biases, and numbers of a distance.
const NETWORK: u64 = 512;
const AXES: u64 = 2;
/// Factor of the sigmoids of what it makes.
const LARGEST_BIAS: f64 = 16.0;

impl Scores {
    fn new(d: &mut Declare, at: ModuleId, of: &Stages, stage: Stage) -> Self {
        let shape = [stage.distances(of.window), stage.heads];
        if !of.cosine {
            return Self::Table(d.table(at, ("bias", ""), ModuleKind::Layer, shape));
        }
        let outer = d.rows(Some(shape[0]));
        let module = d.module(at, "bias", ModuleKind::Layer);
        let first = d.linear(module, ("first", ""), [NETWORK, AXES], true);
        let second = d.linear(module, ("second", ""), [stage.heads, NETWORK], false);
        d.rows(outer);
        let factors = d.module(at, "factors", ModuleKind::Layer);
        Self::Cosine {
            first,
            second,
            factors: d.parameters(factors, "", &[stage.heads, 1, 1], false),
        }
    }

    /// Looks up the biases of all pairs of `rows`, `[rows * rows, heads]`.
    fn biases(&self, b: &mut Builder<'_>, at: ModuleId, rows: u64, distances: u64) -> ValueId {
        let pairs = b.constant("window_distances", &[rows * rows], DType::I64, false);
        match self {
            Self::Table(table) => b.embedding(*table, pairs),
            Self::Cosine { first, second, .. } => {
                let places = b.constant("distances", &[distances, AXES], DType::F32, false);
                let places = b.within(at, |b| b.as_activation(places));
                let inner = b.linear(*first, places);
                let inner = b.within(at, |b| b.g.unary(OpKind::Relu, inner));
                let table = b.linear(*second, inner);
                let heads = b.g.value(table).cols();
                b.within(at, |b| {
                    let shape = [rows * rows, heads];
                    let each = b.compute(OpKind::Embedding, &[pairs, table], &[&shape])[0];
                    let each = b.g.unary(OpKind::Sigmoid, each);
                    b.scale(each, LARGEST_BIAS)
                })
            }
        }
    }

    /// Normalizes queries (0) and keys (1), `[windows, rows, heads, dim]`, and multiplies queries
    /// by the factors of their heads.
    fn normalize(&self, b: &mut Builder<'_>, at: ModuleId, n: usize, x: ValueId) -> ValueId {
        let Self::Cosine { factors, .. } = self else {
            return x;
        };
        if n > 1 {
            return x;
        }
        let shape = b.g.value(x).shape.clone();
        let (heads, dim) = (shape[2], shape[3]);
        let ones = b.constant("ones", &[dim], DType::F32, false);
        let factors = b.weight(*factors);
        b.within(at, |b| {
            let ones = b.as_activation(ones);
            let rows = b.g.value(x).rows();
            let kind = OpKind::RmsNorm(op::RmsNorm { eps: Real(1e-12) });
            let y = b.compute(kind, &[x, ones], &[&shape, &[rows, 1]])[0];
            if n == 1 {
                return y;
            }
            let ones = b.g.expand(ones, &[heads, dim]);
            let factors = b.g.reshape(factors, &[heads, 1]);
            let each = b.g.binary(OpKind::ScaleRows, ones, factors);
            b.g.binary(OpKind::Mul, y, each)
        })
    }
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
        let qkv = ["q", "k", "v"].map(|name| {
            let bias = m.bias.qkv() && (m.options.attention.key_bias || name != "k");
            d.linear(attention, (name, ""), [w, w], bias)
        });
        let output = d.linear(attention, ("o", ""), [w, w], true);
        let scores = Scores::new(d, attention, of, stage);
        let mlp = d.module(at, "mlp", ModuleKind::Mlp);
        let ffn = m.ffn * w / m.hidden;
        let second = d.norm(mlp, ("norm", ""), w, true, Order::Declared);
        Self {
            stage,
            attention,
            // Windows shift by half their width, which rounds to 0 for one patch.
            shifts: shifts && stage.window > 1,
            norms: [first, second],
            qkv,
            output,
            distances: stage.distances(of.window),
            scores,
            mlp,
            up: d.linear(mlp, ("w1", ""), [ffn, w], true),
            down: d.linear(mlp, ("w2", ""), [w, ffn], true),
        }
    }

    /// Applies the block to `[batch, rows, width]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        // Swin V2 normalizes what is added, Swin what is read.
        let after = matches!(self.scores, Scores::Cosine { .. });
        let normalize = |b: &mut Builder<'_>, n: usize, x, now: bool| match now {
            true => b.layer_norm(self.norms[n], x),
            false => x,
        };
        let y = normalize(b, 0, x, !after);
        let y = b.within(self.attention, |b| self.divide(b, y));
        let made = self.attend(b, y);
        let made = b.within(self.attention, |b| self.join(b, made));
        let made = normalize(b, 0, made, after);
        let x = b.within(self.attention, |b| b.g.binary(OpKind::Add, x, made));
        let y = normalize(b, 1, x, !after);
        let up = b.linear(self.up, y);
        let activation = defaults::activation(&b.s.model);
        let up = b.within(self.mlp, |b| activate(b, activation, up));
        let down = b.linear(self.down, up);
        let down = normalize(b, 1, down, after);
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
        let mut n = 0;
        let qkv = self.qkv.map(|layer| {
            let made = b.linear(layer, y);
            let made = b.within(self.attention, |b| {
                b.g.reshape(made, &[windows, rows, heads, dim])
            });
            let made = self.scores.normalize(b, self.attention, n, made);
            n += 1;
            b.within(self.attention, |b| b.g.transpose(made, 1, 2))
        });
        let bias = (self.scores).biases(b, self.attention, rows, self.distances);
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
