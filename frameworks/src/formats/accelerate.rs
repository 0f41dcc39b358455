//! Hugging Face Accelerate: the file written by `accelerate config`.

use super::deepspeed::DEEPSPEED;
use super::fsdp;
use crate::convert::{
    CONTEXT, EVALUATION, LAUNCH, MSAMP, SAVING, VALUES, float8_format, float8_gather,
    float8_library, float8_overrides, full_recompute, if_true, replicas, shard_ranks,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Float8Scaling, Format, Key, Table, To, fact, integer, key, lost,
    number, with,
};
use crate::tree::Node;

pub(crate) static ACCELERATE: Format = Format {
    name: "Accelerate",
    tables: &[
        fsdp::table("fsdp_config"),
        Table {
            under: "deepspeed_config",
            prefix: "",
            keys: PLUGIN,
            asides: &[
                (
                    LAUNCH,
                    &[
                        "deepspeed_multinode_launcher",
                        "deepspeed_hostfile",
                        "deepspeed_exclusion_filter",
                        "deepspeed_inclusion_filter",
                    ],
                ),
                (SAVING, &["zero3_init_flag", "zero3_save_16bit_model"]),
                (
                    "the device decides",
                    &["offload_optimizer_nvme_path", "offload_param_nvme_path"],
                ),
            ],
        },
        Table {
            under: "parallelism_config",
            prefix: "parallelism_config_",
            keys: PARALLELISM,
            asides: &[(CONTEXT, OF_CONTEXT)],
        },
        Table {
            under: "fp8_config",
            prefix: "fp8_",
            keys: &[
                with("backend", float8_library),
                with("format", float8_format),
                with("enable_fsdp_float8_all_gather", float8_gather),
                with("override_linear_precision", float8_overrides),
                with("use_mxfp8_block_scaling", |node| {
                    if_true(node, Float8Scaling::Mx.effect())
                }),
                lost("opt_level", MSAMP),
                lost("optimization_level", MSAMP),
            ],
            asides: &[
                (
                    VALUES,
                    &[
                        "margin",
                        "interval",
                        "amax_history_len",
                        "amax_history_length",
                        "amax_compute_algo",
                        "amax_compute_algorithm",
                    ],
                ),
                (EVALUATION, &["use_autocast_during_eval"]),
                (
                    "8-bit matmuls are predicted where dimensions are multiples of 16",
                    &["pad_inner_dim"],
                ),
            ],
        },
        Table {
            under: "dynamo_config",
            prefix: "dynamo_",
            keys: &[
                with("backend", compiled),
                with("use_regional_compilation", |node| {
                    Ok(Effect::Fact(
                        Fact::RegionalCompilation,
                        node.truth()?.into(),
                    ))
                }),
            ],
            asides: &[(
                "compiled code is predicted with Inductor's defaults",
                &["mode", "use_dynamic", "use_fullgraph"],
            )],
        },
        Table {
            under: "",
            prefix: "",
            keys: KEYS,
            asides: ASIDES,
        },
    ],
    engine: Some(Engine::Ddp),
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: &[fsdp::TORCH_SEGMENTS],
};

const KEYS: &[Key] = &[
    with("distributed_type", |node| {
        Ok(match node.full().to_ascii_uppercase().as_str() {
            "FSDP" => Effect::Engine(Engine::Fsdp),
            "DEEPSPEED" => Effect::Engine(Engine::DeepSpeed),
            "MULTI_GPU" => Effect::Engine(Engine::Ddp),
            "NO" => Effect::All(vec![
                Effect::Engine(Engine::Ddp),
                Effect::Fact(Fact::OneProcess, 1),
            ]),
            "MEGATRON_LM" => {
                Effect::Decisive("Megatron-LM under Accelerate is not read: give its own arguments")
            }
            _ => Effect::Decisive("not a program that shards on NVIDIA GPUs"),
        })
    }),
    with("mixed_precision", mixed_precision),
    // Versions before `dynamo_config`.
    with("dynamo_backend", compiled),
    fact("num_processes", Fact::Processes),
    fact("num_machines", Fact::Nodes),
    integer("gradient_accumulation_steps", "train.grad_accum"),
    lost(
        "megatron_lm_config",
        "Megatron-LM under Accelerate is not read",
    ),
    lost("use_cpu", "GPUs are predicted"),
];

/// Reads the compute dtype.
pub(super) fn mixed_precision(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().as_str() {
        "no" | "false" => Effect::Mixed(Dtype::F32),
        "fp8" => Effect::All(vec![
            Effect::Mixed(Dtype::Bf16),
            Effect::Fact(Fact::Float8, 1),
        ]),
        _ => Effect::Mixed(Dtype::of(node)?),
    })
}

const ASIDES: &[(&str, &[&str])] = &[
    (
        LAUNCH,
        &[
            "compute_environment",
            "debug",
            "enable_cpu_affinity",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "rdzv_backend",
            "rdzv_conf",
            "same_network",
            "gpu_ids",
            "commands",
            "command_file",
            "mpirun_config",
            "deepspeed_hostfile",
            "tpu_name",
            "tpu_zone",
            "tpu_vm",
            "tpu_env",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "ipex_config",
            "max_restarts",
            "use_mps_device",
        ],
    ),
    ("TPUs only", &["downcast_bf16"]),
];

/// Accelerate's own options for DeepSpeed.
pub(super) const PLUGIN: &[Key] = &[
    fact("zero_stage", Fact::ZeroStage),
    with("offload_optimizer_device", |node| {
        Ok(super::deepspeed::device(node, Fact::OffloadOptimizer))
    }),
    with("offload_param_device", |node| {
        Ok(super::deepspeed::device(node, Fact::OffloadParams))
    }),
    integer("gradient_accumulation_steps", "train.grad_accum"),
    number("gradient_clipping", "train.clip_norm"),
    key("deepspeed_config_file", To::File(&DEEPSPEED)),
    lost(
        "deepspeed_moe_layer_cls_names",
        "experts are predicted as the model has them",
    ),
];

/// Options of `accelerate launch` for the sizes of `parallelism_config`.
pub(super) const SIZES: Table = Table {
    under: "parallelism_config_",
    prefix: "",
    keys: PARALLELISM,
    asides: &[(CONTEXT, OF_CONTEXT)],
};

/// Variables of the environment from which Accelerate reads what `accelerate launch` sets.
pub(super) const VARIABLES: Table = Table {
    under: "",
    prefix: "",
    keys: &[
        with("ACCELERATE_USE_FSDP", uses_fsdp),
        with("ACCELERATE_USE_DEEPSPEED", |node| {
            if_true(node, Effect::Engine(Engine::DeepSpeed))
        }),
        with("ACCELERATE_MIXED_PRECISION", mixed_precision),
        fact("FSDP_VERSION", Fact::FsdpVersion),
        with("FSDP_SHARDING_STRATEGY", fsdp::strategy),
        with("FSDP_RESHARD_AFTER_FORWARD", fsdp::reshard),
        with("FSDP_OFFLOAD_PARAMS", fsdp::offload),
        with("FSDP_AUTO_WRAP_POLICY", fsdp::policy),
        with("FSDP_TRANSFORMER_CLS_TO_WRAP", fsdp::blocks),
        with("FSDP_ACTIVATION_CHECKPOINTING", full_recompute),
    ],
    asides: &[],
};

/// Reads whether FSDP is on.
pub(super) fn uses_fsdp(node: &Node) -> Result<Effect, String> {
    if_true(node, Effect::Engine(Engine::Fsdp))
}

/// Options that matter to context parallelism only.
const OF_CONTEXT: &[&str] = &[
    "cp_backend",
    "cp_comm_strategy",
    "sp_backend",
    "sp_seq_length",
    "sp_seq_length_is_variable",
    "sp_attn_implementation",
];

const PARALLELISM: &[Key] = &[
    with("dp_shard_size", shard_ranks),
    with("dp_replicate_size", replicas),
    fact("tp_size", Fact::Tensor),
    fact("cp_size", Fact::Context),
    fact("sp_size", Fact::Context),
];

/// Reads the backend of torch.compile.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn compiled(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().to_ascii_lowercase().as_str() {
        "no" | "false" => Effect::Aside("off"),
        _ => Effect::Fact(Fact::Compiled, 1),
    })
}
