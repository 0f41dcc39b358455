//! Recurrent layers, which replace attention.

use super::Carried;
use super::lightning::Lightning;
use super::mlstm::Mlstm;
use super::norm::Norm;
use super::rwkv::TimeMix;
use super::rwkv_heads::HeadMix;
use super::{normalized, scaled};
use crate::config::{LayerType, LinearAttention, Model, Ssm};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;
use smallvec::SmallVec;

/// Positions between the states that a selective scan saves (`selective_scan_fn`).
const SCAN_CHUNK: u64 = 2048;
/// Positions of a chunk of the gated delta rule (flash-linear-attention).
const DELTA_CHUNK: u64 = 64;

pub(super) struct Recurrent {
    pub(super) module: ModuleId,
    /// Input norm.
    pub(super) norm: Option<Norm>,
    kind: Kind,
    /// Output norm, before the residual connection.
    post_norm: Option<Norm>,
}

enum Kind {
    Mamba(Mamba),
    Mamba2(Mamba2),
    Delta(GatedDelta),
    Lightning(Lightning),
    Mlstm(Mlstm),
    Conv(ShortConv),
    Rwkv(TimeMix),
    RwkvHeads(HeadMix),
    RgLru(RgLru),
}

impl Recurrent {
    /// Declares what a layer of this type has in place of attention; `None` if it has nothing, or
    /// attention.
    pub(super) fn new(
        d: &mut Declare,
        block: ModuleId,
        m: &Model,
        kind: LayerType,
    ) -> Option<Self> {
        let o = &m.options;
        let (ssm, linear) = (o.ssm.as_ref(), o.linear_attention.as_ref());
        let mut declare = |name, make: &dyn Fn(&mut Declare, ModuleId) -> Kind| {
            let module = d.module(block, name, ModuleKind::Attention);
            // Next to attention, that has the norm.
            let [before, after, _] = normalized(m).map(|has| has && kind != LayerType::Hybrid);
            let norm = before.then(|| {
                let names = ("norm", "input_layernorm");
                Norm::new(d, module, names, m.hidden, m, Order::First)
            });
            let kind = make(d, module);
            let post_norm = after.then(|| {
                let names = ("post_norm", "post_attention_layernorm");
                Norm::new(d, module, names, m.hidden, m, Order::Declared)
            });
            Self {
                module,
                norm,
                kind,
                post_norm,
            }
        };
        Some(match (kind, ssm, linear) {
            (LayerType::Mamba, Some(of), _) => {
                declare("mamba", &|d, at| Kind::Mamba(Mamba::new(d, at, m, of)))
            }
            (LayerType::Mamba2 | LayerType::Hybrid | LayerType::Shared, Some(of), _) => {
                declare("mamba", &|d, at| Kind::Mamba2(Mamba2::new(d, at, m, of)))
            }
            (LayerType::Linear, _, Some(of)) if of.fixed_decays => {
                declare("linear_attn", &|d, at| {
                    Kind::Lightning(Lightning::new(d, at, m, of))
                })
            }
            (LayerType::Linear, _, Some(of)) if of.exponential_gates => {
                declare("mlstm", &|d, at| Kind::Mlstm(Mlstm::new(d, at, m, of)))
            }
            (LayerType::Linear, _, Some(of)) => declare("linear_attn", &|d, at| {
                Kind::Delta(GatedDelta::new(d, at, m, of))
            }),
            (LayerType::Conv, Some(of), _) => {
                declare("conv", &|d, at| Kind::Conv(ShortConv::new(d, at, m, of)))
            }
            (LayerType::Rwkv, ..) if o.rwkv.is_some() => declare("attention", &|d, at| {
                let of = o.rwkv.as_ref().expect("the guard has found it");
                Kind::RwkvHeads(HeadMix::new(d, at, m, of))
            }),
            (LayerType::Rwkv, Some(of), _) => {
                declare("attention", &|d, at| Kind::Rwkv(TimeMix::new(d, at, m, of)))
            }
            (LayerType::RgLru, Some(of), _) => {
                declare("recurrent", &|d, at| Kind::RgLru(RgLru::new(d, at, m, of)))
            }
            _ => return None,
        })
    }

    /// Applies the layer to `y`; returns what it adds to the residual stream.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        carried: &mut Carried,
    ) -> ValueId {
        b.within(self.module, |b| {
            let mut out = match &self.kind {
                Kind::Mamba(layer) => layer.forward(b, y),
                Kind::Mamba2(layer) => layer.forward(b, y),
                Kind::Delta(layer) => layer.forward(b, y),
                Kind::Lightning(layer) => layer.forward(b, y),
                Kind::Mlstm(layer) => layer.forward(b, y),
                Kind::Conv(layer) => layer.forward(b, y),
                Kind::Rwkv(layer) => layer.forward(b, y),
                Kind::RwkvHeads(layer) => layer.forward(b, y, &mut carried.first_values),
                Kind::RgLru(layer) => layer.forward(b, y),
            };
            if let Some(norm) = self.post_norm {
                out = norm.apply(b, out);
            }
            scaled(b, out, b.s.model.options.residual_multiplier)
        })
    }
}

/// Declares a weight without a layer, of any shape.
fn raw(d: &mut Declare, at: ModuleId, name: &str, shape: &[u64]) -> Layer {
    let module = d.module(at, name, ModuleKind::Layer);
    d.parameters(module, "", shape, false)
}

/// Declares a causal convolution of each channel.
fn conv(d: &mut Declare, at: ModuleId, channels: u64, kernel: u64, bias: bool) -> Layer {
    let module = d.module(at, "conv1d", ModuleKind::Layer);
    d.parameters(module, "", &[channels, 1, kernel], bias)
}

/// Applies a causal convolution to `[batch, seq, channels]`, and SiLU if asked for.
fn convolve(b: &mut Builder<'_>, layer: Layer, x: ValueId, silu: bool) -> ValueId {
    let (w, bias) = (b.weight(layer), b.bias(layer));
    let kind = OpKind::CausalConv1d(op::CausalConv1d {
        kernel: b.g.value(w).cols(),
        bias: bias.is_some(),
        silu,
    });
    let shape = b.g.value(x).shape.clone();
    let inputs: SmallVec<[ValueId; 3]> = [x, w].into_iter().chain(bias).collect();
    b.within(layer.module(), |b| b.compute(kind, &inputs, &[&shape])[0])
}

/// Cuts the last dimension into parts of these widths.
fn cut<const N: usize>(b: &mut Builder<'_>, x: ValueId, widths: [u64; N]) -> [ValueId; N] {
    let axis = b.g.value(x).shape.len() - 1;
    let mut start = 0;
    widths.map(|width| {
        let part = b.g.slice(x, axis, start, width);
        start += width;
        part
    })
}

/// Splits the last dimension of `[batch, seq, heads * width]`.
fn heads(b: &mut Builder<'_>, x: ValueId, heads: u64) -> ValueId {
    let shape = [b.batch(), b.seq(), heads, b.g.value(x).cols() / heads];
    b.g.reshape(x, &shape)
}

/// Multiplies by the gate's SiLU.
fn gated(b: &mut Builder<'_>, x: ValueId, gate: ValueId) -> ValueId {
    let gate = b.g.unary(OpKind::Silu, gate);
    b.g.binary(OpKind::Mul, x, gate)
}

/// Mamba's layer.
struct Mamba {
    of: Ssm,
    input: Layer,
    conv: Layer,
    /// Projection to time steps, and to inputs and outputs of states.
    x: Layer,
    /// Norms of these three.
    norms: Option<[Layer; 3]>,
    dt: Layer,
    a_log: Layer,
    d: Layer,
    output: Layer,
}

impl Mamba {
    fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &Ssm) -> Self {
        let (h, inner, state, rank) = (m.hidden, of.inner, of.state, of.dt_rank);
        Self {
            of: of.clone(),
            input: d.linear(at, ("in", "mamba.in_proj"), [2 * inner, h], of.bias),
            conv: conv(d, at, inner, of.conv, of.conv_bias),
            x: d.linear(at, ("x", "mamba.x_proj"), [rank + 2 * state, inner], false),
            norms: of.norms.then(|| {
                let mut norm = |name, width| d.norm(at, (name, ""), width, false, Order::Declared);
                [
                    norm("dt_norm", rank),
                    norm("b_norm", state),
                    norm("c_norm", state),
                ]
            }),
            dt: d.linear(at, ("dt", "mamba.dt_proj"), [inner, rank], true),
            a_log: raw(d, at, "a_log", &[inner, state]),
            d: raw(d, at, "d", &[inner]),
            output: d.linear(at, ("out", "mamba.out_proj"), [h, inner], of.bias),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let (inner, state) = (self.of.inner, self.of.state);
        let both = b.linear(self.input, y);
        let [x, z] = cut(b, both, [inner, inner]);
        let x = convolve(b, self.conv, x, true);
        let made = b.linear(self.x, x);
        let mut made = cut(b, made, [self.of.dt_rank, state, state]);
        if let Some(norms) = self.norms {
            for (value, norm) in made.iter_mut().zip(norms) {
                *value = b.rms_norm(norm, *value);
            }
        }
        let [dt, b_of, c_of] = made;
        let dt = b.g.make_contiguous(dt);
        let dt = b.linear(self.dt, dt);
        let (a_log, d) = (b.weight(self.a_log), b.weight(self.d));
        let (batch, seq) = (b.batch(), b.seq());
        let states = [batch, seq.div_ceil(SCAN_CHUNK), inner, 2 * state];
        let inputs = [x, dt, a_log, b_of, c_of, d, z];
        let y = b.compute(
            OpKind::SelectiveScan,
            &inputs,
            &[&[batch, seq, inner], &states],
        )[0];
        b.linear(self.output, y)
    }
}

/// Mamba-2's layer.
struct Mamba2 {
    of: Ssm,
    /// Projection to the gate, the convolution's input, and time steps.
    input: Layer,
    conv: Layer,
    dt_bias: Layer,
    a_log: Layer,
    d: Layer,
    norm: Option<Layer>,
    output: Layer,
}

impl Mamba2 {
    fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &Ssm) -> Self {
        let (h, inner) = (m.hidden, of.inner);
        let convolved = inner + 2 * of.groups * of.state;
        let width = inner + convolved + of.heads;
        Self {
            of: of.clone(),
            input: d.linear(at, ("in", "mixer.in_proj"), [width, h], of.bias),
            conv: conv(d, at, convolved, of.conv, of.conv_bias),
            dt_bias: raw(d, at, "dt_bias", &[of.heads]),
            a_log: raw(d, at, "a_log", &[of.heads]),
            d: raw(d, at, "d", &[of.heads]),
            norm: of
                .gate_norm
                .then(|| d.norm(at, ("gated_norm", ""), inner, false, Order::Declared)),
            output: d.linear(at, ("out", "mixer.out_proj"), [h, inner], of.bias),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let of = &self.of;
        let states = of.groups * of.state;
        let made = b.linear(self.input, y);
        let [z, convolved, dt] = cut(b, made, [of.inner, of.inner + 2 * states, of.heads]);
        let convolved = convolve(b, self.conv, convolved, true);
        let [x, b_of, c_of] = cut(b, convolved, [of.inner, states, states]);
        let x = heads(b, x, of.heads);
        let [b_of, c_of] = [b_of, c_of].map(|v| heads(b, v, of.groups));
        let [a_log, d, dt_bias] = [self.a_log, self.d, self.dt_bias].map(|w| b.weight(w));
        let (batch, seq, width) = (b.batch(), b.seq(), of.inner / of.heads);
        let chunk = of.chunk.min(seq);
        let states = [batch, seq.div_ceil(chunk), of.heads, width, of.state];
        let kind = OpKind::ChunkScan(op::ChunkScan { chunk });
        let inputs = [x, dt, a_log, b_of, c_of, d, dt_bias];
        let y = b.compute(kind, &inputs, &[&[batch, seq, of.heads, width], &states])[0];
        let y = b.g.reshape(y, &[batch, seq, of.inner]);
        let y = gated(b, y, z);
        let y = self.norm.map_or(y, |norm| b.rms_norm(norm, y));
        b.linear(self.output, y)
    }
}

/// A layer with the gated delta rule.
struct GatedDelta {
    of: LinearAttention,
    /// Make queries, keys, values, the gate of results, `beta` and the gate of states.
    inputs: Vec<Layer>,
    /// Second projections of the gates of results and of states, if these have two.
    gates: Option<[Layer; 2]>,
    conv: Layer,
    dt_bias: Layer,
    a_log: Layer,
    norm: Layer,
    output: Layer,
}

impl GatedDelta {
    fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &LinearAttention) -> Self {
        let (h, n) = (m.hidden, of.value_heads);
        let (keys, values) = (of.key_heads * of.key_dim, n * of.value_dim);
        let parts: &[(&str, &str, u64)] = match of.projections {
            _ if of.gate_rank > 0 => &[
                ("q", "self_attn.q_proj", keys),
                ("k", "self_attn.k_proj", keys),
                ("v", "self_attn.v_proj", values),
                ("g_a", "self_attn.g_a_proj", of.gate_rank),
                ("b", "self_attn.b_proj", n),
                ("f_a", "self_attn.forget_gate.f_a_proj", of.gate_rank),
            ],
            6 if of.channel_decays => &[
                ("q", "self_attn.q_proj", keys),
                ("k", "self_attn.k_proj", keys),
                ("v", "self_attn.v_proj", values),
                ("g", "self_attn.g_proj", values),
                ("b", "self_attn.b_proj", n),
                ("f", "self_attn.forget_gate.f_proj", n * of.key_dim),
            ],
            6 => &[
                ("q", "linear_attn.q_proj", keys),
                ("k", "linear_attn.k_proj", keys),
                ("v", "linear_attn.v_proj", values),
                ("g", "linear_attn.g_proj", values),
                ("b", "linear_attn.b_proj", n),
                ("a", "linear_attn.a_proj", n),
            ],
            2 => &[
                ("qkvz", "linear_attn.in_proj_qkvz", 2 * keys + 2 * values),
                ("ba", "linear_attn.in_proj_ba", 2 * n),
            ],
            _ => &[
                ("qkv", "linear_attn.in_proj_qkv", 2 * keys + values),
                ("z", "linear_attn.in_proj_z", values),
                ("b", "linear_attn.in_proj_b", n),
                ("a", "linear_attn.in_proj_a", n),
            ],
        };
        let mut linear = |&(name, hf, width)| d.linear(at, (name, hf), [width, h], false);
        let inputs = parts.iter().map(&mut linear).collect();
        let gates = (of.gate_rank > 0).then(|| {
            let mut second =
                |name, hf, width| d.linear(at, (name, hf), [width, of.gate_rank], false);
            [
                second("g_b", "self_attn.g_b_proj", values),
                second("f_b", "self_attn.forget_gate.f_b_proj", n * of.key_dim),
            ]
        });
        let decays = match of.gate_rank > 0 || of.channel_decays {
            true => n * of.key_dim,
            false => n,
        };
        Self {
            of: of.clone(),
            inputs,
            gates,
            conv: conv(d, at, 2 * keys + values, of.conv, false),
            dt_bias: raw(d, at, "dt_bias", &[decays]),
            a_log: raw(d, at, "a_log", &[n]),
            norm: d.norm(at, ("gated_norm", ""), of.value_dim, false, Order::Declared),
            output: {
                let theirs = match gates.is_some() || of.channel_decays {
                    true => "self_attn.o_proj",
                    false => "linear_attn.out_proj",
                };
                d.linear(at, ("out", theirs), [h, values], false)
            },
        }
    }

    fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let of = &self.of;
        let n = of.value_heads;
        let (keys, values) = (of.key_heads * of.key_dim, n * of.value_dim);
        let made: SmallVec<[ValueId; 6]> = self.inputs.iter().map(|&l| b.linear(l, y)).collect();
        let [qkv, z, beta, gate] = match made[..] {
            [q, k, v, z, beta, gate] => {
                let qkv = b.g.cat(&[q, k, v], 2);
                match self.gates {
                    Some([of_z, of_gate]) => {
                        let (z, gate) = (b.linear(of_z, z), b.linear(of_gate, gate));
                        [qkv, z, beta, heads(b, gate, n)]
                    }
                    None if of.channel_decays => [qkv, z, beta, heads(b, gate, n)],
                    None => [qkv, z, beta, gate],
                }
            }
            [qkv, z, beta, gate] => [qkv, z, beta, gate],
            [qkvz, ba, ..] => {
                let [qkv, z] = cut(b, qkvz, [2 * keys + values, values]);
                let [beta, gate] = cut(b, ba, [n, n]);
                [qkv, z, beta, gate]
            }
            _ => unreachable!("a layer has two, four or six projections"),
        };
        let qkv = convolve(b, self.conv, qkv, true);
        let [q, k, v] = cut(b, qkv, [keys, keys, values]);
        let [q, k] = [q, k].map(|x| heads(b, x, of.key_heads));
        let v = heads(b, v, n);
        let beta = b.g.unary(OpKind::Sigmoid, beta);
        let [a_log, dt_bias] = [self.a_log, self.dt_bias].map(|w| b.weight(w));
        let (batch, seq) = (b.batch(), b.seq());
        let chunk = DELTA_CHUNK.min(seq);
        let kind = OpKind::GatedDelta(op::GatedDelta { chunk });
        let shape = [batch, seq, n, of.value_dim];
        let inputs = [q, k, v, gate, beta, a_log, dt_bias];
        let by_channel = self.gates.is_some() || of.channel_decays;
        let saved = [batch, seq, n, chunk * (1 + u64::from(by_channel))];
        let y = b.compute(kind, &inputs, &[&shape, &saved])[0];
        let y = b.rms_norm(self.norm, y);
        let z = heads(b, z, n);
        let y = match by_channel {
            true => {
                let z = b.g.unary(OpKind::Sigmoid, z);
                b.g.binary(OpKind::Mul, y, z)
            }
            false => gated(b, y, z),
        };
        let y = b.g.reshape(y, &[batch, seq, values]);
        b.linear(self.output, y)
    }
}

/// LFM2's layer: a short convolution between two gates.
struct ShortConv {
    /// Projection to the gates before and after the convolution, and to its input.
    input: Layer,
    conv: Layer,
    output: Layer,
}

impl ShortConv {
    fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &Ssm) -> Self {
        let (h, inner) = (m.hidden, of.inner);
        Self {
            input: d.linear(at, ("in", "conv.in_proj"), [3 * inner, h], of.bias),
            conv: conv(d, at, inner, of.conv, of.conv_bias),
            output: d.linear(at, ("out", "conv.out_proj"), [h, inner], of.bias),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let made = b.linear(self.input, y);
        let inner = b.g.value(made).cols() / 3;
        let [before, after, x] = cut(b, made, [inner; 3]);
        let x = b.g.binary(OpKind::Mul, before, x);
        let x = convolve(b, self.conv, x, false);
        let x = b.g.binary(OpKind::Mul, after, x);
        b.linear(self.output, x)
    }
}

/// RecurrentGemma's layer: a convolution and a linear recurrence, times an activated projection.
/// The code of transformers runs the recurrence position by position; the plan has one operation.
struct RgLru {
    of: Ssm,
    /// Make what is multiplied at the end, and what is convolved.
    inputs: [Layer; 2],
    conv: Layer,
    /// Weights and biases of the gates of inputs and of decays, head by head.
    gates: [[Layer; 2]; 2],
    decay: Layer,
    output: Layer,
}

impl RgLru {
    fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &Ssm) -> Self {
        let (h, inner, n) = (m.hidden, of.inner, of.heads);
        let width = inner / n;
        let mut gate = |name: &str| {
            let module = d.module(at, name, ModuleKind::Layer);
            let weight = d.parameters(module, "", &[n, width, width], false);
            let bias = d.module(module, "bias", ModuleKind::Layer);
            [weight, d.parameters(bias, "", &[n, width], false)]
        };
        let gates = [gate("input_gate"), gate("recurrent_gate")];
        Self {
            of: of.clone(),
            inputs: [
                d.linear(at, ("y", "temporal_block.linear_y"), [inner, h], of.bias),
                d.linear(at, ("x", "temporal_block.linear_x"), [inner, h], of.bias),
            ],
            conv: conv(d, at, inner, of.conv, of.conv_bias),
            gates,
            decay: raw(d, at, "recurrent_param", &[inner]),
            output: d.linear(
                at,
                ("out", "temporal_block.linear_out"),
                [h, inner],
                of.bias,
            ),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let branch = b.linear(self.inputs[0], y);
        let activation = defaults::activation(&b.s.model);
        let branch = activate(b, activation, branch);
        let x = b.linear(self.inputs[1], y);
        let x = convolve(b, self.conv, x, false);
        let by_head = heads(b, x, self.of.heads);
        let shape = b.g.value(by_head).shape.clone();
        let rows = b.g.value(x).shape.clone();
        let gates = self.gates.map(|[weight, bias]| {
            let (w, bias) = (b.weight(weight), b.weight(bias));
            let inputs = [by_head, w, bias];
            let gate = b.within(weight.module(), |b| {
                b.compute(OpKind::HeadLinear, &inputs, &[&shape])[0]
            });
            b.g.reshape(gate, &rows)
        });
        let decay = b.weight(self.decay);
        let inputs = [x, gates[0], gates[1], decay];
        let x = b.compute(OpKind::RgLru, &inputs, &[&rows])[0];
        let x = b.g.binary(OpKind::Mul, x, branch);
        b.linear(self.output, x)
    }
}
