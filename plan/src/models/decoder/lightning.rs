//! Lightning attention (MiniMax-Text-01): sums of keys times values, which decay with an untrained
//! rate of each head.
//!
//! It is planned as one kernel that works chunk by chunk. The code of transformers runs a loop over
//! the chunks.

use crate::config::{LinearAttention, Model};
use crate::graph::ValueId;
use crate::ir::{DType, ModuleId, OpKind, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;

pub(super) struct Lightning {
    of: LinearAttention,
    /// Projection to query, key and value of each head.
    qkv: Layer,
    /// Norm of all heads together.
    norm: Layer,
    gate: Layer,
    output: Layer,
}

impl Lightning {
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model, of: &LinearAttention) -> Self {
        let (h, n) = (m.hidden, of.value_heads);
        let (keys, values) = (n * of.key_dim, n * of.value_dim);
        let rows = 2 * keys + values;
        Self {
            of: of.clone(),
            qkv: d.linear(at, ("qkv", "self_attn.qkv_proj"), [rows, h], false),
            norm: d.norm(
                at,
                ("out_norm", "self_attn.norm"),
                values,
                false,
                Order::Declared,
            ),
            gate: d.linear(at, ("gate", "self_attn.output_gate"), [values, h], false),
            output: d.linear(at, ("out", "self_attn.out_proj"), [h, values], false),
        }
    }

    pub(super) fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let (of, n) = (&self.of, self.of.value_heads);
        let (batch, seq) = (b.batch(), b.seq());
        let made = b.linear(self.qkv, y);
        let activation = defaults::activation(&b.s.model);
        let made = activate(b, activation, made);
        let each = 2 * of.key_dim + of.value_dim;
        let made = b.g.reshape(made, &[batch, seq, n, each]);
        let q = b.g.slice(made, 3, 0, of.key_dim);
        let k = b.g.slice(made, 3, of.key_dim, of.key_dim);
        let v = b.g.slice(made, 3, 2 * of.key_dim, of.value_dim);
        let [decay, own] =
            ["decays", "ones"].map(|name| b.constant(name, &[n, of.key_dim], DType::F32, false));
        let kind = OpKind::WkvHeads(op::WkvHeads {
            chunk: of.chunk.min(seq),
        });
        let shape = [batch, seq, n, of.value_dim];
        let out = b.compute(kind, &[q, k, v, decay, own], &[&shape])[0];
        let out = b.g.reshape(out, &[batch, seq, n * of.value_dim]);
        let out = b.rms_norm(self.norm, out);
        let gate = b.linear(self.gate, y);
        let gate = b.g.unary(OpKind::Sigmoid, gate);
        let out = b.g.binary(OpKind::Mul, gate, out);
        b.linear(self.output, out)
    }
}
