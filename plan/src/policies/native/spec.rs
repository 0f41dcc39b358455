//! Defaults and rules of the policy `native`.

use super::Native;
use crate::compile::WeightAdjacency;
use crate::config::{
    AllocatorKind, Dispatcher, GradientSync, PolicyKind, Prefetch, Reshard, Variant,
};
use crate::ir::DType;
use crate::lower::engine::Engine;
use crate::lower::{Lowering, MuonMatrices, RouterBiases, flat_layout};
use crate::policies::GRADIENTS_ADDED_UP;
use crate::policies::spec::{
    Defaults, PolicySpec, Refusal, Rules, WithoutEffect, fully_compiled, keeps_frozen_as_gathered,
};
use crate::program::Contract;
use crate::shard::placements;

pub(crate) const SPEC: PolicySpec = PolicySpec {
    kind: PolicyKind::Native,
    variant: Variant::Released,
    defaults: Defaults {
        prefetch: Prefetch::Depth(1),
        reduce_in_flight: 2,
        gradient_sync: GradientSync::OuterLast,
        reshard: |_| Reshard::Always,
        separate_communicators: true,
        allocator: AllocatorKind::Pool,
        main_grads: |_| DType::F32,
        comm_grads: |_, main_grads| main_grads,
        dispatcher: Dispatcher::Gather,
        capacity_factor: None,
        shared_expert_overlap: true,
        optimizes_code: true,
    },
    rules: Rules {
        options: &[
            "atomic",
            "cast_before_all_gather",
            "copy_engine_reduce_scatter",
            "copy_in_stream",
            "no_sync_units",
            "optimizer_in_backward",
            "prefetch_lists",
            "prefetch_next_step",
        ],
        refuses: REFUSES,
        without_effect: &[
            WithoutEffect {
                key: "precision.frozen_params",
                because_of: "fsdp.policy",
                only: Some(keeps_frozen_as_gathered),
                why: "policy native keeps parameters that are not trained in the type that it \
                      computes in",
            },
            WithoutEffect {
                key: "train.attention_backend",
                because_of: "fsdp.policy",
                only: None,
                why: "policy native picks its kernels by itself",
            },
        ],
    },
    fixes: |_, _| false,
    fixed_addresses: "set fsdp.allocator = \"pool\"",
    engine: Engine {
        framework: false,
        fused_optimizer: true,
        late_norm: true,
        frees_gradients: true,
        own_workspaces: Some("policy native plans the workspace of its matmuls with its kernels"),
        plans_persistent: true,
        shards_params: false,
        // If the dtypes agree, the optimizer updates the compute weights in place, as in the
        // rewrite on Megatron-LM's main branch.
        separate_main_params: false,
        copies_for_comm: false,
        premultiplies: |dtype| dtype == DType::F32,
        averages: |outer| outer == 1,
        reshards_root: false,
        separate_frozen_main: false,
        saved_tensor_hooks: false,
    },
    lowering: Lowering {
        layout: flat_layout,
        contract: Contract::STRICT,
        float8_apart: true,
        places_merged_weights: true,
        adjacency: WeightAdjacency::WeightsAndGradients,
        muon: MuonMatrices::Whole,
        router_biases: RouterBiases::LikeGradients,
        lifecycle: |out| Ok(Box::new(Native::new(out))),
    },
};

const REFUSES: &[Refusal] = &[
    Refusal {
        keys: &["fsdp.reshard_after_backward", "fsdp.strategy"],
        when: |s| {
            let weight_sharded = placements::weight_sharded(s.fsdp.strategy);
            !s.fsdp.reshard_after_backward && !weight_sharded && !fully_compiled(s)
        },
        message: "`reshard_after_backward` = false keeps gathered weights, but with this strategy \
                  weights are never sharded",
        help: "set reshard_after_backward = true",
    },
    GRADIENTS_ADDED_UP,
];
