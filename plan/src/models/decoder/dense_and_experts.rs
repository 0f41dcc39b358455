//! Experts in parallel with a dense feed-forward layer (Gemma 4).
//!
//! Both read the residual stream, each through a separate norm, and their normalized results are
//! added. The router reads it through a norm without a weight, times a learned vector.

use super::experts::Experts;
use super::norm::Norm;
use super::scaled;
use crate::config::{Model, Norm as Kind};
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};

/// The experts, and the norms around them.
pub(super) struct DenseAndExperts {
    module: ModuleId,
    experts: Experts,
    router_norm: Norm,
    /// Factors of the router's input, `[hidden]`.
    router_scale: Layer,
    /// Input norm of the experts.
    norm: Norm,
    /// Output norm of the experts.
    post_norm: Norm,
    /// Output norm of the dense layer.
    dense_norm: Norm,
}

impl DenseAndExperts {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let at = d.module(block, "moe", ModuleKind::Layer);
        let h = m.hidden;
        let norm = |d: &mut Declare, name, of: &Model| {
            Norm::new(d, at, (name, ""), h, of, Order::Declared)
        };
        let mut plain = m.clone();
        plain.options.norm = Kind::RmsNoWeight;
        let vector = |d: &mut Declare, name, width| {
            let module = d.module(at, name, ModuleKind::Layer);
            d.parameters(module, "", &[width], false)
        };
        let router_scale = vector(d, "router_scale", h);
        // Factors of the weights of experts, which the plan leaves out.
        let expert_scale = vector(d, "expert_scale", m.options.experts.experts);
        d.untrained(expert_scale);
        Self {
            module: at,
            router_norm: norm(d, "router_norm", &plain),
            router_scale,
            norm: norm(d, "norm", m),
            post_norm: norm(d, "post_norm", m),
            dense_norm: norm(d, "dense_norm", m),
            experts: Experts::named(d, at, "mlp", m, [false; 3]),
        }
    }

    /// Applies the experts to the residual stream `x`. Returns the sum of their output and that of
    /// the dense layer, and the router's logits.
    pub(super) fn add(
        &self,
        b: &mut Builder<'_>,
        x: ValueId,
        dense: ValueId,
    ) -> (ValueId, ValueId) {
        let width = b.g.value(x).cols();
        let factors = b.weight(self.router_scale);
        b.within(self.module, |b| {
            let dense = self.dense_norm.apply(b, dense);
            let by = self.router_norm.apply(b, x);
            let by = b.g.binary(OpKind::Mul, by, factors);
            let by = scaled(b, by, (width as f64).powf(-0.5));
            let y = self.norm.apply(b, x);
            let (routed, logits) = self.experts.forward_by(b, y, by);
            let routed = self.post_norm.apply(b, routed);
            (b.g.binary(OpKind::Add, dense, routed), logits)
        })
    }
}
