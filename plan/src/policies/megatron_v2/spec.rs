//! Defaults and rules of the policy `megatron_v2`.

use super::MegatronV2;
use crate::compile::WeightAdjacency;
use crate::config::{
    AllocatorKind, CompileMode, Dispatcher, GradientSync, OuterStrategy, PolicyKind, Prefetch,
    Reshard, Strategy, Variant,
};
use crate::lower::engine::Engine;
use crate::lower::{Lowering, MuonMatrices, RouterBiases, flat_layout};
use crate::policies::spec::{
    Defaults, PolicySpec, Refusal, Rules, WithoutEffect, is_fixed_by_megatron_v2, joins_backwards,
    some_unit,
};
use crate::policies::{GRADIENTS_ADDED_UP, SHARDS_ROWS, SKIPS_NO_BLOCKS};
use crate::program::Contract;

pub(crate) const SPEC: PolicySpec = PolicySpec {
    kind: PolicyKind::MegatronV2,
    variant: Variant::Released,
    defaults: Defaults {
        prefetch: Prefetch::Implicit,
        reduce_in_flight: 1,
        gradient_sync: GradientSync::OuterLast,
        reshard: |_| Reshard::Always,
        separate_communicators: false,
        allocator: AllocatorKind::Caching,
        // `main_grads_dtype` defaults to the dtype of the parameters.
        main_grads: |compute| compute,
        // Gradients are reduced in the dtype in which autograd produces them.
        comm_grads: |compute, _| compute,
        dispatcher: Dispatcher::Gather,
        capacity_factor: None,
        shared_expert_overlap: false,
        optimizes_code: false,
    },
    rules: Rules {
        options: &["decoupled_gradients", "variant"],
        refuses: REFUSES,
        without_effect: &[
            WithoutEffect {
                key: "precision.frozen_params",
                because_of: "fsdp.policy",
                only: None,
                why: "policy megatron_v2 keeps parameters that are not trained in both types",
            },
            WithoutEffect {
                key: "fsdp.reduce_in_flight",
                because_of: "fsdp.policy",
                only: None,
                why: "policy megatron_v2 packs gradients once the reduction before is done, so that \
                      one buffer is in flight",
            },
            WithoutEffect {
                key: "fsdp.average_in_collective",
                because_of: "fsdp.policy",
                only: None,
                why: "policy megatron_v2 always averages in the collective",
            },
        ],
    },
    fixes: |key, _| {
        let prefetch = matches!(key, "fsdp.prefetch_forward" | "fsdp.prefetch_backward");
        prefetch || is_fixed_by_megatron_v2(key)
    },
    fixed_addresses: "use policy native",
    engine: Engine {
        framework: true,
        fused_optimizer: false,
        late_norm: false,
        frees_gradients: false,
        own_workspaces: None,
        plans_persistent: false,
        shards_params: false,
        separate_main_params: false,
        copies_for_comm: false,
        premultiplies: |_| false,
        averages: |_| true,
        reshards_root: true,
        separate_frozen_main: true,
        saved_tensor_hooks: false,
    },
    lowering: Lowering {
        layout: flat_layout,
        contract: Contract::STRICT,
        float8_apart: true,
        places_merged_weights: false,
        // Gradients belong to autograd until they are packed.
        adjacency: WeightAdjacency::Weights,
        muon: MuonMatrices::Refused(SHARDS_ROWS),
        router_biases: RouterBiases::Apart,
        lifecycle: |out| Ok(Box::new(MegatronV2::new(out))),
    },
};

/// Returns whether the prefetch depth differs from the engine's fixed depth of one unit.
fn is_other_depth(rule: Prefetch) -> bool {
    !matches!(rule, Prefetch::Implicit | Prefetch::Depth(1))
}

const ONE_AHEAD: &str = "policy megatron_v2 gathers exactly one unit ahead: the experimental engine \
                         prefetches the next module of a fixed order";
const ONE_UNIT: &str = "set it to 1 or \"implicit\", or use policy native, fsdp2 or megatron";
const OTHER_ENGINE: &str = "leave it out, or use policy native or megatron";

const REFUSES: &[Refusal] = &[
    Refusal {
        keys: &["compile.mode", "fsdp.policy"],
        when: |s| s.compile.mode != CompileMode::Off,
        message: "policy megatron_v2 runs eagerly only: torch.compile fails on its modules, whose \
                  hooks resize storages and switch streams, which Dynamo cannot trace",
        help: "set compile.mode = \"off\", or use policy megatron or fsdp2",
    },
    Refusal {
        keys: &["fsdp.strategy", "fsdp.placements", "fsdp.policy"],
        when: |s| s.fsdp.strategy != Strategy::OptimGradsParams,
        message: "policy megatron_v2 always shards parameters: `unshard_parameters` of \
                  megatron-fsdp 0.6.1 raises if a gather would not change their placement",
        help: "use optim_grads_params, or policy native or megatron",
    },
    Refusal {
        keys: &["fsdp.outer_strategy", "fsdp.placements", "fsdp.policy"],
        when: |s| s.fsdp.outer_strategy == OuterStrategy::Optim,
        message: "policy megatron_v2 can only replicate over dp_replicate: `DBuffer.redistribute` \
                  of megatron-fsdp 0.6.1 cannot make a sharded gradient partial again, which the \
                  next step needs",
        help: "use outer_strategy = \"no_shard\", or policy native or megatron",
    },
    Refusal {
        keys: &["fsdp.reshard_after_forward", "fsdp.policy"],
        when: |s| s.fsdp.reshard_after_forward != Reshard::Always,
        message: "policy megatron_v2 reshards every unit after forward, the root too",
        help: "set reshard_after_forward = true, or use policy native or fsdp2",
    },
    Refusal {
        keys: &["fsdp.reshard_after_backward", "fsdp.policy"],
        when: |s| !s.fsdp.reshard_after_backward,
        message: "policy megatron_v2 reshards every unit after its backward",
        help: "set reshard_after_backward = true, or use policy native or fsdp2",
    },
    Refusal {
        keys: &["fsdp.units", "fsdp.policy"],
        when: |s| some_unit(s, |u| u.keep),
        message: "policy megatron_v2 has no units that stay gathered after forward (`=keep`)",
        help: "leave out `=keep`, or use policy native, fsdp2 or megatron",
    },
    Refusal {
        keys: &["fsdp.units", "fsdp.policy"],
        when: |s| some_unit(s, |u| u.modules.len() > 1),
        message: "policy megatron_v2 has one module per unit: `fully_shard` of the experimental \
                  engine takes no list of modules (`+`)",
        help: "name each module on its own, or leave them to the root",
    },
    Refusal {
        keys: &["fsdp.prefetch_forward", "fsdp.policy"],
        when: |s| is_other_depth(s.fsdp.prefetch_forward),
        message: ONE_AHEAD,
        help: ONE_UNIT,
    },
    Refusal {
        keys: &["fsdp.prefetch_backward", "fsdp.policy"],
        when: |s| is_other_depth(s.fsdp.prefetch_backward),
        message: ONE_AHEAD,
        help: ONE_UNIT,
    },
    Refusal {
        keys: &["train.joint_backward", "fsdp.policy"],
        when: joins_backwards,
        message: "`joint_backward` is impossible under policy megatron_v2: a module whose backward \
                  has begun refuses to begin another one before its parameters have their gradients",
        help: "set joint_backward = false",
    },
    SKIPS_NO_BLOCKS,
    Refusal {
        keys: &["fsdp.async_reduce", "fsdp.policy"],
        when: |s| !s.fsdp.async_reduce,
        message: "policy megatron_v2 always reduces on a side stream",
        help: OTHER_ENGINE,
    },
    Refusal {
        keys: &["fsdp.unify_comm_stream", "fsdp.policy"],
        when: |s| s.fsdp.unify_comm_stream,
        message: "policy megatron_v2 has separate streams for gathers and reductions: \
                  `unify_communication_stream` came after megatron-fsdp 0.6.1",
        help: OTHER_ENGINE,
    },
    Refusal {
        keys: &["fsdp.separate_communicators", "fsdp.policy"],
        when: |s| s.fsdp.separate_communicators,
        message: "policy megatron_v2 gathers and reduces over the one process group of its mesh",
        help: OTHER_ENGINE,
    },
    Refusal {
        keys: &["fsdp.allocator", "fsdp.policy"],
        when: |s| {
            let allocator = s.fsdp.allocator;
            matches!(allocator, AllocatorKind::Pool | AllocatorKind::DoubleBuffer)
        },
        message: "policy megatron_v2 allocates through PyTorch's caching allocator: it has no \
                  planned pool and no double buffer",
        help: "use \"caching\" or \"temporary\", or policy native or megatron",
    },
    Refusal {
        keys: &["fsdp.offload", "fsdp.policy"],
        when: |s| s.fsdp.offload.any(),
        message: "policy megatron_v2 has no host offload: the optimizer of Megatron-LM refuses \
                  `optimizer_cpu_offload` with this engine (`FullyShardedOptimizer`)",
        help: "set fsdp.offload = [], or use policy native or fsdp2",
    },
    Refusal {
        keys: &["fsdp.gradient_scaling_factor", "fsdp.policy"],
        when: |s| s.fsdp.gradient_scaling_factor.is_some(),
        message: "policy megatron_v2 always averages gradients over ranks: megatron-fsdp 0.6.1's \
                  experimental engine has no divisor",
        help: "leave it out, or use policy native, fsdp2 or megatron",
    },
    Refusal {
        keys: &["fsdp.per_token_loss", "fsdp.policy"],
        when: |s| s.fsdp.per_token_loss,
        message: "policy megatron_v2 always averages gradients over ranks",
        help: OTHER_ENGINE,
    },
    GRADIENTS_ADDED_UP,
    Refusal {
        keys: &["fsdp.gradient_sync", "fsdp.policy"],
        when: |s| s.fsdp.gradient_sync == GradientSync::Last,
        message: "`gradient_sync` = \"last\" needs unsharded gradients, but policy megatron_v2 \
                  reduces them in every micro-batch",
        help: "set gradient_sync = \"outer_last\"",
    },
    Refusal {
        keys: &["precision.reduce_dtype", "fsdp.policy"],
        when: |s| s.precision.comm_grads != s.precision.compute,
        message: "policy megatron_v2 reduces gradients in param_dtype: the buffer that it packs \
                  has the type of autograd's gradients",
        help: "set reduce_dtype to param_dtype; main_grads is the type in which they are kept",
    },
    Refusal {
        keys: &["mesh.ep", "fsdp.policy"],
        when: |s| s.mesh.ep > 1,
        message: "policy megatron_v2 has no expert parallelism: megatron-fsdp 0.6.1's experimental \
                  engine has no divisor for gradients that experts sum over ranks",
        help: "set mesh.ep = 1, or use policy native, fsdp2 or megatron",
    },
];
