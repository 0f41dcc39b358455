//! Arguments of the Hugging Face Trainer and of TRL, as JSON or YAML.

use super::deepspeed::DEEPSPEED;
use super::fsdp::{self, FSDP};
use crate::convert::{
    DATA, DISTILLATION, EVALUATION, LAUNCH, LOGGING, NF4, PREFERENCES, SAVING, STORAGE, VALUES,
    adapter, attention, clip, compiled_regions, decay_of_matrices, decomposed, double_quantization,
    eight_bits, flash_attention, four_bits, full_determinism, full_recompute, liger_kernels,
    mixed_bf16, mixed_f16, offloaded_activations, optimizer, rank_stabilized, reentrant, replicas,
    saved_modules, schedule, set, shard_ranks, synchronized_micro_batches, targets, unfused_loss,
    warmup, weights,
};
use crate::table::{
    Effect, Engine, Fact, Fallback, Format, Key, Table, To, decisive, fact, integer, key, lost,
    number, quoted, with,
};
use crate::tree::Node;

/// Name of the format.
pub(super) const NAME: &str = "the Hugging Face Trainer";

pub(crate) static TRAINER: Format = Format {
    name: NAME,
    tables: &[
        TABLE,
        TRL_TABLE,
        Table {
            under: "parallelism_config",
            prefix: "",
            keys: &[
                with("dp_shard_size", shard_ranks),
                with("dp_replicate_size", replicas),
                fact("tp_size", Fact::Tensor),
                fact("cp_size", Fact::Context),
                fact("sp_size", Fact::Context),
            ],
            asides: &[],
        },
    ],
    engine: Some(Engine::Ddp),
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

/// Arguments that LLaMA-Factory shares.
pub(super) const TABLE: Table = Table {
    under: "",
    prefix: "",
    keys: KEYS,
    asides: ASIDES,
};

/// The arguments of TRL.
pub(super) const TRL_TABLE: Table = Table {
    under: "",
    prefix: "",
    keys: TRL,
    asides: TRL_ASIDES,
};

/// Defaults of the Trainer.
pub(super) const DEFAULTS: &[Fallback] = &[MICRO_BATCH, CLIP_NORM, fsdp::TORCH_SEGMENTS];

pub(super) const MICRO_BATCH: Fallback = Fallback {
    key: "train.micro_batch",
    value: "8",
    why: "the Trainer's default",
};

pub(super) const CLIP_NORM: Fallback = Fallback {
    key: "train.clip_norm",
    value: "1.0",
    why: "the Trainer's default",
};

/// Why the size of DDP's buckets is not used.
pub(super) const BUCKETS: &str =
    "gradients are predicted as reduced block by block, whatever the size of buckets";

/// Keys of Accelerate's `GradientAccumulationPlugin`, which the Trainer passes on.
pub(super) const SYNC_EACH_BATCH: &str =
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch";
pub(super) const ACCUMULATED: &str = "accelerator_config.gradient_accumulation_kwargs.num_steps";

const KEYS: &[Key] = &[
    key("model_name_or_path", To::Model),
    integer("per_device_train_batch_size", "train.micro_batch"),
    integer("gradient_accumulation_steps", "train.grad_accum"),
    with("max_grad_norm", clip),
    number("learning_rate", "train.lr"),
    with("weight_decay", decay_of_matrices),
    number("adam_epsilon", "train.eps"),
    with("warmup_steps", warmup),
    with("lr_scheduler_type", schedule),
    with("optim", optimizer),
    with("bf16", mixed_bf16),
    with("fp16", mixed_f16),
    with("gradient_checkpointing", full_recompute),
    // An argument of scripts, which they pass on.
    with("use_gradient_checkpointing", full_recompute),
    with("gradient_checkpointing_kwargs.use_reentrant", reentrant),
    with("activation_checkpointing", full_recompute),
    with("torch_compile", compiled_regions),
    with("use_liger_kernel", liger_kernels),
    with(
        "liger_kernel_config.fused_linear_cross_entropy",
        unfused_loss,
    ),
    with(SYNC_EACH_BATCH, synchronized_micro_batches),
    integer(ACCUMULATED, "train.grad_accum"),
    with("full_determinism", full_determinism),
    with("torch_dtype", weights),
    with("fsdp", fsdp::words),
    key("fsdp_config", To::File(&FSDP)),
    with("fsdp_transformer_layer_cls_to_wrap", |_| {
        Ok(crate::convert::set("fsdp.units", "block"))
    }),
    lost(
        "fsdp_min_num_params",
        "units by size are predicted as one unit per block",
    ),
    key("deepspeed", To::File(&DEEPSPEED)),
    lost(
        "torch_empty_cache_steps",
        "the allocator's cache is predicted as kept",
    ),
    lost("auto_find_batch_size", "the given batch size is predicted"),
    lost("ddp_bucket_cap_mb", BUCKETS),
];

const ASIDES: &[(&str, &[&str])] = &[
    (
        SAVING,
        &[
            "output_dir",
            "overwrite_output_dir",
            "save_only_model",
            "save_strategy",
            "save_steps",
            "save_on_each_node",
            "save_total_limit",
            "save_safetensors",
            "enable_jit_checkpoint",
            "push_to_hub",
            "hub_token",
            "hub_private_repo",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
            "hub_model_revision",
            "overwrite_hub_revision",
            "push_to_hub_revision",
            "checkpointing_steps",
            "keep_last_n_checkpoints",
            "load_best_model_at_end",
            "resume_from_checkpoint",
            "ignore_data_skip",
            "restore_callback_states_from_checkpoint",
            "model_revision",
            "trust_remote_code",
            "cache_dir",
            "use_cache",
        ],
    ),
    (
        LOGGING,
        &[
            "logging_strategy",
            "logging_steps",
            "logging_first_step",
            "logging_dir",
            "log_on_each_node",
            "logging_nan_inf_filter",
            "include_num_input_tokens_seen",
            "include_tokens_per_second",
            "log_level",
            "log_level_replica",
            "disable_tqdm",
            "report_to",
            "run_name",
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "wandb_entity",
            "wandb_project",
            "wandb_run_group",
            "with_tracking",
            "callbacks",
            "benchmarks",
            "skip_memory_metrics",
            "debug",
        ],
    ),
    (
        EVALUATION,
        &[
            "do_train",
            "do_eval",
            "do_predict",
            "eval_strategy",
            "evaluation_strategy",
            "eval_steps",
            "eval_delay",
            "per_device_eval_batch_size",
            "prediction_loss_only",
            "eval_on_start",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
            "include_for_metrics",
            "batch_eval_metrics",
            "metric_for_best_model",
            "greater_is_better",
            "bf16_full_eval",
            "fp16_full_eval",
        ],
    ),
    (
        DATA,
        &[
            "num_train_epochs",
            "max_steps",
            "data_seed",
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "remove_unused_columns",
            "label_names",
            "train_sampling_strategy",
            "group_by_length",
            "length_column_name",
            "streaming",
        ],
    ),
    (
        VALUES,
        &[
            "seed",
            "adam_beta1",
            "adam_beta2",
            "optim_args",
            "optim_target_modules",
            "lr_scheduler_kwargs",
            "warmup_ratio",
            "label_smoothing_factor",
            "average_tokens_across_devices",
            "neftune_noise_alpha",
            "tf32",
            "half_precision_backend",
        ],
    ),
    (
        "how recomputation is done; its result is the same",
        &[
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
        ],
    ),
    (
        "compiled code is predicted with Inductor's defaults",
        &[
            "torch_compile_backend",
            "torch_compile_mode",
            "liger_kernel_config",
        ],
    ),
    (
        LAUNCH,
        &[
            "local_rank",
            "accelerator_config",
            "ddp_find_unused_parameters",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ddp_timeout",
            "use_cpu",
            "no_cuda",
        ],
    ),
];

/// Arguments of TRL's trainers and scripts.
const TRL: &[Key] = &[
    integer("max_seq_length", "train.seq_len"),
    integer("max_length", "train.seq_len"),
    with("dtype", weights),
    with("use_peft", adapter),
    integer("lora_r", "lora.r"),
    number("lora_alpha", "lora.lora_alpha"),
    with("lora_target_modules", targets),
    with("target_modules", targets),
    with("use_rslora", rank_stabilized),
    number("lora_dropout", "lora.lora_dropout"),
    with("attn_implementation", attention),
    with("use_flash_attention_2", flash_attention),
    with("use_dora", decomposed),
    with("lora_modules_to_save", saved_modules),
    with("load_in_4bit", four_bits),
    with("use_bnb_nested_quant", double_quantization),
    with("bnb_4bit_use_double_quant", double_quantization),
    with("load_in_8bit", eight_bits),
    with("loss_type", loss_type),
    // Arguments of `from_pretrained`.
    with("model_init_kwargs.attn_implementation", attention),
    with("model_init_kwargs.dtype", weights),
    with("model_init_kwargs.torch_dtype", weights),
    with("model_init_kwargs.load_in_4bit", four_bits),
    with("model_init_kwargs.load_in_8bit", eight_bits),
    with(
        "model_init_kwargs.quantization_config.load_in_4bit",
        four_bits,
    ),
    with(
        "model_init_kwargs.quantization_config.load_in_8bit",
        eight_bits,
    ),
    with(
        "model_init_kwargs.quantization_config.bnb_4bit_use_double_quant",
        double_quantization,
    ),
    lost(
        "model_init_kwargs.use_kernels",
        "kernels of the Hub are predicted as those of transformers",
    ),
    decisive("teacher_model", DISTILLATION),
    decisive("teacher_model_name_or_path", DISTILLATION),
    decisive("beta", PREFERENCES),
    decisive("num_generations", PREFERENCES),
    decisive("reward_funcs", PREFERENCES),
    decisive("reward_model_path", PREFERENCES),
    decisive("center_rewards_coefficient", PREFERENCES),
    decisive("desirable_weight", PREFERENCES),
    decisive("precompute_ref_log_probs", PREFERENCES),
    decisive("max_completion_length", PREFERENCES),
    decisive("num_samples_per_prompt_rollout", PREFERENCES),
    decisive("total_episodes", PREFERENCES),
    decisive("apply_verifiable_reward", PREFERENCES),
    lost(
        "lora_target_parameters",
        "adapters of the experts' parameters are not predicted",
    ),
    lost(
        "cast_lm_head_to_fp32",
        "the head is predicted in the type of computation",
    ),
    // Arguments of open-instruct.
    with("use_lora", adapter),
    with("use_qlora", |node| {
        crate::convert::if_true(
            node,
            Effect::All(vec![
                Effect::Fact(Fact::Adapter, 1),
                Effect::Fact(Fact::FourBits, 2),
            ]),
        )
    }),
    integer("lora_rank", "lora.r"),
    with("use_flash_attn", flash_attention),
    with("activation_offloading", offloaded_activations),
    with("packing", |node| {
        Ok(Effect::Aside(if node.truth()? {
            "sequences are predicted as full"
        } else {
            "sequences are predicted as full, so shorter ones need less"
        }))
    }),
];

/// Reads the loss of TRL's `SFTTrainer`. Other trainers have losses of the same key that do not
/// decide how logits are computed.
fn loss_type(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("chunked_nll") => chunked_nll(),
        Some("nll" | "dft") => Effect::Assume("train.loss", quoted("materialized"), UNCHUNKED),
        _ => Effect::Aside(VALUES),
    })
}

/// Computes the loss as TRL's `chunked_nll` does: by `torch.utils.checkpoint` over chunks of
/// `_CHUNKED_LM_HEAD_CHUNK_SIZE` tokens.
pub(crate) fn chunked_nll() -> Effect {
    Effect::All(vec![
        set("train.loss", "checkpointed_chunks"),
        Effect::Set("train.loss_chunk_tokens", "256".to_owned()),
    ])
}

/// Why the losses of TRL that need all logits may need less memory.
const UNCHUNKED: &str = "as in TRL up to 1.14; later versions compute logits in tiles, as predicted for loss_type: chunked_nll";

const TRL_ASIDES: &[(&str, &[&str])] = &[
    ("part of an adapter", &["lora_task_type"]),
    (
        NF4,
        &[
            "bnb_4bit_quant_type",
            "model_init_kwargs.quantization_config.bnb_4bit_quant_type",
        ],
    ),
    (
        STORAGE,
        &[
            "bnb_4bit_quant_storage",
            "bnb_4bit_compute_dtype",
            "model_init_kwargs.quantization_config.bnb_4bit_quant_storage",
            "model_init_kwargs.quantization_config.bnb_4bit_compute_dtype",
        ],
    ),
    (
        SAVING,
        &[
            "model_init_kwargs.trust_remote_code",
            "model_init_kwargs.revision",
            "model_init_kwargs.use_cache",
            "model_init_kwargs.low_cpu_mem_usage",
            "model_init_kwargs.device_map",
            "model_init_kwargs.cache_dir",
            "model_init_kwargs.token",
            "model_init_kwargs.use_safetensors",
            "model_init_kwargs.local_files_only",
        ],
    ),
    (
        DATA,
        &[
            "chat_template",
            "chat_template_path",
            "eos_token",
            "pad_token",
            "dataset_name",
            "dataset_config",
            "dataset_mixture",
            "dataset_mixer",
            "dataset_configs",
            "dataset_splits",
            "dataset_train_split",
            "dataset_test_split",
            "dataset_num_proc",
            "dataset_text_field",
            "dataset_kwargs",
            "dataset_batch_size",
            "preprocessing_num_workers",
            "truncation_side",
            "max_prompt_length",
            "auto_insert_empty_system_msg",
            "tokenizer_name_or_path",
            "packing_strategy",
            "padding_free",
            "eval_packing",
            "pad_to_multiple_of",
            "shuffle_dataset",
            "datasets",
            "dataset_split",
            "dataset_streaming",
            "dataset_prompt_column",
            "test_split_size",
            "system_prompt",
            "truncation_mode",
            "dataset_mix_dir",
            "dataset_mixer_list",
            "max_train_samples",
            "tokenizer_name",
            "use_slow_tokenizer",
            "add_bos",
            "num_epochs",
            "preprocessing_batch_size",
            "data_path",
            "eval_data_path",
            "lazy_preprocess",
            "hf_metadata_dataset",
        ],
    ),
    (
        VALUES,
        &[
            "assistant_only_loss",
            "completion_only_loss",
            "base_model_revision",
            "router_aux_loss_coef",
            "disable_dropout",
            "ignore_bias_buffers",
        ],
    ),
];
