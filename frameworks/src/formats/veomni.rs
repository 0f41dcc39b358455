//! VeOmni's training configurations: those with sections (`train.accelerator`), and the earlier
//! ones without (`train.data_parallel_mode`).
//!
//! Sources: `veomni/arguments/arguments_types.py` with its history, `veomni/trainer`,
//! `veomni/lora/config.py`, and `build_parallelize_model` of `veomni/distributed`.

use super::{llm_foundry, script};
use crate::convert::{
    DATA, DISTILLATION, EVALUATION, KERNELS, LAUNCH, LOGGING, MUON, PACKED, REFERENCE, SAVING,
    UNMODELED, VALUES, adapter_alphas, adapter_ranks, clip, excluded_modules, full_recompute,
    fused_loss, if_true, rank_stabilized, ranks, reentrant, saved_modules, set, targets,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Format, Key, Table, To, choice, decisive, fact, integer,
    key, lost, number, quoted, with,
};
use crate::tree::Node;

const NAME: &str = "VeOmni";

pub(crate) static VEOMNI: Format = FORMAT;

/// A command that starts a trainer, with options such as `--train.micro_batch_size 2`.
pub(crate) static VEOMNI_SCRIPT: Format = Format {
    tables: &[
        ROOT,
        RUN,
        SHARDING,
        UPDATES,
        SIZES,
        WITHOUT_SECTIONS,
        MODEL_RUN,
        MODEL_SHARDING,
        MODEL_UPDATES,
        script::LAUNCHER,
        script::ENVIRONMENT,
    ],
    ..FORMAT
};

const FORMAT: Format = Format {
    name: NAME,
    tables: &[
        ROOT,
        RUN,
        SHARDING,
        UPDATES,
        SIZES,
        WITHOUT_SECTIONS,
        MODEL_RUN,
        MODEL_SHARDING,
        MODEL_UPDATES,
    ],
    engine: Some(Engine::Fsdp),
    accelerated: false,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

const DEFAULTS: &[Fallback] = &[
    Fallback {
        key: "train.clip_norm",
        value: "1.0",
        why: WHY,
    },
    Fallback {
        key: "train.betas",
        value: "[0.9, 0.95]",
        why: WHY,
    },
    Fallback {
        key: "train.weight_decay",
        value: "0.0",
        why: WHY,
    },
    Fallback {
        key: "train.sync_each_step",
        value: "true",
        why: "VeOmni reads the loss in each step",
    },
    Fallback {
        key: "model.attn_implementation",
        value: "\"flash_attention_2\"",
        why: WHY,
    },
    Fallback {
        key: "fsdp.expandable_segments",
        value: "false",
        why: "PyTorch's default",
    },
    Fallback {
        key: "moe.dispatcher",
        value: "\"all_to_all\"",
        why: "VeOmni sends each choice of an expert with an all-to-all",
    },
];

const WHY: &str = "VeOmni's default";

const ROOT: Table = table("", KEYS, ASIDES);
const RUN: Table = table("train", KNOBS, KNOB_ASIDES);
const SHARDING: Table = table("train.accelerator", ACCELERATOR, ACCELERATOR_ASIDES);
const UPDATES: Table = table("train.optimizer", OPTIMIZER, OPTIMIZER_ASIDES);
const SIZES: Table = table("model.model_config", llm_foundry::OVERRIDES, &[]);
const WITHOUT_SECTIONS: Table = table("train", FLAT, FLAT_ASIDES);
// The branch `omniv2` has these sections in `model`.
const MODEL_RUN: Table = table("model.accelerator", KNOBS, KNOB_ASIDES);
const MODEL_SHARDING: Table = table("model.accelerator", ACCELERATOR, ACCELERATOR_ASIDES);
const MODEL_UPDATES: Table = table("model.optimizer", OPTIMIZER, OPTIMIZER_ASIDES);

const fn table(
    under: &'static str,
    keys: &'static [Key],
    asides: &'static [(&'static str, &'static [&'static str])],
) -> Table {
    Table {
        under,
        prefix: "",
        keys,
        asides,
    }
}

const DIFFUSION: &str = "diffusion models are not modeled";
const COMPOSED: &str = "models composed of encoders, a foundation and decoders are not modeled";
const FROZEN: &str = "what is frozen is predicted as trained: name it with --set fsdp.frozen";
const EXPERT_KERNELS: &str = "experts are predicted as grouped matmuls";
const EXPERT_ADAPTERS: &str = "adapters of the experts' parameters are not predicted";
const OTHER_KERNELS: &str =
    "a choice of kernels: they are predicted with the rates of the hardware profile";

const KEYS: &[Key] = &[
    key("model.model_path", To::Model),
    with("model.config_path", |node| {
        let name = node.text();
        let name = name.ok_or_else(|| node.expected("the path of a config.json"))?;
        Ok(Effect::Config(name.to_owned()))
    }),
    lost("model.model_config", llm_foundry::CONFIG_JSON),
    lost(
        "model.basic_modules",
        "units are predicted as one unit per block",
    ),
    with("model.attn_implementation", attention),
    with("model.moe_implementation", experts),
    with("model.ops_implementation.attn_implementation", attention),
    with("model.ops_implementation.moe_implementation", experts),
    with(
        "model.ops_implementation.cross_entropy_loss_implementation",
        |node| {
            Ok(match node.full().as_str() {
                "liger_kernel" => fused_loss(),
                "chunk_loss" | "npu" => set("train.loss", "chunked"),
                "eager" => set("train.loss", "materialized"),
                _ => return Err(node.expected("liger_kernel, chunk_loss, npu or eager")),
            })
        },
    ),
    with("model.ops_implementation.rms_norm_implementation", |node| {
        kernels(node, Fact::FusedNorms)
    }),
    with(
        "model.ops_implementation.rotary_pos_emb_implementation",
        |node| kernels(node, Fact::FusedRotary),
    ),
    with(
        "model.ops_implementation.swiglu_mlp_implementation",
        |node| kernels(node, Fact::FusedGates),
    ),
    with("model.lora_config.rank", adapter_rank),
    with("model.lora_config.r", adapter_rank),
    number("model.lora_config.alpha", "lora.lora_alpha"),
    number("model.lora_config.lora_alpha", "lora.lora_alpha"),
    number("model.lora_config.lora_dropout", "lora.lora_dropout"),
    with("model.lora_config.lora_modules", adapted),
    with("model.lora_config.target_modules", adapted),
    with("model.lora_config.exclude_modules", excluded_modules),
    with("model.lora_config.use_rslora", rank_stabilized),
    with("model.lora_config.rank_pattern", adapter_ranks),
    with("model.lora_config.alpha_pattern", adapter_alphas),
    with("model.lora_config.modules_to_save", saved_modules),
    lost("model.lora_config.target_parameters", EXPERT_ADAPTERS),
    with("model.lora_config.bias", |node| {
        Ok(match node.full().as_str() {
            "none" => Effect::Aside("as predicted"),
            _ => Effect::Lost("biases are predicted as frozen"),
        })
    }),
    decisive("model.encoders", COMPOSED),
    decisive("model.decoders", COMPOSED),
    decisive("model.foundation", COMPOSED),
    decisive("model.teacher_model_path", DISTILLATION),
    decisive("model.condition_model_path", DIFFUSION),
    decisive("model.condition_model_cfg", DIFFUSION),
    decisive("model.pretrained_text_encoder_path", DIFFUSION),
    decisive("model.pretrained_text_encoder_2_path", DIFFUSION),
    decisive("model.pretrained_vae_path", DIFFUSION),
    integer("data.max_seq_len", "train.seq_len"),
    with("data.data_type", |node| {
        Ok(match node.full().as_str() {
            "plaintext" | "conversation" => Effect::Aside(DATA),
            "diffusion" => Effect::Decisive(DIFFUSION),
            "classification" => Effect::Decisive(
                "a classification head: --model names a folder whose config.json has it",
            ),
            "dpo" => Effect::Decisive(REFERENCE),
            _ => {
                let names = "plaintext, conversation, classification, dpo or diffusion";
                return Err(node.expected(names));
            }
        })
    }),
    integer("train.micro_batch_size", "train.micro_batch"),
    fact("train.global_batch_size", Fact::GlobalBatch),
    with("train.dyn_bsz_count_mode", |node| {
        Ok(match node.full().as_str() {
            "total" => Effect::Aside("the default"),
            "effective" => Effect::Lost(
                "micro-batches are predicted with micro_batch_size times max_seq_len tokens",
            ),
            _ => return Err(node.expected("total or effective")),
        })
    }),
    with("train.enable_mixed_precision", mixed_precision),
    with("train.enable_full_determinism", |node| {
        if_true(
            node,
            Effect::Set("precision.deterministic", "true".to_owned()),
        )
    }),
    lost(
        "train.enable_batch_invariant_mode",
        "kernels are predicted as PyTorch's",
    ),
    decisive("train.training_task", DIFFUSION),
    lost("train.freeze_vit", FROZEN),
    lost("train.freeze_audio_tower", FROZEN),
    lost("train.freeze_encoder", FROZEN),
    lost("train.freeze_encoder_all", FROZEN),
    lost("train.freeze_decoder", FROZEN),
    lost("train.freeze_foundation", FROZEN),
];

const ASIDES: &[(&str, &[&str])] = &[
    (
        SAVING,
        &[
            "model.safetensor_idx_path",
            "model.tokenizer_path",
            "model.tokenizer_1_path",
            "model.tokenizer_2_path",
            "model.lora_config.lora_adapter",
            "model.lora_config.is_trainable",
            "model.lora_config.task_type",
            "model.lora_config.base_model_name_or_path",
            "model.force_use_huggingface",
            "train.checkpoint",
            "train.save_initial_model",
        ],
    ),
    ("initial values", &["model.lora_config.init_lora_weights"]),
    (
        "of adapters of the experts' parameters",
        &["model.lora_config.share_expert_lora"],
    ),
    (
        "VeOmni does not read it: lora_dropout is the key that it reads",
        &["model.lora_config.dropout"],
    ),
    (
        "of VeOmni's trainers of diffusion models and of composed models",
        &[
            "model.lora_rank",
            "model.lora_alpha",
            "model.lora_target_modules",
            "model.lora_target_modules_support",
            "model.input_encoder",
            "model.output_encoder",
            "model.encode_target",
            "model.teacher_model_kwargs",
            "model.model_kwargs",
            "data.height",
            "data.width",
            "data.datasets_repeat",
            "data.generation_ratio",
            "train.ops_to_save",
        ],
    ),
    (
        OTHER_KERNELS,
        &[
            "model.ops_implementation.rotary_pos_emb_vision_implementation",
            "model.ops_implementation.load_balancing_loss_implementation",
            "model.ops_implementation.rms_norm_gated_implementation",
            "model.ops_implementation.causal_conv1d_implementation",
            "model.ops_implementation.chunk_gated_delta_rule_implementation",
            "model.ops_implementation.dsa_indexer_implementation",
            "model.ops_implementation.dsa_indexer_backend",
            "model.ops_implementation.dsa_attention_implementation",
            "model.ops_implementation.dsa_attention_backend",
            "model.ops_implementation.mhc_implementation",
            "model.ops_implementation.mhc_backend",
        ],
    ),
    (
        DATA,
        &[
            "model.encoder_data_balance",
            "model.encoder_data_balance_sorting_algo",
            "data.train_path",
            "data.train_size",
            "data.train_sample",
            "data.datasets_type",
            "data.multisource_datasets_type",
            "data.enable_multisource",
            "data.source_name",
            "data.data_name",
            "data.data_tag",
            "data.dyn_bsz_buffer_size",
            "data.text_keys",
            "data.image_keys",
            "data.chat_template",
            "data.silent_exception",
            "data.mm_configs",
            "data.max_image_nums",
            "data.max_pixels",
            "data.max_pixel_size",
            "data.scale_factor",
            "data.dataloader",
            "data.dataloader_type",
            "data.num_workers",
            "data.prefetch_factor",
            "data.drop_last",
            "data.drop_resume_buffer",
            "data.pin_memory",
            "data.shuffle_shard_nums",
            "data.split_nums",
            "data.predownload_factor",
            "train.num_train_epochs",
            "train.max_steps",
            "train.dyn_bsz_runtime",
            "train.dyn_bsz_buffer_size",
            "train.dyn_bsz_physical_overflow_ratio",
        ],
    ),
    (
        PACKED,
        &[
            "train.dyn_bsz",
            "train.pad_to_length",
            "train.rmpad",
            "train.rmpad_with_pos_ids",
            "train.dyn_bsz_margin",
            "train.pad_packed_input",
            "train.pad_packed_to_length",
        ],
    ),
    (
        "steps after the warm-up of the batch size are predicted",
        &["train.bsz_warmup_ratio", "train.bsz_warmup_init_mbtoken"],
    ),
    (
        "not in most steps",
        &["train.empty_cache_steps", "train.gc_steps"],
    ),
    (
        "VeOmni reads the loss after each micro-batch, and waits for it",
        &["train.sync_each_train_step"],
    ),
    (
        EVALUATION,
        &["data.eval_path", "train.eval_steps", "train.eval_epochs"],
    ),
    (
        LOGGING,
        &[
            "train.wandb",
            "train.profile",
            "train.channel_loss",
            "train.moe_load_balance_monitor_interval",
        ],
    ),
    (VALUES, &["train.seed", "train.vit_lr", "dpo_config"]),
    (LAUNCH, &["train.allow_cuda_launch_blocking"]),
];

/// Options of recompute and compilation.
const KNOBS: &[Key] = &[
    with("gradient_checkpointing.enable", full_recompute),
    with("gradient_checkpointing.enable_reentrant", reentrant),
    with("gradient_checkpointing.early_stop", |node| {
        Ok(if node.truth()? {
            Effect::Aside("the default")
        } else {
            Effect::Lost("recompute is predicted to stop early")
        })
    }),
    with("torch_compile.enable", |node| {
        Ok(Effect::Fact(Fact::CompiledBlocks, node.truth()?.into()))
    }),
    with("torch_compile.backend", |node| {
        Ok(match node.full().as_str() {
            "inductor" => Effect::Aside("the default"),
            _ => Effect::Lost("compiled code is predicted as Inductor's"),
        })
    }),
    with("torch_compile.mode", |node| {
        Ok(match node.full().as_str() {
            "default" => Effect::Aside("the default"),
            _ => Effect::Lost("compiled code is predicted without CUDA graphs and autotuning"),
        })
    }),
    lost(
        "torch_compile.dynamic",
        "code is predicted as compiled for the given shapes",
    ),
    lost(
        "chunk_mbs_config.enable",
        "layers are predicted on all tokens of a micro-batch at once",
    ),
];

const KNOB_ASIDES: &[(&str, &[&str])] = &[
    (
        "part of an option that is listed",
        &["chunk_mbs_config.chunk_mbs", "torch_compile.fullgraph"],
    ),
    (LOGGING, &["gradient_checkpointing.debug"]),
    (
        SAVING,
        &[
            "init_device",
            "broadcast_model_weights_from_rank0",
            "ep_sharded_stream_load",
        ],
    ),
];

/// Options of parallelism and sharding.
const ACCELERATOR: &[Key] = &[
    with("dp_replicate_size", |node| ranks(node, Fact::DpReplicate)),
    with("dp_shard_size", |node| ranks(node, Fact::DpShard)),
    fact("tp_size", Fact::Tensor),
    fact("pp_size", Fact::Pipeline),
    fact("cp_size", Fact::Context),
    fact("ulysses_size", Fact::Ulysses),
    fact("ep_size", Fact::Expert),
    lost("ep_outside", OUTSIDE),
    decisive(
        "extra_parallel_sizes",
        "parallelism of other modules than experts is not modeled",
    ),
    with("fsdp_config.fsdp_mode", mode),
    with("fsdp_config.reshard_after_forward", |node| {
        Ok(Effect::Fact(Fact::Reshard, node.truth()?.into()))
    }),
    with("fsdp_config.reshard_after_backward", reshard_after_backward),
    with("fsdp_config.full_shard", full_shard),
    with("fsdp_config.forward_prefetch", prefetch),
    with("fsdp_config.offload", offload),
    with("fsdp_config.mixed_precision.enable", mixed_precision),
    with("fsdp_config.mixed_precision.param_dtype", |node| {
        Ok(Effect::Mixed(Dtype::of(node)?))
    }),
    with("fsdp_config.mixed_precision.reduce_dtype", |node| {
        Ok(set("precision.reduce_dtype", Dtype::of(node)?.name()))
    }),
    with("fsdp_config.mixed_precision.output_dtype", |node| {
        Dtype::of(node)?;
        Ok(Effect::Lost(
            "outputs of blocks are predicted in the type of computation",
        ))
    }),
    with("offload_config.enable_activation", offloaded_activations),
    lost("offload_config.activation_gpu_limit", GPU_LIMIT),
];

const ACCELERATOR_ASIDES: &[(&str, &[&str])] = &[
    ("part of Ulysses sequence parallelism", &["enable_async"]),
    (
        "part of extra_parallel_sizes",
        &["extra_parallel_names", "extra_parallel_placement_innermost"],
    ),
    (
        "inputs of blocks have the type of computation in any case",
        &["fsdp_config.mixed_precision.cast_forward_inputs"],
    ),
    (
        "FSDP1 only, without effect on a prediction",
        &["fsdp_config.mixed_precision.buffer_dtype"],
    ),
    (SAVING, &["fsdp_config.max_load_broadcast_size"]),
    (
        "VeOmni does not read this section: offload_config is the one that it reads",
        &["offload"],
    ),
];

const OPTIMIZER: &[Key] = &[
    with("type", optimizer),
    number("lr", "train.lr"),
    number("weight_decay", "train.weight_decay"),
    with("max_grad_norm", clip),
];

const OPTIMIZER_ASIDES: &[(&str, &[&str])] = &[
    (
        VALUES,
        &[
            "lr_min",
            "lr_start",
            "lr_warmup_ratio",
            "lr_decay_style",
            "lr_decay_ratio",
            "no_decay_modules",
            "no_decay_params",
        ],
    ),
    (
        "of Muon, which is not predicted",
        &[
            "muon_lr",
            "muon_momentum",
            "muon_nesterov",
            "muon_weight_decay",
            "muon_ns_steps",
            "muon_ns_coefficients",
            "muon_eps",
            "muon_adjust_lr_fn",
            "muon_head_group_size",
            "muon_head_split_modules",
            "muon_expert_zero_comm",
            "muon_ns_implementation",
            "muon_gram_ns_reset_iterations",
        ],
    ),
];

/// Arguments of versions before March 2026, without sections. Next to sections, VeOmni ignores
/// them.
const FLAT: &[Key] = &[
    with("data_parallel_mode", mode),
    with("data_parallel_replicate_size", |node| {
        ranks(node, Fact::DpReplicate)
    }),
    with("data_parallel_shard_size", |node| {
        ranks(node, Fact::DpShard)
    }),
    fact("tensor_parallel_size", Fact::Tensor),
    fact("pipeline_parallel_size", Fact::Pipeline),
    fact("context_parallel_size", Fact::Context),
    fact("ulysses_parallel_size", Fact::Ulysses),
    fact("expert_parallel_size", Fact::Expert),
    lost("ep_outside", OUTSIDE),
    with("enable_gradient_checkpointing", full_recompute),
    with("enable_reentrant", reentrant),
    with("enable_full_shard", full_shard),
    with("enable_reshard_after_forward", |node| {
        Ok(Effect::Fact(Fact::Reshard, node.truth()?.into()))
    }),
    with("enable_reshard_after_backward", reshard_after_backward),
    with("enable_forward_prefetch", prefetch),
    with("enable_fsdp_offload", offload),
    with("enable_activation_offload", offloaded_activations),
    lost("activation_gpu_limit", GPU_LIMIT),
    choice("optimizer", optimizer),
    number("lr", "train.lr"),
    number("weight_decay", "train.weight_decay"),
    with("max_grad_norm", clip),
    decisive(
        "use_doptim",
        "veScale's optimizer, an option of VeOmni's first version, is not modeled",
    ),
    with("train_architecture", |node| {
        Ok(match node.full().as_str() {
            "full" => Effect::Aside("the default"),
            "lora" => Effect::Decisive(
                "in versions without sections, adapters are those of diffusion models, which are not modeled",
            ),
            _ => return Err(node.expected("full or lora")),
        })
    }),
];

const FLAT_ASIDES: &[(&str, &[&str])] = &[
    ("part of Ulysses sequence parallelism", &["async_enabled"]),
    (
        "VeOmni does not read it",
        &["enable_compile", "enable_manual_eager", "enable_rank0_init"],
    ),
    (
        SAVING,
        &[
            "output_dir",
            "ckpt_manager",
            "load_checkpoint_path",
            "save_async",
            "save_steps",
            "save_epochs",
            "save_hf_weights",
            "hf_save_steps",
            "hf_save_epochs",
        ],
    ),
    (
        LOGGING,
        &[
            "debug_gradient_checkpointing",
            "use_wandb",
            "wandb_project",
            "wandb_name",
            "wandb_id",
            "enable_profiling",
            "profile_start_step",
            "profile_end_step",
            "profile_trace_dir",
            "profile_record_shapes",
            "profile_profile_memory",
            "profile_with_stack",
            "profile_rank0_only",
        ],
    ),
    (
        VALUES,
        &[
            "lr_min",
            "lr_start",
            "lr_warmup_ratio",
            "lr_decay_style",
            "lr_decay_ratio",
            "no_decay_modules",
            "no_decay_params",
        ],
    ),
];

const OUTSIDE: &str = "expert-parallel ranks are predicted as adjacent";
const GPU_LIMIT: &str = "all saved activations are predicted on the host";

/// Sections that versions without them do not have.
const SECTIONS: [&str; 6] = [
    "train.accelerator.",
    "train.optimizer.",
    "train.gradient_checkpointing.",
    "train.checkpoint.",
    "model.accelerator.",
    "model.optimizer.",
];

/// Returns whether a key is in a section that versions without sections do not have.
pub(crate) fn veomni_section(key: &str) -> bool {
    SECTIONS.iter().any(|section| key.starts_with(section))
}

/// Returns whether a key decides time or memory in versions without sections, and has another path
/// in those with sections.
pub(crate) fn veomni_flat(key: &str) -> bool {
    let name = key.strip_prefix("train.");
    name.is_some_and(|name| FLAT.iter().any(|k| k.name == name))
}

/// Reads how the model is distributed.
fn mode(node: &Node) -> Result<Effect, String> {
    let fsdp = |version| {
        Effect::All(vec![
            Effect::Engine(Engine::Fsdp),
            Effect::Fact(Fact::FsdpVersion, version),
        ])
    };
    Ok(match node.full().as_str() {
        "fsdp2" => fsdp(2),
        "fsdp1" => fsdp(1),
        "ddp" => Effect::Engine(Engine::Ddp),
        "fsdp2-vescale" => Effect::Decisive("veScale's FSDP is not modeled"),
        _ => return Err(node.expected("fsdp2, fsdp1 or ddp")),
    })
}

fn mixed_precision(node: &Node) -> Result<Effect, String> {
    Ok(Effect::Fact(Fact::MixedPrecision, node.truth()?.into()))
}

fn full_shard(node: &Node) -> Result<Effect, String> {
    Ok(Effect::Fact(Fact::FullShard, node.truth()?.into()))
}

fn prefetch(node: &Node) -> Result<Effect, String> {
    Ok(Effect::Fact(Fact::ExplicitPrefetch, node.truth()?.into()))
}

fn offload(node: &Node) -> Result<Effect, String> {
    Ok(Effect::Fact(Fact::OffloadAll, node.truth()?.into()))
}

fn reshard_after_backward(node: &Node) -> Result<Effect, String> {
    Ok(if node.truth()? {
        Effect::Aside("the default")
    } else {
        Effect::Set("fsdp.reshard_after_backward", "false".to_owned())
    })
}

/// Copies saved activations to pageable memory, for which the host and the GPU wait.
fn offloaded_activations(node: &Node) -> Result<Effect, String> {
    let why = "the GPU waits for copies to pageable memory; they are predicted as copies to pinned memory on a separate stream";
    if_true(
        node,
        Effect::Assume("train.activation_offload", "true".to_owned(), why),
    )
}

/// Reads the attention implementation, which VeOmni wraps for sequence parallelism.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn attention(node: &Node) -> Result<Effect, String> {
    const KEY: &str = "model.attn_implementation";
    let name = node.full();
    let name = name.strip_prefix("veomni_").unwrap_or(&name);
    let name = name.strip_suffix("_with_sp").unwrap_or(name);
    Ok(match name {
        "eager" | "sdpa" | "flash_attention_2" => set(KEY, name),
        "native-sparse" => Effect::Lost("attention is predicted as dense"),
        _ => Effect::Aside(KERNELS),
    })
}

/// Reads the kernels of experts.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn experts(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().as_str() {
        "eager" => Effect::Lost(EXPERT_KERNELS),
        _ => Effect::Aside("as predicted"),
    })
}

/// Reads whether an operation runs in one fused kernel or in the kernels of transformers.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn kernels(node: &Node, fact: Fact) -> Result<Effect, String> {
    let fused = node.full() != "eager";
    Ok(Effect::Fact(fact, fused.into()))
}

fn adapter_rank(node: &Node) -> Result<Effect, String> {
    Ok(Effect::All(vec![
        Effect::Fact(Fact::Adapter, 1),
        Effect::Set("lora.r", node.count()?.to_string()),
    ]))
}

fn adapted(node: &Node) -> Result<Effect, String> {
    Ok(Effect::All(vec![
        Effect::Fact(Fact::Adapter, 1),
        targets(node)?,
    ]))
}

/// Reads the optimizer.
fn optimizer(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().as_str() {
        "adamw" => set("train.optimizer", "adamw"),
        "anyprecision_adamw" => Effect::Assume("train.optimizer", quoted("adamw"), UNMODELED),
        "muon" => Effect::Assume("train.optimizer", quoted("adamw"), MUON),
        _ => return Err(node.expected("adamw, anyprecision_adamw or muon")),
    })
}
