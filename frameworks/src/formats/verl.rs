//! verl's supervised fine-tuning: `fsdp_sft_trainer` and `sft_trainer` with its FSDP engine.
//!
//! Sources: `verl/trainer/config/sft_trainer.yaml`, `sft_trainer_engine.yaml`, `engine/fsdp.yaml`,
//! and `verl/trainer/fsdp_sft_trainer.py`.

use super::{fsdp, script::LAUNCHER};
use crate::convert::{
    ADAPTER, CONTEXT, DATA, EVALUATION, LAUNCH, LOGGING, PACKED, PIPELINE, SAVING, TENSOR, VALUES,
    betas, clip, full_recompute, if_true, in_8_bits, liger_kernels, set, shard_ranks, targets,
    weights,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Format, Key, Table, To, choice, decisive, fact, integer,
    key, lost, number, with,
};
use crate::tree::Node;

const NAME: &str = "verl";

pub(crate) static VERL: Format = FORMAT;

/// A command that starts the trainer, with overrides such as `data.train_batch_size=64`.
pub(crate) static VERL_SCRIPT: Format = Format {
    tables: &[TABLE, LAUNCHER, COMMAND],
    ..FORMAT
};

const FORMAT: Format = Format {
    name: NAME,
    tables: &[TABLE, GPUS],
    engine: Some(Engine::Fsdp),
    accelerated: false,
    reduces_in_f32: true,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

const DEFAULTS: &[Fallback] = &[
    Fallback {
        key: "train.clip_norm",
        value: "1.0",
        why: "verl's default",
    },
    Fallback {
        key: "model.implementation",
        value: "\"transformers\"",
        why: "verl trains models of transformers",
    },
    Fallback {
        key: "model.attn_implementation",
        value: "\"flash_attention_2\"",
        why: "verl loads models with FlashAttention 2",
    },
    Fallback {
        key: "fsdp.expandable_segments",
        value: "false",
        why: "PyTorch's default",
    },
];

const TABLE: Table = Table {
    under: "",
    prefix: "",
    keys: KEYS,
    asides: ASIDES,
};

/// The number of GPUs in a file. `torchrun` decides it in a script.
const GPUS: Table = Table {
    under: "",
    prefix: "",
    keys: &[
        fact("trainer.n_gpus_per_node", Fact::GpusPerNode),
        fact("trainer.nnodes", Fact::Nodes),
    ],
    asides: &[],
};

const COMMAND: Table = Table {
    under: "",
    prefix: "",
    keys: &[
        lost("config_name", HYDRA),
        lost("config_path", HYDRA),
        lost("config_dir", HYDRA),
    ],
    asides: &[(
        "torchrun starts the processes",
        &["trainer.n_gpus_per_node", "trainer.nnodes"],
    )],
};

const HYDRA: &str = "Hydra's file of defaults is not read: verl's own defaults are predicted, give the file instead";
const ENGINE: &str = "of verl's engines, FSDP alone is read";
const MOVED: &str = "moves between steps are not predicted";

const KEYS: &[Key] = &[
    fact("data.train_batch_size", Fact::GlobalBatch),
    integer("data.micro_batch_size_per_gpu", "train.micro_batch"),
    integer("data.max_length", "train.seq_len"),
    fact("data.max_token_len_per_gpu", Fact::MostTokens),
    with("data.use_dynamic_bsz", |node| {
        Ok(Effect::Fact(Fact::DynamicBatch, node.truth()?.into()))
    }),
    key("model.partial_pretrain", To::Model),
    key("model.path", To::Model),
    with("model.enable_gradient_checkpointing", full_recompute),
    with("model.use_liger", liger_kernels),
    with("model.lora_rank", |node| {
        Ok(match node.count()? {
            0 => Effect::Fact(Fact::Adapter, 0),
            rank => Effect::All(vec![
                Effect::Fact(Fact::Adapter, 1),
                Effect::Set("lora.r", rank.to_string()),
            ]),
        })
    }),
    number("model.lora_alpha", "lora.lora_alpha"),
    with("model.target_modules", targets),
    with("model.exclude_modules", crate::convert::excluded_modules),
    lost("model.lora_adapter_path", ADAPTER),
    lost(
        "model.enable_activation_offload",
        "activations are predicted on the device",
    ),
    with("model.strategy", strategy),
    with("model.fsdp_config.model_dtype", weights),
    with("model.fsdp_config.offload_params", |node| {
        Ok(Effect::Fact(Fact::OffloadAll, node.truth()?.into()))
    }),
    with("model.fsdp_config.reshard_after_forward", |node| {
        Ok(Effect::Fact(Fact::Reshard, node.truth()?.into()))
    }),
    lost("model.fsdp_config.wrap_policy.min_num_params", BY_SIZE),
    with(
        "model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",
        fsdp::blocks,
    ),
    lost("model.fsdp_config.wrap_policy.disable", BY_SIZE),
    fact("ulysses_sequence_parallel_size", Fact::Ulysses),
    // Hydra's `engine=fsdp` and `optim=fsdp` choose files of defaults.
    choice("engine", engine),
    choice("optim", engine),
    with("engine._choice_", engine),
    with("optim._choice_", engine),
    with("engine.strategy", strategy),
    with("engine.model_dtype", weights),
    with("engine.dtype", |node| Ok(Effect::Mixed(Dtype::of(node)?))),
    with("engine.mixed_precision.param_dtype", |node| {
        Ok(Effect::Mixed(Dtype::of(node)?))
    }),
    with("engine.mixed_precision.reduce_dtype", |node| {
        Ok(set("precision.reduce_dtype", Dtype::of(node)?.name()))
    }),
    with("engine.fsdp_size", shard_ranks),
    with("engine.reshard_after_forward", |node| {
        Ok(Effect::Fact(Fact::Reshard, node.truth()?.into()))
    }),
    with("engine.forward_prefetch", fsdp::forward_prefetch),
    with("engine.offload_policy", |node| {
        Ok(Effect::Fact(Fact::OffloadAll, node.truth()?.into()))
    }),
    lost("engine.param_offload", MOVED),
    lost("engine.optimizer_offload", MOVED),
    lost("engine.wrap_policy.min_num_params", BY_SIZE),
    with(
        "engine.wrap_policy.transformer_layer_cls_to_wrap",
        fsdp::blocks,
    ),
    fact("engine.ulysses_sequence_parallel_size", Fact::Ulysses),
    decisive("engine.tensor_model_parallel_size", TENSOR),
    decisive("engine.pipeline_model_parallel_size", PIPELINE),
    decisive("engine.context_parallel_size", CONTEXT),
    decisive("engine.vanilla_mbridge", ENGINE),
    decisive("engine.use_mbridge", ENGINE),
    with("engine.full_determinism", |node| {
        if_true(
            node,
            Effect::Set("precision.deterministic", "true".to_owned()),
        )
    }),
    number("optim.lr", "train.lr"),
    number("optim.weight_decay", "train.weight_decay"),
    with("optim.betas", betas),
    with("optim.clip_grad", clip),
    with("optim.lr_warmup_steps", |node| {
        Ok(match node.integer()? {
            -1 => Effect::Aside(VALUES),
            _ => Effect::Set("train.warmup_steps", node.count()?.to_string()),
        })
    }),
    with("optim.optimizer", |node| {
        Ok(match node.full().as_str() {
            "AdamW" | "Adam" | "_AdamW" => set("train.optimizer", "adamw"),
            "AdamW8bit" => in_8_bits("adamw"),
            "SGD" => set("train.optimizer", "sgd"),
            _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
        })
    }),
];

const BY_SIZE: &str = "units are predicted as one unit per block";

const ASIDES: &[(&str, &[&str])] = &[
    (
        "verl's trainer does not read it: micro_batch_size_per_gpu decides",
        &["data.micro_batch_size"],
    ),
    ("offload_params decides", &["model.fsdp_config.cpu_offload"]),
    (
        DATA,
        &[
            "data.train_files",
            "data.val_files",
            "data.train_max_samples",
            "data.val_max_samples",
            "data.prompt_key",
            "data.response_key",
            "data.prompt_dict_keys",
            "data.response_dict_keys",
            "data.messages_key",
            "data.tools_key",
            "data.enable_thinking_key",
            "data.multiturn",
            "data.pad_mode",
            "data.truncation",
            "data.balance_dp_token",
            "data.chat_template",
            "data.custom_cls",
            "data.use_shm",
            "data.num_workers",
            "data.apply_chat_template",
            "data.apply_chat_template_kwargs",
            "data.ignore_input_ids_mismatch",
            "trainer.total_epochs",
            "trainer.total_training_steps",
            "model.use_shm",
            "model.external_lib",
            "model.tokenizer_path",
            "model.custom_chat_template",
            "optim.total_training_steps",
        ],
    ),
    (PACKED, &["use_remove_padding", "model.use_remove_padding"]),
    (
        EVALUATION,
        &["trainer.test_freq", "trainer.val_before_train"],
    ),
    (
        LOGGING,
        &[
            "trainer.logger",
            "trainer.project_name",
            "trainer.experiment_name",
            "trainer.profile_interval",
            "profiler",
        ],
    ),
    (
        SAVING,
        &[
            "trainer.default_local_dir",
            "trainer.default_hdfs_dir",
            "trainer.save_freq",
            "trainer.max_ckpt_to_keep",
            "trainer.resume_mode",
            "trainer.resume_from_path",
            "trainer.checkpoint",
            "checkpoint",
            "model.trust_remote_code",
            "model.hf_config_path",
        ],
    ),
    (
        VALUES,
        &[
            "trainer.seed",
            "engine.seed",
            "optim.lr_warmup_steps_ratio",
            "optim.lr_scheduler",
            "optim.lr_scheduler_type",
            "optim.warmup_style",
            "optim.warmup_steps_ratio",
            "optim.min_lr_ratio",
            "optim.num_cycles",
            "optim.optimizer_impl",
        ],
    ),
    (
        LAUNCH,
        &[
            "defaults",
            "hydra",
            "trainer.device",
            "optim._target_",
            "engine._target_",
        ],
    ),
    (
        "of training on rewards, without effect here",
        &[
            "engine.use_torch_compile",
            "engine.entropy_from_logits_with_chunking",
            "engine.entropy_checkpointing",
            "engine.forward_only",
        ],
    ),
    (
        "FSDP1 only, without effect on a prediction",
        &["engine.use_orig_params"],
    ),
];

/// Reads the version of FSDP.
fn strategy(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().as_str() {
        "fsdp" => Effect::Fact(Fact::FsdpVersion, 1),
        "fsdp2" => Effect::Fact(Fact::FsdpVersion, 2),
        "megatron" | "veomni" | "torchtitan" | "mindspeed" => Effect::Decisive(ENGINE),
        _ => return Err(node.expected("fsdp or fsdp2")),
    })
}

/// Reads the engine of `sft_trainer`.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn engine(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().as_str() {
        "fsdp" | "fsdp2" => Effect::Aside("as predicted"),
        _ => Effect::Decisive(ENGINE),
    })
}
