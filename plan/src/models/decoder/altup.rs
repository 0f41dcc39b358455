//! Alternating updates of residual streams (Gemma 3n). Each block predicts all streams, computes
//! one of them, and corrects the others by the difference.
//!
//! Clipping of the coefficients' weights (`altup_coef_clip`) is not planned, because they have only
//! a few elements each.

use super::norm::Norm;
use super::{Block, Carried, Surroundings};
use crate::config::{self, Model};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order, ROOT};
use std::f64::consts::FRAC_1_SQRT_2;

/// Projections from embedded tokens to streams, and from all streams to one row.
pub(super) struct Ends {
    module: ModuleId,
    spread: Vec<Layer>,
    merge: Vec<Layer>,
}

impl Ends {
    pub(super) fn new(d: &mut Declare, m: &Model) -> Option<Self> {
        let n = m.options.per_layer.altup.as_ref()?.streams;
        let module = d.module(ROOT, "altup", ModuleKind::Layer);
        let mut all = |ours: &str, theirs: &str| {
            let one = |i: u64| {
                let names = (format!("{ours}_{i}"), format!("model.{theirs}.{}", i - 1));
                d.linear(module, (&names.0, &names.1), [m.hidden; 2], false)
            };
            (1..n).map(one).collect()
        };
        Some(Self {
            spread: all("spread", "altup_projections"),
            merge: all("merge", "altup_unembed_projections"),
            module,
        })
    }

    /// Returns the streams, `[streams, batch, seq, hidden]`, of embedded tokens `x`.
    pub(super) fn spread(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let inputs = vec![x; self.spread.len()];
        self.stack(b, x, &self.spread, &inputs)
    }

    /// Returns the mean of the streams.
    pub(super) fn merge(&self, b: &mut Builder<'_>, streams: ValueId) -> ValueId {
        let all = b.within(ROOT, |b| {
            let n = self.merge.len() as u64 + 1;
            (0..n).map(|i| stream(b, streams, i)).collect::<Vec<_>>()
        });
        let stacked = self.stack(b, all[0], &self.merge, &all[1..]);
        let n = all.len() as f64;
        b.within(self.module, |b| {
            let shape = b.g.value(all[0]).shape.clone();
            let sum = b.compute(OpKind::SumLeading, &[stacked], &[&shape])[0];
            b.scale(sum, 1.0 / n)
        })
    }

    /// Stacks `first` and the projections of others, which get its magnitude.
    fn stack(
        &self,
        b: &mut Builder<'_>,
        first: ValueId,
        layers: &[Layer],
        others: &[ValueId],
    ) -> ValueId {
        let target = b.within(self.module, |b| {
            let mean = mean_square(b, first);
            let root = OpKind::Pow(op::Pow {
                exponent: Real(0.5),
            });
            b.g.unary(root, mean)
        });
        let shape = b.g.value(first).shape.clone();
        let shape = [1, shape[0], shape[1], shape[2]];
        let mut all = vec![b.g.reshape(first, &shape)];
        for (&layer, &x) in layers.iter().zip(others) {
            let y = b.linear(layer, x);
            all.push(b.within(self.module, |b| {
                let mean = mean_square(b, y);
                // `clamp(min=1e-5)` costs as much.
                let mean = b.g.unary(OpKind::Shift(op::Shift { by: Real(1e-5) }), mean);
                let inverse = b.g.unary(OpKind::Rsqrt, mean);
                let y = b.g.binary(OpKind::Mul, y, target);
                let y = b.g.binary(OpKind::Mul, y, inverse);
                b.g.reshape(y, &shape)
            }));
        }
        b.within(self.module, |b| b.g.cat(&all, 0))
    }
}

/// Returns the mean of the squares of each row, in the type of the rows.
fn mean_square(b: &mut Builder<'_>, x: ValueId) -> ValueId {
    let exponent = Real(2.0);
    let squares = b.g.unary(OpKind::Pow(op::Pow { exponent }), x);
    let value = b.g.value(squares);
    let (mut shape, width) = (value.shape.clone(), value.cols());
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    let scale = Real(1.0 / width as f64);
    let mean = b.compute(OpKind::RowSum(op::RowSum { scale }), &[squares], &[&shape])[0];
    b.as_activation(mean)
}

/// Returns one stream, `[batch, seq, hidden]`.
fn stream(b: &mut Builder<'_>, streams: ValueId, n: u64) -> ValueId {
    let shape = b.g.value(streams).shape.clone();
    let one = b.g.slice(streams, 0, n, 1);
    b.g.reshape(one, &shape[1..])
}

/// Predicts and corrects the streams of a block.
pub(super) struct AltUp {
    of: config::AltUp,
    module: ModuleId,
    router_norm: Norm,
    router: Layer,
    predict: Layer,
    correct: Layer,
    scale: Layer,
    /// Adds to what attention makes: two projections, and the norm of the second one's result.
    laurel: (Layer, Layer, Norm),
}

impl AltUp {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Option<Self> {
        let of = m.options.per_layer.altup.clone()?;
        let (h, n, rank) = (m.hidden, of.streams, of.laurel_rank);
        let module = d.module(block, "altup", ModuleKind::Layer);
        let scale = d.module(module, "scale", ModuleKind::Layer);
        let scale = d.parameters(scale, "", &[h], false);
        if !of.scale {
            d.untrained(scale);
        }
        let mut linear = |ours, theirs, shape| d.linear(module, (ours, theirs), shape, false);
        let correct = linear("correct", "altup.correction_coefs", [n, n]);
        let predict = linear("predict", "altup.prediction_coefs", [n * n, n]);
        let router = linear("router", "altup.modality_router", [n, h]);
        let left = linear("laurel_left", "laurel.linear_left", [rank, h]);
        let right = linear("laurel_right", "laurel.linear_right", [h, rank]);
        let mut norm = |ours, theirs| Norm::new(d, module, (ours, theirs), h, m, Order::Declared);
        Some(Self {
            router_norm: norm("router_norm", "altup.router_norm"),
            laurel: (left, right, norm("laurel_norm", "laurel.post_laurel_norm")),
            of,
            module,
            router,
            predict,
            correct,
            scale,
        })
    }

    /// Returns a number for each stream and position, from one stream.
    fn route(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let hidden = b.s.model.hidden as f64;
        let y = self.router_norm.apply(b, x);
        let y = b.within(self.module, |b| b.scale(y, 1.0 / hidden));
        let y = b.linear(self.router, y);
        b.within(self.module, |b| {
            let y = b.g.cast(y, DType::F32);
            let tanh = OpKind::Softcap(op::Softcap { cap: Real(1.0) });
            let y = b.g.unary(tanh, y);
            b.as_activation(y)
        })
    }

    /// Returns the predicted streams.
    fn predict(&self, b: &mut Builder<'_>, streams: ValueId) -> ValueId {
        let active = b.within(self.module, |b| stream(b, streams, self.of.active));
        let routed = self.route(b, active);
        let weights = b.linear(self.predict, routed);
        b.within(self.module, |b| {
            let shape = b.g.value(streams).shape.clone();
            let mixed = [shape[1], shape[2], shape[3], shape[0]];
            let y = b.compute(OpKind::MixStreams, &[streams, weights], &[&mixed])[0];
            let y = b.g.transpose(y, 0, 3);
            let y = b.g.transpose(y, 1, 3);
            let y = b.g.transpose(y, 2, 3);
            let y = b.g.add_into(y, streams);
            b.g.make_contiguous(y)
        })
    }

    /// Returns the streams corrected by what the block made of the active one.
    fn correct(&self, b: &mut Builder<'_>, streams: ValueId, made: ValueId) -> ValueId {
        let routed = self.route(b, made);
        let weights = b.linear(self.correct, routed);
        b.within(self.module, |b| {
            let shape = b.g.value(streams).shape.clone();
            let predicted = stream(b, streams, self.of.active);
            let change = b.g.binary(OpKind::Sub, made, predicted);
            let change = b.g.expand(change, &shape);
            let change = b.g.make_contiguous(change);
            let weights =
                b.g.unary(OpKind::Shift(op::Shift { by: Real(1.0) }), weights);
            let weights = b.g.transpose(weights, 1, 2);
            let weights = b.g.transpose(weights, 0, 1);
            let weights = b.g.reshape(weights, &[shape[0], shape[1], shape[2], 1]);
            let change = b.g.binary(OpKind::Mul, change, weights);
            b.g.add_into(change, streams)
        })
    }

    /// Returns what is added to attention's sum: `y` and its projection to a small width and back.
    fn laurel(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let (left, right, norm) = &self.laurel;
        let low = b.linear(*left, y);
        let made = b.linear(*right, low);
        let made = norm.apply(b, made);
        b.within(self.module, |b| b.g.binary(OpKind::Add, y, made))
    }
}

impl Block {
    /// Applies attention and the feed-forward layer to one of the residual streams `x`.
    pub(super) fn alternating(
        &self,
        b: &mut Builder<'_>,
        altup: &AltUp,
        x: ValueId,
        by: Surroundings,
        carried: &mut Carried,
    ) -> ValueId {
        let (Some(mixer), Some(mlp)) = (&self.mixer, &self.mlp) else {
            return x;
        };
        let active = altup.of.active;
        let predicted = altup.predict(b, x);
        let own = b.within(altup.module, |b| stream(b, predicted, active));
        let y = mixer.norms()[0].map_or(own, |norm| norm.apply(b, own));
        let more = altup.laurel(b, y);
        let (o, mut locals) = self.mix(b, mixer, y, by, carried);
        let sum = b.within(altup.module, |b| {
            let sum = b.g.binary(OpKind::Add, own, o);
            let sum = b.g.binary(OpKind::Add, sum, more);
            b.scale(sum, FRAC_1_SQRT_2)
        });
        let y2 = mlp.norms()[0].map_or(sum, |norm| norm.apply(b, sum));
        let f = mlp.forward(b, [sum, y2], &mut carried.routers);
        let made = b.within(altup.module, |b| b.g.binary(OpKind::Add, sum, f));
        let mut out = altup.correct(b, predicted, made);
        if let Some((input, rows)) = self.input.as_ref().zip(by.rows) {
            let mut first = b.within(altup.module, |b| {
                let first = stream(b, out, active);
                let shape = b.g.value(first).shape.clone();
                b.compute(OpKind::Copy, &[first], &[&shape])[0]
            });
            if altup.of.scale {
                let w = b.weight(altup.scale);
                first = b.within(altup.module, |b| b.g.binary(OpKind::Mul, first, w));
            }
            let made = input.forward(b, first, rows);
            out = b.within(altup.module, |b| {
                let n = altup.of.streams;
                let kept = b.g.slice(out, 0, 0, 1);
                let others = b.g.slice(out, 0, 1, n - 1);
                let others = b.g.binary(OpKind::Add, others, made);
                b.g.cat(&[kept, others], 0)
            });
        }
        locals.extend([x, predicted, y, more, y2]);
        self.release(b, locals);
        out
    }
}
