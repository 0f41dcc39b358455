//! LLaMA-Factory's YAML: the Trainer's arguments and its own.

use super::{fsdp, trainer};
use crate::convert::{
    ADAPTER, DATA, EVALUATION, KERNELS, LAYERS_IN_TURN, LOGGING, MUON, NF4, PACKED, PREFERENCES,
    QUANTIZED, REFERENCE, SAVING, VALUES, attention, decomposed, double_quantization, float8,
    float8_gather, float8_library, frozen_language, frozen_projector, frozen_vision,
    full_recompute, liger_kernels, rank_stabilized, reentrant, saved_modules, set, targets,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Format, Key, Table, decisive, fact, integer, lost,
    number, with,
};

/// Name of the format.
pub(super) const NAME: &str = "LLaMA-Factory";

/// LLaMA-Factory's own arguments.
pub(super) const TABLE: Table = Table {
    under: "",
    prefix: "",
    keys: KEYS,
    asides: ASIDES,
};

pub(crate) static LLAMA_FACTORY: Format = Format {
    name: NAME,
    tables: &[TABLE, trainer::TABLE],
    engine: Some(Engine::Ddp),
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

pub(super) const DEFAULTS: &[Fallback] = &[
    Fallback {
        key: "train.recompute",
        value: "\"full\"",
        why: "LLaMA-Factory's default",
    },
    Fallback {
        key: "train.seq_len",
        value: "2048",
        why: "LLaMA-Factory's default",
    },
    trainer::MICRO_BATCH,
    trainer::CLIP_NORM,
    fsdp::TORCH_SEGMENTS,
];

const KEYS: &[Key] = &[
    with("stage", |node| {
        Ok(match node.text() {
            Some("sft" | "pt") => Effect::Aside("as predicted"),
            // `pref_loss` decides whether there is a reference model.
            Some("dpo") => Effect::All(vec![
                Effect::Fact(Fact::Pairs, 1),
                Effect::Fact(Fact::Reference, 1),
            ]),
            _ => Effect::Decisive(PREFERENCES),
        })
    }),
    with("finetuning_type", |node| {
        Ok(match node.text() {
            Some("full") => Effect::Aside("as predicted"),
            Some("freeze") => Effect::Decisive("frozen layers: name them with --set fsdp.frozen"),
            Some("lora") => Effect::Fact(Fact::Adapter, 1),
            _ => Effect::Decisive(ADAPTER),
        })
    }),
    integer("lora_rank", "lora.r"),
    number("lora_alpha", "lora.lora_alpha"),
    with("lora_target", targets),
    with("use_rslora", rank_stabilized),
    number("lora_dropout", "lora.lora_dropout"),
    with("flash_attn", attention),
    with("use_dora", decomposed),
    with("additional_target", saved_modules),
    integer("cutoff_len", "train.seq_len"),
    with("pure_bf16", |node| {
        crate::convert::if_true(node, Effect::Weights(Dtype::Bf16))
    }),
    with("enable_liger_kernel", liger_kernels),
    with("disable_gradient_checkpointing", |node| {
        let mode = if node.truth()? { "none" } else { "full" };
        Ok(set("train.recompute", mode))
    }),
    with("use_unsloth_gc", full_recompute),
    with("use_reentrant_gc", reentrant),
    with("quantization_bit", |node| {
        Ok(match node.integer()? {
            4 => Effect::Fact(Fact::FourBits, 2),
            8 => Effect::Fact(Fact::EightBits, 1),
            _ => Effect::Decisive(QUANTIZED),
        })
    }),
    with("double_quantization", double_quantization),
    with("freeze_vision_tower", frozen_vision),
    with("freeze_multi_modal_projector", frozen_projector),
    with("freeze_language_model", frozen_language),
    lost(
        "pissa_init",
        "adapters are predicted with the frozen weights as they are",
    ),
    decisive("use_hyper_parallel", "HyperParallel is not modeled"),
    lost("shift_attn", KERNELS),
    lost(
        "upcast_lmhead_output",
        "logits are predicted in the type of computation",
    ),
    lost("use_v1_kernels", "kernels are predicted as PyTorch's"),
    with("quantization_method", |node| {
        Ok(match node.text() {
            Some("bnb" | "bitsandbytes") => Effect::Aside("as predicted"),
            _ => Effect::Decisive(QUANTIZED),
        })
    }),
    with("pref_loss", |node| {
        Ok(match node.text() {
            Some("orpo" | "simpo") => Effect::Fact(Fact::WithoutReference, 1),
            _ => Effect::Aside("losses over pairs, with a reference"),
        })
    }),
    decisive("ref_model", REFERENCE),
    // `create_ref_model`; with adapters, the model without them is the reference.
    with("use_asft_loss", |node| {
        crate::convert::if_true(node, Effect::Fact(Fact::Reference, 1))
    }),
    decisive("reward_model", PREFERENCES),
    decisive("predict_with_generate", GENERATION),
    decisive("infer_backend", GENERATION),
    decisive("export_dir", "this job writes a model and trains nothing"),
    fact("tensor_model_parallel_size", Fact::Tensor),
    fact("pipeline_model_parallel_size", Fact::Pipeline),
    fact("context_parallel_size", Fact::Context),
    fact("expert_model_parallel_size", Fact::Expert),
    decisive("recompute_granularity", MEGATRON_CORE),
    decisive("use_distributed_optimizer", MEGATRON_CORE),
    decisive("mixture_of_depths", "mixture of depths is not modeled"),
    decisive(
        "use_llama_pro",
        "frozen layers: name them with --set fsdp.frozen",
    ),
    decisive("use_mca", MEGATRON_CORE),
    decisive(
        "use_megatron_bridge",
        "Megatron-Bridge under LLaMA-Factory is not read",
    ),
    decisive("use_kt", "KTransformers is not modeled"),
    lost(
        "use_galore",
        "this optimizer is not modeled: AdamW is predicted",
    ),
    lost(
        "use_apollo",
        "this optimizer is not modeled: AdamW is predicted",
    ),
    decisive("use_badam", LAYERS_IN_TURN),
    lost(
        "use_adam_mini",
        "this optimizer is not modeled: AdamW is predicted",
    ),
    lost("use_muon", MUON),
    lost("use_unsloth", "Unsloth's kernels are not modeled"),
    with("fp8", float8),
    with("fp8_backend", float8_library),
    with("fp8_enable_fsdp_float8_all_gather", float8_gather),
    lost(
        "upcast_layernorm",
        "norms are predicted in the type of computation",
    ),
];

const GENERATION: &str = "this job generates texts and trains nothing";
const MEGATRON_CORE: &str = "Megatron-Core under LLaMA-Factory is not read";

const ASIDES: &[(&str, &[&str])] = &[
    (PACKED, &["packing", "neat_packing"]),
    (
        DATA,
        &[
            "preserve_thinking",
            "image_min_pixels",
            "image_do_pan_and_scan",
            "crop_to_patches",
            "video_min_pixels",
            "video_fps",
            "video_maxlen",
            "use_audio_in_video",
            "audio_sampling_rate",
            "add_tokens",
            "add_special_tokens",
            "new_special_tokens_config",
            "init_special_tokens",
            "dataset",
            "eval_dataset",
            "dataset_dir",
            "media_dir",
            "template",
            "train_on_prompt",
            "mask_history",
            "buffer_size",
            "mix_strategy",
            "interleave_probs",
            "overwrite_cache",
            "preprocessing_batch_size",
            "preprocessing_num_workers",
            "max_samples",
            "ignore_pad_token_for_loss",
            "tool_format",
            "default_system",
            "enable_thinking",
            "tokenized_path",
            "data_shared_file_system",
            "disable_shuffling",
            "image_max_pixels",
            "video_max_pixels",
        ],
    ),
    (
        SAVING,
        &[
            "adapter_name_or_path",
            "adapter_folder",
            "use_fast_tokenizer",
            "resize_vocab",
            "split_special_tokens",
            "new_special_tokens",
            "low_cpu_mem_usage",
            "hf_hub_token",
            "ms_hub_token",
            "om_hub_token",
            "create_new_adapter",
            "pissa_iter",
            "pissa_convert",
            "offload_folder",
            "train_from_scratch",
        ],
    ),
    (
        LOGGING,
        &[
            "plot_loss",
            "include_effective_tokens_per_second",
            "use_swanlab",
            "swanlab_project",
            "swanlab_run_name",
            "swanlab_workspace",
            "swanlab_mode",
            "swanlab_api_key",
            "swanlab_logdir",
            "swanlab_lark_webhook_url",
            "swanlab_lark_secret",
            "ray_storage_path",
            "ray_init_kwargs",
            "resources_per_worker",
            "placement_strategy",
            "print_param_status",
            "ray_run_name",
            "ray_num_workers",
            "enable_torch_profiler",
        ],
    ),
    (
        EVALUATION,
        &[
            "val_size",
            "eval_num_beams",
            "eval_on_each_dataset",
            "compute_accuracy",
            "early_stopping_steps",
        ],
    ),
    (
        VALUES,
        &[
            "rope_scaling",
            "loraplus_lr_ratio",
            "loraplus_lr_embedding",
            "pref_beta",
            "pref_ftx",
            "pref_bco_weight",
            "dpo_label_smoothing",
            "kto_chosen_weight",
            "kto_rejected_weight",
            "simpo_gamma",
            "ld_alpha",
            "moe_aux_loss_coef",
            "use_dft_loss",
            "use_eaft_loss",
            "asft_alpha",
            "eaft_alpha",
        ],
    ),
    (NF4, &["quantization_type"]),
    (
        "part of finetuning_type = freeze",
        &["freeze_trainable_layers"],
    ),
    (
        "part of GaLore, which use_galore turns on",
        &[
            "galore_target",
            "galore_rank",
            "galore_update_interval",
            "galore_scale",
            "galore_proj_type",
            "galore_layerwise",
        ],
    ),
    (
        "part of APOLLO, which use_apollo turns on",
        &[
            "apollo_target",
            "apollo_rank",
            "apollo_update_interval",
            "apollo_scale",
            "apollo_proj",
            "apollo_proj_type",
            "apollo_layerwise",
            "apollo_scale_type",
            "apollo_scale_front",
        ],
    ),
    (
        "part of BAdam, which use_badam turns on",
        &[
            "badam_layer",
            "badam_mode",
            "badam_start_block",
            "badam_switch_mode",
            "badam_switch_interval",
            "badam_update_ratio",
            "badam_mask_mode",
            "badam_verbose",
        ],
    ),
];
