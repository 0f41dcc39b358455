//! Layers of RWKV: projections read a mixture of each position and the previous one.

use super::norm::Norm;
use crate::config::{Model, Ssm};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

/// Shares of each position in what projections read; the rest is that of the position before.
pub(super) struct Mixture {
    module: ModuleId,
    pub(super) shares: Vec<Layer>,
}

impl Mixture {
    pub(super) fn new(d: &mut Declare, at: ModuleId, names: &[&str], h: u64) -> Self {
        let share = |name: &&str| {
            let module = d.module(at, name, ModuleKind::Layer);
            d.parameters(module, "", &[1, 1, h], false)
        };
        Self {
            module: at,
            shares: names.iter().map(share).collect(),
        }
    }

    /// Returns a mixture of `x`, `[batch, seq, hidden]`, for each share.
    pub(super) fn of(&self, b: &mut Builder<'_>, x: ValueId) -> Vec<ValueId> {
        let (batch, seq, h) = (b.batch(), b.seq(), b.g.value(x).cols());
        let zeros = b.constant("zeros", &[batch, 1, h], DType::F32, false);
        let shares: Vec<ValueId> = self.shares.iter().map(|&l| b.weight(l)).collect();
        b.within(self.module, |b| {
            let zeros = b.as_activation(zeros);
            let earlier = b.g.slice(x, 1, 0, seq - 1);
            let before = b.g.cat(&[zeros, earlier], 1);
            let mixed = |share: ValueId| {
                let own = b.g.binary(OpKind::Mul, x, share);
                let rest = b.g.unary(OpKind::Neg, share);
                let one = OpKind::Shift(op::Shift { by: Real(1.0) });
                let rest = b.g.unary(one, rest);
                let rest = b.g.binary(OpKind::Mul, before, rest);
                b.g.binary(OpKind::Add, own, rest)
            };
            shares.into_iter().map(mixed).collect()
        })
    }
}

impl Mixture {
    /// Returns the same mixtures, by the difference of positions.
    fn by_difference(&self, b: &mut Builder<'_>, x: ValueId) -> Vec<ValueId> {
        let shares: Vec<ValueId> = self.shares.iter().map(|&l| b.weight(l)).collect();
        b.within(self.module, |b| {
            let change = difference(b, x);
            let mixed = |share| shifted(b, [x, change, share]);
            shares.into_iter().map(mixed).collect()
        })
    }
}

/// The layers of RWKV-4 in place of attention.
pub(super) struct TimeMix {
    mixture: Mixture,
    decay: Layer,
    first: Layer,
    /// Make keys, values and the gate of results.
    inputs: [Layer; 3],
    output: Layer,
}

impl TimeMix {
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &Ssm) -> Self {
        let (h, inner) = (m.hidden, of.inner);
        let vector = |d: &mut Declare, name| {
            let module = d.module(at, name, ModuleKind::Layer);
            d.parameters(module, "", &[inner], false)
        };
        Self {
            decay: vector(d, "decay"),
            first: vector(d, "first"),
            mixture: Mixture::new(d, at, &["mix_k", "mix_v", "mix_r"], h),
            inputs: [
                ("k", "attention.key"),
                ("v", "attention.value"),
                ("r", "attention.receptance"),
            ]
            .map(|names| d.linear(at, names, [inner, h], false)),
            output: d.linear(at, ("out", "attention.output"), [h, inner], false),
        }
    }

    pub(super) fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let mixed = self.mixture.of(b, y);
        let made: Vec<ValueId> = (self.inputs.iter().zip(mixed))
            .map(|(&layer, x)| b.linear(layer, x))
            .collect();
        let [k, v, r] = [made[0], made[1], made[2]];
        let r = b.g.unary(OpKind::Sigmoid, r);
        let [decay, first] = [self.decay, self.first].map(|w| b.weight(w));
        let shape = b.g.value(k).shape.clone();
        let y = b.compute(OpKind::Wkv, &[k, v, decay, first], &[&shape])[0];
        let y = b.g.binary(OpKind::Mul, r, y);
        b.linear(self.output, y)
    }
}

/// The feed-forward layer. Until RWKV-7, its result has a gate.
pub(super) struct ChannelMix {
    pub(super) module: ModuleId,
    /// Input norm.
    pub(super) norm: Norm,
    mixture: Mixture,
    up: Layer,
    gate: Option<Layer>,
    down: Layer,
}

impl ChannelMix {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let (h, ffn) = (m.hidden, m.ffn);
        let module = d.module(block, "mlp", ModuleKind::Mlp);
        let norm = Norm::new(d, module, ("norm", "ln2"), h, m, Order::First);
        let version = m.options.rwkv.as_ref().map_or(4, |of| of.version);
        let gated = version < 7;
        let shares = ["mix_k", "mix_r"];
        Self {
            module,
            norm,
            mixture: Mixture::new(d, module, &shares[..1 + usize::from(gated)], h),
            up: d.linear(module, ("w1", "feed_forward.key"), [ffn, h], false),
            gate: gated.then(|| d.linear(module, ("r", "feed_forward.receptance"), [h, h], false)),
            down: d.linear(module, ("w2", "feed_forward.value"), [h, ffn], false),
        }
    }

    pub(super) fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        b.within(self.module, |b| {
            let later =
                b.s.model
                    .options
                    .rwkv
                    .as_ref()
                    .is_some_and(|of| of.version > 5);
            let mixed = match later {
                true => self.mixture.by_difference(b, y),
                false => self.mixture.of(b, y),
            };
            let up = b.linear(self.up, mixed[0]);
            let up = b.g.unary(OpKind::Relu, up);
            let up = b.g.binary(OpKind::Mul, up, up);
            let down = b.linear(self.down, up);
            let Some(gate) = self.gate else {
                return down;
            };
            let gate = b.linear(gate, mixed[1]);
            let gate = b.g.unary(OpKind::Sigmoid, gate);
            b.g.binary(OpKind::Mul, gate, down)
        })
    }
}

/// Returns the difference of each position of `x`, `[batch, seq, hidden]`, to the one before.
pub(super) fn difference(b: &mut Builder<'_>, x: ValueId) -> ValueId {
    let (batch, seq, h) = (b.batch(), b.seq(), b.g.value(x).cols());
    let zeros = b.constant("zeros", &[batch, 1, h], DType::F32, false);
    let zeros = b.as_activation(zeros);
    let earlier = b.g.slice(x, 1, 0, seq - 1);
    let before = b.g.cat(&[zeros, earlier], 1);
    b.g.binary(OpKind::Sub, before, x)
}

/// Computes `x + share * difference`.
pub(super) fn shifted(b: &mut Builder<'_>, [x, difference, share]: [ValueId; 3]) -> ValueId {
    let part = b.g.binary(OpKind::Mul, difference, share);
    b.g.binary(OpKind::Add, x, part)
}
