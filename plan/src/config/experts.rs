//! Mixtures of experts.

use serde::{Deserialize, Serialize};

/// Keys of `[model]` for experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Experts {
    /// Experts of a layer.
    pub experts: u64,
    /// Experts that take each token.
    pub top_k: u64,
    /// Width of one expert; `None`: that of dense layers.
    pub expert_ffn: Option<u64>,
    /// Width that routed experts work on, if it is not that of the model.
    pub expert_latent: Option<u64>,
    /// The router and the routed experts have biases.
    pub expert_bias: bool,
    /// What routed experts make of gates and other factors.
    pub glu: Glu,
    /// Bound of gates and other factors ([`Glu::GptOss`]).
    pub glu_limit: f64,
    /// Experts are chosen by the sum of score and a bias, which is not trained by gradients.
    pub router_bias: bool,
    /// How far a step moves the biases of routers, up for experts with less than the mean load and
    /// down for those with more; 0: not at all.
    pub router_bias_update_speed: f64,
    /// Width of the expert that takes every token; 0 for none.
    pub shared_expert_ffn: u64,
    /// The shared expert's result is multiplied by the sigmoid of a projection of its input.
    pub shared_expert_gate: bool,
    /// What a layer of experts adds is normalized, unlike what others add.
    pub expert_norm: bool,
    /// Each layer has a dense feed-forward layer and experts, whose results are added.
    pub dense_and_experts: bool,
    /// Experts that return what they read. Each layer has rows for their gates, which nothing uses
    /// (LongCat-Flash).
    pub zero_experts: u64,
    /// Each block has two layers of attention and dense ones; experts read what the first dense
    /// layer does, and their results are added after the second one (LongCat-Flash).
    pub shortcut_experts: bool,
    /// Experts make the queries of attention and its results; these and those of other experts have
    /// a bias (JetMoE).
    pub routed_attention: bool,
    /// First layers, which are dense.
    pub dense_layers: u64,
    /// Every n-th of the other layers has experts.
    pub moe_every: u64,
    /// Scores of the router.
    pub router: Router,
    /// The weights of a token's experts are divided by their sum.
    pub normalize_top_k: bool,
    /// Factor of the weights.
    pub route_scale: f64,
    /// The weights multiply what experts read, not what they make.
    pub score_before_experts: bool,
    /// Groups of adjacent experts, of which a token uses some; 1 for none.
    pub router_groups: u64,
    /// Groups that a token uses.
    pub router_group_top_k: u64,
    /// Coefficient of the load-balancing loss; 0 for none.
    pub aux_loss: f64,
    /// Tokens over which the load-balancing loss averages.
    pub aux_loss_kind: AuxLoss,
    /// Coefficient of the mean squared log-sum-exp of the router's logits; 0 for none.
    pub z_loss: f64,
}

/// The defaults of the key table; a test compares them.
impl Default for Experts {
    fn default() -> Self {
        Self {
            experts: 8,
            top_k: 2,
            expert_ffn: None,
            expert_latent: None,
            expert_bias: false,
            glu: Glu::Activated,
            glu_limit: 7.0,
            router_bias: false,
            router_bias_update_speed: 0.0,
            shared_expert_ffn: 0,
            shared_expert_gate: false,
            expert_norm: false,
            dense_and_experts: false,
            zero_experts: 0,
            shortcut_experts: false,
            routed_attention: false,
            dense_layers: 0,
            moe_every: 1,
            router: Router::SoftmaxTopK,
            normalize_top_k: true,
            route_scale: 1.0,
            score_before_experts: false,
            router_groups: 1,
            router_group_top_k: 1,
            aux_loss: 0.0,
            aux_loss_kind: AuxLoss::Layer,
            z_loss: 0.0,
        }
    }
}

impl Experts {
    /// Returns whether a layer has experts: after the dense ones, every `moe_every`-th, counted
    /// from the first layer of the model as transformers does.
    #[must_use]
    pub fn has(&self, layer: u64) -> bool {
        layer >= self.dense_layers && (layer + 1).is_multiple_of(self.moe_every)
    }

    /// Returns whether the weights of a token's experts add up to `route_scale`.
    #[must_use]
    pub fn normalizes(&self) -> bool {
        self.normalize_top_k || self.router == Router::TopKSoftmax
    }
}

/// What experts make of gates and other factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glu {
    /// `activation(gate) * up`.
    Activated,
    /// `gate * sigmoid(1.702 * gate) * (up + 1)` of clamped gates and factors.
    GptOss,
}

words!(Glu {
    Activated = "activation",
    GptOss = "gpt_oss",
});

/// Scores of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Router {
    /// Softmax over all experts, of which the largest are chosen.
    SoftmaxTopK,
    /// The largest logits are chosen; softmax over these.
    TopKSoftmax,
    /// Sigmoids, of which the largest are chosen.
    Sigmoid,
}

words!(Router {
    SoftmaxTopK = "softmax_topk",
    TopKSoftmax = "topk_softmax",
    Sigmoid = "sigmoid",
});

/// Tokens over which a load-balancing loss averages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuxLoss {
    /// Those of a layer and micro-batch (Switch Transformer, Megatron).
    Layer,
    /// Those of a layer and sequence; the mean over sequences.
    Sequence,
    /// Those of all layers and a micro-batch, not divided by `top_k` (transformers).
    Pooled,
}

words!(AuxLoss {
    Layer = "layer",
    Sequence = "sequence",
    Pooled = "hf",
});
