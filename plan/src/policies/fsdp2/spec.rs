//! Defaults and rules of the policy `fsdp2`.

use super::Fsdp2;
use crate::compile::WeightAdjacency;
use crate::config::{
    AllocatorKind, Dispatcher, GradientSync, MergeProjections, OuterStrategy, PolicyKind, Prefetch,
    Reshard, Strategy, Variant,
};
use crate::ir::DType;
use crate::lower::engine::Engine;
use crate::lower::{Lowering, MuonMatrices, RouterBiases, per_param_layout};
use crate::policies::spec::{
    Defaults, PolicySpec, Refusal, Rules, fully_compiled, is_native_option,
};
use crate::program::Contract;

pub(crate) const SPEC: PolicySpec = PolicySpec {
    kind: PolicyKind::Fsdp2,
    variant: Variant::Released,
    defaults: Defaults {
        prefetch: Prefetch::Implicit,
        reduce_in_flight: 1,
        // Without `set_requires_gradient_sync(False)`, torch reduces over all axes in every
        // micro-batch.
        gradient_sync: GradientSync::Every,
        reshard: |strategy| match strategy {
            Strategy::OptimGrads => Reshard::Never,
            _ => Reshard::Always,
        },
        separate_communicators: false,
        allocator: AllocatorKind::Caching,
        main_grads: |_| DType::F32,
        comm_grads: |_, _| DType::F32,
        dispatcher: Dispatcher::AllToAll,
        // Buffers have exactly as many rows as the token counts require.
        capacity_factor: Some(1.0),
        shared_expert_overlap: false,
        optimizes_code: false,
    },
    rules: Rules {
        options: &[
            "ignored_params",
            "keep_unsharded_storage",
            "no_sync_units",
            "prefetch_lists",
            "reduce_unused",
            "reshard_root",
        ],
        refuses: REFUSES,
        without_effect: &[],
    },
    fixes: |key, value| match (key, value) {
        // `set_modules_to_forward_prefetch` adds prefetches, but nothing removes the implicit one.
        ("fsdp.prefetch_forward" | "fsdp.prefetch_backward", "0") => true,
        // Collectives as graph nodes, and graphs of whole iterations, need other engines.
        ("compile.mode", "full") => true,
        ("compile.cuda_graph", value) => value != "off",
        // Parts of blocks are an option of Megatron-LM. PyTorch chooses among operations.
        ("train.recompute_modules", _) => true,
        // `reshard_after_forward` replaces the strategy.
        ("fsdp.strategy" | "fsdp.allocator", _) => true,
        ("fsdp.separate_communicators" | "fsdp.unify_comm_stream", _) => true,
        _ => is_native_option(key),
    },
    fixed_addresses: "use policy native",
    engine: Engine {
        framework: true,
        fused_optimizer: false,
        late_norm: false,
        frees_gradients: false,
        own_workspaces: None,
        plans_persistent: false,
        shards_params: true,
        separate_main_params: false,
        copies_for_comm: false,
        premultiplies: |dtype| dtype == DType::F32,
        averages: |_| false,
        reshards_root: false,
        separate_frozen_main: false,
        saved_tensor_hooks: true,
    },
    lowering: Lowering {
        layout: per_param_layout,
        // torch has one `FSDPParamGroup` per `fully_shard` call. It gathers all of its parameters,
        // and reduces those that have gradients.
        contract: Contract {
            frozen_apart: false,
            ..Contract::STRICT
        },
        float8_apart: false,
        places_merged_weights: false,
        adjacency: WeightAdjacency::None,
        // `DTensor.full_tensor()`. What DTensor would choose for each matmul of `torch.optim.Muon`
        // depends on shapes and ranks: see docs/explanation/optimizers.md.
        muon: MuonMatrices::Gathered,
        router_biases: RouterBiases::Apart,
        lifecycle: |out| {
            super::supports(out.inputs)?;
            Ok(Box::new(Fsdp2::new(out)))
        },
    },
};

const REFUSES: &[Refusal] = &[
    Refusal {
        keys: &["fsdp.strategy", "fsdp.placements", "fsdp.policy"],
        when: |s| matches!(s.fsdp.strategy, Strategy::NoShard | Strategy::Optim),
        message: "policy fsdp2 always shards gradients: torch `fully_shard` has no ZeRO-1 and no \
                  replication over its shard axis",
        help: "use optim_grads_params, optim_grads (reshard_after_forward = false), or policy \
               native or megatron",
    },
    Refusal {
        keys: &[
            "fsdp.reshard_after_forward",
            "fsdp.strategy",
            "fsdp.placements",
            "fsdp.policy",
        ],
        when: |s| {
            let reshards = s.fsdp.reshard_after_forward != Reshard::Never;
            s.fsdp.strategy == Strategy::OptimGrads && reshards
        },
        message: "with policy fsdp2, optim_grads means reshard_after_forward = false",
        help: "set reshard_after_forward = false, or strategy = \"optim_grads_params\"",
    },
    Refusal {
        keys: &["fsdp.outer_strategy", "fsdp.placements", "fsdp.policy"],
        when: |s| s.fsdp.outer_strategy == OuterStrategy::Optim,
        message: "policy fsdp2 can only replicate over dp_replicate: torch `fully_shard` has HSDP, \
                  not HFSDP",
        help: "use policy native or megatron, or outer_strategy = \"no_shard\"",
    },
    Refusal {
        keys: &["fsdp.allocator", "fsdp.policy"],
        when: |s| {
            let allocator = s.fsdp.allocator;
            matches!(allocator, AllocatorKind::Pool | AllocatorKind::DoubleBuffer)
        },
        message: "policy fsdp2 allocates through PyTorch's caching allocator: it has no planned \
                  pool and no double buffer",
        help: "use \"caching\" or \"temporary\", or policy native",
    },
    Refusal {
        keys: &["fsdp.offload", "fsdp.policy"],
        when: |s| s.fsdp.offload.any() && !s.fsdp.offload.all(),
        message: "with policy fsdp2, all state is in host memory or none: `CPUOffloadPolicy` keeps \
                  parameters, gradients and optimizer state there",
        help: "set fsdp.offload = [\"params\", \"grads\", \"optimizer\"], or fsdp.policy = \"native\"",
    },
    Refusal {
        keys: &["compile.fuse_projections", "fsdp.policy"],
        when: |s| s.compile.merge_projections != MergeProjections::None && !fully_compiled(s),
        message: "policy fsdp2 copies every parameter into a separate buffer, but merging needs \
                  adjacent weights",
        help: "use policy native or megatron, or fuse_projections none",
    },
];
