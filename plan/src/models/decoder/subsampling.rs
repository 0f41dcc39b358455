//! Two-dimensional convolutions that make rows of the frames and bands of a sound.

use crate::config::Subsampling;
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

/// Positions that a convolution sees in each dimension, and its stride.
const KERNEL: u64 = 3;
const STRIDE: u64 = 2;

/// Convolutions and a projection from frames to rows.
pub(super) struct Subsampled {
    of: Subsampling,
    module: ModuleId,
    bands: u64,
    rows: u64,
    convolutions: Vec<Halving>,
    projection: Layer,
}

/// A convolution that halves frames and bands.
struct Halving {
    layer: Layer,
    /// Mixes the channels of each position.
    mix: Option<Layer>,
    norm: Option<Layer>,
}

impl Subsampled {
    /// Declares the convolutions over `bands` bands, which output `rows` rows of width `hidden`.
    pub(super) fn new(
        d: &mut Declare,
        at: ModuleId,
        of: &Subsampling,
        [bands, rows, hidden]: [u64; 3],
    ) -> Self {
        let module = d.module(at, "subsampling", ModuleKind::Layer);
        let [chunks, mut frames] = of.chunks(rows);
        let (mut height, mut inputs) = (bands, 1);
        let mut halve = |(n, &channels): (usize, &u64)| {
            (frames, height) = (frames.div_ceil(STRIDE), height.div_ceil(STRIDE));
            d.rows(Some(chunks * frames * height));
            let alone = of.separable && n > 0;
            let seen = if alone { 1 } else { inputs };
            let outputs = if alone { inputs } else { channels };
            let at = d.module(module, &format!("convolutions.{n}"), ModuleKind::Layer);
            let halving = Halving {
                layer: d.parameters(at, "", &[outputs, seen, KERNEL, KERNEL], of.bias),
                mix: alone.then(|| {
                    let at = d.module(at, "mix", ModuleKind::Layer);
                    d.parameters(at, "", &[channels, inputs, 1, 1], of.bias)
                }),
                norm: (of.norms)
                    .then(|| d.norm(at, ("norm", ""), channels, false, Order::Declared)),
            };
            inputs = channels;
            halving
        };
        let convolutions = of.channels.iter().enumerate().map(&mut halve).collect();
        d.rows(Some(rows));
        let shape = [hidden, inputs * height];
        let projection = d.linear(module, ("projection", ""), shape, of.projection_bias);
        Self {
            of: of.clone(),
            module,
            bands,
            rows,
            convolutions,
            projection,
        }
    }

    /// Computes rows from the frames of each sound, `[batch, rows, hidden]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>) -> ValueId {
        let batch = b.batch();
        let [chunks, frames] = self.of.chunks(self.rows);
        let shape = [batch * chunks, 1, frames, self.bands];
        let frames = b.constant("frames", &shape, DType::F32, true);
        let mut x = b.within(self.module, |b| b.as_activation(frames));
        for halving in &self.convolutions {
            x = halving.forward(b, &self.of, x);
        }
        let x = b.within(self.module, |b| {
            let left = b.g.value(x).shape.clone();
            let by_frame = b.g.transpose(x, 1, 2);
            b.g.reshape(by_frame, &[batch, self.rows, left[1] * left[3]])
        });
        b.linear(self.projection, x)
    }
}

impl Halving {
    /// Applies the convolution to `[sounds, channels, frames, bands]`, the norm and the activation.
    fn forward(&self, b: &mut Builder<'_>, of: &Subsampling, x: ValueId) -> ValueId {
        let at = self.layer.module();
        let mut x = convolve(b, self.layer, x, STRIDE);
        if let Some(mix) = self.mix {
            x = convolve(b, mix, x, 1);
        }
        let Some(norm) = self.norm else {
            return b.within(at, |b| activate(b, of.activation, x));
        };
        // Channels last, and back.
        let last = b.within(at, |b| {
            let frames = b.g.transpose(x, 1, 2);
            let last = b.g.transpose(frames, 2, 3);
            b.g.make_contiguous(last)
        });
        let y = b.layer_norm(norm, last);
        b.within(at, |b| {
            let bands = b.g.transpose(y, 2, 3);
            let first = b.g.transpose(bands, 1, 2);
            let first = b.g.make_contiguous(first);
            activate(b, of.activation, first)
        })
    }
}

/// Applies `nn.Conv2d`: the convolution, then the bias in place.
fn convolve(b: &mut Builder<'_>, layer: Layer, x: ValueId, stride: u64) -> ValueId {
    let (w, bias) = (b.weight(layer), b.bias(layer));
    b.within(layer.module(), |b| {
        let (of_x, of_w) = (&b.g.value(x).shape, &b.g.value(w).shape);
        let (channels, kernel) = (of_w[0], of_w[3]);
        let [frames, bands] = [of_x[2], of_x[3]].map(|n| n.div_ceil(stride));
        let shape = [of_x[0], channels, frames, bands];
        let kind = OpKind::Conv2d(op::Conv2d { kernel, stride });
        let y = b.compute(kind, &[x, w], &[&shape])[0];
        match bias {
            Some(bias) => {
                let bias = b.g.reshape(bias, &[1, channels, 1, 1]);
                b.g.add_into(y, bias)
            }
            None => y,
        }
    })
}
