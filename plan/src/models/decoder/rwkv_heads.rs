//! Layers of RWKV-5 to 7, which replace attention: recurrences whose heads have matrices as states.
//!
//! Version 7 is planned as flash-linear-attention runs it, which fuses more elementwise operations
//! than the plan does; its norms of heads are planned as norms and multiplications.

use super::rwkv::{Mixture, difference, shifted};
use crate::config::{Model, Rwkv};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer};
use smallvec::SmallVec;

/// Positions of a chunk in flash-linear-attention.
const CHUNK: u64 = 64;

/// The layers of RWKV with matrices as states, in place of attention.
pub(super) struct HeadMix {
    of: Rwkv,
    mixture: Mixture,
    /// Make receptances, keys and values.
    inputs: [Layer; 3],
    kind: Kind,
    /// Weights and biases of the norm of each head's result.
    norm: Layer,
    output: Layer,
}

enum Kind {
    Five(Static),
    Six(Dynamic),
    Seven(Box<Delta>),
}

/// Gates, and decays that do not depend on the input (RWKV-5).
struct Static {
    gate: Layer,
    decay: Layer,
    first: Layer,
}

/// Gates, and decays and shares of positions that depend on the input (RWKV-6).
struct Dynamic {
    gate: Layer,
    /// Projection before those to shares.
    mix: Layer,
    /// Projection to shares: one matrix and one bias per mixture.
    shares: [Layer; 2],
    decay: Low,
    first: Layer,
}

/// The delta rule, which replaces parts of the state (RWKV-7).
struct Delta {
    decay: Low,
    rate: Low,
    /// Projection to shares of the first layer's values, in later layers.
    value: Option<Low>,
    gate: Low,
    /// Factors of keys, of their rates, and of receptances.
    factors: [Layer; 3],
}

/// Two projections with a small width between them.
struct Low([Layer; 2]);

impl Low {
    fn new(d: &mut Declare, at: ModuleId, name: &str, sizes: [u64; 3], bias: bool) -> Self {
        let [input, rank, output] = sizes;
        let (first, second) = (format!("{name}_a"), format!("{name}_b"));
        let hf = [0, 2].map(|n| format!("attn.{name}_lora.lora.{n}"));
        Self([
            d.linear(at, (&first, &hf[0]), [rank, input], false),
            d.linear(at, (&second, &hf[1]), [output, rank], bias),
        ])
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId, between: Option<OpKind>) -> ValueId {
        let mut y = b.linear(self.0[0], x);
        if let Some(activation) = between {
            y = b.g.unary(activation, y);
        }
        b.linear(self.0[1], y)
    }
}

const TANH: OpKind = OpKind::Softcap(op::Softcap { cap: Real(1.0) });

/// Declares a weight without a layer, of any shape.
fn raw(d: &mut Declare, at: ModuleId, name: &str, shape: &[u64]) -> Layer {
    let module = d.module(at, name, ModuleKind::Layer);
    d.parameters(module, "", shape, false)
}

impl HeadMix {
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &Rwkv) -> Self {
        let (h, keys, values) = (m.hidden, of.keys, of.values);
        let names: &[&str] = match of.version {
            5 => &["mix_k", "mix_v", "mix_r", "mix_g"],
            // The first one mixes what the shares are made of.
            6 => &["mix_x"],
            _ => &["mix_r", "mix_w", "mix_k", "mix_v", "mix_a", "mix_g"],
        };
        let mixture = Mixture::new(d, at, names, h);
        let [r, k, v, o] = match of.version {
            7 => ["attn.r_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"],
            _ => [
                "attention.receptance",
                "attention.key",
                "attention.value",
                "attention.output",
            ],
        };
        let inputs = [
            d.linear(at, ("r", r), [keys, h], false),
            d.linear(at, ("k", k), [keys, h], false),
            d.linear(at, ("v", v), [values, h], false),
        ];
        let gate = |d: &mut Declare| d.linear(at, ("g", "attention.gate"), [values, h], false);
        let per_head = [of.heads, keys / of.heads];
        let kind = match of.version {
            5 => Kind::Five(Static {
                gate: gate(d),
                decay: raw(d, at, "decay", &per_head),
                first: raw(d, at, "first", &per_head),
            }),
            6 => Kind::Six(Dynamic {
                gate: gate(d),
                mix: d.linear(at, ("mix", ""), [5 * of.mix_rank, h], false),
                shares: [
                    raw(d, at, "shares", &[5, of.mix_rank, h]),
                    raw(d, at, "shares_bias", &[5, h]),
                ],
                decay: Low::new(d, at, "w", [h, of.decay_rank, keys], true),
                first: raw(d, at, "first", &per_head),
            }),
            _ => Kind::Seven(Box::new(Delta {
                decay: Low::new(d, at, "w", [h, of.decay_rank, keys], true),
                rate: Low::new(d, at, "a", [h, of.rate_rank, keys], true),
                value: (d.layer() > 0)
                    .then(|| Low::new(d, at, "v", [h, of.value_rank, values], true)),
                gate: Low::new(d, at, "g", [h, of.gate_rank, values], false),
                factors: [
                    raw(d, at, "k_k", &[keys]),
                    raw(d, at, "k_a", &[keys]),
                    raw(d, at, "r_k", &per_head),
                ],
            })),
        };
        let norm = d.module(at, "head_norm", ModuleKind::Layer);
        Self {
            of: of.clone(),
            mixture,
            inputs,
            kind,
            norm: d.parameters(norm, "", &[values], true),
            output: d.linear(at, ("out", o), [h, values], false),
        }
    }

    /// Applies the layer to `y`. The first layer sets `first` to its values.
    pub(super) fn forward(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        first: &mut Option<ValueId>,
    ) -> ValueId {
        match &self.kind {
            Kind::Five(of) => {
                let mixed = self.mixture.of(b, y);
                let [k, v, r] =
                    [(1, 0), (2, 1), (0, 2)].map(|(n, x)| b.linear(self.inputs[n], mixed[x]));
                let gate = b.linear(of.gate, mixed[3]);
                let decay = b.weight(of.decay);
                self.attend(b, [r, k, v], decay, of.first, gate)
            }
            Kind::Six(of) => self.dynamic(b, of, y),
            Kind::Seven(of) => self.delta(b, of, y, first),
        }
    }

    /// Splits the last dimension into heads.
    fn heads(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let n = self.of.heads;
        let shape = [b.batch(), b.seq(), n, b.g.value(x).cols() / n];
        b.g.reshape(x, &shape)
    }

    /// Runs the recurrence of RWKV-5 and 6.
    fn attend(
        &self,
        b: &mut Builder<'_>,
        rkv: [ValueId; 3],
        decay: ValueId,
        first: Layer,
        gate: ValueId,
    ) -> ValueId {
        let [r, k, v] = rkv.map(|x| self.heads(b, x));
        let first = b.weight(first);
        let shape = b.g.value(v).shape.clone();
        let chunk = CHUNK.min(b.seq());
        let kind = OpKind::WkvHeads(op::WkvHeads { chunk });
        let y = b.compute(kind, &[r, k, v, decay, first], &[&shape])[0];
        let y = self.normalize(b, y);
        let gate = b.g.unary(OpKind::Silu, gate);
        let y = b.g.binary(OpKind::Mul, y, gate);
        b.linear(self.output, y)
    }

    /// Normalizes each head of `[batch, seq, heads, width]`; returns `[batch, seq, values]`.
    fn normalize(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let (batch, seq, values) = (b.batch(), b.seq(), self.of.values);
        let module = self.norm.module();
        let width = b.g.value(y).cols();
        let ones = b.ones(module, width);
        let y = b.layer_norm_by(module, y, ones, None);
        let (w, bias) = (b.weight(self.norm), b.bias(self.norm));
        b.within(module, |b| {
            let y = b.g.reshape(y, &[batch, seq, values]);
            let y = b.g.binary(OpKind::Mul, y, w);
            match bias {
                Some(bias) => b.g.binary(OpKind::Add, y, bias),
                None => y,
            }
        })
    }

    /// RWKV-6.
    fn dynamic(&self, b: &mut Builder<'_>, of: &Dynamic, y: ValueId) -> ValueId {
        let (batch, seq, h) = (b.batch(), b.seq(), b.g.value(y).cols());
        let change = difference(b, y);
        let share = b.weight(self.mixture.shares[0]);
        let mixed = shifted(b, [y, change, share]);
        let small = b.linear(of.mix, mixed);
        let small = b.g.unary(TANH, small);
        let small = b.g.reshape(small, &[batch, seq, 5, self.of.mix_rank]);
        let [w, bias] = of.shares.map(|l| b.weight(l));
        let all = b.compute(
            OpKind::HeadLinear,
            &[small, w, bias],
            &[&[batch, seq, 5, h]],
        )[0];
        let mut mixed = (0..5).map(|n| {
            let share = b.g.slice(all, 2, n, 1);
            let share = b.g.reshape(share, &[batch, seq, h]);
            shifted(b, [y, change, share])
        });
        let mixed: SmallVec<[ValueId; 5]> = mixed.by_ref().collect();
        let r = b.linear(self.inputs[0], mixed[0]);
        let decay = of.decay.forward(b, mixed[1], Some(TANH));
        let k = b.linear(self.inputs[1], mixed[2]);
        let v = b.linear(self.inputs[2], mixed[3]);
        let gate = b.linear(of.gate, mixed[4]);
        let decay = self.heads(b, decay);
        // `-exp(w)`, as one operation that costs as much.
        let decay = b.g.unary(OpKind::Sigmoid, decay);
        let decay = b.g.unary(OpKind::Neg, decay);
        self.attend(b, [r, k, v], decay, of.first, gate)
    }

    /// RWKV-7.
    fn delta(
        &self,
        b: &mut Builder<'_>,
        of: &Delta,
        y: ValueId,
        first: &mut Option<ValueId>,
    ) -> ValueId {
        let (batch, seq, h) = (b.batch(), b.seq(), b.g.value(y).cols());
        let change = difference(b, y);
        let rows: SmallVec<[ValueId; 6]> = (self.mixture.shares.iter())
            .map(|&share| {
                let w = b.weight(share);
                b.g.reshape(w, &[1, h])
            })
            .collect();
        let shares = b.g.cat(&rows, 0);
        let n = rows.len() as u64;
        let shape = [n, batch, seq, h];
        let all = b.compute(OpKind::MixPositions, &[y, change, shares], &[&shape])[0];
        let mixed: SmallVec<[ValueId; 6]> = (0..n)
            .map(|n| {
                let one = b.g.slice(all, 0, n, 1);
                b.g.reshape(one, &[batch, seq, h])
            })
            .collect();
        let r = b.linear(self.inputs[0], mixed[0]);
        let decay = of.decay.forward(b, mixed[1], Some(TANH));
        let decay = b.g.unary(OpKind::Sigmoid, decay);
        let decay = b.scale(decay, -0.606_530_659_712_633_4);
        let k = b.linear(self.inputs[1], mixed[2]);
        let mut v = b.linear(self.inputs[2], mixed[3]);
        match (&of.value, *first) {
            (Some(share), Some(first)) => {
                let share = share.forward(b, mixed[3], None);
                let share = b.g.unary(OpKind::Sigmoid, share);
                let change = b.g.binary(OpKind::Sub, first, v);
                let part = b.g.binary(OpKind::Mul, change, share);
                v = b.g.binary(OpKind::Add, v, part);
            }
            _ => *first = Some(v),
        }
        let rate = of.rate.forward(b, mixed[4], None);
        let rate = b.g.unary(OpKind::Sigmoid, rate);
        let gate = of.gate.forward(b, mixed[5], Some(OpKind::Sigmoid));
        let [k_k, k_a, r_k] = of.factors.map(|l| b.weight(l));
        let lost = b.g.binary(OpKind::Mul, k, k_k);
        let lost = self.heads(b, lost);
        let width = b.g.value(lost).cols();
        let ones = b.ones(self.norm.module(), width);
        let lost = b.rms_norm_by(self.norm.module(), lost, ones);
        // `k * (1 + (rate - 1) * k_a)`.
        let less = b.g.unary(OpKind::Shift(op::Shift { by: Real(-1.0) }), rate);
        let less = b.g.binary(OpKind::Mul, k, less);
        let less = b.g.binary(OpKind::Mul, less, k_a);
        let k = b.g.binary(OpKind::Add, k, less);
        let [r, decay, k, v, rate] = [r, decay, k, v, rate].map(|x| self.heads(b, x));
        let gained = b.g.binary(OpKind::Mul, lost, rate);
        let lost = b.g.unary(OpKind::Neg, lost);
        let shape = b.g.value(v).shape.clone();
        let chunk = CHUNK.min(b.seq());
        let kind = OpKind::DiagonalDelta(op::DiagonalDelta { chunk });
        let out = b.compute(kind, &[r, decay, k, v, lost, gained], &[&shape])[0];
        let out = self.normalize(b, out);
        // `(out + (r * k * r_k).sum(-1) * v) * gate`.
        let own = b.g.binary(OpKind::Mul, r, k);
        let own = b.g.binary(OpKind::Mul, own, r_k);
        let scores = [batch, seq, self.of.heads, 1];
        let sum = OpKind::RowSum(op::RowSum { scale: Real(1.0) });
        let own = b.compute(sum, &[own], &[&scores])[0];
        let own = b.as_activation(own);
        let own = b.g.binary(OpKind::Mul, v, own);
        let own = b.g.reshape(own, &[batch, seq, self.of.values]);
        let out = b.g.binary(OpKind::Add, out, own);
        let out = b.g.binary(OpKind::Mul, out, gate);
        b.linear(self.output, out)
    }
}
