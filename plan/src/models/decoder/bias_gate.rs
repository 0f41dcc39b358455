//! Gates of the biases of attention scores (WavLM). In the plan, all samples share a gate.

use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer};

/// Numbers that the layer makes of each head: two sums of four.
const SUMS: u64 = 2;
const TERMS: u64 = 4;

/// Multiplies the biases of each head by a number that its rows make.
pub(super) struct BiasGate {
    module: ModuleId,
    layer: Layer,
    factors: Layer,
}

impl BiasGate {
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model) -> Option<Self> {
        let sound = m.options.sound.as_ref().filter(|of| of.gated_biases);
        sound.map(|_| {
            let module = d.module(at, "bias_gate", ModuleKind::Layer);
            let shape = [SUMS * TERMS, m.head_dim];
            let layer = d.linear(module, ("layer", ""), shape, true);
            let factors = d.module(module, "factors", ModuleKind::Layer);
            let factors = d.parameters(factors, "", &[m.heads], false);
            Self {
                module,
                layer,
                factors,
            }
        })
    }

    /// Returns `bias`, `[heads, seq, seq]`, multiplied by the gates of `y`, `[batch, seq, hidden]`:
    /// `a * (b * factor - 1) + 2`, where a and b are sigmoids.
    pub(super) fn apply(&self, b: &mut Builder<'_>, y: ValueId, bias: ValueId) -> ValueId {
        let (batch, seq) = (b.batch(), b.seq());
        let (heads, dim) = (b.s.model.heads, b.s.model.head_dim);
        let by_head = b.within(self.module, |b| b.g.reshape(y, &[batch, seq, heads, dim]));
        let made = b.linear(self.layer, by_head);
        let factors = b.weight(self.factors);
        b.within(self.module, |b| {
            let terms = b.g.reshape(made, &[batch, seq, heads, SUMS, TERMS]);
            let kind = OpKind::RowSum(op::RowSum { scale: Real(1.0) });
            let shape = [batch, seq, heads, SUMS, 1];
            let sums = b.compute(kind, &[terms], &[&shape])[0];
            let sums = b.as_activation(sums);
            let sums = b.g.reshape(sums, &[batch, seq, heads, SUMS]);
            let gates = b.g.unary(OpKind::Sigmoid, sums);
            let parts = b.g.split(gates, 3, SUMS);
            let parts: Vec<ValueId> = parts.iter().map(|&v| b.g.make_contiguous(v)).collect();
            let parts = parts
                .into_iter()
                .map(|v| b.g.reshape(v, &[batch, seq, heads]));
            let parts: Vec<ValueId> = parts.collect();
            let shift = |by| OpKind::Shift(op::Shift { by: Real(by) });
            let scaled = b.g.binary(OpKind::Mul, parts[1], factors);
            let scaled = b.g.unary(shift(-1.0), scaled);
            let gate = b.g.binary(OpKind::Mul, parts[0], scaled);
            let gate = b.g.unary(shift(2.0), gate);
            let sum = b.compute(OpKind::SumLeading, &[gate], &[&[seq, heads]])[0];
            let mean = b.scale(sum, 1.0 / batch as f64);
            let mean = b.g.transpose(mean, 0, 1);
            let mean = b.g.make_contiguous(mean);
            let mean = b.g.reshape(mean, &[heads * seq, 1]);
            let rows = b.g.make_contiguous(bias);
            let rows = b.g.reshape(rows, &[heads * seq, seq]);
            let rows = b.g.binary(OpKind::ScaleRows, rows, mean);
            b.g.reshape(rows, &[heads, seq, seq])
        })
    }
}
