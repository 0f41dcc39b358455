//! torchtitan: the TOML configurations used until 2025, and the job configuration that every
//! version prints to its log.

use super::script::LAUNCHER;
use crate::convert::{
    CONTEXT, DATA, EVALUATION, LAUNCH, LOGGING, SAVING, TENSOR, VALUES, clip, compiled_blocks,
    deterministic, float8_ahead, float8_gather, float8_recipe, replicas, round_robin_routing, set,
    shard_ranks,
};
use crate::table::{
    COMPILED_BLOCKS, COMPILED_LOSS, Dtype, Effect, Engine, Fact, Fallback, Float8Scaling, Format,
    Key, Table, To, choice, decisive, fact, integer, key, lost, number, quoted, with,
};
use crate::tree::Node;

pub(crate) static TORCHTITAN: Format = FORMAT;

/// A command with options such as `--training.local_batch_size 2`.
pub(crate) static TORCHTITAN_SCRIPT: Format = Format {
    tables: &[TABLE, LAUNCHER],
    ..FORMAT
};

const FORMAT: Format = Format {
    name: "torchtitan",
    tables: &[TABLE],
    engine: Some(Engine::Fsdp),
    accelerated: false,
    reduces_in_f32: true,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

const TABLE: Table = Table {
    under: "",
    prefix: "",
    keys: KEYS,
    asides: ASIDES,
};

const DEFAULTS: &[Fallback] = &[
    Fallback {
        key: "train.clip_norm",
        value: "1.0",
        why: "torchtitan's default",
    },
    Fallback {
        key: "fsdp.expandable_segments",
        value: "true",
        why: "run_train.sh sets it",
    },
];

const KEYS: &[Key] = &[
    with("model.name", |node| {
        Ok(match node.full().as_str() {
            "flux" => Effect::Decisive("diffusion models are not modeled"),
            _ => Effect::Family(node.full()),
        })
    }),
    with("model.flavor", |node| Ok(Effect::Flavor(node.full()))),
    with("model_spec.name", |node| Ok(Effect::Family(node.full()))),
    with("model_spec.flavor", |node| Ok(Effect::Flavor(node.full()))),
    key(
        "hf_assets_path",
        To::Aside("the tokenizer; the model is known by its name"),
    ),
    integer("training.local_batch_size", "train.micro_batch"),
    integer("training.batch_size", "train.micro_batch"),
    integer("training.seq_len", "train.seq_len"),
    with("training.global_batch_size", |node| {
        Ok(match node.integer()? {
            -1 | 0 => Effect::Aside("one micro-batch per step"),
            _ => Effect::Fact(Fact::GlobalBatch, node.count()?),
        })
    }),
    integer("training.max_context_length", "train.seq_len"),
    fact(
        "training.num_tokens_per_microbatch_per_dp_rank",
        Fact::MicroBatchTokens,
    ),
    with("training.num_tokens_per_train_step", |node| {
        Ok(match node.integer()? {
            -1 | 0 => Effect::Aside("one micro-batch per step"),
            _ => Effect::Fact(Fact::StepTokens, node.count()?),
        })
    }),
    lost(
        "training.disable_cuda_graphs",
        "kernels are predicted as launched by the host",
    ),
    with("training.max_norm", clip),
    with("training.enable_cpu_offload", |node| {
        Ok(Effect::Fact(Fact::OffloadAll, node.truth()?.into()))
    }),
    with("training.mixed_precision_param", |node| {
        Ok(Effect::Mixed(Dtype::of(node)?))
    }),
    with("training.mixed_precision_reduce", |node| {
        Ok(set("precision.reduce_dtype", Dtype::of(node)?.name()))
    }),
    with("training.dtype", |node| {
        Ok(Effect::Weights(Dtype::of(node)?))
    }),
    with("training.compile", compiled_blocks),
    with("optimizer.name", |node| {
        Ok(match node.full().to_ascii_lowercase().as_str() {
            "adam" | "adamw" => set("train.optimizer", "adamw"),
            _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
        })
    }),
    number("optimizer.lr", "train.lr"),
    number("optimizer.eps", "train.eps"),
    number("optimizer.weight_decay", "train.weight_decay"),
    lost(
        "optimizer.early_step_in_backward",
        "the optimizer is predicted after backward",
    ),
    integer("lr_scheduler.warmup_steps", "train.warmup_steps"),
    integer("training.warmup_steps", "train.warmup_steps"),
    with("parallelism.data_parallel_shard_degree", shard_ranks),
    with("training.data_parallel_shard_degree", shard_ranks),
    with("parallelism.data_parallel_replicate_degree", replicas),
    with("training.data_parallel_replicate_degree", replicas),
    fact("parallelism.tensor_parallel_degree", Fact::Tensor),
    fact("training.tensor_parallel_degree", Fact::Tensor),
    fact("parallelism.pipeline_parallel_degree", Fact::Pipeline),
    fact("experimental.pipeline_parallel_degree", Fact::Pipeline),
    fact("parallelism.context_parallel_degree", Fact::Context),
    fact("experimental.context_parallel_degree", Fact::Context),
    fact("parallelism.expert_parallel_degree", Fact::Expert),
    with(
        "parallelism.expert_parallel_comm_backend",
        |node| match node.text() {
            Some("standard") => Ok(Effect::Aside("as predicted")),
            Some("deepep" | "hybridep") => Ok(Effect::Fact(Fact::TokenDispatcher, 2)),
            Some("minimal_async_ep") => Ok(Effect::All(vec![
                Effect::Fact(Fact::TokenDispatcher, 3),
                Effect::Lost(
                    "each token is predicted to travel once per rank, not once per expert",
                ),
            ])),
            _ => Err(node.expected("standard, deepep, hybridep or minimal_async_ep")),
        },
    ),
    with("parallelism.fsdp_reshard_after_forward", |node| {
        Ok(match node.text() {
            Some("never") => Effect::Fact(Fact::Reshard, 0),
            Some("always") => Effect::Fact(Fact::Reshard, 1),
            Some("default") => Effect::Fact(Fact::ReshardByDefault, 1),
            _ => return Err(node.expected("default, always or never")),
        })
    }),
    lost(
        "parallelism.enable_fsdp_symm_mem",
        "NCCL's kernels are predicted as without registered buffers",
    ),
    decisive("parallelism.expert_tensor_parallel_degree", TENSOR),
    choice("activation_checkpoint.mode", |node| {
        Ok(match node.text() {
            Some("none") => set("train.recompute", "none"),
            Some("full") => set("train.recompute", "full"),
            Some("selective") => Effect::Fact(Fact::SelectiveMode, 1),
            _ => Effect::Assume(
                "train.recompute",
                quoted("selective"),
                "a memory budget is predicted as selective recomputation",
            ),
        })
    }),
    // Logs since 2026 have no mode; they contain the options of the activation checkpointing class.
    with("activation_checkpoint.debug", |_| {
        Ok(Effect::Fact(Fact::Recompute, 1))
    }),
    with(
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns",
        |_| {
            Ok(Effect::All(vec![
                Effect::Fact(Fact::SelectiveMode, 1),
                Effect::Fact(Fact::RecomputeEvery, 0),
            ]))
        },
    ),
    with(
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        |node| {
            Ok(match node.words().unwrap_or_default().as_str() {
                "" | "moe.router.gate" => Effect::Aside("as predicted: routers are small"),
                _ => Effect::Lost(
                    "of matmuls, every second one is predicted as recomputed, whatever its name",
                ),
            })
        },
    ),
    with("activation_checkpoint.selective_ac_option", |node| {
        Ok(match node.text() {
            Some("op") => Effect::Fact(Fact::RecomputeEvery, 0),
            _ => {
                let every = node.count();
                let every = every.map_err(|_| node.expected("op or a number of blocks"))?;
                // 0 means every block, as 1 does.
                Effect::Fact(Fact::RecomputeEvery, every.max(1))
            }
        })
    }),
    with("activation_checkpoint.early_stop", |node| {
        Ok(if node.truth()? {
            Effect::Aside("as predicted")
        } else {
            Effect::Lost(
                "recompute is predicted to end with the last tensor that backward needs: the matmul after it in each \
                 block runs again, too",
            )
        })
    }),
    with("loss.num_chunks", |node| {
        Ok(match node.count()? {
            0 | 1 => Effect::Aside("off"),
            chunks => Effect::Fact(Fact::LossChunks, chunks),
        })
    }),
    with("compile.enable", compiled_blocks),
    with("compile.components", |node| {
        let words = node.words().unwrap_or_default();
        let has = |part| words.split([' ', ',']).any(|word| word == part);
        let parts = if has("model") { COMPILED_BLOCKS } else { 0 };
        let parts = parts + if has("loss") { COMPILED_LOSS } else { 0 };
        Ok(Effect::Fact(Fact::CompiledParts, parts))
    }),
    with("debug.moe_force_load_balance", round_robin_routing),
    with("training.debug_moe_force_load_balance", round_robin_routing),
    with("debug.deterministic", deterministic),
    with("training.deterministic", deterministic),
    with("model.converters", |node| {
        let words = node.words().unwrap_or_default();
        Ok(if words.contains("float8") {
            Effect::Fact(Fact::Float8, 1)
        } else if words.contains("mx") {
            let on = Effect::Fact(Fact::Float8, 1);
            Effect::All(vec![on, Float8Scaling::Mx.effect()])
        } else {
            Effect::Aside("no conversion")
        })
    }),
    with("float8.recipe_name", float8_recipe),
    with("float8.filter_fqns", float8_filters),
    with("float8.enable_fsdp_float8_all_gather", float8_gather),
    with(
        "float8.precompute_float8_dynamic_scale_for_fsdp",
        float8_ahead,
    ),
    with("mx.recipe_name", float8_recipe),
    with("mx.filter_fqns", float8_filters),
    with("quantize.linear.mx.recipe_name", float8_recipe),
    with("quantize.linear.mx.filter_fqns", float8_filters),
    with("quantize.linear.float8.recipe_name", float8_recipe),
    with("quantize.linear.float8.filter_fqns", float8_filters),
    with(
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        float8_gather,
    ),
    with(
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        float8_ahead,
    ),
];

/// Reads the names of linear layers that stay in 16 bits: those that contain one of the listed
/// strings. The output head and routers always do.
pub(super) fn float8_filters(node: &Node) -> Result<Effect, String> {
    let words = node.words().unwrap_or_default();
    let words = words.split([' ', ',']).filter(|word| !word.is_empty());
    let (by_size, names): (Vec<&str>, Vec<&str>) =
        words.partition(|w| w.starts_with("auto_filter"));
    let outside = |name: &&str| !matches!(*name, "output" | "lm_head") && !name.contains("router");
    let globs: Vec<String> = names
        .into_iter()
        .filter(outside)
        .map(|name| quoted(&format!("*{name}*")))
        .collect();
    let set = (!globs.is_empty()).then(|| {
        let globs = format!("[{}]", globs.join(", "));
        Effect::Set("precision.float8_exclude", globs)
    });
    let lost = (!by_size.is_empty()).then_some(Effect::Lost(
        "filters by size are not modeled: small layers are predicted in 8 bits",
    ));
    Ok(match (set, lost) {
        (Some(set), Some(lost)) => Effect::All(vec![set, lost]),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => Effect::Aside("these layers stay in 16 bits anyway"),
    })
}

const ASIDES: &[(&str, &[&str])] = &[
    (
        LOGGING,
        &[
            "job",
            "profiling",
            "profiler",
            "metrics",
            "memory_estimation",
            "logging",
            "dump_folder",
        ],
    ),
    (
        SAVING,
        &[
            "checkpoint",
            "model.hf_assets_path",
            "model.tokenizer_path",
            "model.print_after_conversion",
        ],
    ),
    (
        DATA,
        &[
            "dataloader",
            "training.dataset",
            "training.dataset_path",
            "training.dataloader",
            "training.steps",
            "tokenizer",
        ],
    ),
    (EVALUATION, &["validation", "validator"]),
    ("the model is known by its name", &["model_spec"]),
    (VALUES, &["loss"]),
    (
        VALUES,
        &[
            "lr_scheduler",
            "optimizer.beta1",
            "optimizer.beta2",
            "debug",
            "training.seed",
        ],
    ),
    (
        "as predicted",
        &[
            "optimizer.implementation",
            "optimizer.fused",
            "optimizer.foreach",
            "training.gc_freq",
            "training.gc_debug",
        ],
    ),
    (LAUNCH, &["comm", "fault_tolerance", "experimental"]),
    (
        "part of an option that is off",
        &[
            "quantize",
            "float8",
            "mx",
            "parallelism.disable_loss_parallel",
            "parallelism.enable_async_tensor_parallel",
            "parallelism.enable_sequence_parallel",
            "parallelism.spmd_backend",
            "parallelism.module_fqns_per_model_part",
            "parallelism.num_pp_microbatches",
            "parallelism.pipeline_parallel_schedule",
            "parallelism.pipeline_parallel_schedule_csv",
            "parallelism.pipeline_parallel_microbatch_size",
            "parallelism.pipeline_parallel_first_stage_less_layers",
            "parallelism.pipeline_parallel_last_stage_less_layers",
            "parallelism.pipeline_parallel_layers_per_stage",
            "parallelism.pipeline_parallel_expert_parallel_overlap",
            "parallelism.pipeline_parallel_split_points",
            "parallelism.context_parallel_rotate_method",
            "parallelism.context_parallel_load_balancer",
            "parallelism.context_parallel_ptrr_mask_key",
            "activation_checkpoint.memory_budget",
            "activation_checkpoint.visualize_memory_budget_pareto",
            "activation_checkpoint.preserve_rng_state",
            "activation_checkpoint.determinism_check",
        ],
    ),
    (
        "compiled code is predicted with Inductor's defaults",
        &["compile.backend", "compile.enable_async_tensor_parallel"],
    ),
    (CONTEXT, &["parallelism.context_parallel_method"]),
];
