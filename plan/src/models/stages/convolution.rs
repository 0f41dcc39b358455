//! Blocks with a convolution of each channel and a feed-forward layer (ConvNeXt).

use crate::config::{Model, Stage, Stages};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;

pub(super) struct Convolution {
    module: ModuleId,
    stage: Stage,
    conv: Layer,
    norm: Layer,
    up: Layer,
    /// Factors and summands of what is divided by the mean of its channels.
    response: Option<Layer>,
    down: Layer,
    scale: Option<Layer>,
}

impl Convolution {
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &Stages, stage: Stage) -> Self {
        let (w, ffn) = (stage.width, m.ffn * stage.width / m.hidden);
        let module = d.module(at, "mlp", ModuleKind::Mlp);
        let conv = d.module(module, "conv", ModuleKind::Layer);
        let vector = |d: &mut Declare, name, width, bias| {
            let module = d.module(module, name, ModuleKind::Layer);
            d.parameters(module, "", &[width], bias)
        };
        Self {
            module,
            stage,
            conv: d.parameters(conv, "", &[w, 1, of.kernel, of.kernel], true),
            norm: d.norm(module, ("norm", ""), w, true, Order::Declared),
            up: d.linear(module, ("w1", ""), [ffn, w], true),
            response: (of.response_norm).then(|| vector(d, "response", ffn, true)),
            down: d.linear(module, ("w2", ""), [w, ffn], true),
            scale: (m.options.layer_scale).then(|| vector(d, "scale", w, false)),
        }
    }

    /// Applies the block to `[batch, rows, width]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let y = self.convolve(b, x);
        let y = b.layer_norm(self.norm, y);
        let up = b.linear(self.up, y);
        let activation = defaults::activation(&b.s.model);
        let mut up = b.within(self.module, |b| activate(b, activation, up));
        if let Some(layer) = self.response {
            up = b.within(self.module, |b| response(b, layer, up));
        }
        let mut y = b.linear(self.down, up);
        if let Some(scale) = self.scale {
            let w = b.weight(scale);
            y = b.within(scale.module(), |b| b.g.binary(OpKind::Mul, y, w));
        }
        b.within(self.module, |b| b.g.binary(OpKind::Add, x, y))
    }

    /// Applies the convolution. Channels come before rows in its operands: values are copied into
    /// that order and back.
    fn convolve(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let Stage { width, edge, .. } = self.stage;
        let batch = b.batch();
        let (w, bias) = (b.weight(self.conv), b.bias(self.conv));
        b.within(self.conv.module(), |b| {
            let image = b.g.transpose(x, 1, 2);
            let image = b.g.reshape(image, &[batch, width, edge, edge]);
            let kind = OpKind::DepthwiseConv(op::DepthwiseConv {
                kernel: b.g.value(w).cols(),
            });
            let inputs: Vec<ValueId> = [image, w].into_iter().chain(bias).collect();
            let shape = [batch, width, edge, edge];
            let made = b.compute(kind, &inputs, &[&shape])[0];
            let made = b.g.reshape(made, &[batch, width, edge * edge]);
            let made = b.g.transpose(made, 1, 2);
            b.g.make_contiguous(made)
        })
    }
}

/// Multiplies each channel of `[batch, rows, width]` by its norm over the rows, divided by the mean
/// of these norms; adds the input (`ConvNextV2GRN`).
fn response(b: &mut Builder<'_>, layer: Layer, x: ValueId) -> ValueId {
    let shape = b.g.value(x).shape.clone();
    let (batch, rows, width) = (shape[0], shape[1], shape[2]);
    let squares = b.g.binary(OpKind::Mul, x, x);
    let squares = b.g.transpose(squares, 0, 1);
    let sums = b.compute(OpKind::SumLeading, &[squares], &[&[batch, width]])[0];
    let power = |exponent| {
        OpKind::Pow(op::Pow {
            exponent: Real(exponent),
        })
    };
    let norms = b.g.unary(power(0.5), sums);
    let mean = OpKind::RowSum(op::RowSum {
        scale: Real(1.0 / width as f64),
    });
    let means = b.compute(mean, &[norms], &[&[batch, 1]])[0];
    let inverse = b.g.unary(power(-1.0), means);
    let inverse = b.as_activation(inverse);
    let each = b.g.binary(OpKind::ScaleRows, norms, inverse);
    // The gradient of a broadcast sums leading dimensions only.
    let each = b.g.expand(each, &[rows, batch, width]);
    let each = b.g.transpose(each, 0, 1);
    let y = b.g.binary(OpKind::Mul, x, each);
    let w = b.weight(layer);
    let y = b.g.binary(OpKind::Mul, y, w);
    let y = match b.bias(layer) {
        Some(bias) => b.g.binary(OpKind::Add, y, bias),
        None => y,
    };
    b.g.binary(OpKind::Add, y, x)
}
