//! Feed-forward layer of a decoder.

use super::attention::mlp_reads_norm;
use super::norm::Norm;
use super::{names, normalized, scaled};
use crate::config::Model;
use crate::graph::ValueId;
use crate::ir::{ModuleId, ModuleKind, OpKind, Real, op};
use crate::models::activation::activate;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::{defaults, implementation};

pub(super) struct Mlp {
    pub(super) module: ModuleId,
    /// Input norm.
    pub(super) norm: Option<Norm>,
    input: Input,
    /// Share of the gates that are 0.
    sparsity: Option<f64>,
    /// Norm before the down projection.
    sub_norm: Option<Norm>,
    down: Layer,
    /// Output norm, before the residual connection.
    post_norm: Option<Norm>,
    /// Norm of the sum.
    pub(super) sum_norm: Option<Norm>,
}

/// Projections before the activation.
enum Input {
    /// The activated gate is multiplied by `up`.
    Gated { gate: Layer, up: Layer },
    /// Gate and `up` as one projection.
    Packed(Layer),
    /// No gate.
    Plain(Layer),
}

impl Mlp {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let names = names::of(m);
        let (h, ffn, bias) = (m.hidden, m.ffn, m.bias.mlp());
        let at = d.module(block, "mlp", ModuleKind::Mlp);
        let norm = mlp_reads_norm(m).then(|| {
            let names = ("norm", names.mlp_norm);
            Norm::new(d, at, names, h, m, Order::First)
        });
        let input = match (m.options.gated_mlp, m.options.packed_gate_up) {
            (true, false) => Input::Gated {
                gate: d.linear(at, ("w1", names.gate), [ffn, h], bias),
                up: d.linear(at, ("w3", names.up), [ffn, h], bias),
            },
            (true, true) => Input::Packed(d.linear(at, ("w13", names.gate_up), [2 * ffn, h], bias)),
            (false, _) => Input::Plain(d.linear(at, ("w1", names.up), [ffn, h], bias)),
        };
        for n in 0..m.options.activation_scalars {
            let module = d.module(at, &format!("activation_{n}"), ModuleKind::Layer);
            let scalar = d.parameters(module, "", &[1], false);
            d.untrained(scalar);
        }
        let sub_norm = m.options.sub_norms.then(|| {
            let names = ("sub_norm", "mlp.ffn_sub_norm");
            Norm::new(d, at, names, ffn, m, Order::Declared)
        });
        let down = d.linear(at, ("w2", names.down), [h, ffn], bias);
        let post_norm = normalized(m)[1].then(|| {
            let names = ("post_norm", names.mlp_post_norm);
            Norm::new(d, at, names, h, m, Order::Declared)
        });
        let sum_norm = normalized(m)[2].then(|| {
            let names = ("norm", names.mlp_norm);
            Norm::new(d, at, names, h, m, Order::Declared)
        });
        Self {
            module: at,
            norm,
            input,
            sparsity: m.sparsity(d.layer()),
            sub_norm,
            down,
            post_norm,
            sum_norm,
        }
    }

    /// Applies the layer to `y`. Returns the residual update.
    pub(super) fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let down = self.inner(b, y);
        self.finish(b, down)
    }

    /// Applies dropout, output norm and multiplier to the layer's result. Returns the residual
    /// update.
    pub(super) fn finish(&self, b: &mut Builder<'_>, mut down: ValueId) -> ValueId {
        b.within(self.module, |b| {
            down = b.dropout(down, b.s.model.options.dropout);
            if let Some(norm) = self.post_norm {
                down = norm.apply(b, down);
            }
            scaled(b, down, b.s.model.options.residual_multiplier)
        })
    }

    /// Applies the layer to `y`, without the norm of its result.
    pub(super) fn inner(&self, b: &mut Builder<'_>, y: ValueId) -> ValueId {
        let activation = defaults::activation(&b.s.model);
        b.within(self.module, |b| {
            let mut inner = match self.input {
                Input::Gated { gate, up } => {
                    let mut gate = b.linear(gate, y);
                    if let Some(share) = self.sparsity {
                        gate = largest(b, gate, share);
                    }
                    let gate = activate(b, activation, gate);
                    let up = b.linear(up, y);
                    b.g.binary(OpKind::Mul, gate, up)
                }
                Input::Packed(both) => {
                    let both = b.linear(both, y);
                    let parts = b.g.split(both, 2, 2);
                    let gate = activate(b, activation, parts[0]);
                    b.g.binary(OpKind::Mul, parts[1], gate)
                }
                Input::Plain(up) => {
                    let up = b.linear(up, y);
                    activate(b, activation, up)
                }
            };
            if let Some(norm) = self.sub_norm {
                inner = norm.apply(b, inner);
            }
            if implementation::drops_inner(b) {
                inner = b.dropout(inner, b.s.model.options.dropout);
            }
            b.linear(self.down, inner)
        })
    }
}

/// Subtracts from each row the value below which `share` of its numbers are, if these have a normal
/// distribution, and sets negative ones to 0.
fn largest(b: &mut Builder<'_>, x: ValueId, share: f64) -> ValueId {
    let (width, mut shape) = (b.g.value(x).cols() as f64, b.g.value(x).shape.clone());
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    let scale = Real(1.0 / width);
    let mean = b.compute(OpKind::RowSum(op::RowSum { scale }), &[x], &[&shape])[0];
    let mean = b.as_activation(mean);
    // One kernel per row, as `torch.std` is.
    let squares = b.compute(OpKind::RowDot, &[x, x], &[&shape])[0];
    let squares = b.as_activation(squares);
    let squares = b.scale(squares, 1.0 / width);
    let of_mean = b.g.binary(OpKind::Mul, mean, mean);
    let variance = b.g.binary(OpKind::Sub, squares, of_mean);
    let exponent = Real(0.5);
    let deviation = b.g.unary(OpKind::Pow(op::Pow { exponent }), variance);
    let deviation = b.scale(deviation, normal_quantile(share));
    let cutoff = b.g.binary(OpKind::Add, mean, deviation);
    let rest = b.g.binary(OpKind::Sub, x, cutoff);
    b.g.unary(OpKind::Relu, rest)
}

/// Returns the number below which `share` of a standard normal distribution is, by bisection of
/// its logistic approximation.
fn normal_quantile(share: f64) -> f64 {
    let below = |x: f64| 1.0 / (1.0 + (-x * (1.5976 + 0.07056 * x * x)).exp());
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if below(middle) < share {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}
