//! Blocks of attention and a convolution over positions, between two halves of a feed-forward
//! layer (Conformer).

mod attention;

use super::convolve::convolve;
use super::norm::Norm;
use crate::config::{Conformer as Of, ConvolutionNorm, Model, Norm as NormKind};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;
use crate::models::rope::Rope;
use attention::Attention;

/// Factor of the output of a feed-forward layer.
const HALF: f64 = 0.5;
/// Bound of clamped values.
const RANGE: f64 = 1e10;

/// The layers of a conformer block, in place of attention and one feed-forward layer.
pub(super) struct Conformer {
    first: FeedForward,
    attention: Attention,
    convolution: Convolution,
    second: FeedForward,
    norm: Norm,
    scores: Option<Scores>,
    clamps: bool,
}

impl Conformer {
    /// Declares the contents of a block, if the model has such blocks.
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model, layer: usize) -> Option<Self> {
        let of = m.options.conformer.as_ref()?;
        if of.scored_block > 0 {
            d.blocks_differ();
        }
        Some(Self {
            first: FeedForward::new(d, block, "mlp_1", m, of),
            attention: Attention::new(d, block, m, of),
            convolution: Convolution::new(d, block, m, of),
            second: FeedForward::new(d, block, "mlp_2", m, of),
            norm: Norm::new(d, block, ("norm", ""), m.hidden, m, Order::Declared),
            scores: (of.scored_block == 1 + layer as u64).then(|| Scores::new(d, block, m, of)),
            clamps: of.clamps,
        })
    }

    /// Applies the block to `[batch, rows, hidden]`.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        mut x: ValueId,
        rope: Option<Rope>,
    ) -> ValueId {
        x = self.first.forward(b, x);
        x = self.attention.forward(b, x, rope);
        x = self.convolution.forward(b, x);
        x = self.second.forward(b, x);
        let module = self.norm.module();
        x = b.within(module, |b| limited(b, x, self.clamps));
        x = self.norm.apply(b, x);
        match &self.scores {
            Some(scores) => scores.forward(b, x),
            None => x,
        }
    }
}

/// Limits values to a range, if the model does.
fn limited(b: &mut Builder<'_>, x: ValueId, clamps: bool) -> ValueId {
    let kind = OpKind::Clamp(op::Clamp {
        min: Some(Real(-RANGE)),
        max: Real(RANGE),
    });
    if clamps { b.g.unary(kind, x) } else { x }
}

/// Applies a linear layer. `clamps` limits its input and output to a range.
fn linear(b: &mut Builder<'_>, layer: Layer, x: ValueId, clamps: bool) -> ValueId {
    let at = layer.module();
    let x = b.within(at, |b| limited(b, x, clamps));
    let y = b.linear(layer, x);
    b.within(at, |b| limited(b, y, clamps))
}

/// Half of a feed-forward layer.
struct FeedForward {
    module: ModuleId,
    norm: Norm,
    up: Layer,
    down: Layer,
    post_norm: Option<Norm>,
    clamps: bool,
}

impl FeedForward {
    fn new(d: &mut Declare, block: ModuleId, name: &str, m: &Model, of: &Of) -> Self {
        let module = d.module(block, name, ModuleKind::Mlp);
        let (h, bias) = (m.hidden, m.bias.mlp());
        Self {
            module,
            norm: Norm::new(d, module, ("norm", ""), h, m, Order::Declared),
            up: d.linear(module, ("w1", ""), [m.ffn, h], bias),
            down: d.linear(module, ("w2", ""), [h, m.ffn], bias),
            post_norm: (of.post_norms)
                .then(|| Norm::new(d, module, ("post_norm", ""), h, m, Order::Declared)),
            clamps: of.clamps,
        }
    }

    /// Returns the input plus half of the layer's result.
    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let activation = defaults::activation(&b.s.model);
        b.within(self.module, |b| {
            let y = limited(b, x, self.clamps);
            let y = self.norm.apply(b, y);
            let up = linear(b, self.up, y, self.clamps);
            let up = activate(b, activation, up);
            let mut down = linear(b, self.down, up, self.clamps);
            if let Some(norm) = self.post_norm {
                down = limited(b, down, self.clamps);
                down = norm.apply(b, down);
            }
            let half = b.scale(down, HALF);
            b.g.binary(OpKind::Add, half, x)
        })
    }
}

/// A depthwise convolution over positions with a gated input.
struct Convolution {
    module: ModuleId,
    norm: Norm,
    input: Layer,
    depthwise: Layer,
    inner: InnerNorm,
    output: Layer,
    /// Input and output are linear layers over rows.
    linear: bool,
    clamps: bool,
}

/// Norm of the convolution's output.
enum InnerNorm {
    OfChannels(Layer),
    OfRows(Norm),
}

impl Convolution {
    fn new(d: &mut Declare, block: ModuleId, m: &Model, of: &Of) -> Self {
        let module = d.module(block, "convolution", ModuleKind::Mlp);
        let (h, inner) = (m.hidden, m.hidden * of.expansion);
        let norm = Norm::new(d, module, ("norm", ""), h, m, Order::Declared);
        let pointwise = |d: &mut Declare, name, [out, input]: [u64; 2]| {
            if of.linear {
                return d.linear(module, (name, ""), [out, input], of.pointwise_bias);
            }
            let at = d.module(module, name, ModuleKind::Layer);
            d.parameters(at, "", &[out, input, 1], of.pointwise_bias)
        };
        let input = pointwise(d, "in", [2 * inner, h]);
        let at = d.module(module, "depthwise", ModuleKind::Layer);
        let depthwise = d.parameters(at, "", &[inner, 1, of.kernel], of.depthwise_bias);
        let norms = ("inner_norm", "");
        let of_rows = |d: &mut Declare, kind| {
            let mut like = m.clone();
            like.options.norm = kind;
            InnerNorm::OfRows(Norm::new(d, module, norms, inner, &like, Order::Declared))
        };
        let inner_norm = match of.norm {
            ConvolutionNorm::Batch => {
                InnerNorm::OfChannels(d.norm(module, norms, inner, true, Order::Declared))
            }
            ConvolutionNorm::Layer => of_rows(d, NormKind::Layer),
            ConvolutionNorm::Rms => of_rows(d, NormKind::Rms),
        };
        let output = pointwise(d, "out", [h, inner]);
        Self {
            module,
            norm,
            input,
            depthwise,
            inner: inner_norm,
            output,
            linear: of.linear,
            clamps: of.clamps,
        }
    }

    /// Adds what the convolution makes of `[batch, rows, hidden]`.
    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let activation = defaults::activation(&b.s.model);
        b.within(self.module, |b| {
            let y = self.norm.apply(b, x);
            let y = self.gated(b, y);
            let mut y = along(b, self.depthwise, y);
            y = match &self.inner {
                InnerNorm::OfChannels(layer) => batch_norm(b, *layer, y),
                InnerNorm::OfRows(norm) => {
                    let rows = b.g.transpose(y, 1, 2);
                    let rows = b.g.make_contiguous(rows);
                    let rows = limited(b, rows, self.clamps);
                    let rows = norm.apply(b, rows);
                    b.g.transpose(rows, 1, 2)
                }
            };
            let y = activate(b, activation, y);
            let y = if self.linear {
                let rows = b.g.transpose(y, 1, 2);
                linear(b, self.output, rows, self.clamps)
            } else {
                let y = along(b, self.output, y);
                b.g.transpose(y, 1, 2)
            };
            b.g.binary(OpKind::Add, x, y)
        })
    }

    /// Projects rows, and multiplies half of the result by gates: `[batch, channels, rows]`.
    fn gated(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let (y, axis) = if self.linear {
            (linear(b, self.input, y, self.clamps), 2)
        } else {
            let channels = b.g.transpose(y, 1, 2);
            (along(b, self.input, channels), 1)
        };
        let parts = b.g.split(y, axis, 2);
        let gate = b.g.unary(OpKind::Sigmoid, parts[1]);
        let y = b.g.binary(OpKind::Mul, parts[0], gate);
        if self.linear {
            return b.g.transpose(y, 1, 2);
        }
        y
    }
}

/// Applies a convolution that keeps the positions of `[batch, channels, rows]`.
fn along(b: &mut Builder<'_>, layer: Layer, x: ValueId) -> ValueId {
    let (w, bias) = (b.weight(layer), b.bias(layer));
    let rows = b.g.value(x).cols();
    convolve(b, layer.module(), [x, w], bias, [1, rows])
}

/// Applies `nn.BatchNorm1d` to `[batch, channels, rows]`.
fn batch_norm(b: &mut Builder<'_>, layer: Layer, x: ValueId) -> ValueId {
    let (w, bias) = (b.weight(layer), b.bias(layer));
    b.within(layer.module(), |b| {
        let shape = b.g.value(x).shape.clone();
        let inputs: Vec<ValueId> = [x, w].into_iter().chain(bias).collect();
        b.compute(OpKind::BatchNorm, &inputs, &[&shape, &[2, shape[1]]])[0]
    })
}

/// Scores of the rows of one block, which are added to them again.
struct Scores {
    module: ModuleId,
    score: Layer,
    back: Layer,
}

impl Scores {
    fn new(d: &mut Declare, block: ModuleId, m: &Model, of: &Of) -> Self {
        let module = d.module(block, "scores", ModuleKind::Layer);
        Self {
            module,
            score: d.linear(module, ("out", ""), [of.scores, m.hidden], true),
            back: d.linear(module, ("back", ""), [m.hidden, of.scores], true),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let scores = b.linear(self.score, x);
        let shares = b.within(self.module, |b| b.g.unary(OpKind::Softmax, scores));
        let back = b.linear(self.back, shares);
        b.within(self.module, |b| b.g.binary(OpKind::Add, x, back))
    }
}

/// Returns zeros of a shape, in the type of `like`.
fn zeros(b: &mut Builder<'_>, shape: &[u64], like: ValueId) -> ValueId {
    let dtype = b.g.value(like).dtype;
    let zeros = b.constant("zeros", shape, DType::F32, false);
    b.g.cast(zeros, dtype)
}

/// Fills `[batch, rows, ..]` up with zeros to this number of rows.
pub(super) fn filled(b: &mut Builder<'_>, x: ValueId, rows: u64) -> ValueId {
    let mut shape = b.g.value(x).shape.to_vec();
    if shape[1] == rows {
        return x;
    }
    shape[1] = rows - shape[1];
    let more = zeros(b, &shape, x);
    b.g.cat(&[x, more], 1)
}
