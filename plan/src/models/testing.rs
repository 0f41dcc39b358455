//! Scenarios for tests, built by hand.

use crate::config::*;
use crate::ir::{DType, Module, Param};

/// Returns whether a family has Llama's attention.
fn is_llama(family: Family) -> bool {
    matches!(family, Family::Llama | Family::Moe)
}

/// Returns the defaults, and for experts what they may have.
fn options(family: Family) -> ModelOptions {
    let mut options = ModelOptions::default();
    if family == Family::Moe {
        options.experts = Experts {
            experts: 4,
            expert_ffn: Some(6),
            shared_expert_ffn: 5,
            shared_expert_gate: true,
            ..Experts::default()
        };
    }
    options
}

/// Returns a scenario of a family with tiny shapes and the usual defaults.
pub(crate) fn tiny(family: Family) -> Scenario {
    Scenario {
        name: "test".into(),
        about: String::new(),
        model_file: None,
        model: Model {
            preset: None,
            family,
            layers: 2,
            hidden: 8,
            heads: 4,
            kv_heads: if is_llama(family) { 2 } else { 4 },
            head_dim: 2,
            ffn: 12,
            vocab: 11,
            tie_embeddings: family == Family::Gpt2,
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            max_seq_len: 6,
            channels: 3,
            height: 4,
            width: 5,
            kernel: 3,
            bias: Bias::from(!is_llama(family)),
            options: options(family),
        },
        train: Train {
            seq_len: if family == Family::Cnn { 1 } else { 5 },
            document_lengths: DocumentLengths::NONE,
            micro_batch: 2,
            grad_accum: 1,
            recompute: Recompute::None,
            recompute_layers: RecomputeLayers::All,
            recompute_save: None,
            recompute_modules: Vec::new(),
            recompute_nth_matmul: 0,
            use_reentrant: false,
            activation_offload: false,
            caches_unneeded: false,
            loss: Loss::Materialized,
            keep_logits: false,
            loss_chunk_rows: 4096,
            attention_backend: None,
            optimizer: Optimizer::Adamw,
            decay_norms_and_biases: true,
            param_groups: Vec::new(),
            lr: 3e-4,
            warmup_steps: 0,
            lr_schedule: LrSchedule::Constant,
            min_lr: 0.0,
            betas: [0.9, 0.95],
            muon_momentum: 0.95,
            muon_adjust_lr: Default::default(),
            eps: 1e-8,
            weight_decay: 0.1,
            clip_norm: 0.0,
            grad_norm: false,
            sync: false,
            steps: 3,
            validate_every: 0,
            no_grad_forwards: 0,
            joint_backward: false,
            skipped_blocks: vec![],
            param_norms_every: 0,
        },
        mesh: Mesh {
            hardware: "h200-nvlink".into(),
            dp_shard: 4,
            dp_outer: 1,
            tp: 1,
            ep: 1,
            gpus_per_node: 8,
        },
        fsdp: Fsdp {
            policy: PolicyKind::Fsdp2,
            variant: Variant::Released,
            strategy: Strategy::OptimGradsParams,
            outer_strategy: OuterStrategy::NoShard,
            units: Units::Block,
            reshard_after_forward: Reshard::Always,
            reshard_root: false,
            reshard_after_backward: true,
            keep_unsharded_storage: false,
            gradient_sync: GradientSync::Every,
            atomic: Atomic::Row,
            ignored_params: IgnoredParams::NONE,
            no_sync_units: vec![],
            reduce_unused: false,
            prefetch_forward: Prefetch::Implicit,
            prefetch_backward: Prefetch::Implicit,
            prefetch_lists: vec![],
            prefetch_next_step: 0,
            optimizer_in_backward: false,
            reduce_in_flight: 1,
            async_reduce: true,
            copy_engine_gather: false,
            copy_engine_reduce: false,
            sum_in_optimizer: false,
            cast_before_all_gather: false,
            copy_in_stream: false,
            separate_communicators: false,
            unify_comm_stream: false,
            allocator: AllocatorKind::Caching,
            expandable_segments: true,
            cublas_workspace_bytes: 33_554_432,
            persist_on_alloc_fail: false,
            average_in_collective: false,
            per_token_loss: false,
            gradient_scaling_factor: None,
            decoupled_gradients: false,
            keep_fp8_transpose_cache: false,
            nan_check: false,
            offload: Default::default(),
            frozen: vec![],
        },
        precision: Precision {
            compute: DType::Bf16,
            main_params: Some(DType::F32),
            frozen_params: None,
            main_grads: DType::F32,
            comm_grads: DType::F32,
            moments: crate::config::MomentType::F32,
            loss_fp32_upcast: true,
            deterministic: false,
            float8: crate::config::Float8::off(),
        },
        compile: Compile {
            mode: CompileMode::Off,
            loss: false,
            exclude: Vec::new(),
            bucket_bytes: 0,
            max_inflight_bytes: 0,
            memory_budget: 0.0,
            merge_projections: MergeProjections::None,
            epilogues: false,
            mix_order_reductions: false,
            fused_products: false,
            cuda_graph: CudaGraph::Off,
        },
        lora: None,
        moe: None,
        forced_routing: None,
        gate: Gate::default(),
    }
}

/// Returns a llama of given width, heads, key heads, feed-forward width, layers and vocabulary.
pub(crate) fn llama(
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    ffn: u64,
    layers: u32,
    vocab: u64,
) -> Scenario {
    let mut s = tiny(Family::Llama);
    let head_dim = hidden / heads;
    s.model = Model {
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        layers,
        vocab,
        ..s.model
    };
    s
}

/// Returns the 1.5-billion-parameter model of the measured runs: two sequences of 4,096 tokens.
pub(crate) fn measured_1b() -> Scenario {
    let mut s = llama(2048, 32, 8, 8192, 16, 128_256);
    (s.train.micro_batch, s.train.seq_len) = (2, 4096);
    s
}

/// Returns Llama 3 8B, with one sequence of 8,192 tokens.
pub(crate) fn llama3_8b() -> Scenario {
    let mut s = llama(4096, 32, 8, 14_336, 32, 128_256);
    (s.train.micro_batch, s.train.seq_len) = (1, 8192);
    s
}

/// Returns GPT-2 small.
pub(crate) fn gpt2_small() -> Scenario {
    let mut s = tiny(Family::Gpt2);
    s.model = Model {
        layers: 12,
        hidden: 768,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        ffn: 3072,
        vocab: 50_257,
        max_seq_len: 1024,
        ..s.model
    };
    (s.train.micro_batch, s.train.seq_len) = (1, 1024);
    s
}

/// Returns modules in pre-order and parameters in registration order, without building a graph.
pub(crate) fn modules_and_params(scenario: &Scenario) -> (Vec<Module>, Vec<Param>) {
    let tree = super::declare(scenario, scenario.model.layers).tree;
    (tree.modules, tree.params)
}
