//! Rules of compile mode full.

use super::Full;
use crate::compile::WeightAdjacency;
use crate::config::{
    CudaGraph, GradientSync, MergeProjections, OuterStrategy, PolicyKind, Reshard, Strategy,
};
use crate::lower::{Lowering, MuonMatrices, RouterBiases, per_param_layout};
use crate::policies::spec::{Refusal, Rules, WithoutEffect};
use crate::policies::{SHARDS_ROWS, fsdp2};
use crate::program::Contract;

/// The schedule. The compiled graph replaces the policy's hooks.
pub(crate) const LOWERING: Lowering = Lowering {
    layout: per_param_layout,
    contract: Contract::STRICT,
    float8_apart: true,
    places_merged_weights: false,
    adjacency: WeightAdjacency::None,
    muon: MuonMatrices::Refused(SHARDS_ROWS),
    router_biases: RouterBiases::Apart,
    lifecycle: |out| {
        fsdp2::supports(out.inputs)?;
        Ok(Box::new(Full::new(out)))
    },
};

/// Rules that apply in addition to the policy's.
pub(crate) const RULES: Rules = Rules {
    options: &[],
    refuses: REFUSES,
    without_effect: WITHOUT_EFFECT,
};

/// Returns whether a strategy shards gradients or optimizer state, but not parameters.
fn partly_sharded(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::Optim | Strategy::OptimGrads)
}

const REFUSES: &[Refusal] = &[
    Refusal {
        keys: &["fsdp.strategy", "fsdp.placements", "compile.mode"],
        // All strategies of policy fsdp2 shard parameters.
        when: |s| s.fsdp.policy == PolicyKind::Native && partly_sharded(s.fsdp.strategy),
        message: "compile mode full shards parameters, gradients and optimizer state: SimpleFSDP, \
                  which it follows, has modes replicate, fully_shard and hybrid_shard, and none \
                  that shards less",
        help: "use strategy optim_grads_params, or mode regions or blocks",
    },
    Refusal {
        keys: &["fsdp.strategy", "fsdp.placements", "compile.mode"],
        when: |s| s.fsdp.policy == PolicyKind::Native && s.fsdp.strategy == Strategy::NoShard,
        message: "compile mode full shards parameters, gradients and optimizer state: \
                  SimpleFSDP's mode replicate is not modeled, and DistributedDataParallel splits \
                  the graph at its buckets (DDPOptimizer)",
        help: "use strategy optim_grads_params, or mode regions or blocks",
    },
    Refusal {
        keys: &["fsdp.outer_strategy", "fsdp.placements", "compile.mode"],
        when: |s| s.fsdp.outer_strategy == OuterStrategy::Optim,
        message: "compile mode full can only replicate over dp_replicate",
        help: "use mode regions or blocks, or outer_strategy = \"no_shard\"",
    },
    Refusal {
        keys: &["fsdp.reshard_after_forward", "compile.mode"],
        when: |s| matches!(s.fsdp.reshard_after_forward, Reshard::Group(_)),
        message: "compile mode full cannot reshard to a smaller group: it frees a parameter or \
                  keeps all of it",
        help: "use true or false, or mode regions or blocks",
    },
    Refusal {
        keys: &["fsdp.offload", "compile.mode"],
        when: |s| s.fsdp.offload.any(),
        message: "compile mode full has no host offload: offload needs collectives outside of \
                  the graph",
        help: "use compile.mode off, regions or blocks, or set fsdp.offload = []",
    },
    Refusal {
        keys: &["fsdp.reshard_after_backward", "compile.mode"],
        when: |s| !s.fsdp.reshard_after_backward,
        message: "`reshard_after_backward` = false is not possible in compile mode full, which \
                  frees a parameter after its last use in forward and in backward",
        help: "set reshard_after_backward = true",
    },
    Refusal {
        keys: &["fsdp.gradient_sync", "compile.mode"],
        when: |s| s.fsdp.gradient_sync == GradientSync::Last,
        message: "`gradient_sync` = \"last\" keeps full gradients between micro-batches, but \
                  compile mode full reduces them right away",
        help: "set gradient_sync = \"outer_last\"",
    },
    Refusal {
        keys: &["compile.fuse_projections", "compile.mode"],
        when: |s| s.compile.merge_projections != MergeProjections::None,
        message: "compile mode full gathers every parameter into a separate buffer, but merging \
                  needs adjacent weights",
        help: "use mode regions or blocks, or fuse_projections none",
    },
    Refusal {
        keys: &["compile.cuda_graph", "compile.mode"],
        when: |s| matches!(s.compile.cuda_graph, CudaGraph::Scopes(_)),
        message: "compile mode full makes collectives graph nodes, which cross the boundaries of \
                  captured scopes",
        help: "use mode regions or blocks, or capture the full iteration",
    },
];

const ORDER: &str =
    "in compile mode full, the graph alone orders collectives, bounded by `max_inflight_bytes`";
const STREAMS: &str = "compile mode full has one stream for gathers and one for reductions";

const WITHOUT_EFFECT: &[WithoutEffect] = &[
    WithoutEffect {
        key: "fsdp.prefetch_forward",
        because_of: "compile.mode",
        only: None,
        why: ORDER,
    },
    WithoutEffect {
        key: "fsdp.prefetch_backward",
        because_of: "compile.mode",
        only: None,
        why: ORDER,
    },
    WithoutEffect {
        key: "fsdp.reduce_in_flight",
        because_of: "compile.mode",
        only: None,
        why: ORDER,
    },
    WithoutEffect {
        key: "fsdp.async_reduce",
        because_of: "compile.mode",
        only: None,
        why: STREAMS,
    },
    WithoutEffect {
        key: "fsdp.unify_comm_stream",
        because_of: "compile.mode",
        only: None,
        why: STREAMS,
    },
    WithoutEffect {
        key: "fsdp.reshard_after_forward",
        because_of: "compile.mode",
        only: Some(|s| s.fsdp.reshard_after_forward == Reshard::Auto),
        why: "compile mode full frees every parameter after its last use, or none (false)",
    },
];
