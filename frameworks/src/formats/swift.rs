//! Commands of ms-swift: `swift sft`, which trains with transformers, and `megatron sft`, which
//! trains with Megatron-Core.
//!
//! Sources: `swift/arguments` and `swift/megatron/arguments` of ms-swift 4.

use super::deepspeed::DEEPSPEED;
use super::{fsdp, megatron, script, trainer};
use crate::convert::{
    ADAPTER, DATA, KERNELS, LAUNCH, LOGGING, PACKED, PREFERENCES, SAVING, VALUES, attention,
    double_quantization, rank_stabilized, saved_modules, set, targets,
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
            asides: &[],
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

/// Arguments with names of Python.
const KEYS: &[Key] = &[
    key("model", To::Model),
    with("tuner_type", tuner),
    with("train_type", tuner),
    with("sft_type", tuner),
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
    fact("NPROC_PER_NODE", Fact::GpusPerNode),
    fact("NNODES", Fact::Nodes),
    decisive("reward_model", PREFERENCES),
    decisive(
        "teacher_model",
        "distillation, with a second model, is not modeled",
    ),
    decisive("ref_model", crate::convert::REFERENCE),
    lost("freeze_parameters", FROZEN),
    lost("freeze_parameters_regex", FROZEN),
    lost("freeze_parameters_ratio", FROZEN),
    lost("trainable_parameters", FROZEN),
    lost("trainable_parameters_regex", FROZEN),
    lost("freeze_llm", FROZEN),
    lost(
        "target_parameters",
        "adapters of the experts' parameters are not predicted",
    ),
    lost(
        "padding_free",
        "sequences are predicted as padded to the same length",
    ),
    with("task_type", |node| {
        Ok(match node.text() {
            Some("causal_lm") => Effect::Aside("as predicted"),
            _ => Effect::Decisive("another head: --model names a folder whose config.json has it"),
        })
    }),
];

/// Arguments of the Trainer's engine alone.
const BY_TRAINER: &[Key] = &[
    with("attn_impl", attention),
    key("deepspeed", To::Preset(zero, &DEEPSPEED)),
    key("fsdp", To::Preset(fsdp2, &fsdp::FSDP)),
    fact("sequence_parallel_size", Fact::Context),
    fact("deepspeed_autotp_size", Fact::Tensor),
    lost("zero_hpz_partition_size", "ZeRO++ is not modeled"),
    lost("device_map", "the whole model is predicted on each GPU"),
    lost("experts_impl", "experts are predicted as grouped matmuls"),
    lost("use_galore", OPTIMIZER),
    with("optimizer", |_| Ok(Effect::Lost(OPTIMIZER))),
    fact("nproc_per_node", Fact::GpusPerNode),
    fact("nnodes", Fact::Nodes),
];

/// Arguments of Megatron-SWIFT, with dashes.
const BY_MEGATRON: &[Key] = &[
    key("model", To::Model),
    key("config", To::AnyFile),
    with("tuner-type", tuner),
    with("train-type", tuner),
    with("torch-dtype", dtype),
    integer("lora-rank", "lora.r"),
    number("lora-alpha", "lora.lora_alpha"),
    number("lora-dropout", "lora.lora_dropout"),
    with("target-modules", targets),
    with("target-regex", targets),
    with("modules-to-save", saved_modules),
    with("use-rslora", rank_stabilized),
    integer("max-length", "train.seq_len"),
    with("packing-length", packed),
    with("rlhf-type", |_| Ok(Effect::Decisive(PREFERENCES))),
    fact("NPROC-PER-NODE", Fact::GpusPerNode),
    fact("NNODES", Fact::Nodes),
    fact("virtual-pipeline-model-parallel-size", Fact::Pipeline),
    lost("freeze-parameters", FROZEN),
    lost("freeze-parameters-regex", FROZEN),
    lost("freeze-parameters-ratio", FROZEN),
    lost("trainable-parameters", FROZEN),
    lost("trainable-parameters-regex", FROZEN),
    lost("freeze-llm", FROZEN),
    lost(
        "padding-free",
        "sequences are predicted as padded to the same length",
    ),
];

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
            "label_names",
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
            "freeze_vit",
            "freeze_aligner",
            "vit_gradient_checkpointing",
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
            "beta",
            "rpo_alpha",
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
    (KERNELS, &["use_flash_attn"]),
];

const MEGATRON_ASIDES: &[(&str, &[&str])] = &[
    (
        DATA,
        &[
            "dataset",
            "val-dataset",
            "cached-dataset",
            "cached-val-dataset",
            "split-dataset-ratio",
            "load-from-cache-file",
            "dataset-num-proc",
            "dataset-shuffle",
            "streaming",
            "template",
            "system",
            "truncation-strategy",
            "use-chat-template",
            "max-pixels",
            "loss-scale",
            "lazy-tokenize",
            "packing-num-proc",
            "packing-strategy",
            "strict",
            "remove-unused-columns",
            "custom-dataset-info",
            "columns",
            "new-special-tokens",
            "enable-thinking",
            "add-non-thinking-prefix",
            "response-prefix",
            "padding-side",
            "agent-template",
            "load-data-args",
            "to-cached-dataset",
            "interleave-prob",
            "shuffle-buffer-size",
            "train-dataloader-shuffle",
        ],
    ),
    (
        SAVING,
        &[
            "adapters",
            "model-type",
            "model-revision",
            "model-author",
            "model-name",
            "save-safetensors",
            "merge-lora",
            "use-hf",
            "create-checkpoint-symlink",
            "add-version",
            "resume-only-model",
            "load-args",
            "external-plugins",
            "custom-register-path",
            "local-repo-path",
            "check-model",
            "ignore-args-error",
            "init-weights",
            "tuner-backend",
            "freeze-vit",
            "freeze-aligner",
            "mcore-model",
            "mcore-adapter",
            "output-dir",
            "save-steps",
            "save-total-limit",
            "save-strategy",
        ],
    ),
    (
        LOGGING,
        &[
            "swanlab-project",
            "swanlab-exp-name",
            "swanlab-mode",
            "eval-metric",
            "logprobs",
            "stream",
            "temperature",
            "max-new-tokens",
            "predict-with-generate",
            "loss-type",
            "infer-backend",
            "callbacks",
            "logging-steps",
            "report-to",
            "eval-steps",
            "num-train-epochs",
            "max-epochs",
        ],
    ),
    (
        VALUES,
        &[
            "lora-bias",
            "lora-dtype",
            "lorap-lr-ratio",
            "rope-scaling",
            "vit-lr",
            "aligner-lr",
            "problem-type",
            "quant-method",
        ],
    ),
    (
        LAUNCH,
        &[
            "CUDA-VISIBLE-DEVICES",
            "ddp-timeout",
            "ddp-backend",
            "local-rank",
            "dataloader-num-workers",
            "dataloader-pin-memory",
            "dataloader-prefetch-factor",
            "dataloader-persistent-workers",
        ],
    ),
    (PACKED, &["packing"]),
];

/// Reads what is trained.
fn tuner(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("full") => Effect::Fact(Fact::Adapter, 0),
        Some("lora" | "lora_llm") => Effect::Fact(Fact::Adapter, 1),
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
