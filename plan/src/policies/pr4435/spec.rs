//! Defaults and rules of variant `pr4435` of policy `megatron_v2`.

use super::Pr4435;
use crate::compile::WeightAdjacency;
use crate::config::{
    AllocatorKind, CompileMode, Dispatcher, GradientSync, PolicyKind, Prefetch, Recompute, Reshard,
    Strategy, Variant,
};
use crate::ir::DType;
use crate::lower::engine::Engine;
use crate::lower::{Lowering, MuonMatrices, RouterBiases, flat_layout};
use crate::policies::spec::{
    Defaults, PolicySpec, Refusal, Rules, WithoutEffect, is_fixed_by_megatron_v2, joins_backwards,
    some_unit,
};
use crate::policies::{SHARDS_ROWS, SKIPS_NO_BLOCKS};
use crate::program::Contract;

pub(crate) const SPEC: PolicySpec = PolicySpec {
    kind: PolicyKind::MegatronV2,
    variant: Variant::Pr4435,
    defaults: Defaults {
        prefetch: Prefetch::Implicit,
        // The sliding drain allows the gradients of a unit and of the previous one.
        reduce_in_flight: 2,
        gradient_sync: GradientSync::OuterLast,
        reshard: |_| Reshard::Always,
        separate_communicators: false,
        allocator: AllocatorKind::Caching,
        // `main_grads_dtype` defaults to the dtype of the parameters.
        main_grads: |compute| compute,
        // `grad_comm_dtype` defaults to the dtype of the bucket.
        comm_grads: |_, main_grads| main_grads,
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
                because_of: "fsdp.variant",
                only: None,
                why: "variant pr4435 keeps parameters that are not trained in both types",
            },
            WithoutEffect {
                key: "fsdp.reduce_in_flight",
                because_of: "fsdp.variant",
                only: None,
                why: "variant pr4435 releases gradients by its sliding drain, which keeps those of two units",
            },
        ],
    },
    // Its `enable_unshard_prefetch` sets both prefetches.
    fixes: |key, _| is_fixed_by_megatron_v2(key),
    fixed_addresses: "use policy native",
    engine: Engine {
        framework: true,
        fused_optimizer: false,
        late_norm: false,
        frees_gradients: false,
        own_workspaces: None,
        plans_persistent: false,
        shards_params: false,
        // Main weights have a buffer whenever `main_params_dtype` is given.
        separate_main_params: true,
        copies_for_comm: false,
        premultiplies: |dtype| dtype != DType::Bf16,
        averages: |_| false,
        reshards_root: true,
        separate_frozen_main: true,
        saved_tensor_hooks: false,
    },
    lowering: Lowering {
        layout: flat_layout,
        contract: Contract::STRICT,
        float8_apart: true,
        places_merged_weights: false,
        // Gradients belong to autograd until they are staged.
        adjacency: WeightAdjacency::Weights,
        muon: MuonMatrices::Refused(SHARDS_ROWS),
        router_biases: RouterBiases::Apart,
        lifecycle: |out| Ok(Box::new(Pr4435::new(out))),
    },
};

/// Returns whether the prefetch depth is neither zero nor one unit.
fn is_other_depth(rule: Prefetch) -> bool {
    !matches!(rule, Prefetch::Implicit | Prefetch::Depth(0 | 1))
}

/// Returns whether the prefetch depth turns on `enable_unshard_prefetch`.
fn is_on(rule: Prefetch) -> bool {
    rule != Prefetch::Depth(0)
}

const DEPTH: &str = "variant pr4435 gathers one unit ahead, or none (`enable_unshard_prefetch`)";
const ONE_OR_NONE: &str = "set it to 1, 0 or \"implicit\"";
const OTHER_ENGINE: &str = "leave it out, or use policy native or megatron";

const REFUSES: &[Refusal] = &[
    Refusal {
        keys: &["compile.mode", "fsdp.variant"],
        when: |s| s.compile.mode != CompileMode::Off,
        message: "variant pr4435 runs eagerly only: Megatron-LM #4435 excludes hooks from the \
                  compiler where they touch inputs and outputs, but not where they gather and free",
        help: "set compile.mode = \"off\", or use policy megatron or fsdp2",
    },
    Refusal {
        keys: &["fsdp.strategy", "fsdp.placements", "fsdp.variant"],
        when: |s| s.fsdp.strategy != Strategy::OptimGradsParams,
        message: "variant pr4435 shards parameters, gradients and optimizer state: `fully_shard` of \
                  Megatron-LM #4435 has no argument for another strategy",
        help: "use optim_grads_params, or policy native or megatron",
    },
    Refusal {
        keys: &["mesh.dp_replicate", "fsdp.variant"],
        when: |s| s.mesh.dp_outer > 1,
        message: "variant pr4435 has no outer axis: Megatron-LM #4435 names it as a gap",
        help: "set mesh.dp_replicate = 1, or leave out fsdp.variant",
    },
    Refusal {
        keys: &["fsdp.reshard_after_forward", "fsdp.variant"],
        when: |s| s.fsdp.reshard_after_forward != Reshard::Always,
        message: "variant pr4435 reshards every unit after forward, the root too",
        help: "set reshard_after_forward = true, or use policy native or fsdp2",
    },
    Refusal {
        keys: &["fsdp.reshard_after_backward", "fsdp.variant"],
        when: |s| !s.fsdp.reshard_after_backward,
        message: "variant pr4435 reshards every unit after its backward",
        help: "set reshard_after_backward = true, or use policy native or fsdp2",
    },
    Refusal {
        keys: &["train.joint_backward", "fsdp.variant"],
        when: joins_backwards,
        message: "`joint_backward` is not modeled with variant pr4435, which reduces a unit at the \
                  end of each part",
        help: "set joint_backward = false",
    },
    SKIPS_NO_BLOCKS,
    Refusal {
        keys: &["fsdp.units", "fsdp.variant"],
        when: |s| some_unit(s, |u| u.keep),
        message: "variant pr4435 has no units that stay gathered after forward (`=keep`)",
        help: "leave out `=keep`, or use policy native, fsdp2 or megatron",
    },
    Refusal {
        keys: &["fsdp.units", "fsdp.variant"],
        when: |s| some_unit(s, |u| u.modules.len() > 1),
        message: "variant pr4435 has one module per unit: its `fully_shard` takes no list of \
                  modules (`+`)",
        help: "name each module on its own, or leave them to the root",
    },
    Refusal {
        keys: &["fsdp.prefetch_forward", "fsdp.variant"],
        when: |s| is_other_depth(s.fsdp.prefetch_forward),
        message: DEPTH,
        help: ONE_OR_NONE,
    },
    Refusal {
        keys: &["fsdp.prefetch_backward", "fsdp.variant"],
        when: |s| is_other_depth(s.fsdp.prefetch_backward),
        message: DEPTH,
        help: ONE_OR_NONE,
    },
    Refusal {
        keys: &[
            "fsdp.prefetch_backward",
            "fsdp.prefetch_forward",
            "fsdp.variant",
        ],
        when: |s| is_on(s.fsdp.prefetch_forward) != is_on(s.fsdp.prefetch_backward),
        message: "variant pr4435 has one flag for both directions (`enable_unshard_prefetch`)",
        help: "set prefetch_forward and prefetch_backward alike",
    },
    Refusal {
        keys: &["train.recompute", "fsdp.prefetch_forward", "fsdp.variant"],
        when: |s| s.train.recompute != Recompute::None && !is_on(s.fsdp.prefetch_forward),
        message: "without prefetch, variant pr4435 gathers a unit that is full again: once for the \
                  recomputed forward, once for backward (rule INV-11)",
        help: "leave out prefetch_forward and prefetch_backward, or set train.recompute = \"none\"",
    },
    Refusal {
        keys: &["train.validate_every", "fsdp.allocator"],
        when: |s| s.fsdp.allocator == AllocatorKind::TracePool && s.train.validate_every > 0,
        message: "a trace pool fails with validation between steps: forwards without backward \
                  leave its cursors behind, and the next backward finds its slots in use \
                  (Megatron-LM #4435)",
        help: "set fsdp.allocator = \"caching\"",
    },
    Refusal {
        keys: &["train.no_grad_forwards", "fsdp.allocator"],
        when: |s| s.fsdp.allocator == AllocatorKind::TracePool && s.train.no_grad_forwards > 0,
        message: "a trace pool fails with forwards that have no backward: they leave its cursors \
                  behind, and the next backward finds its slots in use (Megatron-LM #4435)",
        help: "set fsdp.allocator = \"caching\"",
    },
    Refusal {
        keys: &["fsdp.unify_comm_stream", "fsdp.variant"],
        when: |s| s.fsdp.unify_comm_stream,
        message: "variant pr4435 has separate streams for gathers and reductions",
        help: OTHER_ENGINE,
    },
    Refusal {
        keys: &["fsdp.separate_communicators", "fsdp.variant"],
        when: |s| s.fsdp.separate_communicators,
        message: "variant pr4435 gathers and reduces over the one process group of its mesh",
        help: OTHER_ENGINE,
    },
    Refusal {
        keys: &["fsdp.allocator", "fsdp.variant"],
        when: |s| {
            let allocator = s.fsdp.allocator;
            matches!(allocator, AllocatorKind::Pool | AllocatorKind::DoubleBuffer)
        },
        message: "variant pr4435 has no double buffer, and no pool but the trace pool",
        help: "use \"caching\", \"temporary\" or \"trace_pool\", or policy native or megatron",
    },
    Refusal {
        keys: &["fsdp.offload", "fsdp.variant"],
        when: |s| s.fsdp.offload.any(),
        message: "variant pr4435 has no host offload: its parameters are DTensors, which \
                  Megatron-LM's optimizer on the CPU cannot pin (Megatron-LM #1986)",
        help: "set fsdp.offload = [], or use policy native or fsdp2",
    },
    Refusal {
        keys: &["fsdp.average_in_collective", "fsdp.variant"],
        when: |s| s.fsdp.average_in_collective,
        message: "variant pr4435 adds gradients up and scales them: it has no average in the \
                  collective",
        help: OTHER_ENGINE,
    },
    Refusal {
        keys: &["fsdp.gradient_sync", "fsdp.variant"],
        when: |s| s.fsdp.gradient_sync == GradientSync::Last,
        message: "`gradient_sync` = \"last\" needs unsharded gradients, but variant pr4435 reduces \
                  them in every micro-batch",
        help: "set gradient_sync = \"outer_last\"",
    },
    Refusal {
        keys: &["mesh.ep", "fsdp.variant"],
        when: |s| s.mesh.ep > 1,
        message: "variant pr4435 has no expert parallelism here: Megatron-LM #4435 leaves the \
                  factor of experts' gradients to the caller",
        help: "set mesh.ep = 1, or use policy native, fsdp2 or megatron",
    },
];
