//! Maps scenario keys to the keys of frameworks. This is the inverse of the tables of the formats.
//!
//! Keys that formats read as an integer or number of a scenario need no rule.

use crate::table::{Format, To};
use shardlab_plan::Scenario;

/// A scenario key with a value, and the equivalent keys of a framework.
struct Rule {
    format: &'static str,
    key: &'static str,
    value: &'static str,
    /// If set, the rule only applies to files that have this key.
    with: Option<&'static str>,
    to: &'static [(&'static str, &'static str)],
}

/// Matches any value.
const ANY: &str = "*";
/// Placeholder for the number of sequences per step over all ranks.
const GLOBAL: &str = "{global}";
/// Placeholder for the value in the scenario.
const SAME: &str = "{value}";

const ACCELERATE: &str = "Accelerate";
const TRAINER: &str = "the Hugging Face Trainer";
const AXOLOTL: &str = "Axolotl";
const LLAMA: &str = "LLaMA-Factory";
const TITAN: &str = "torchtitan";
const TUNE: &str = "torchtune";
const NEMO: &str = "NeMo Automodel";
const MEGATRON: &str = "Megatron-LM";
const DEEPSPEED: &str = "DeepSpeed";
const FOUNDRY: &str = "LLM Foundry";
const LITGPT: &str = "LitGPT";
const VERL: &str = "verl";
const VEOMNI: &str = "VeOmni";
const RESHARD: &str = "fsdp.reshard_after_forward";
const RECOMPUTE: &str = "train.recompute";
const MODE: &str = "compile.mode";
const LOSS: &str = "train.loss";
const ACCUM: &str = "train.grad_accum";
const LENGTH: &str = "train.seq_len";
const REDUCE: &str = "precision.reduce_dtype";

const SHARDING: &str = "fsdp_config.fsdp_sharding_strategy";
/// Key of VeOmni's versions without sections.
const MODE_FLAT: &str = "train.data_parallel_mode";

/// Defines a table of rules, one per line: `FORMAT: KEY = VALUE => [PATH = VALUE, …];`, or
/// `FORMAT if PATH: …` for files that have this path. The first rule that applies wins.
macro_rules! rules {
    ($($format:ident $(if $with:tt)?: $key:tt = $value:tt => [$($path:tt = $to:tt),*];)*) => {
        &[$(Rule {
            format: $format,
            key: $key,
            value: $value,
            with: rules!(@with $($with)?),
            to: &[$(($path, $to)),*],
        }),*]
    };
    (@with) => { None };
    (@with $path:tt) => { Some($path) };
}

#[rustfmt::skip]
const RULES: &[Rule] = rules! {
    ACCELERATE if SHARDING: RESHARD = "true" => [SHARDING = "FULL_SHARD"];
    ACCELERATE if SHARDING: RESHARD = "false" => [SHARDING = "SHARD_GRAD_OP"];
    ACCELERATE: RESHARD = "true" => ["fsdp_config.fsdp_reshard_after_forward" = "true"];
    ACCELERATE: RESHARD = "false" => ["fsdp_config.fsdp_reshard_after_forward" = "false"];
    ACCELERATE: RECOMPUTE = "full" => ["fsdp_config.fsdp_activation_checkpointing" = "true"];
    ACCELERATE: RECOMPUTE = "none" => ["fsdp_config.fsdp_activation_checkpointing" = "false"];
    ACCELERATE: "fsdp.prefetch_forward" = "1" => ["fsdp_config.fsdp_forward_prefetch" = "true"];
    ACCELERATE: MODE = "off" => ["dynamo_config.dynamo_backend" = "NO"];
    ACCELERATE: MODE = "regions" => ["dynamo_config.dynamo_backend" = "INDUCTOR", "dynamo_config.dynamo_use_regional_compilation" = "false"];
    ACCELERATE: MODE = "blocks" => ["dynamo_config.dynamo_backend" = "INDUCTOR", "dynamo_config.dynamo_use_regional_compilation" = "true"];
    ACCELERATE: "precision.param_dtype" = "bf16" => ["mixed_precision" = "bf16"];
    ACCELERATE: "precision.param_dtype" = "f16" => ["mixed_precision" = "fp16"];
    ACCELERATE: "precision.param_dtype" = "f32" => ["mixed_precision" = "no"];
    ACCELERATE: "mesh.dp_shard" = ANY => ["parallelism_config.parallelism_config_dp_shard_size" = SAME];
    ACCELERATE: "mesh.dp_replicate" = ANY => ["parallelism_config.parallelism_config_dp_replicate_size" = SAME];
    TRAINER: "train.weight_decay" = ANY => ["weight_decay" = SAME];
    TRAINER: RESHARD = "true" => ["fsdp_config.reshard_after_forward" = "true"];
    TRAINER: RESHARD = "false" => ["fsdp_config.reshard_after_forward" = "false"];
    TRAINER if "fsdp_config.activation_checkpointing": RECOMPUTE = "full" => ["fsdp_config.activation_checkpointing" = "true"];
    TRAINER if "fsdp_config.activation_checkpointing": RECOMPUTE = "none" => ["fsdp_config.activation_checkpointing" = "false"];
    TRAINER: RECOMPUTE = "full" => ["gradient_checkpointing" = "true"];
    TRAINER: RECOMPUTE = "none" => ["gradient_checkpointing" = "false"];
    TRAINER: MODE = "off" => ["torch_compile" = "false"];
    TRAINER: MODE = "regions" => ["torch_compile" = "true"];
    TRAINER: LOSS = "chunked" => ["use_liger_kernel" = "true"];
    TRAINER if "loss_type": LOSS = "materialized" => ["loss_type" = "nll"];
    TRAINER if "packing": LOSS = "materialized" => ["loss_type" = "nll"];
    TRAINER: LOSS = "materialized" => ["use_liger_kernel" = "false"];
    TRAINER: "precision.param_dtype" = "bf16" => ["bf16" = "true"];
    TRAINER if "max_seq_length": LENGTH = ANY => ["max_seq_length" = SAME];
    TRAINER: LENGTH = ANY => ["max_length" = SAME];
    AXOLOTL: "train.weight_decay" = ANY => ["weight_decay" = SAME];
    AXOLOTL: RESHARD = "true" => ["fsdp_config.reshard_after_forward" = "true"];
    AXOLOTL: RESHARD = "false" => ["fsdp_config.reshard_after_forward" = "false"];
    AXOLOTL: RECOMPUTE = "full" => ["gradient_checkpointing" = "true"];
    AXOLOTL: RECOMPUTE = "none" => ["gradient_checkpointing" = "false"];
    AXOLOTL: MODE = "off" => ["torch_compile" = "false"];
    AXOLOTL: MODE = "regions" => ["torch_compile" = "true"];
    AXOLOTL: LOSS = "chunked" => ["chunked_cross_entropy" = "true"];
    LLAMA: "train.weight_decay" = ANY => ["weight_decay" = SAME];
    LLAMA: RECOMPUTE = "full" => ["disable_gradient_checkpointing" = "false"];
    LLAMA: RECOMPUTE = "none" => ["disable_gradient_checkpointing" = "true"];
    LLAMA: MODE = "off" => ["torch_compile" = "false"];
    LLAMA: MODE = "regions" => ["torch_compile" = "true"];
    LLAMA: LOSS = "chunked" => ["enable_liger_kernel" = "true"];
    LLAMA: LOSS = "materialized" => ["enable_liger_kernel" = "false"];
    TITAN: RESHARD = "true" => ["parallelism.fsdp_reshard_after_forward" = "default"];
    TITAN: RESHARD = "false" => ["parallelism.fsdp_reshard_after_forward" = "never"];
    TITAN: RECOMPUTE = "none" => ["activation_checkpoint.mode" = "none"];
    TITAN: RECOMPUTE = "full" => ["activation_checkpoint.mode" = "full"];
    TITAN: RECOMPUTE = "selective" => ["activation_checkpoint.mode" = "selective", "activation_checkpoint.selective_ac_option" = "op"];
    TITAN: "train.recompute_nth_matmul" = "2" => ["activation_checkpoint.mode" = "selective", "activation_checkpoint.selective_ac_option" = "op"];
    TITAN if "training.compile": MODE = "blocks" => ["training.compile" = "true"];
    TITAN if "training.compile": MODE = "off" => ["training.compile" = "false"];
    TITAN: MODE = "blocks" => ["compile.enable" = "true"];
    TITAN: MODE = "off" => ["compile.enable" = "false"];
    TITAN: REDUCE = "f32" => ["training.mixed_precision_reduce" = "float32"];
    TITAN: REDUCE = "bf16" => ["training.mixed_precision_reduce" = "bfloat16"];
    TITAN: "precision.param_dtype" = "bf16" => ["training.mixed_precision_param" = "bfloat16"];
    TITAN: "precision.param_dtype" = "f32" => ["training.mixed_precision_param" = "float32"];
    TITAN if "training.max_context_length": LENGTH = ANY => ["training.max_context_length" = SAME];
    TITAN: ACCUM = ANY => ["training.global_batch_size" = GLOBAL];
    TITAN: "train.micro_batch" = ANY => ["training.local_batch_size" = SAME];
    TITAN: "mesh.dp_shard" = ANY => ["parallelism.data_parallel_shard_degree" = SAME];
    TITAN: "mesh.dp_replicate" = ANY => ["parallelism.data_parallel_replicate_degree" = SAME];
    TUNE: RECOMPUTE = "full" => ["enable_activation_checkpointing" = "true"];
    TUNE: RECOMPUTE = "none" => ["enable_activation_checkpointing" = "false"];
    TUNE: RESHARD = "true" => ["fsdp_reshard_after_forward" = "true"];
    TUNE: RESHARD = "false" => ["fsdp_reshard_after_forward" = "false"];
    TUNE: MODE = "blocks" => ["compile" = "true"];
    TUNE: MODE = "off" => ["compile" = "false"];
    NEMO: RECOMPUTE = "full" => ["distributed.activation_checkpointing" = "true"];
    NEMO: RECOMPUTE = "none" => ["distributed.activation_checkpointing" = "false"];
    NEMO: RESHARD = "true" => ["distributed.reshard_after_forward" = "true"];
    NEMO: RESHARD = "false" => ["distributed.reshard_after_forward" = "false"];
    NEMO: MODE = "blocks" => ["compile.enabled" = "true"];
    NEMO: MODE = "off" => ["compile.enabled" = "false"];
    NEMO if "packed_sequence.packed_sequence_size": LENGTH = ANY => ["packed_sequence.packed_sequence_size" = SAME];
    NEMO if "dataset.seq_length": LENGTH = ANY => ["dataset.seq_length" = SAME];
    NEMO: ACCUM = ANY => ["step_scheduler.global_batch_size" = GLOBAL];
    MEGATRON: "train.weight_decay" = ANY => ["weight-decay" = SAME];
    MEGATRON: ACCUM = ANY => ["global-batch-size" = GLOBAL];
    MEGATRON: RECOMPUTE = "full" => ["recompute-granularity" = "full", "recompute-method" = "uniform", "recompute-num-layers" = "1"];
    MEGATRON: RECOMPUTE = "selective" => ["recompute-granularity" = "selective"];
    MEGATRON: "fsdp.strategy" = ANY => ["data-parallel-sharding-strategy" = SAME];
    MEGATRON: "fsdp.outer_strategy" = ANY => ["outer-dp-sharding-strategy" = SAME];
    DEEPSPEED if "train_batch_size": ACCUM = ANY => ["gradient_accumulation_steps" = SAME, "train_batch_size" = GLOBAL];
    DEEPSPEED: "fsdp.strategy" = "no_shard" => ["zero_optimization.stage" = "0"];
    DEEPSPEED: "fsdp.strategy" = "optim" => ["zero_optimization.stage" = "1"];
    DEEPSPEED: "fsdp.strategy" = "optim_grads" => ["zero_optimization.stage" = "2"];
    DEEPSPEED: "fsdp.strategy" = "optim_grads_params" => ["zero_optimization.stage" = "3"];
    DEEPSPEED: "fsdp.async_reduce" = "true" => ["zero_optimization.overlap_comm" = "true"];
    DEEPSPEED: "fsdp.async_reduce" = "false" => ["zero_optimization.overlap_comm" = "false"];
    DEEPSPEED: "precision.param_dtype" = "bf16" => ["bf16.enabled" = "true"];
    FOUNDRY: ACCUM = ANY => ["global_train_batch_size" = GLOBAL];
    FOUNDRY: "train.micro_batch" = ANY => ["device_train_microbatch_size" = SAME];
    FOUNDRY: RECOMPUTE = "full" => ["fsdp_config.activation_checkpointing" = "true"];
    FOUNDRY: RECOMPUTE = "none" => ["fsdp_config.activation_checkpointing" = "false"];
    FOUNDRY: RESHARD = "true" => ["fsdp_config.sharding_strategy" = "FULL_SHARD"];
    FOUNDRY: RESHARD = "false" => ["fsdp_config.sharding_strategy" = "SHARD_GRAD_OP"];
    FOUNDRY: REDUCE = "f32" => ["fsdp_config.mixed_precision" = "DEFAULT"];
    FOUNDRY: REDUCE = "bf16" => ["fsdp_config.mixed_precision" = "PURE"];
    FOUNDRY: "fsdp.prefetch_forward" = "1" => ["fsdp_config.forward_prefetch" = "true"];
    LITGPT: ACCUM = ANY => ["train.global_batch_size" = GLOBAL];
    VERL: ACCUM = ANY => ["data.train_batch_size" = GLOBAL];
    VERL: RECOMPUTE = "full" => ["model.enable_gradient_checkpointing" = "true"];
    VERL: RECOMPUTE = "none" => ["model.enable_gradient_checkpointing" = "false"];
    VERL: LOSS = "chunked" => ["model.use_liger" = "true"];
    VERL: LOSS = "materialized" => ["model.use_liger" = "false"];
    VERL if "engine.strategy": RESHARD = "true" => ["engine.reshard_after_forward" = "true"];
    VERL if "engine.strategy": RESHARD = "false" => ["engine.reshard_after_forward" = "false"];
    VEOMNI: ACCUM = ANY => ["train.global_batch_size" = GLOBAL];
    VEOMNI: LENGTH = ANY => ["data.max_seq_len" = SAME];
    VEOMNI if MODE_FLAT: RECOMPUTE = "full" => ["train.enable_gradient_checkpointing" = "true"];
    VEOMNI if MODE_FLAT: RECOMPUTE = "none" => ["train.enable_gradient_checkpointing" = "false"];
    VEOMNI if MODE_FLAT: RESHARD = "true" => ["train.enable_reshard_after_forward" = "true"];
    VEOMNI if MODE_FLAT: RESHARD = "false" => ["train.enable_reshard_after_forward" = "false"];
    VEOMNI if MODE_FLAT: "mesh.dp_shard" = ANY => ["train.data_parallel_shard_size" = SAME];
    VEOMNI if MODE_FLAT: "mesh.dp_replicate" = ANY => ["train.data_parallel_replicate_size" = SAME];
    VEOMNI if MODE_FLAT: "mesh.ep" = ANY => ["train.expert_parallel_size" = SAME];
    VEOMNI: RECOMPUTE = "full" => ["train.gradient_checkpointing.enable" = "true"];
    VEOMNI: RECOMPUTE = "none" => ["train.gradient_checkpointing.enable" = "false"];
    VEOMNI: RESHARD = "true" => ["train.accelerator.fsdp_config.reshard_after_forward" = "true"];
    VEOMNI: RESHARD = "false" => ["train.accelerator.fsdp_config.reshard_after_forward" = "false"];
    VEOMNI: REDUCE = "f32" => ["train.accelerator.fsdp_config.mixed_precision.reduce_dtype" = "float32"];
    VEOMNI: REDUCE = "bf16" => ["train.accelerator.fsdp_config.mixed_precision.reduce_dtype" = "bfloat16"];
    VEOMNI: MODE = "blocks" => ["train.torch_compile.enable" = "true"];
    VEOMNI: MODE = "off" => ["train.torch_compile.enable" = "false"];
    VEOMNI: LOSS = "chunked" => ["model.ops_implementation.cross_entropy_loss_implementation" = "liger_kernel"];
    VEOMNI: LOSS = "materialized" => ["model.ops_implementation.cross_entropy_loss_implementation" = "eager"];
    VEOMNI: "mesh.dp_shard" = ANY => ["train.accelerator.dp_shard_size" = SAME];
    VEOMNI: "mesh.dp_replicate" = ANY => ["train.accelerator.dp_replicate_size" = SAME];
    VEOMNI: "mesh.ep" = ANY => ["train.accelerator.ep_size" = SAME];
    // Frameworks recompute all blocks by default.
    ANY: "train.recompute_layers" = "all" => [];
};

/// Returns the keys of a framework, with their values, that are equivalent to a scenario key;
/// `None` if there are none. `has` returns whether the file already has a key.
pub(super) fn pairs(
    format: &Format,
    key: &str,
    value: &str,
    to: &Scenario,
    has: &dyn Fn(&str) -> bool,
) -> Option<Vec<(String, String)>> {
    let value = value.trim_matches('"');
    let found = RULES.iter().find(|r| {
        (r.format == format.name || r.format == ANY)
            && r.key == key
            && (r.value == value || r.value == ANY)
            && r.with.is_none_or(has)
    });
    if let Some(rule) = found {
        let train = &to.train;
        let global =
            train.micro_batch * u64::from(train.grad_accum) * u64::from(to.mesh.data_ranks());
        let text = |v: &str| v.replace(GLOBAL, &global.to_string()).replace(SAME, value);
        let pairs = rule
            .to
            .iter()
            .map(|(path, v)| ((*path).to_owned(), text(v)));
        return Some(pairs.collect());
    }
    let mut all = format
        .tables
        .iter()
        .flat_map(|t| t.keys.iter().map(move |k| (t, k)));
    let (table, found) = all.find(|(_, k)| match k.to {
        To::Integer(name) | To::Number(name) => name == key,
        _ => false,
    })?;
    let path = match table.under {
        "" => format.spelled(found.name).into_owned(),
        under if under.ends_with('_') => format!("{under}{}", found.name),
        under => format!("{under}.{}{}", table.prefix, found.name),
    };
    Some(vec![(path, value.to_owned())])
}
