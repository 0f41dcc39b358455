//! Axolotl's YAML.

use super::deepspeed::DEEPSPEED;
use super::fsdp;
use crate::convert::{
    ADAPTER, CONTEXT, DATA, EVALUATION, KERNELS, LAUNCH, LOGGING, NF4, PREFERENCES, QUANTIZED,
    REFERENCE, SAVING, STORAGE, TENSOR, VALUES, all_linear, attention, chunked_loss, clip,
    compiled_regions, decay_of_matrices, decomposed, double_quantization, eager_attention,
    eight_bits, flash_attention, float8, float8_gather, four_bits_twice, full_recompute, if_true,
    liger_norms, mixed_bf16, mixed_f16, offloaded_activations, optimizer, rank_stabilized,
    reentrant, replicas, schedule, sdp_attention, shard_ranks, targets, warmup,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Format, Key, Table, To, decisive, fact, integer, key,
    lost, number, quoted, with,
};
use crate::tree::Node;

pub(crate) static AXOLOTL: Format = Format {
    name: "Axolotl",
    tables: &[
        fsdp::table("fsdp_config"),
        Table {
            under: "",
            prefix: "",
            keys: KEYS,
            asides: ASIDES,
        },
    ],
    engine: Some(Engine::Ddp),
    accelerated: true,
    flat: false,
    defaults: &[
        Fallback {
            key: "train.clip_norm",
            value: "1.0",
            why: "the Trainer's default",
        },
        Fallback {
            key: "fsdp.expandable_segments",
            value: "true",
            why: "Axolotl sets it",
        },
    ],
};

const KEYS: &[Key] = &[
    key("base_model", To::Model),
    integer("sequence_len", "train.seq_len"),
    integer("micro_batch_size", "train.micro_batch"),
    integer("gradient_accumulation_steps", "train.grad_accum"),
    fact("batch_size", Fact::RankBatch),
    number("learning_rate", "train.lr"),
    with("weight_decay", decay_of_matrices),
    number("adam_epsilon", "train.eps"),
    with("warmup_steps", warmup),
    with("max_grad_norm", clip),
    with("lr_scheduler", schedule),
    with("optimizer", optimizer),
    with("bf16", mixed_bf16),
    with("bfloat16", |node| {
        if_true(node, Effect::Weights(Dtype::Bf16))
    }),
    with("fp16", mixed_f16),
    with("float16", |node| if_true(node, Effect::Weights(Dtype::F16))),
    with("gradient_checkpointing", full_recompute),
    with("gradient_checkpointing_kwargs.use_reentrant", reentrant),
    with("activation_offloading", |node| match node.text() {
        Some("legacy" | "disk") => Ok(Effect::Lost("activations are predicted on the device")),
        _ => offloaded_activations(node),
    }),
    with("torch_compile", compiled_regions),
    with("liger_fused_linear_cross_entropy", chunked_loss),
    with("cut_cross_entropy", chunked_loss),
    with("liger_rms_norm", liger_norms),
    with("chunked_cross_entropy", chunked_loss),
    with("plugins", |node| {
        let words = node.words().unwrap_or_default();
        Ok(if words.contains("CutCrossEntropy") {
            Effect::Assume(
                "train.loss",
                quoted("chunked"),
                "Cut Cross Entropy is predicted as the chunked loss",
            )
        } else if words.contains("LigerPlugin") {
            Effect::Aside("kernels are predicted as PyTorch's; the fused loss has its own key")
        } else {
            Effect::Lost("what these plugins do is not known here")
        })
    }),
    with("fsdp", fsdp::words),
    key("fsdp_version", To::Fact(Fact::FsdpVersion)),
    key("deepspeed", To::File(&DEEPSPEED)),
    with("dp_shard_size", shard_ranks),
    with("dp_replicate_size", replicas),
    fact("tensor_parallel_size", Fact::Tensor),
    fact("context_parallel_size", Fact::Context),
    fact("expert_parallel_size", Fact::Expert),
    decisive("sequence_parallel_degree", CONTEXT),
    with("adapter", |node| {
        Ok(match node.text() {
            // QLoRA also has `load_in_4bit`, which decides.
            Some("lora" | "qlora") => Effect::Fact(Fact::Adapter, 1),
            _ => Effect::Decisive(ADAPTER),
        })
    }),
    integer("lora_r", "lora.r"),
    number("lora_alpha", "lora.lora_alpha"),
    with("lora_target_linear", all_linear),
    with("lora_target_modules", targets),
    with("peft_use_rslora", rank_stabilized),
    number("lora_dropout", "lora.lora_dropout"),
    with("attn_implementation", attention),
    with("flash_attention", flash_attention),
    with("sdp_attention", sdp_attention),
    with("eager_attention", eager_attention),
    with("peft_use_dora", decomposed),
    lost(
        "lora_modules_to_save",
        "these modules are predicted as frozen",
    ),
    with("load_in_4bit", four_bits_twice),
    with(
        "bnb_config_kwargs.bnb_4bit_use_double_quant",
        double_quantization,
    ),
    with("load_in_8bit", eight_bits),
    decisive("gptq", QUANTIZED),
    with("rl", preferences),
    with("rl_adapter_ref_model", |node| {
        if_true(node, Effect::Decisive(REFERENCE))
    }),
    with("precompute_ref_log_probs", |node| {
        if_true(node, Effect::Fact(Fact::ReferenceInAdvance, 1))
    }),
    with("dpo_use_liger_kernel", chunked_loss),
    lost(
        "dpo_padding_free",
        "sequences are predicted as padded to the same length",
    ),
    decisive("reward_model", PREFERENCES),
    decisive(
        "unfrozen_parameters",
        "frozen parameters: name them with --set fsdp.frozen",
    ),
    with("relora", |node| {
        let why = "steps are predicted, not the merges of adapters into the weights between them";
        if_true(node, Effect::Lost(why))
    }),
    lost("qat", "fake quantization is not modeled"),
    with("fp8", float8),
    with("fp8_enable_fsdp_float8_all_gather", float8_gather),
    lost("tiled_mlp", "feed-forward layers are predicted as a whole"),
    lost("embeddings_skip_upcast", TENSOR),
    lost(
        "resize_token_embeddings_to_32x",
        "the vocabulary is predicted as in config.json",
    ),
    lost("layer_offloading", "layers are predicted on the device"),
];

/// Reads the kind of training on preferences. Losses over pairs run both answers of a sample in
/// one forward; DPO and IPO run it again without gradients for the reference, which is the model
/// without its adapters (`setup_reference_model`).
fn preferences(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("dpo" | "ipo") => Effect::All(vec![
            Effect::Fact(Fact::Pairs, 1),
            Effect::Fact(Fact::Reference, 1),
        ]),
        // Without adapters, Axolotl loads a second model for SimPO, too.
        Some("simpo") => Effect::All(vec![
            Effect::Fact(Fact::Pairs, 1),
            Effect::Fact(Fact::Reference, 0),
        ]),
        Some("orpo") => Effect::Fact(Fact::Pairs, 1),
        _ => Effect::Decisive(PREFERENCES),
    })
}

const ASIDES: &[(&str, &[&str])] = &[
    (
        KERNELS,
        &[
            "flex_attention",
            "xformers_attention",
            "sage_attention",
            "flash_attn_fuse_mlp",
            "flash_attn_cross_entropy",
            "flash_attn_rms_norm",
            "s2_attention",
            "liger_rope",
            "liger_layer_norm",
            "liger_glu_activation",
            "liger_swiglu",
            "liger_cross_entropy",
        ],
    ),
    (
        DATA,
        &[
            "datasets",
            "test_datasets",
            "pretraining_dataset",
            "dataset_prepared_path",
            "dataset_processes",
            "dataset_num_proc",
            "dataset_keep_in_memory",
            "dataset_exact_deduplication",
            "shuffle_merged_datasets",
            "chat_template",
            "chat_template_jinja",
            "default_system_message",
            "eot_tokens",
            "train_on_inputs",
            "group_by_length",
            "sample_packing",
            "sample_packing_bin_size",
            "sample_packing_group_size",
            "sample_packing_eff_est",
            "eval_sample_packing",
            "multipack_real_batches",
            "pad_to_sequence_len",
            "pretrain_multipack_attn",
            "excess_length_strategy",
            "special_tokens",
            "tokens",
            "added_tokens_overrides",
            "streaming",
            "streaming_multipack_buffer_size",
            "num_epochs",
            "max_steps",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "remove_unused_columns",
            "strict",
            "skip_prepare_dataset",
        ],
    ),
    (
        SAVING,
        &[
            "base_model_config",
            "model_type",
            "revision_of_model",
            "tokenizer_type",
            "tokenizer_config",
            "tokenizer_use_fast",
            "tokenizer_legacy",
            "trust_remote_code",
            "reinit_weights",
            "is_llama_derived_model",
            "is_mistral_derived_model",
            "is_falcon_derived_model",
            "is_qwen_derived_model",
            "output_dir",
            "hub_model_id",
            "hub_strategy",
            "push_dataset_to_hub",
            "hf_use_auth_token",
            "resume_from_checkpoint",
            "auto_resume_from_checkpoints",
            "save_safetensors",
            "save_steps",
            "save_strategy",
            "save_total_limit",
            "save_only_model",
            "save_first_step",
            "saves_per_epoch",
            "load_best_model_at_end",
            "lora_model_dir",
            "fsdp_final_state_dict_type",
            "low_cpu_mem_usage",
        ],
    ),
    (
        LOGGING,
        &[
            "logging_steps",
            "wandb_project",
            "wandb_entity",
            "wandb_watch",
            "wandb_name",
            "wandb_run_id",
            "wandb_log_model",
            "wandb_mode",
            "mlflow_tracking_uri",
            "mlflow_experiment_name",
            "use_tensorboard",
            "include_tokens_per_second",
            "include_tkps",
            "profiler_steps",
            "profiler_steps_start",
            "loss_watchdog_threshold",
            "loss_watchdog_patience",
            "debug",
        ],
    ),
    (
        EVALUATION,
        &[
            "val_set_size",
            "evals_per_epoch",
            "eval_steps",
            "eval_strategy",
            "evaluation_strategy",
            "eval_batch_size",
            "eval_table_size",
            "eval_max_new_tokens",
            "eval_sequence_len",
            "do_bench_eval",
            "early_stopping_patience",
        ],
    ),
    (
        VALUES,
        &[
            "seed",
            "loraplus_lr_ratio",
            "loraplus_lr_embedding",
            "adam_beta1",
            "adam_beta2",
            "optim_args",
            "lr_scheduler_kwargs",
            "cosine_min_lr_ratio",
            "cosine_constant_lr_ratio",
            "warmup_ratio",
            "tf32",
            "neftune_noise_alpha",
            "rope_scaling",
            "rl_beta",
            "orpo_alpha",
            "simpo_gamma",
            "cpo_alpha",
            "dpo_loss_type",
            "dpo_loss_weights",
            "dpo_label_smoothing",
            "dpo_use_weighting",
            "overrides_of_model_config",
            "overrides_of_model_kwargs",
        ],
    ),
    (NF4, &["bnb_config_kwargs.bnb_4bit_quant_type"]),
    (
        STORAGE,
        &[
            "bnb_config_kwargs.bnb_4bit_quant_storage",
            "bnb_config_kwargs.bnb_4bit_compute_dtype",
        ],
    ),
    (
        "what happens between steps, where adapters are merged (ReLoRA)",
        &[
            "relora_prune_ratio",
            "relora_prune_method",
            "relora_cpu_offload",
            "jagged_restart_steps",
            "jagged_restart_warmup_steps",
            "jagged_restart_anneal_steps",
        ],
    ),
    (
        "how recomputation is done; its result is the same",
        &["gradient_checkpointing_kwargs"],
    ),
    (
        "compiled code is predicted with Inductor's defaults",
        &["torch_compile_backend", "torch_compile_mode"],
    ),
    (
        LAUNCH,
        &[
            "ddp_timeout",
            "local_rank",
            "world_size",
            "device",
            "device_map",
            "use_ray",
            "gc_steps",
        ],
    ),
    (
        "part of an adapter that is off",
        &[
            "lora_fan_in_fan_out",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "qlora_sharded_model_loading",
            "heads_k_stride",
            "ring_attn_func",
        ],
    ),
];
