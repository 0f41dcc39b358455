//! Commands of ms-swift: `swift sft`, which trains with transformers, and `megatron sft`, which
//! trains with Megatron-Core.
//!
//! Sources: `swift/arguments` and `swift/megatron/arguments` of ms-swift 4.

use super::deepspeed::DEEPSPEED;
use super::{fsdp, megatron, script, trainer};
use crate::convert::{
    ADAPTER, DATA, DISTILLATION, KERNELS, LAUNCH, LOGGING, PACKED, PREFERENCES, SAVING, VALUES,
    attention, double_quantization, frozen_language, frozen_projector, frozen_vision,
    layers_in_turn, rank_stabilized, saved_modules, set, targets,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Format, Key, Table, To, decisive, fact, integer, key,
    lost, number, quoted, with,
};
use crate::tree::Node;

/// Arguments of `swift sft`, `pt` and `rlhf`.
pub(crate) static SWIFT: Format = Format {
    name: "ms-swift",
    tables: &[
        Table {
            under: "",
            prefix: "",
            keys: KEYS,
            asides: ASIDES,
        },
        Table {
            under: "",
            prefix: "",
            keys: BY_TRAINER,
            asides: TRAINER_ASIDES,
        },
        trainer::TABLE,
        trainer::TRL_TABLE,
        script::LAUNCHER,
    ],
    engine: Some(Engine::Ddp),
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: true,
    defaults: &[
        Fallback {
            key: "train.micro_batch",
            value: "1",
            why: "ms-swift's default",
        },
        trainer::CLIP_NORM,
        fsdp::TORCH_SEGMENTS,
    ],
};

/// Arguments of `megatron sft`, `pt` and `rlhf`.
pub(crate) static SWIFT_MEGATRON: Format = Format {
    name: "Megatron-SWIFT",
    tables: &[
        Table {
            under: "",
            prefix: "--",
            keys: KEYS,
            asides: ASIDES,
        },
        Table {
            under: "",
            prefix: "--",
            keys: BY_MEGATRON,
            asides: MEGATRON_ASIDES,
        },
        megatron::TABLE,
    ],
    engine: Some(Engine::MegatronOptimizer),
    accelerated: false,
    reduces_in_f32: false,
    flat: true,
    open: true,
    defaults: &[
        Fallback {
            key: "train.micro_batch",
            value: "1",
            why: "ms-swift's default",
        },
        Fallback {
            key: "train.clip_norm",
            value: "1.0",
            why: "ms-swift's default",
        },
        Fallback {
            key: "moe.dispatcher",
            value: "\"all_to_all\"",
            why: "ms-swift's default",
        },
        fsdp::TORCH_SEGMENTS,
    ],
};

/// The file that `--fsdp` names, such as `config/fsdp2.json` of ms-swift: the Trainer's `fsdp`
/// and `fsdp_config`.
pub(crate) static SWIFT_FSDP: Format = Format {
    name: "ms-swift's file for --fsdp",
    tables: &[
        fsdp::table("fsdp_config"),
        Table {
            under: "",
            prefix: "",
            keys: &[with("fsdp", fsdp::words)],
            asides: &[],
        },
    ],
    engine: None,
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: &[],
};

/// Arguments of both engines.
const KEYS: &[Key] = &[
    key("model", To::Model),
    with("tuner_type", tuner),
    with("train_type", tuner),
    with("torch_dtype", dtype),
    integer("lora_rank", "lora.r"),
    number("lora_alpha", "lora.lora_alpha"),
    number("lora_dropout", "lora.lora_dropout"),
    with("target_modules", targets),
    with("target_regex", targets),
    with("modules_to_save", saved_modules),
    with("use_rslora", rank_stabilized),
    integer("max_length", "train.seq_len"),
    with("packing_length", packed),
    fact("NPROC_PER_NODE", Fact::GpusPerNode),
    fact("NNODES", Fact::Nodes),
    lost("freeze_parameters", FROZEN),
    lost("freeze_parameters_regex", FROZEN),
    lost("freeze_parameters_ratio", FROZEN),
    lost("trainable_parameters", FROZEN),
    lost("trainable_parameters_regex", FROZEN),
    with("freeze_vit", frozen_vision),
    with("freeze_aligner", frozen_projector),
    with("freeze_llm", frozen_language),
    lost(
        "padding_free",
        "sequences are predicted as padded to the same length",
    ),
];

/// Arguments of the Trainer's engine alone.
const BY_TRAINER: &[Key] = &[
    with("sft_type", tuner),
    with("gradient_checkpointing", |node| {
        Ok(if node.truth()? {
            set("train.recompute", "full")
        } else {
            Effect::Fact(Fact::Recompute, 0)
        })
    }),
    with("quant_bits", |node| {
        Ok(match node.full().as_str() {
            "4" => Effect::Fact(Fact::FourBits, 2),
            "8" => Effect::Fact(Fact::EightBits, 1),
            _ => Effect::Decisive(crate::convert::QUANTIZED),
        })
    }),
    with("bnb_4bit_use_double_quant", double_quantization),
    with("rlhf_type", preferences),
    decisive("reward_model", PREFERENCES),
    decisive("teacher_model", DISTILLATION),
    decisive("ref_model", crate::convert::REFERENCE),
    lost(
        "target_parameters",
        "adapters of the experts' parameters are not predicted",
    ),
    with("task_type", |node| {
        Ok(match node.text() {
            Some("causal_lm") => Effect::Aside("as predicted"),
            _ => Effect::Decisive("another head: --model names a folder whose config.json has it"),
        })
    }),
    with("attn_impl", attention),
    key("deepspeed", To::Preset(zero, &DEEPSPEED)),
    key("fsdp", To::Preset(fsdp2, &SWIFT_FSDP)),
    fact("sequence_parallel_size", Fact::Context),
    fact("deepspeed_autotp_size", Fact::Tensor),
    lost("zero_hpz_partition_size", "ZeRO++ is not modeled"),
    lost("device_map", "the whole model is predicted on each GPU"),
    lost("experts_impl", "experts are predicted as grouped matmuls"),
    lost("use_galore", OPTIMIZER),
    with("lisa_activated_layers", layers_in_turn),
    with("optimizer", |_| Ok(Effect::Lost(OPTIMIZER))),
    fact("nproc_per_node", Fact::GpusPerNode),
    fact("nnodes", Fact::Nodes),
];

/// Arguments of Megatron-SWIFT alone.
const BY_MEGATRON: &[Key] = &[
    key("config", To::AnyFile),
    with("rlhf_type", |_| Ok(Effect::Decisive(PREFERENCES))),
    fact("virtual_pipeline_model_parallel_size", Fact::Pipeline),
];

const LORA_LLM: &str =
    "adapters of the language model next to a vision tower trained in full are not modeled";
const FROZEN: &str = "what is frozen is predicted as trained: name it with --set fsdp.frozen";
const OPTIMIZER: &str = "this optimizer is not modeled: AdamW is predicted";

const ASIDES: &[(&str, &[&str])] = &[
    (
        DATA,
        &[
            "dataset",
            "val_dataset",
            "cached_dataset",
            "cached_val_dataset",
            "split_dataset_ratio",
            "load_from_cache_file",
            "dataset_num_proc",
            "dataset_shuffle",
            "streaming",
            "template",
            "system",
            "truncation_strategy",
            "use_chat_template",
            "max_pixels",
            "loss_scale",
            "lazy_tokenize",
            "packing_num_proc",
            "packing_strategy",
            "strict",
            "remove_unused_columns",
            "custom_dataset_info",
            "columns",
            "new_special_tokens",
            "enable_thinking",
            "add_non_thinking_prefix",
            "response_prefix",
            "padding_side",
            "agent_template",
            "load_data_args",
            "to_cached_dataset",
            "interleave_prob",
            "shuffle_buffer_size",
            "train_dataloader_shuffle",
        ],
    ),
    (
        SAVING,
        &[
            "adapters",
            "model_type",
            "model_revision",
            "model_author",
            "model_name",
            "save_safetensors",
            "merge_lora",
            "use_hf",
            "create_checkpoint_symlink",
            "add_version",
            "resume_only_model",
            "load_args",
            "external_plugins",
            "custom_register_path",
            "local_repo_path",
            "check_model",
            "ignore_args_error",
            "init_weights",
            "tuner_backend",
        ],
    ),
    (
        LOGGING,
        &[
            "swanlab_project",
            "swanlab_exp_name",
            "swanlab_mode",
            "eval_metric",
            "logprobs",
            "stream",
            "temperature",
            "max_new_tokens",
            "predict_with_generate",
            "loss_type",
            "infer_backend",
            "callbacks",
        ],
    ),
    (
        VALUES,
        &[
            "lora_bias",
            "lora_dtype",
            "lorap_lr_ratio",
            "rope_scaling",
            "vit_lr",
            "aligner_lr",
            "problem_type",
            "quant_method",
        ],
    ),
    (
        LAUNCH,
        &[
            "CUDA_VISIBLE_DEVICES",
            "ddp_timeout",
            "ddp_backend",
            "local_rank",
        ],
    ),
    (PACKED, &["packing"]),
];

const TRAINER_ASIDES: &[(&str, &[&str])] = &[
    (DATA, &["label_names"]),
    (SAVING, &["vit_gradient_checkpointing"]),
    (VALUES, &["beta", "rpo_alpha"]),
    (KERNELS, &["use_flash_attn"]),
    (
        "part of LISA, which lisa_activated_layers turns on",
        &["lisa_step_interval"],
    ),
    (
        "part of GaLore, which use_galore turns on",
        &[
            "galore_target_modules",
            "galore_rank",
            "galore_update_proj_gap",
            "galore_scale",
            "galore_proj_type",
            "galore_optim_per_parameter",
            "galore_with_embedding",
            "galore_quantization",
            "galore_proj_quant",
            "galore_proj_bits",
            "galore_proj_group_size",
            "galore_cos_threshold",
            "galore_gamma_proj",
            "galore_queue_size",
        ],
    ),
];

const MEGATRON_ASIDES: &[(&str, &[&str])] = &[
    (
        SAVING,
        &[
            "mcore_model",
            "mcore_adapter",
            "output_dir",
            "save_steps",
            "save_total_limit",
            "save_strategy",
        ],
    ),
    (
        LOGGING,
        &[
            "logging_steps",
            "report_to",
            "eval_steps",
            "num_train_epochs",
            "max_epochs",
        ],
    ),
    (
        LAUNCH,
        &[
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
        ],
    ),
];

/// Reads which parameters are trained.
fn tuner(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("full") => Effect::Fact(Fact::Adapter, 0),
        Some("lora") => Effect::Fact(Fact::Adapter, 1),
        Some("lora_llm") => Effect::Decisive(LORA_LLM),
        _ => Effect::Decisive(ADAPTER),
    })
}

/// Reads the dtype of the weights, which also turns on mixed precision.
fn dtype(node: &Node) -> Result<Effect, String> {
    let weights = Dtype::of(node)?;
    Ok(Effect::All(vec![
        Effect::Weights(weights),
        Effect::Mixed(weights),
    ]))
}

/// Reads the length of packed sequences.
fn packed(node: &Node) -> Result<Effect, String> {
    Ok(Effect::Fact(Fact::PackedLength, node.count()?))
}

/// Reads the preference training method. DPO's reference is the model without its adapters.
fn preferences(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("dpo") => Effect::All(vec![
            Effect::Fact(Fact::Pairs, 1),
            Effect::Fact(Fact::Reference, 1),
        ]),
        Some("orpo" | "simpo" | "cpo") => Effect::Fact(Fact::Pairs, 1),
        _ => Effect::Decisive(PREFERENCES),
    })
}

/// Reads the name of a DeepSpeed configuration that ms-swift ships.
fn zero(node: &Node) -> Option<Effect> {
    let (stage, offload) = match node.text()? {
        "zero0" => (0, false),
        "zero1" => (1, false),
        "zero2" => (2, false),
        "zero3" => (3, false),
        "zero2_offload" => (2, true),
        "zero3_offload" => (3, true),
        _ => return None,
    };
    let mut effects = vec![
        Effect::Engine(Engine::DeepSpeed),
        Effect::Fact(Fact::ZeroStage, stage),
        Effect::Set("fsdp.async_reduce", "false".to_owned()),
    ];
    if offload {
        effects.push(Effect::Fact(Fact::OffloadOptimizer, 1));
        if stage == 3 {
            effects.push(Effect::Fact(Fact::OffloadParams, 1));
        }
    }
    Some(Effect::All(effects))
}

/// Reads the name of the FSDP configuration that ms-swift ships, `config/fsdp2.json`, or the
/// options of the Trainer.
fn fsdp2(node: &Node) -> Option<Effect> {
    if node.text()? != "fsdp2" {
        return fsdp::words(node).ok();
    }
    Some(Effect::All(vec![
        Effect::Engine(Engine::Fsdp),
        Effect::Fact(Fact::FsdpVersion, 2),
        Effect::Fact(Fact::Reshard, 1),
        set("fsdp.units", "block"),
        Effect::Set("train.recompute", quoted("full")),
    ]))
}
