//! DeepSpeed's JSON. The Trainer fills in values that are `auto`.

use crate::convert::{
    LOGGING, SAVING, VALUES, betas, compiled_regions, mixed_bf16, mixed_f16, set,
};
use crate::table::{
    Effect, Engine, Fact, Format, Key, Table, decisive, fact, integer, lost, number, with,
};
use crate::tree::{Node, Value};

pub(crate) static DEEPSPEED: Format = Format {
    name: "DeepSpeed",
    tables: &[Table {
        under: "",
        prefix: "",
        keys: KEYS,
        asides: ASIDES,
    }],
    engine: Some(Engine::DeepSpeed),
    accelerated: false,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: &[super::fsdp::TORCH_SEGMENTS],
};

const BUCKETS: &str = "buckets by size are predicted as units of blocks";

const KEYS: &[Key] = &[
    integer("train_micro_batch_size_per_gpu", "train.micro_batch"),
    integer("gradient_accumulation_steps", "train.grad_accum"),
    fact("train_batch_size", Fact::GlobalBatch),
    number("gradient_clipping", "train.clip_norm"),
    with("bf16.enabled", enabled_bf16),
    with("fp16.enabled", enabled_f16),
    fact("zero_optimization.stage", Fact::ZeroStage),
    with("zero_optimization.offload_optimizer.device", |node| {
        Ok(device(node, Fact::OffloadOptimizer))
    }),
    with("zero_optimization.offload_param.device", |node| {
        Ok(device(node, Fact::OffloadParams))
    }),
    with("zero_optimization.cpu_offload", |node| {
        Ok(Effect::Fact(Fact::OffloadOptimizer, node.truth()?.into()))
    }),
    with("zero_optimization.overlap_comm", |node| {
        let off = || Effect::Set("fsdp.async_reduce", "false".to_owned());
        Ok(if node.is_auto() || node.truth()? {
            Effect::Aside("the default")
        } else {
            off()
        })
    }),
    lost("zero_optimization.allgather_bucket_size", BUCKETS),
    lost("zero_optimization.reduce_bucket_size", BUCKETS),
    lost("zero_optimization.stage3_prefetch_bucket_size", BUCKETS),
    lost(
        "zero_optimization.stage3_param_persistence_threshold",
        "small parameters are predicted as sharded, too",
    ),
    lost(
        "zero_optimization.stage3_max_live_parameters",
        "the next unit is gathered while one computes",
    ),
    lost(
        "zero_optimization.stage3_max_reuse_distance",
        "parameters are gathered again in backward",
    ),
    lost(
        "zero_optimization.max_live_parameters",
        "the next unit is gathered while one computes",
    ),
    lost(
        "zero_optimization.max_reuse_distance",
        "parameters are gathered again in backward",
    ),
    lost(
        "zero_optimization.sub_group_size",
        "the optimizer is predicted over all parameters at once",
    ),
    lost(
        "zero_optimization.zero_hpz_partition_size",
        "ZeRO++ is not modeled",
    ),
    lost(
        "zero_optimization.zero_quantized_weights",
        "ZeRO++ is not modeled",
    ),
    lost(
        "zero_optimization.zero_quantized_gradients",
        "ZeRO++ is not modeled",
    ),
    lost(
        "zero_optimization.mics_shard_size",
        "MiCS is not modeled; mesh.dp_replicate is similar",
    ),
    with("optimizer.type", |node| {
        Ok(match node.full().to_ascii_lowercase().as_str() {
            "adam" | "adamw" => set("train.optimizer", "adamw"),
            "sgd" => set("train.optimizer", "sgd"),
            _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
        })
    }),
    number("optimizer.params.lr", "train.lr"),
    number("optimizer.params.weight_decay", "train.weight_decay"),
    number("optimizer.params.eps", "train.eps"),
    with("optimizer.params.betas", |node| {
        if node.is_auto() || matches!(node.value, Value::Text(_)) {
            return Ok(Effect::Aside("filled in from the training arguments"));
        }
        betas(node)
    }),
    with("compile.disable", |node| {
        Ok(if node.truth()? {
            Effect::Aside("off")
        } else {
            set("compile.mode", "regions")
        })
    }),
    with("compile.enabled", compiled_regions),
    lost(
        "compile.deepcompile",
        "DeepCompile is predicted as compiled regions",
    ),
    lost(
        "activation_checkpointing.partition_activations",
        "activations are predicted as whole",
    ),
    lost(
        "activation_checkpointing.cpu_checkpointing",
        "activations are predicted on the device",
    ),
    lost(
        "communication_data_type",
        "gradients are predicted to be reduced in the type of computation",
    ),
    lost(
        "data_types.grad_accum_dtype",
        "gradients are predicted in the type of computation",
    ),
    lost(
        "bf16.bf16_master_weights_and_grads",
        "weights are predicted with float32 copies",
    ),
    lost(
        "bf16.bf16_optimizer_states",
        "moments are predicted in float32",
    ),
    lost(
        "fp16.fp16_master_weights_and_grads",
        "weights are predicted with float32 copies",
    ),
    with("torch_autocast.enabled", mixed_bf16),
    lost("progressive_layer_drop", "all layers are predicted"),
    lost("data_efficiency", "sequences are predicted as given"),
    lost("curriculum_learning", "sequences are predicted as given"),
    lost("compression_training", "compression is not modeled"),
    lost(
        "sparse_attention",
        "attention is predicted over all positions",
    ),
    lost("zero_optimization.zenflow", "ZenFlow is not modeled"),
    lost(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "ZeRO++ is not modeled",
    ),
    lost("amp", "Apex is not modeled"),
    lost("hybrid_engine", "generation is not predicted"),
    decisive("tensor_parallel", crate::convert::TENSOR),
    decisive("sequence_parallel_size", crate::convert::CONTEXT),
];

const ASIDES: &[(&str, &[&str])] = &[
    (
        LOGGING,
        &[
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "flops_profiler",
            "tensorboard",
            "wandb",
            "csv_monitor",
            "monitor_config",
            "comms_config",
            "memory_breakdown",
            "autotuning",
            "comms_logger",
        ],
    ),
    (
        VALUES,
        &[
            "fp16.loss_scale",
            "fp16.auto_cast",
            "fp16.loss_scale_window",
            "fp16.initial_scale_power",
            "fp16.hysteresis",
            "fp16.min_loss_scale",
            "fp16.consecutive_hysteresis",
            "bf16.auto_cast",
            "scheduler",
            "prescale_gradients",
            "gradient_predivide_factor",
            "optimizer.params.torch_adam",
            "optimizer.params.adam_w_mode",
            "optimizer.params.bias_correction",
            "optimizer.params.total_num_steps",
            "optimizer.params.max_grad_norm",
            "optimizer.params.momentum",
            "optimizer.params.freeze_step",
            "optimizer.params.cuda_aware",
            "optimizer.params.comm_backend_name",
            "optimizer.params.var_freeze_step",
            "optimizer.params.var_update_scaler",
            "optimizer.params.local_step_scaler",
            "optimizer.params.local_step_clipper",
            "optimizer.params.max_coeff",
            "optimizer.params.min_coeff",
            "optimizer.params.coeff_beta",
            "optimizer.params.factor_max",
            "optimizer.params.factor_min",
            "optimizer.params.factor_threshold",
            "sparse_gradients",
            "fp16.fp16_opt_level",
            "torch_autocast",
        ],
    ),
    (
        SAVING,
        &[
            "checkpoint",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.elastic_checkpoint",
            "zero_optimization.load_from_fp32_weights",
            "zero_optimization.ignore_unused_parameters",
        ],
    ),
    (
        "as predicted",
        &[
            "zero_optimization.allgather_partitions",
            "zero_optimization.reduce_scatter",
            "zero_optimization.contiguous_gradients",
            "zero_optimization.round_robin_gradients",
            "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_param.pin_memory",
            "zero_optimization.offload_optimizer.fast_init",
            "zero_optimization.offload_optimizer.pipeline_read",
            "zero_optimization.offload_optimizer.pipeline_write",
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_optimizer.ratio",
            "zero_optimization.offload_param.buffer_count",
            "zero_optimization.offload_param.buffer_size",
            "zero_optimization.offload_param.max_in_cpu",
            "zero_optimization.use_multi_rank_bucket_allreduce",
            "zero_optimization.log_trace_cache_warnings",
            "zero_optimization.memory_efficient_linear",
            "zero_optimization.stage3_module_granularity_threshold",
            "zero_optimization.offload_optimizer.nvme_path",
            "zero_optimization.offload_param.nvme_path",
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.number_checkpoints",
            "activation_checkpointing.synchronize_checkpoint_boundary",
            "activation_checkpointing.profile",
            "aio",
            "elasticity",
            "dataloader_drop_last",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "compile.backend",
            "compile.kwargs",
        ],
    ),
];

fn enabled_bf16(node: &Node) -> Result<Effect, String> {
    if node.is_auto() {
        return Ok(Effect::Aside("filled in from the training arguments"));
    }
    mixed_bf16(node)
}

fn enabled_f16(node: &Node) -> Result<Effect, String> {
    mixed_f16(node)
}

/// Reads the device that holds state.
pub(super) fn device(node: &Node, fact: Fact) -> Effect {
    match node.full().as_str() {
        "cpu" => Effect::Fact(fact, 1),
        "nvme" => Effect::All(vec![
            Effect::Fact(fact, 1),
            Effect::Lost("state on NVMe is predicted as in host memory"),
        ]),
        _ => Effect::Aside("on the device"),
    }
}
