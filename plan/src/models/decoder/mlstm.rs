//! Matrix memories with exponential gates (xLSTM).
//!
//! They are planned as the scan of Mamba-2, whose states and decays have the same sizes: with a
//! sigmoid in place of the exponential of the input gate, and without the sums that divide results.

use crate::config::{LinearAttention, Model};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

/// Soft limit of the gates of inputs and states.
const GATE_CAP: f64 = 15.0;

pub(super) struct Mlstm {
    of: LinearAttention,
    q: Layer,
    k: Layer,
    v: Layer,
    /// Gate of what the memory returns.
    output_gate: Layer,
    input_gate: Layer,
    forget_gate: Layer,
    /// Norm of each head, with a weight for each number.
    norm: Layer,
    output: Layer,
}

impl Mlstm {
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &LinearAttention) -> Self {
        let (h, n) = (m.hidden, of.value_heads);
        let (keys, values) = (n * of.key_dim, n * of.value_dim);
        let mut linear = |name, hf, rows, bias| d.linear(at, (name, hf), [rows, h], bias);
        Self {
            of: of.clone(),
            q: linear("q", "mlstm_layer.q", keys, false),
            k: linear("k", "mlstm_layer.k", keys, false),
            v: linear("v", "mlstm_layer.v", values, false),
            output_gate: linear("gate", "mlstm_layer.ogate_preact", values, false),
            input_gate: linear("i", "mlstm_layer.igate_preact", n, true),
            forget_gate: linear("f", "mlstm_layer.fgate_preact", n, true),
            norm: d.norm(
                at,
                ("out_norm", "mlstm_layer.multihead_norm"),
                values,
                false,
                Order::Declared,
            ),
            output: d.linear(at, ("out", "mlstm_layer.out_proj"), [h, values], false),
        }
    }

    pub(super) fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let (of, n) = (&self.of, self.of.value_heads);
        let (batch, seq) = (b.batch(), b.seq());
        let heads = |b: &mut Builder<'_>, layer, dim| {
            let made = b.linear(layer, y);
            b.g.reshape(made, &[batch, seq, n, dim])
        };
        let [q, k] = [self.q, self.k].map(|layer| heads(b, layer, of.key_dim));
        let v = heads(b, self.v, of.value_dim);
        let cap = OpKind::Softcap(op::Softcap {
            cap: Real(GATE_CAP),
        });
        let [input, forget] = [self.input_gate, self.forget_gate].map(|layer| {
            let gate = b.linear(layer, y);
            b.g.unary(cap, gate)
        });
        let input = b.g.unary(OpKind::Sigmoid, input);
        let input = b.g.reshape(input, &[batch * seq * n, 1]);
        let rows = b.g.reshape(v, &[batch * seq * n, of.value_dim]);
        let rows = b.g.binary(OpKind::ScaleRows, rows, input);
        let v = b.g.reshape(rows, &[batch, seq, n, of.value_dim]);
        let out = self.scan(b, [q, k, v], forget);
        let ones = b.ones(self.norm.module(), of.value_dim);
        let out = b.layer_norm_by(self.norm.module(), out, ones, None);
        let out = b.g.reshape(out, &[batch, seq, n * of.value_dim]);
        let weight = b.weight(self.norm);
        let out = b.within(self.norm.module(), |b| b.g.binary(OpKind::Mul, out, weight));
        let gate = b.linear(self.output_gate, y);
        let gate = b.g.unary(OpKind::Sigmoid, gate);
        let out = b.g.binary(OpKind::Mul, gate, out);
        b.linear(self.output, out)
    }

    /// Reads the memory by `q` after each pair of `k` and `v` is added, `[batch, seq, heads, dim]`,
    /// and `forget`, `[batch, seq, heads]`, makes it decay.
    fn scan(&self, b: &mut Builder<'_>, [q, k, v]: [ValueId; 3], forget: ValueId) -> ValueId {
        let (of, n) = (&self.of, self.of.value_heads);
        let (batch, seq) = (b.batch(), b.seq());
        let [decay, own, bias] =
            ["decays", "zeros", "zeros"].map(|name| b.constant(name, &[n], DType::F32, false));
        let chunk = of.chunk.min(seq);
        let kind = OpKind::ChunkScan(op::ChunkScan { chunk });
        let shape = [batch, seq, n, of.value_dim];
        let states = [batch, seq.div_ceil(chunk), n, of.value_dim, of.key_dim];
        b.compute(
            kind,
            &[v, forget, decay, k, q, own, bias],
            &[&shape, &states],
        )[0]
    }
}
