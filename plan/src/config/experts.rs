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
    /// How routed experts combine gate and up projections.
    pub glu: Glu,
    /// Clamp limit of gate and up projections ([`Glu::GptOss`]).
    pub glu_limit: f64,
    /// Experts are chosen by score plus a bias that is not trained by gradients.
    pub router_bias: bool,
    /// Step size of router biases, which increase for experts below the mean load and decrease for
    /// those above; 0: no updates.
    pub router_bias_update_speed: f64,
    /// Width of the shared expert, which takes every token; 0 for none.
    pub shared_expert_ffn: u64,
    /// The shared expert's result is multiplied by the sigmoid of a projection of its input.
    pub shared_expert_gate: bool,
    /// The output of MoE layers is normalized, unlike that of other layers.
    pub expert_norm: bool,
    /// Each layer has a dense feed-forward layer and experts; their results are added.
    pub dense_and_experts: bool,
    /// Number of experts that return their input. Each layer has unused rows for their gates
    /// (LongCat-Flash).
    pub zero_experts: u64,
    /// Each block has two attention layers and two dense layers. Experts read the input of the
    /// first dense layer, and their results are added after the second one (LongCat-Flash).
    pub shortcut_experts: bool,
    /// Experts compute the queries and the output of attention; these and the other experts have a
    /// bias (JetMoE).
    pub routed_attention: bool,
    /// Number of first layers that are dense.
    pub dense_layers: u64,
    /// Every n-th of the other layers has experts.
    pub moe_every: u64,
    /// Scoring function of the router.
    pub router: Router,
    /// The weights of a token's experts are normalized to sum to 1.
    pub normalize_top_k: bool,
    /// Factor of the weights.
    pub route_scale: f64,
    /// The weights multiply the inputs of experts, not their outputs.
    pub score_before_experts: bool,
    /// The code of transformers also masks rows of experts on other ranks where there are none.
    pub mask_expert_rows: bool,
    /// Number of groups of adjacent experts that limit a token's choices; 1 for none.
    pub router_groups: u64,
    /// Number of groups that a token uses.
    pub router_group_top_k: u64,
    /// Coefficient of the load-balancing loss; 0 for none.
    pub aux_loss: f64,
    /// Set of tokens that the load-balancing loss averages over.
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
            mask_expert_rows: true,
            router_groups: 1,
            router_group_top_k: 1,
            aux_loss: 0.0,
            aux_loss_kind: AuxLoss::Layer,
            z_loss: 0.0,
        }
    }
}

impl Experts {
    /// Returns whether a layer has experts: after the dense layers, every `moe_every`-th layer. As
    /// in transformers, layers are counted from the first layer of the model.
    #[must_use]
    pub fn has(&self, layer: u64) -> bool {
        layer >= self.dense_layers && (layer + 1).is_multiple_of(self.moe_every)
    }

    /// Returns whether the weights of a token's experts add up to `route_scale`.
    #[must_use]
    pub(crate) fn normalizes(&self) -> bool {
        self.normalize_top_k || self.router == Router::TopKSoftmax
    }
}

/// How experts combine gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glu {
    /// `activation(gate) * up`.
    Activated,
    /// `gate * sigmoid(1.702 * gate) * (up + 1)`, with gate and up clamped.
    GptOss,
}

words!(Glu {
    Activated = "activation",
    GptOss = "gpt_oss",
});

/// Scoring function of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Router {
    /// Softmax over all experts; the largest are chosen.
    SoftmaxTopK,
    /// The largest logits are chosen, followed by a softmax over them.
    TopKSoftmax,
    /// Sigmoids; the largest are chosen.
    Sigmoid,
}

words!(Router {
    SoftmaxTopK = "softmax_topk",
    TopKSoftmax = "topk_softmax",
    Sigmoid = "sigmoid",
});

/// Set of tokens that a load-balancing loss averages over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuxLoss {
    /// The tokens of a layer and micro-batch (Switch Transformer, Megatron).
    Layer,
    /// The tokens of a layer and sequence, with the mean over sequences.
    Sequence,
    /// The tokens of all layers of a micro-batch, not divided by `top_k` (transformers).
    Pooled,
}

words!(AuxLoss {
    Layer = "layer",
    Sequence = "sequence",
    Pooled = "hf",
});
