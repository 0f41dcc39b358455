//! Defaults and rules of the policy `megatron`.

use super::Megatron;
use crate::compile::WeightAdjacency;
use crate::config::{
    AllocatorKind, Dispatcher, GradientSync, OuterStrategy, PolicyKind, Prefetch, Reshard, Variant,
};
use crate::ir::DType;
use crate::lower::engine::Engine;
use crate::lower::{Lowering, MuonMatrices, RouterBiases, flat_layout};
use crate::policies::spec::{
    Defaults, PolicySpec, Refusal, Rules, WithoutEffect, fully_compiled, is_native_option,
    keeps_frozen_as_gathered, skips_blocks,
};
use crate::policies::{GRADIENTS_ADDED_UP, SHARDS_ROWS};
use crate::program::{Contract, InFlight};
use crate::shard::placements;

pub(crate) const SPEC: PolicySpec = PolicySpec {
    kind: PolicyKind::Megatron,
    variant: Variant::Released,
    defaults: Defaults {
        prefetch: Prefetch::Implicit,
        reduce_in_flight: 2,
        gradient_sync: GradientSync::OuterLast,
        reshard: |_| Reshard::Always,
        separate_communicators: false,
        allocator: AllocatorKind::Caching,
        main_grads: |compute| match compute {
            DType::F32 => DType::F32,
            _ => DType::Bf16,
        },
        comm_grads: |_, main_grads| main_grads,
        dispatcher: Dispatcher::AllToAll,
        // Buffers have exactly as many rows as the token counts require.
        capacity_factor: Some(1.0),
        shared_expert_overlap: false,
        optimizes_code: false,
    },
    rules: Rules {
        options: &["decoupled_gradients", "keep_fp8_transpose_cache"],
        refuses: REFUSES,
        without_effect: &[
            WithoutEffect {
                key: "precision.frozen_params",
                because_of: "fsdp.policy",
                only: Some(keeps_frozen_as_gathered),
                why: "policy megatron keeps parameters that are not trained in the type that it computes in",
            },
            WithoutEffect {
                key: "fsdp.reduce_in_flight",
                because_of: "fsdp.policy",
                only: None,
                why: "policy megatron bounds gradients in flight by elements, not buffers",
            },
        ],
    },
    fixes: |key, _| is_native_option(key),
    fixed_addresses: "set fsdp.allocator = \"double_buffer\" and persist_on_alloc_fail = true",
    engine: Engine {
        framework: true,
        fused_optimizer: false,
        late_norm: false,
        frees_gradients: false,
        own_workspaces: None,
        plans_persistent: false,
        shards_params: false,
        // The production engine has main weights whenever a main dtype is given.
        separate_main_params: true,
        copies_for_comm: true,
        // `gradient_reduce_preprocessing`, with the default `gradient_reduce_div_fusion`.
        premultiplies: |dtype| dtype != DType::Bf16,
        averages: |_| false,
        reshards_root: false,
        separate_frozen_main: false,
        saved_tensor_hooks: false,
    },
    lowering: Lowering {
        layout: flat_layout,
        contract: Contract {
            // The flag for a step's first micro-batch remains set during its backward.
            repeats_outer_gathers: true,
            // The engine's queue is bounded by elements, or by its double buffer.
            in_flight: InFlight::DoubleBuffer,
            ..Contract::STRICT
        },
        float8_apart: true,
        places_merged_weights: false,
        // Gradients belong to autograd until they are copied into the bucket.
        adjacency: WeightAdjacency::Weights,
        muon: MuonMatrices::Refused(SHARDS_ROWS),
        router_biases: RouterBiases::Apart,
        lifecycle: |out| Ok(Box::new(Megatron::new(out))),
    },
};

const REFUSES: &[Refusal] = &[
    Refusal {
        keys: &["fsdp.reshard_after_forward", "fsdp.policy"],
        when: |s| matches!(s.fsdp.reshard_after_forward, Reshard::Group(_)),
        message: "policy megatron cannot reshard to a smaller group",
        help: "use true, false or \"auto\", or policy native or fsdp2",
    },
    Refusal {
        keys: &["fsdp.offload", "fsdp.policy"],
        when: |s| s.fsdp.offload.any(),
        // `HybridDeviceOptimizer` calls `pin_memory` on each DTensor in its constructor.
        message: "policy megatron has no host offload: Megatron-LM's optimizer on the CPU pins \
                  parameters, and PyTorch cannot pin the DTensors of Megatron-FSDP \
                  (Megatron-LM #1986)",
        help: "set fsdp.offload = [], or use policy native or fsdp2",
    },
    Refusal {
        keys: &["fsdp.reshard_after_backward", "fsdp.policy"],
        when: |s| !s.fsdp.reshard_after_backward && !fully_compiled(s),
        message: "`reshard_after_backward` = false is an option of policies native and fsdp2: \
                  Megatron-FSDP releases every unit after its backward",
        help: "set reshard_after_backward = true",
    },
    Refusal {
        keys: &["train.skipped_blocks", "fsdp.outer_strategy"],
        when: |s| skips_blocks(s) && s.fsdp.outer_strategy == OuterStrategy::Optim,
        message: "`skipped_blocks` is not modeled with outer_strategy = \"optim\" under policy \
                  megatron: it gathers over the outer axis in a step's first micro-batch only, so \
                  that a unit which another one uses first has old weights",
        help: "set skipped_blocks = []",
    },
    Refusal {
        keys: &["train.skipped_blocks", "fsdp.allocator"],
        when: |s| skips_blocks(s) && s.fsdp.allocator == AllocatorKind::DoubleBuffer,
        message: "`skipped_blocks` is not modeled with the double buffer of policy megatron: the \
                  gradients of all unused units are in memory at once",
        help: "set skipped_blocks = []",
    },
    GRADIENTS_ADDED_UP,
    Refusal {
        keys: &["fsdp.gradient_sync", "fsdp.policy", "fsdp.strategy"],
        when: |s| {
            let last = s.fsdp.gradient_sync == GradientSync::Last;
            last && placements::grad_sharded(s.fsdp.strategy) && !fully_compiled(s)
        },
        message: "`gradient_sync` = \"last\" needs unsharded gradients: Megatron-FSDP's no_sync \
                  reduces sharded ones all the same",
        help: "set gradient_sync = \"outer_last\"",
    },
    Refusal {
        keys: &["compile.mode", "fsdp.policy"],
        when: fully_compiled,
        message: "compile mode full makes collectives graph nodes, but policy megatron issues \
                  them from hooks, in which Megatron-FSDP disables the compiler (Megatron-LM \
                  #2425)",
        help: "use mode regions or blocks, or policy native or fsdp2",
    },
];
