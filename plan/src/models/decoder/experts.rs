//! A layer of experts: router, routed experts, shared expert.
//!
//! Every token is sent to `top_k` experts. The rows of these choices are sorted by expert, and each
//! expert multiplies its own rows. Weights of choices are applied between the two matmuls of an
//! expert, so that their gradient is a dot product per row and no result of an expert has to be
//! saved. The code of torchtitan and transformers applies them after the matmuls (`indexed.rs`),
//! Llama 4 before them. Expert-parallel ranks have some of the experts each, and exchange tokens
//! (`dispatch.rs`).

use super::attention::mlp_reads_norm;
use super::dispatch::{Dispatch, Routed, layer_number};
use super::names::{self, Names, Stacks};
use super::norm::Norm;
use super::{normalized, scaled};
use crate::config::{ExpertCode, Glu, Model, Router};
use crate::graph::{SharedOverlap, ValueId};
use crate::ir::{HfForm, Indexing, Init, ModuleId, ModuleKind, MoeStage, OpKind, Real, op};
use crate::models::activation::{activate, clamped_glu};
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, Order};
use crate::models::defaults;
use crate::ops::masked_fill;
use smallvec::SmallVec;

/// Returns the width of one expert.
pub(in crate::models) fn width(m: &Model) -> u64 {
    m.options.experts.expert_ffn.unwrap_or(m.ffn)
}

/// A layer of experts, with its norms.
pub(super) struct Experts {
    pub(super) module: ModuleId,
    /// Input norm.
    pub(super) norm: Option<Norm>,
    router: Layer,
    /// Bias of the scores for the choice of experts, `[experts]`.
    router_bias: Option<Layer>,
    dispatch: Dispatch,
    routed: ModuleId,
    /// `[experts, 2 ffn, hidden]`: of each expert of this rank, the gate's rows, then those of the
    /// other factor.
    gate_up: Layer,
    /// `[experts, hidden, ffn]`, of this rank's experts.
    down: Layer,
    shared: Option<Shared>,
    /// Biases of gates and other factors, `[experts, 2 ffn]`, and of results, `[experts, hidden]`.
    biases: Option<[Layer; 2]>,
    /// Bias of the sum over a token's experts, `[hidden]`.
    sum_bias: Option<Layer>,
    /// Projections to and from the width of the routed experts.
    latent: Option<[Layer; 2]>,
    /// Output norm, before the residual connection.
    post_norm: Option<Norm>,
    /// Norm of the sum.
    pub(super) sum_norm: Option<Norm>,
}

/// Returns the names of the stacks of gates and other factors, and of the stacks of results, in
/// files, with their forms.
fn stored(names: &Names) -> [(&'static str, HfForm); 2] {
    match names.expert_stacks {
        Stacks::None => {
            let entries = |layers| (names.experts, HfForm::Entries(layers));
            [names.expert_gate_up, names.expert_down].map(entries)
        }
        Stacks::Layers(names) => names.map(|name| (name, HfForm::Layer)),
        Stacks::Parameters {
            names: [gate_up, down],
            interleaved,
        } => {
            let parameter = |interleaved| HfForm::Parameter { interleaved };
            [(gate_up, parameter(interleaved)), (down, parameter(false))]
        }
    }
}

/// Multiplies activated gates by the other factors; both are halves of the columns of `both`.
fn gated(b: &mut Builder<'_>, both: ValueId) -> ValueId {
    let parts = b.g.split(both, 1, 2);
    let of = &b.s.model.options.experts;
    if of.glu == Glu::GptOss {
        let limit = of.glu_limit;
        return clamped_glu(b, parts[0], parts[1], limit);
    }
    let activation = defaults::activation(&b.s.model);
    let gate = activate(b, activation, parts[0]);
    b.g.binary(OpKind::Mul, gate, parts[1])
}

/// The expert that takes every token.
struct Shared {
    module: ModuleId,
    w1: Layer,
    /// `None` without a gate, as in the routed experts.
    w3: Option<Layer>,
    w2: Layer,
    gate: Option<Layer>,
}

impl Experts {
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model) -> Self {
        let [_, after, sum] = normalized(m);
        let after = after || m.options.experts.expert_norm;
        let before = mlp_reads_norm(m);
        Self::named(d, block, "mlp", m, [before, after, sum])
    }

    /// Declares the experts as a module named `name`. The flags say whether there are norms of the
    /// input, of the output, and of the residual sum.
    pub(super) fn named(
        d: &mut Declare,
        block: ModuleId,
        name: &str,
        m: &Model,
        [before, after, of_sum]: [bool; 3],
    ) -> Self {
        let (h, of) = (m.hidden, &m.options.experts);
        let names = names::of(m);
        let at = d.module(block, name, ModuleKind::Mlp);
        let norm = before.then(|| {
            let names = ("norm", names.mlp_norm);
            Norm::new(d, at, names, h, m, Order::First)
        });
        // Routers of transformers 5 are modules of their own, to which PEFT adds no adapters.
        let router = d.module(at, "router", ModuleKind::Layer);
        let scored = of.experts + of.zero_experts;
        let router = d.parameters(router, names.router, &[scored, h], of.expert_bias);
        let router_bias = of.router_bias.then(|| {
            let module = d.module(at, "router_bias", ModuleKind::Layer);
            let name = (names.router_bias, names::ROUTER_BIAS);
            d.router_bias(module, name, scored, of.router_bias_update_speed > 0.0)
        });
        let routed = d.module(at, "experts", ModuleKind::Layer);
        let mut stack = |name, stored, shape: [u64; 3]| {
            let module = d.module(routed, name, ModuleKind::Layer);
            d.experts(module, stored, &shape)
        };
        let (ffn, all) = (width(m), of.experts);
        let inner = of.expert_latent.unwrap_or(h);
        let first = if m.options.gated_mlp { 2 * ffn } else { ffn };
        let stored = stored(&names);
        let gate_up = stack("gate_up", stored[0], [scored, first, inner]);
        let down = stack("down", stored[1], [all, inner, ffn]);
        let biases = of.expert_bias.then(|| {
            let ([gate_up, down], interleaved) = match names.expert_stacks {
                Stacks::Parameters { names, interleaved } => {
                    (names.map(|name| [name, "_bias"].concat()), interleaved)
                }
                _ => Default::default(),
            };
            let mut bias = |name, stored: (&str, bool), width| {
                let module = d.module(routed, name, ModuleKind::Layer);
                d.expert_parameter(module, stored, &[all, width], Init::Zeros)
            };
            [
                bias("gate_up_bias", (&gate_up, interleaved), first),
                bias("down_bias", (&down, false), inner),
            ]
        });
        let latent = of.expert_latent.map(|inner| {
            [
                d.linear(
                    at,
                    ("latent_down", "mixer.fc1_latent_proj"),
                    [inner, h],
                    false,
                ),
                d.linear(
                    at,
                    ("latent_up", "mixer.fc2_latent_proj"),
                    [h, inner],
                    false,
                ),
            ]
        });
        let shared = (of.shared_expert_ffn > 0).then(|| Shared::new(d, at, m));
        let sum_bias = of.routed_attention.then(|| {
            let module = d.module(at, "sum_bias", ModuleKind::Layer);
            d.parameters(module, "", &[h], false)
        });
        let post_norm = after.then(|| {
            let names = ("post_norm", names.mlp_post_norm);
            Norm::new(d, at, names, h, m, Order::Declared)
        });
        let sum_norm = of_sum.then(|| {
            let names = ("norm", names.mlp_norm);
            Norm::new(d, at, names, h, m, Order::Declared)
        });
        Self {
            module: at,
            norm,
            router,
            router_bias,
            dispatch: Dispatch::new(&d.mesh, of.experts),
            routed,
            gate_up,
            down,
            shared,
            biases,
            sum_bias,
            latent,
            post_norm,
            sum_norm,
        }
    }

    /// Applies the layer to `y`. Returns the residual update and the router's logits,
    /// `[tokens, experts]`, in float32.
    pub(super) fn forward(&self, b: &mut Builder<'_>, y: ValueId) -> (ValueId, ValueId) {
        self.forward_by(b, y, y)
    }

    /// Does the same where the router reads other values.
    pub(super) fn forward_by(
        &self,
        b: &mut Builder<'_>,
        y: ValueId,
        routed_by: ValueId,
    ) -> (ValueId, ValueId) {
        b.within(self.module, |b| {
            let shape = b.g.value(y).shape.clone();
            let (tokens, hidden) = (b.g.value(y).rows(), b.g.value(y).cols());
            let route = self.route(b);
            let (flat, logits, narrow) = b.in_stage(MoeStage::Router, |b| {
                let flat = b.g.reshape(y, &[tokens, hidden]);
                let by = match routed_by == y {
                    true => flat,
                    false => b.g.reshape(routed_by, &[tokens, hidden]),
                };
                let logits = b.linear(self.router, by);
                let logits = b.as_operand(route, 0, logits);
                let narrow = self.latent.map_or(flat, |[down, _]| b.linear(down, flat));
                (flat, logits, narrow)
            });
            let mut routed = self.routed(b, narrow, logits, route);
            if let Some([_, up]) = self.latent {
                routed = b.linear(up, routed);
            }
            if let Some(bias) = self.sum_bias {
                let bias = b.weight(bias);
                routed = b.g.binary(OpKind::Add, routed, bias);
            }
            let sum = match &self.shared {
                None => routed,
                Some(shared) => {
                    let overlaps = self.overlap(b, shared);
                    b.g.overlaps.extend(overlaps);
                    let shared = match overlaps.is_some_and(|of| of.overlaps) {
                        true => shared.forward(b, flat),
                        false => b.in_stage(MoeStage::SharedExpert, |b| shared.forward(b, flat)),
                    };
                    b.g.binary(OpKind::Add, routed, shared)
                }
            };
            let mut sum = b.g.reshape(sum, &shape);
            if let Some(norm) = self.post_norm {
                sum = norm.apply(b, sum);
            }
            let out = scaled(b, sum, b.s.model.options.residual_multiplier);
            (out, logits)
        })
    }

    /// Returns the part of the shared expert that overlaps with the exchange of tokens; `None` if
    /// ranks exchange no tokens.
    fn overlap(&self, b: &Builder<'_>, shared: &Shared) -> Option<SharedOverlap> {
        let moe = b.s.moe.as_ref().filter(|_| self.dispatch.exchanges())?;
        Some(SharedOverlap {
            layer: self.module,
            shared: shared.module,
            down: shared.w2.module(),
            overlaps: moe.shared_expert_overlap,
        })
    }

    fn route(&self, b: &Builder<'_>) -> OpKind {
        let of = &b.s.model.options.experts;
        let forced = b.s.forced_routing.as_ref();
        OpKind::Route(op::Route {
            k: of.top_k,
            sigmoid: of.router == Router::Sigmoid,
            normalize: of.normalizes(),
            scale: Real(of.route_scale),
            groups: of.router_groups,
            kept: of.router_group_top_k,
            bias: self.router_bias.is_some(),
            forced: forced.map(|f| f.choice(of, layer_number(b, self.module))),
        })
    }

    /// Computes the weighted sum of the routed experts' results, `[tokens, hidden]`.
    fn routed(&self, b: &mut Builder<'_>, x: ValueId, logits: ValueId, route: OpKind) -> ValueId {
        let k = b.s.model.options.experts.top_k;
        let choices = [b.g.value(x).rows(), k];
        let chosen = b.in_stage(MoeStage::Router, |b| {
            let bias = self.router_bias.map(|bias| b.weight(bias));
            let bias = bias.map(|bias| b.as_operand(route, 1, bias));
            let inputs: SmallVec<[ValueId; 2]> = [logits].into_iter().chain(bias).collect();
            b.compute(route, &inputs, &[&choices, &choices])
        });
        let (weights, ids) = (chosen[0], chosen[1]);
        let zeros = b.s.model.options.experts.zero_experts > 0;
        b.within(self.routed, |b| {
            // What experts without weights add: the input, weighted.
            let same = zeros.then(|| {
                let first = b.g.slice(weights, 1, 0, 1);
                let first = b.g.make_contiguous(first);
                let first = b.as_activation(first);
                b.g.binary(OpKind::ScaleRows, x, first)
            });
            let of = Routed { x, weights, ids };
            let sum = match b.s.expert_code() {
                ExpertCode::Rows => self.by_rows(b, of),
                ExpertCode::Torchtitan => self.of_torchtitan(b, of),
                ExpertCode::Transformers => self.of_transformers(b, of),
            };
            same.map_or(sum, |same| b.g.binary(OpKind::Add, sum, same))
        })
    }

    /// Returns the stack of gates and other factors of experts that have weights.
    fn gates(&self, b: &mut Builder<'_>) -> ValueId {
        let weights = b.weight(self.gate_up);
        match b.s.model.options.experts.zero_experts {
            0 => weights,
            _ => b.g.slice(weights, 0, 0, self.dispatch.experts()),
        }
    }

    /// Computes it with kernels that know where rows go. Weights travel with rows, and are applied
    /// between the matmuls.
    fn by_rows(&self, b: &mut Builder<'_>, of: Routed) -> ValueId {
        let sent = self.dispatch.send(b, self.module, of);
        let Routed { x, weights, ids } = sent.routed;
        let &[tokens, k] = &b.g.value(ids).shape[..] else {
            unreachable!("tokens have k choices each");
        };
        let ([offsets, position], x) = self.dispatch.locally(b, |b| {
            let [offsets, position] = self.dispatch.sort_within(b, ids, sent.calls, sent.limit);
            let x = b.moved(to_experts(sent.used), [x, position], sent.rows);
            ([offsets, position], x)
        });
        // Each number in the place of its row.
        let place = b.g.reshape(position, &[tokens * k, 1]);
        let each = b.g.reshape(weights, &[tokens * k, 1]);
        let before = scores_before(b);
        let at = Rows {
            x: if before {
                weighted(b, Indexing::Own, x, [each, place])
            } else {
                x
            },
            place,
            offsets,
            used: sent.used,
            mask: None,
        };
        let out = self.matmuls(b, &at, (!before).then_some(each));
        let from = OpKind::Unpermute(op::Unpermute {
            by: Indexing::Own,
            routed: sent.used,
        });
        let y = b.moved(from, [out, position], tokens);
        for v in [weights, ids, offsets, position, x] {
            b.g.release(v);
        }
        self.dispatch.combine(b, &sent, y)
    }

    /// Applies the two matmuls of the experts to rows, and, between them, the weights of choices,
    /// `[choices, 1]`, if there are any.
    pub(super) fn matmuls(
        &self,
        b: &mut Builder<'_>,
        of: &Rows,
        weights: Option<ValueId>,
    ) -> ValueId {
        let (ffn, activation) = (width(&b.s.model), defaults::activation(&b.s.model));
        let (rows, hidden) = (b.g.value(of.x).rows(), b.g.value(of.x).cols());
        let (experts, none) = {
            let experts = &b.s.model.options.experts;
            (experts.experts, experts.zero_experts)
        };
        // Experts without weights get their share of rows.
        let routed = match none {
            0 => of.used,
            _ => Some(of.used.unwrap_or(rows) * experts / (experts + none)),
        };
        let matmul = OpKind::GroupedGemm(op::GroupedGemm { tb: true, routed });
        // Each in the module of its weights, which may be gathered on their own.
        let (mut both, first) = b.within(self.gate_up.module(), |b| {
            let weights = self.gates(b);
            let first = b.g.value(weights).shape[1];
            let both = b.compute(matmul, &[of.x, weights, of.offsets], &[&[rows, first]])[0];
            (both, first)
        });
        if let Some([bias, _]) = self.biases {
            let bias = biases_of(b, bias, of, (rows, routed));
            both = with_bias(b, both, bias);
        }
        both = masked(b, both, of.mask);
        let mut act = if first == ffn {
            activate(b, activation, both)
        } else {
            gated(b, both)
        };
        let weight = weights.map(|each| b.moved(to_experts(of.used), [each, of.place], rows));
        if let Some(weight) = weight {
            act = b.g.binary(OpKind::ScaleRows, act, weight);
        }
        let mut out = b.within(self.down.module(), |b| {
            let weights = b.weight(self.down);
            b.compute(matmul, &[act, weights, of.offsets], &[&[rows, hidden]])[0]
        });
        if let Some([_, bias]) = self.biases {
            let mut bias = biases_of(b, bias, of, (rows, routed));
            if let Some(weight) = weight {
                bias = b.g.binary(OpKind::ScaleRows, bias, weight);
            }
            out = with_bias(b, out, bias);
        }
        masked(b, out, of.mask)
    }

    /// Returns how tokens reach the ranks of their experts.
    pub(super) const fn dispatch(&self) -> &Dispatch {
        &self.dispatch
    }
}

/// Returns the op that copies tokens, or their weights, to rows of experts.
const fn to_experts(routed: Option<u64>) -> OpKind {
    let by = Indexing::Own;
    OpKind::Permute(op::Permute { by, routed })
}

/// Rows in the order of their experts.
pub(super) struct Rows {
    /// The rows, `[rows, hidden]`.
    pub(super) x: ValueId,
    /// The row of each choice, `[choices, 1]`.
    pub(super) place: ValueId,
    /// Where the rows of each expert start.
    pub(super) offsets: ValueId,
    /// How many of the rows are used, if not all.
    pub(super) used: Option<u64>,
    /// Mask of rows whose results are set to zero, `[rows, 1]`.
    pub(super) mask: Option<ValueId>,
}

/// Adds the biases of experts to their rows, which transformers does in place.
fn with_bias(b: &mut Builder<'_>, x: ValueId, bias: ValueId) -> ValueId {
    match b.s.expert_code() {
        ExpertCode::Transformers => b.g.add_into(x, bias),
        ExpertCode::Rows | ExpertCode::Torchtitan => b.g.binary(OpKind::Add, x, bias),
    }
}

fn masked(b: &mut Builder<'_>, x: ValueId, mask: Option<ValueId>) -> ValueId {
    match mask {
        Some(mask) => masked_fill(&mut b.g, x, mask),
        None => x,
    }
}

/// Returns whether the weights of choices multiply the inputs of experts.
pub(super) fn scores_before(b: &Builder<'_>) -> bool {
    b.s.model.options.experts.score_before_experts
}

/// Multiplies rows by the weights of their choices, `[choices, 1]`. `place` is the row of each
/// choice.
pub(super) fn weighted(
    b: &mut Builder<'_>,
    by: Indexing,
    x: ValueId,
    [each, place]: [ValueId; 2],
) -> ValueId {
    let rows = b.g.value(x).rows();
    let weight = b.permute(by, [each, place], rows);
    b.g.binary(OpKind::ScaleRows, x, weight)
}

/// Returns the bias of each row's expert, of `rows`, of which `routed` are computed, if not all.
fn biases_of(
    b: &mut Builder<'_>,
    layer: Layer,
    of: &Rows,
    (rows, routed): (u64, Option<u64>),
) -> ValueId {
    b.within(layer.module(), |b| {
        let biases = b.weight(layer);
        let width = b.g.value(biases).cols();
        let kind = OpKind::RepeatRows(op::RepeatRows { routed });
        b.compute(kind, &[biases, of.offsets], &[&[rows, width]])[0]
    })
}

impl Shared {
    fn new(d: &mut Declare, at: ModuleId, m: &Model) -> Self {
        let (h, of) = (m.hidden, &m.options.experts);
        let names = names::of(m);
        let ffn = of.shared_expert_ffn;
        let module = d.module(at, "shared_expert", ModuleKind::Layer);
        let inner = |part: &str| format!("{}.{part}", names.shared_expert);
        let (gate, up, down) = (inner("gate_proj"), inner("up_proj"), inner("down_proj"));
        Self {
            module,
            w1: d.linear(module, ("w1", &gate), [ffn, h], false),
            w3: m
                .options
                .gated_mlp
                .then(|| d.linear(module, ("w3", &up), [ffn, h], false)),
            w2: d.linear(module, ("w2", &down), [h, ffn], false),
            gate: of
                .shared_expert_gate
                .then(|| d.linear(module, ("gate", names.shared_expert_gate), [1, h], false)),
        }
    }

    fn forward(&self, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let activation = defaults::activation(&b.s.model);
        b.within(self.module, |b| {
            let gate = b.linear(self.w1, x);
            let mut product = activate(b, activation, gate);
            if let Some(w3) = self.w3 {
                let up = b.linear(w3, x);
                product = b.g.binary(OpKind::Mul, product, up);
            }
            let down = b.linear(self.w2, product);
            match self.gate {
                None => down,
                Some(gate) => {
                    let gate = b.linear(gate, x);
                    let gate = b.g.unary(OpKind::Sigmoid, gate);
                    b.g.binary(OpKind::ScaleRows, down, gate)
                }
            }
        })
    }
}
