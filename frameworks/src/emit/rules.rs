//! Which keys of a framework say what a scenario key says: the reverse of the tables of formats.
//!
//! Keys that formats read as an integer or number of a scenario need no rule.

use crate::table::{Format, To};
use shardlab_plan::Scenario;

/// A scenario key with a value, and the keys of a framework that say the same.
struct Rule {
    format: &'static str,
    key: &'static str,
    value: &'static str,
    /// The rule is for files with this key.
    with: Option<&'static str>,
    to: &'static [(&'static str, &'static str)],
}

const fn rule(
    format: &'static str,
    key: &'static str,
    value: &'static str,
    to: &'static [(&'static str, &'static str)],
) -> Rule {
    Rule {
        format,
        key,
        value,
        with: None,
        to,
    }
}

const fn with(path: &'static str, rule: Rule) -> Rule {
    Rule {
        with: Some(path),
        ..rule
    }
}

/// Any value.
const ANY: &str = "*";
/// Stands for the sequences per step over all ranks.
const GLOBAL: &str = "{global}";
/// Stands for the value of the scenario.
const SAME: &str = "{value}";
/// No key has to change.
const NOTHING: &[(&str, &str)] = &[];

const ACCELERATE: &str = "Accelerate";
const TRAINER: &str = "the Hugging Face Trainer";
const AXOLOTL: &str = "Axolotl";
const LLAMA: &str = "LLaMA-Factory";
const TITAN: &str = "torchtitan";
const TUNE: &str = "torchtune";
const NEMO: &str = "NeMo Automodel";
const MEGATRON: &str = "Megatron-LM";
const DEEPSPEED: &str = "DeepSpeed";
const RESHARD: &str = "fsdp.reshard_after_forward";
const RECOMPUTE: &str = "train.recompute";
const MODE: &str = "compile.mode";
const LOSS: &str = "train.loss";
const ACCUM: &str = "train.grad_accum";
const REDUCE: &str = "precision.reduce_dtype";

const SHARDING: &str = "fsdp_config.fsdp_sharding_strategy";

const RULES: &[Rule] = &[
    with(
        SHARDING,
        rule(ACCELERATE, RESHARD, "true", &[(SHARDING, "FULL_SHARD")]),
    ),
    with(
        SHARDING,
        rule(ACCELERATE, RESHARD, "false", &[(SHARDING, "SHARD_GRAD_OP")]),
    ),
    rule(
        ACCELERATE,
        RESHARD,
        "true",
        &[("fsdp_config.fsdp_reshard_after_forward", "true")],
    ),
    rule(
        ACCELERATE,
        RESHARD,
        "false",
        &[("fsdp_config.fsdp_reshard_after_forward", "false")],
    ),
    rule(
        ACCELERATE,
        RECOMPUTE,
        "full",
        &[("fsdp_config.fsdp_activation_checkpointing", "true")],
    ),
    rule(
        ACCELERATE,
        RECOMPUTE,
        "none",
        &[("fsdp_config.fsdp_activation_checkpointing", "false")],
    ),
    rule(
        ACCELERATE,
        "fsdp.prefetch_forward",
        "1",
        &[("fsdp_config.fsdp_forward_prefetch", "true")],
    ),
    rule(
        ACCELERATE,
        MODE,
        "off",
        &[("dynamo_config.dynamo_backend", "NO")],
    ),
    rule(
        ACCELERATE,
        MODE,
        "regions",
        &[("dynamo_config.dynamo_backend", "INDUCTOR")],
    ),
    rule(
        ACCELERATE,
        "precision.param_dtype",
        "bf16",
        &[("mixed_precision", "bf16")],
    ),
    rule(
        ACCELERATE,
        "precision.param_dtype",
        "f16",
        &[("mixed_precision", "fp16")],
    ),
    rule(
        ACCELERATE,
        "precision.param_dtype",
        "f32",
        &[("mixed_precision", "no")],
    ),
    rule(
        ACCELERATE,
        "mesh.dp_shard",
        ANY,
        &[("parallelism_config.parallelism_config_dp_shard_size", SAME)],
    ),
    rule(
        ACCELERATE,
        "mesh.dp_replicate",
        ANY,
        &[(
            "parallelism_config.parallelism_config_dp_replicate_size",
            SAME,
        )],
    ),
    rule(
        TRAINER,
        RESHARD,
        "true",
        &[("fsdp_config.reshard_after_forward", "true")],
    ),
    rule(
        TRAINER,
        RESHARD,
        "false",
        &[("fsdp_config.reshard_after_forward", "false")],
    ),
    rule(
        TRAINER,
        RECOMPUTE,
        "full",
        &[("gradient_checkpointing", "true")],
    ),
    rule(
        TRAINER,
        RECOMPUTE,
        "none",
        &[("gradient_checkpointing", "false")],
    ),
    rule(TRAINER, MODE, "off", &[("torch_compile", "false")]),
    rule(TRAINER, MODE, "regions", &[("torch_compile", "true")]),
    rule(TRAINER, LOSS, "chunked", &[("use_liger_kernel", "true")]),
    rule(
        TRAINER,
        LOSS,
        "materialized",
        &[("use_liger_kernel", "false")],
    ),
    rule(
        TRAINER,
        "precision.param_dtype",
        "bf16",
        &[("bf16", "true")],
    ),
    rule(
        AXOLOTL,
        RESHARD,
        "true",
        &[("fsdp_config.reshard_after_forward", "true")],
    ),
    rule(
        AXOLOTL,
        RESHARD,
        "false",
        &[("fsdp_config.reshard_after_forward", "false")],
    ),
    rule(
        AXOLOTL,
        RECOMPUTE,
        "full",
        &[("gradient_checkpointing", "true")],
    ),
    rule(
        AXOLOTL,
        RECOMPUTE,
        "none",
        &[("gradient_checkpointing", "false")],
    ),
    rule(AXOLOTL, MODE, "off", &[("torch_compile", "false")]),
    rule(AXOLOTL, MODE, "regions", &[("torch_compile", "true")]),
    rule(
        AXOLOTL,
        LOSS,
        "chunked",
        &[("chunked_cross_entropy", "true")],
    ),
    rule(
        LLAMA,
        RECOMPUTE,
        "full",
        &[("disable_gradient_checkpointing", "false")],
    ),
    rule(
        LLAMA,
        RECOMPUTE,
        "none",
        &[("disable_gradient_checkpointing", "true")],
    ),
    rule(LLAMA, MODE, "off", &[("torch_compile", "false")]),
    rule(LLAMA, MODE, "regions", &[("torch_compile", "true")]),
    rule(LLAMA, LOSS, "chunked", &[("enable_liger_kernel", "true")]),
    rule(
        LLAMA,
        LOSS,
        "materialized",
        &[("enable_liger_kernel", "false")],
    ),
    rule(
        TITAN,
        RESHARD,
        "true",
        &[("parallelism.fsdp_reshard_after_forward", "always")],
    ),
    rule(
        TITAN,
        RESHARD,
        "false",
        &[("parallelism.fsdp_reshard_after_forward", "never")],
    ),
    rule(
        TITAN,
        RECOMPUTE,
        "none",
        &[("activation_checkpoint.mode", "none")],
    ),
    rule(
        TITAN,
        RECOMPUTE,
        "full",
        &[("activation_checkpoint.mode", "full")],
    ),
    rule(
        TITAN,
        RECOMPUTE,
        "selective",
        &[("activation_checkpoint.mode", "selective")],
    ),
    with(
        "training.compile",
        rule(TITAN, MODE, "blocks", &[("training.compile", "true")]),
    ),
    with(
        "training.compile",
        rule(TITAN, MODE, "off", &[("training.compile", "false")]),
    ),
    rule(TITAN, MODE, "blocks", &[("compile.enable", "true")]),
    rule(TITAN, MODE, "off", &[("compile.enable", "false")]),
    rule(
        TITAN,
        REDUCE,
        "f32",
        &[("training.mixed_precision_reduce", "float32")],
    ),
    rule(
        TITAN,
        REDUCE,
        "bf16",
        &[("training.mixed_precision_reduce", "bfloat16")],
    ),
    rule(
        TITAN,
        "precision.param_dtype",
        "bf16",
        &[("training.mixed_precision_param", "bfloat16")],
    ),
    rule(
        TITAN,
        "precision.param_dtype",
        "f32",
        &[("training.mixed_precision_param", "float32")],
    ),
    rule(TITAN, ACCUM, ANY, &[("training.global_batch_size", GLOBAL)]),
    rule(
        TITAN,
        "train.micro_batch",
        ANY,
        &[("training.local_batch_size", SAME)],
    ),
    rule(
        TITAN,
        "mesh.dp_shard",
        ANY,
        &[("parallelism.data_parallel_shard_degree", SAME)],
    ),
    rule(
        TITAN,
        "mesh.dp_replicate",
        ANY,
        &[("parallelism.data_parallel_replicate_degree", SAME)],
    ),
    rule(
        TUNE,
        RECOMPUTE,
        "full",
        &[("enable_activation_checkpointing", "true")],
    ),
    rule(
        TUNE,
        RECOMPUTE,
        "none",
        &[("enable_activation_checkpointing", "false")],
    ),
    rule(
        TUNE,
        RESHARD,
        "true",
        &[("fsdp_reshard_after_forward", "true")],
    ),
    rule(
        TUNE,
        RESHARD,
        "false",
        &[("fsdp_reshard_after_forward", "false")],
    ),
    rule(TUNE, MODE, "blocks", &[("compile", "true")]),
    rule(TUNE, MODE, "off", &[("compile", "false")]),
    rule(
        NEMO,
        RECOMPUTE,
        "full",
        &[("distributed.activation_checkpointing", "true")],
    ),
    rule(
        NEMO,
        RECOMPUTE,
        "none",
        &[("distributed.activation_checkpointing", "false")],
    ),
    rule(
        NEMO,
        RESHARD,
        "true",
        &[("distributed.reshard_after_forward", "true")],
    ),
    rule(
        NEMO,
        RESHARD,
        "false",
        &[("distributed.reshard_after_forward", "false")],
    ),
    rule(NEMO, MODE, "blocks", &[("compile.enabled", "true")]),
    rule(NEMO, MODE, "off", &[("compile.enabled", "false")]),
    rule(
        NEMO,
        ACCUM,
        ANY,
        &[("step_scheduler.global_batch_size", GLOBAL)],
    ),
    rule(MEGATRON, ACCUM, ANY, &[("global-batch-size", GLOBAL)]),
    rule(
        MEGATRON,
        RECOMPUTE,
        "full",
        &[
            ("recompute-granularity", "full"),
            ("recompute-method", "uniform"),
            ("recompute-num-layers", "1"),
        ],
    ),
    rule(
        MEGATRON,
        RECOMPUTE,
        "selective",
        &[("recompute-granularity", "selective")],
    ),
    rule(
        MEGATRON,
        "fsdp.strategy",
        ANY,
        &[("data-parallel-sharding-strategy", SAME)],
    ),
    rule(
        MEGATRON,
        "fsdp.outer_strategy",
        ANY,
        &[("outer-dp-sharding-strategy", SAME)],
    ),
    with(
        "train_batch_size",
        rule(
            DEEPSPEED,
            ACCUM,
            ANY,
            &[
                ("gradient_accumulation_steps", SAME),
                ("train_batch_size", GLOBAL),
            ],
        ),
    ),
    rule(
        DEEPSPEED,
        "fsdp.strategy",
        "no_shard",
        &[("zero_optimization.stage", "0")],
    ),
    rule(
        DEEPSPEED,
        "fsdp.strategy",
        "optim",
        &[("zero_optimization.stage", "1")],
    ),
    rule(
        DEEPSPEED,
        "fsdp.strategy",
        "optim_grads",
        &[("zero_optimization.stage", "2")],
    ),
    rule(
        DEEPSPEED,
        "fsdp.strategy",
        "optim_grads_params",
        &[("zero_optimization.stage", "3")],
    ),
    rule(
        DEEPSPEED,
        "fsdp.async_reduce",
        "true",
        &[("zero_optimization.overlap_comm", "true")],
    ),
    rule(
        DEEPSPEED,
        "fsdp.async_reduce",
        "false",
        &[("zero_optimization.overlap_comm", "false")],
    ),
    rule(
        DEEPSPEED,
        "precision.param_dtype",
        "bf16",
        &[("bf16.enabled", "true")],
    ),
    // All blocks are what frameworks recompute if nothing else is said.
    rule(ANY, "train.recompute_layers", "all", NOTHING),
];

/// Returns the keys of a framework with the values that say the same as a scenario key; `None` if
/// there are none. `has` says which keys a file has already.
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
        "" => found.name.to_owned(),
        under => format!("{under}.{}{}", table.prefix, found.name),
    };
    Some(vec![(path, value.to_owned())])
}
