//! Parallel residual streams (hyper-connections of DeepSeek-V4).
//!
//! A block reads a weighted sum of the streams, and adds its output to all of them, with weights
//! from a projection of the streams. DeepSeek-V4 also mixes the streams with each other, by
//! matrices that become doubly stochastic after some iterations; the plan scales each stream
//! instead.

use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, ROOT};

/// Weights of the streams for one part of a block, or for the output layer.
#[derive(Clone, Copy)]
pub(super) struct Streams {
    module: ModuleId,
    weights: Layer,
}

impl Streams {
    /// Declares those of attention and of the feed-forward layer, if the model has streams.
    pub(super) fn of_block(d: &mut Declare, block: ModuleId, m: &Model) -> Option<[Self; 2]> {
        let n = m.options.streams;
        let width = (2 + n) * n;
        (n > 0).then(|| ["attn_hc", "ffn_hc"].map(|name| Self::new(d, block, name, width, 3, m)))
    }

    /// Declares what sums the streams up after the last block.
    pub(super) fn of_output(d: &mut Declare, m: &Model) -> Option<Self> {
        let n = m.options.streams;
        (n > 0).then(|| Self::new(d, ROOT, "hc_head", n, 1, m))
    }

    /// `scales` factors of the weights are not trained in the plan.
    fn new(d: &mut Declare, at: ModuleId, name: &str, width: u64, scales: u64, m: &Model) -> Self {
        let module = d.module(at, name, ModuleKind::Layer);
        let all = m.options.streams * m.hidden;
        let weights = d.linear(module, ("fn", ""), [width, all], true);
        let scale = d.module(module, "scale", ModuleKind::Layer);
        let scale = d.parameters(scale, "", &[scales], false);
        d.untrained(scale);
        Self { module, weights }
    }

    /// Returns the weights of streams `x`, `[batch, seq, streams, hidden]`.
    fn weights(self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let (batch, seq) = (b.batch(), b.seq());
        let width = b.s.model.options.streams * b.s.model.hidden;
        let flat = b.within(self.module, |b| b.g.reshape(x, &[batch, seq, width]));
        let ones = b.ones(self.module, width);
        let y = b.rms_norm_by(self.module, flat, ones);
        let y = b.linear(self.weights, y);
        b.within(self.module, |b| b.g.unary(OpKind::Sigmoid, y))
    }

    /// Returns the weighted sum of the streams, `[batch, seq, hidden]`, and the weights.
    pub(super) fn collapse(self, b: &mut Builder<'_>, x: ValueId) -> [ValueId; 2] {
        let weights = self.weights(b, x);
        let (batch, seq, h) = (b.batch(), b.seq(), b.s.model.hidden);
        let sum = b.within(self.module, |b| {
            let scaled = scale(b, x, weights, 0);
            let first = b.g.transpose(scaled, 1, 2);
            let first = b.g.transpose(first, 0, 1);
            let first = b.g.make_contiguous(first);
            b.compute(OpKind::SumLeading, &[first], &[&[batch, seq, h]])[0]
        });
        [sum, weights]
    }

    /// Adds what a part of a block makes to scaled streams.
    pub(super) fn expand(
        self,
        b: &mut Builder<'_>,
        x: ValueId,
        made: ValueId,
        weights: ValueId,
    ) -> ValueId {
        let n = b.s.model.options.streams;
        let all = replicate(b, self.module, made);
        b.within(self.module, |b| {
            let made = scale(b, all, weights, n);
            let kept = scale(b, x, weights, 2 * n);
            b.g.binary(OpKind::Add, made, kept)
        })
    }
}

/// Returns `x`, `[batch, seq, hidden]`, as every stream.
pub(super) fn replicate(b: &mut Builder<'_>, at: ModuleId, x: ValueId) -> ValueId {
    let (batch, seq, h) = (b.batch(), b.seq(), b.s.model.hidden);
    let n = b.s.model.options.streams;
    b.within(at, |b| {
        let all = b.g.expand(x, &[n, batch, seq, h]);
        let all = b.g.transpose(all, 0, 1);
        let all = b.g.transpose(all, 1, 2);
        b.g.make_contiguous(all)
    })
}

/// Multiplies each stream by its weight; the first one's stands at `start`.
fn scale(b: &mut Builder<'_>, x: ValueId, weights: ValueId, start: u64) -> ValueId {
    let (batch, seq, h) = (b.batch(), b.seq(), b.s.model.hidden);
    let n = b.s.model.options.streams;
    let own = b.g.slice(weights, 2, start, n);
    let own = b.g.reshape(own, &[batch * seq * n, 1]);
    let rows = b.g.reshape(x, &[batch * seq * n, h]);
    let scaled = b.g.binary(OpKind::ScaleRows, rows, own);
    b.g.reshape(scaled, &[batch, seq, n, h])
}
