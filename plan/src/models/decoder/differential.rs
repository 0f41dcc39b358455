//! Differential attention (DiffLlama): differences of the results of two halves of the heads.
//!
//! The code of transformers computes attention twice, with each half of the values. The factor of
//! the second half is computed from four learned vectors.

use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer};

pub(super) struct Differential {
    module: ModuleId,
    /// Two pairs of vectors of a head's width. The vectors of a pair are multiplied.
    factors: [Layer; 4],
}

impl Differential {
    /// Declares the factors, if the model has any.
    pub(super) fn new(d: &mut Declare, at: ModuleId, m: &Model) -> Option<Self> {
        m.options.attention.differential.then(|| Self {
            module: at,
            factors: ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"].map(|name| {
                let module = d.module(at, name, ModuleKind::Layer);
                d.parameters(module, "", &[m.head_dim], false)
            }),
        })
    }

    /// Returns the values for both calls of attention: each half of `v`, `[batch, heads, seq,
    /// head_dim]`, twice.
    pub(super) fn values(b: &mut Builder<'_>, v: ValueId) -> [ValueId; 2] {
        let half = b.g.value(v).shape[1] / 2;
        [0, half].map(|start| {
            let part = b.g.slice(v, 1, start, half);
            b.g.cat(&[part, part], 1)
        })
    }

    /// Returns the normalized differences of the outputs of both calls,
    /// `[batch, heads / 2, seq, 2 * head_dim]`.
    pub(super) fn combine(&self, b: &mut Builder<'_>, made: [ValueId; 2]) -> ValueId {
        let both = b.g.cat(&made, 3);
        let half = b.g.value(both).shape[1] / 2;
        let [first, second] = [0, half].map(|start| b.g.slice(both, 1, start, half));
        let factor = self.factor(b);
        let less = b.g.binary(OpKind::Mul, second, factor);
        let out = b.g.binary(OpKind::Sub, first, less);
        let width = b.g.value(out).cols();
        let ones = b.ones(self.module, width);
        let out = b.rms_norm_by(self.module, out, ones);
        b.scale(out, 0.2)
    }

    /// Returns the difference of the exponentials of both pairs, a number. The plan has sigmoids in
    /// place of the exponentials, at the same cost.
    fn factor(&self, b: &mut Builder<'_>) -> ValueId {
        let [q1, k1, q2, k2] = self.factors.map(|l| b.weight(l));
        let product = |b: &mut Builder<'_>, q, k| {
            let each = b.g.binary(OpKind::Mul, q, k);
            let width = b.g.value(each).numel();
            let each = b.g.reshape(each, &[1, width]);
            let sum = OpKind::RowSum(op::RowSum { scale: Real(1.0) });
            let sum = b.compute(sum, &[each], &[&[1, 1]])[0];
            let sum = b.g.unary(OpKind::Sigmoid, sum);
            b.as_activation(sum)
        };
        let [first, second] = [(q1, k1), (q2, k2)].map(|(q, k)| product(b, q, k));
        let both = b.g.binary(OpKind::Sub, first, second);
        let sum = b.g.unary(OpKind::Shift(op::Shift { by: Real(0.8) }), both);
        b.g.reshape(sum, &[])
    }
}
