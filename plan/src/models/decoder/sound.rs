//! Inputs of audio encoders: rows that convolutions compute from the samples (wav2vec 2.0) or
//! from frames.

use super::convolve::convolve;
use super::scaled;
use super::subsampling::Subsampled;
use crate::config::{Activation, Model};
use crate::graph::ValueId;
use crate::ir::{DType, Init, ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order, ROOT};

/// Convolutions and a projection from samples or frames to rows.
pub(super) struct Sound {
    module: ModuleId,
    /// Number of input positions of each convolution, and of output positions of the last one.
    positions: Vec<u64>,
    convolutions: Vec<Convolution>,
    /// Numbers of a frame, if rows are made of frames.
    bands: u64,
    projection: Projection,
    /// Factor of rows.
    scale: f64,
    /// Stands for masked rows.
    mask: Option<Layer>,
    places: Vec<Places>,
}

/// Layers between the convolutions over samples, or the frames, and the rows.
enum Projection {
    /// A norm and a layer.
    Linear(Option<Layer>, Layer),
    Subsampled(Subsampled),
}

/// A convolution over samples.
struct Convolution {
    layer: Layer,
    stride: u64,
    norm: Option<Layer>,
    /// The norm is one of channels, not of positions.
    by_channel: bool,
}

/// A convolution that makes positions of rows.
struct Places {
    layer: Layer,
    /// Lengths of its weights; without them, results are normalized.
    lengths: Option<Layer>,
}

impl Sound {
    pub(super) fn new(d: &mut Declare, m: &Model) -> Option<Self> {
        let of = m.options.sound.as_ref()?;
        let module = d.module(ROOT, "sound", ModuleKind::Layer);
        let positions = of.positions(m.max_seq_len);
        let outer = d.rows(None);
        let mut inputs = of.bands.max(1);
        let mut convolutions = Vec::new();
        let of_samples = of.widths.iter().filter(|_| of.bands == 0);
        for (n, &width) in of_samples.enumerate() {
            d.rows(Some(positions[n + 1]));
            let at = d.module(module, &format!("convolutions.{n}"), ModuleKind::Layer);
            let layer = d.parameters(at, "", &[width, inputs, of.kernels[n]], of.bias);
            let norm = (of.norms || n == 0)
                .then(|| d.norm(at, ("norm", ""), width, true, Order::Declared));
            convolutions.push(Convolution {
                layer,
                stride: of.strides[n],
                norm,
                by_channel: of.norms,
            });
            inputs = width;
        }
        d.rows(outer);
        let projection = if let Some(by) = &of.subsampling {
            let shape = [of.bands, m.max_seq_len, m.hidden];
            let stem = Projection::Subsampled(Subsampled::new(d, module, by, shape));
            d.rows(outer);
            stem
        } else {
            let norm = (of.input_norm)
                .then(|| d.norm(module, ("norm", ""), inputs, true, Order::Declared));
            let shape = [m.hidden, inputs];
            Projection::Linear(norm, d.linear(module, ("projection", ""), shape, true))
        };
        let mask = of.masked.then(|| {
            let at = d.module(module, "mask", ModuleKind::Layer);
            d.parameters(at, "", &[m.hidden], false)
        });
        let shape = [m.hidden, m.hidden / of.position_groups, of.position_kernel];
        let place = |d: &mut Declare, n: u64| {
            let at = d.module(module, &format!("positions.{n}"), ModuleKind::Layer);
            let layer = d.parameters(at, "", &shape, true);
            let names = ("lengths", "");
            let lengths = (of.weight_norm).then(|| {
                d.norm_from(
                    at,
                    names,
                    of.position_kernel,
                    false,
                    Order::Declared,
                    Init::Ones,
                )
            });
            Places { layer, lengths }
        };
        // Nothing computes those that are not used.
        let outer = d.rows((!of.positions_used).then_some(0));
        let mut places: Vec<Places> = (0..of.position_layers).map(|n| place(d, n)).collect();
        d.rows(outer);
        if !of.positions_used {
            for place in places.drain(..) {
                d.untrained(place.layer);
                if let Some(lengths) = place.lengths {
                    d.untrained(lengths);
                }
            }
        }
        Some(Self {
            module,
            positions,
            convolutions,
            bands: of.bands,
            projection,
            scale: if of.scaled {
                (m.hidden as f64).sqrt()
            } else {
                1.0
            },
            mask,
            places,
        })
    }

    /// Computes rows from the samples of each sound, `[batch, seq, hidden]`.
    pub(super) fn forward(&self, b: &mut Builder<'_>) -> ValueId {
        let mut x = self.project(b);
        x = b.within(self.module, |b| scaled(b, x, self.scale));
        if let Some(mask) = self.mask {
            x = masked(b, self.module, mask, x);
        }
        if self.places.is_empty() {
            return x;
        }
        let mut places = b.within(self.module, |b| b.g.transpose(x, 1, 2));
        for layer in &self.places {
            places = layer.forward(b, places);
        }
        b.within(self.module, |b| {
            let places = b.g.transpose(places, 1, 2);
            b.g.binary(OpKind::Add, x, places)
        })
    }

    /// Computes rows from samples or frames, `[batch, seq, hidden]`.
    fn project(&self, b: &mut Builder<'_>) -> ValueId {
        let (norm, layer) = match &self.projection {
            Projection::Subsampled(by) => return by.forward(b),
            Projection::Linear(norm, layer) => (*norm, *layer),
        };
        let rows = match self.bands {
            0 => self.of_samples(b),
            bands => {
                let shape = [b.batch(), b.seq(), bands];
                let frames = b.constant("frames", &shape, DType::F32, true);
                b.within(self.module, |b| b.as_activation(frames))
            }
        };
        let rows = norm.map_or(rows, |norm| b.layer_norm(norm, rows));
        b.linear(layer, rows)
    }

    /// Applies the convolutions over samples.
    fn of_samples(&self, b: &mut Builder<'_>) -> ValueId {
        let batch = b.batch();
        let samples = b.constant("samples", &[batch, 1, self.positions[0]], DType::F32, true);
        let mut x = b.within(self.module, |b| b.as_activation(samples));
        for (convolution, &positions) in self.convolutions.iter().zip(&self.positions[1..]) {
            x = convolution.forward(b, x, positions);
        }
        b.within(self.module, |b| {
            let rows = b.g.transpose(x, 1, 2);
            b.g.make_contiguous(rows)
        })
    }
}

impl Convolution {
    /// Applies the convolution to `[batch, channels, positions]`, its norm, and GELU.
    fn forward(&self, b: &mut Builder<'_>, x: ValueId, positions: u64) -> ValueId {
        let (w, bias) = (b.weight(self.layer), b.bias(self.layer));
        let at = self.layer.module();
        let mut y = convolve(b, at, [x, w], bias, [self.stride, positions]);
        if let Some(norm) = self.norm {
            y = self.normalize(b, norm, y);
        }
        b.within(at, |b| activate(b, Activation::Gelu, y))
    }

    /// Normalizes channels of each position, or positions of each channel.
    fn normalize(&self, b: &mut Builder<'_>, norm: Layer, y: ValueId) -> ValueId {
        let at = norm.module();
        if self.by_channel {
            let rows = b.within(at, |b| {
                let rows = b.g.transpose(y, 1, 2);
                b.g.make_contiguous(rows)
            });
            let rows = b.layer_norm(norm, rows);
            return b.within(at, |b| b.g.transpose(rows, 1, 2));
        }
        let (w, bias) = (b.weight(norm), b.bias(norm));
        let positions = b.g.value(y).cols();
        let ones = b.ones(at, positions);
        let y = b.layer_norm_by(at, y, ones, None);
        b.within(at, |b| {
            let rows = b.g.transpose(y, 1, 2);
            let mut rows = b.g.binary(OpKind::Mul, rows, w);
            if let Some(bias) = bias {
                rows = b.g.binary(OpKind::Add, rows, bias);
            }
            b.g.transpose(rows, 1, 2)
        })
    }
}

impl Places {
    /// Applies the convolution to `[batch, channels, rows]`, and GELU.
    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let at = self.layer.module();
        let (w, bias) = (b.weight(self.layer), b.bias(self.layer));
        let w = self
            .lengths
            .map_or(w, |lengths| with_lengths(b, at, w, lengths));
        let rows = b.g.value(x).cols();
        let mut y = convolve(b, at, [x, w], bias, [1, rows]);
        if self.lengths.is_none() {
            let by_row = b.within(at, |b| {
                let by_row = b.g.transpose(y, 1, 2);
                b.g.make_contiguous(by_row)
            });
            let ones = b.ones(at, b.g.value(by_row).cols());
            let by_row = b.layer_norm_by(at, by_row, ones, None);
            y = b.within(at, |b| b.g.transpose(by_row, 1, 2));
        }
        b.within(at, |b| activate(b, Activation::Gelu, y))
    }
}

/// Gives the weights of each of the kernel's positions their learned length
/// (`parametrizations.weight_norm`).
fn with_lengths(b: &mut Builder<'_>, at: ModuleId, w: ValueId, lengths: Layer) -> ValueId {
    let lengths = b.weight(lengths);
    let shape = b.g.value(w).shape.clone();
    let (rest, kernel) = (shape[0] * shape[1], shape[2]);
    let ones = b.ones(at, rest);
    b.within(at, |b| {
        let flat = b.g.reshape(w, &[rest, kernel]);
        let rows = b.g.transpose(flat, 0, 1);
        let rows = b.g.make_contiguous(rows);
        let kind = OpKind::RmsNorm(op::RmsNorm { eps: Real(1e-30) });
        let rows = b.compute(kind, &[rows, ones], &[&[kernel, rest], &[kernel, 1]])[0];
        let rows = b.scale(rows, (rest as f64).powf(-0.5));
        let lengths = b.g.reshape(lengths, &[kernel, 1]);
        let rows = b.g.binary(OpKind::ScaleRows, rows, lengths);
        let columns = b.g.transpose(rows, 0, 1);
        let columns = b.g.make_contiguous(columns);
        b.g.reshape(columns, &shape)
    })
}

/// Puts the learned row in place of masked ones.
fn masked(b: &mut Builder<'_>, at: ModuleId, mask: Layer, x: ValueId) -> ValueId {
    let shape = b.g.value(x).shape.clone();
    let (rows, width) = (shape[0] * shape[1], shape[2]);
    let kept = b.constant("kept_rows", &[rows, 1], DType::F32, true);
    let chosen = b.constant("masked_rows", &[rows, 1], DType::F32, true);
    let zeros = b.constant("zeros", &[rows, width], DType::F32, false);
    let mask = b.weight(mask);
    b.within(at, |b| {
        let [kept, chosen, zeros] = [kept, chosen, zeros].map(|v| b.as_activation(v));
        let flat = b.g.reshape(x, &[rows, width]);
        let flat = b.g.binary(OpKind::ScaleRows, flat, kept);
        let learned = b.g.binary(OpKind::Add, zeros, mask);
        let learned = b.g.binary(OpKind::ScaleRows, learned, chosen);
        let sum = b.g.binary(OpKind::Add, flat, learned);
        b.g.reshape(sum, &shape)
    })
}
