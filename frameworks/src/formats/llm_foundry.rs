//! Training configurations of LLM Foundry, which trains with Composer.
//!
//! Sources: `TrainConfig` of `llmfoundry/utils/config_utils.py`, `MPTConfig`, `hf_causal_lm.py`,
//! and `FSDPConfig` and `get_mixed_precision` of Composer.

use super::{deepspeed::DEEPSPEED, fsdp, peft::PEFT, script::LAUNCHER};
use crate::convert::{
    DATA, EVALUATION, KERNELS, LAUNCH, LOGGING, SAVING, TENSOR, VALUES, attention, betas, clip,
    compiled_regions, flash_attention, full_recompute, if_true, in_8_bits, offloaded_activations,
    replicas, set, shard_ranks,
};
use crate::derive::Positions;
use crate::table::{
    Dtype, Effect, Fact, Fallback, Format, Key, Table, To, choice, decisive, fact, integer, key,
    lost, number, quoted, with,
};
use crate::tree::Node;

const NAME: &str = "LLM Foundry";

pub(crate) static LLM_FOUNDRY: Format = FORMAT;

/// A command that names the configuration, with overrides such as
/// `fsdp_config.mixed_precision=PURE`.
pub(crate) static LLM_FOUNDRY_SCRIPT: Format = Format {
    tables: &[COMMAND, LAUNCHER, ROOT, SIZES, FSDP],
    open: true,
    ..FORMAT
};

const FORMAT: Format = Format {
    name: NAME,
    tables: &[ROOT, SIZES, FSDP],
    engine: None,
    accelerated: false,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

const DEFAULTS: &[Fallback] = &[Fallback {
    key: "fsdp.expandable_segments",
    value: "true",
    why: "LLM Foundry's default",
}];

const COMMAND: Table = Table {
    under: "",
    prefix: "",
    keys: &[
        // References in the file are resolved before the command is taken into account.
        lost(
            "variables",
            "references in the file keep the file's own value: override the keys that refer to it",
        ),
        fact("nproc", Fact::GpusPerNode),
        fact("world_size", Fact::Processes),
    ],
    asides: &[(
        DATA,
        &[
            "variables.data_local",
            "variables.data_remote",
            "variables.global_seed",
            "variables.run_name",
            "variables.tokenizer_name",
        ],
    )],
};

const ROOT: Table = Table {
    under: "",
    prefix: "",
    keys: KEYS,
    asides: ASIDES,
};

const SIZES: Table = Table {
    under: "model.config_overrides",
    prefix: "",
    keys: OVERRIDES,
    asides: &[],
};

const FSDP: Table = Table {
    under: "fsdp_config",
    prefix: "",
    keys: FSDP_KEYS,
    asides: FSDP_ASIDES,
};

/// Scenario key of the type of logits in the loss.
pub(crate) const UPCAST: &str = "precision.loss_fp32_upcast";
/// Why the fused loss is an approximation.
pub(crate) const FUSED_LOSS: &str = "the fused loss of flash-attn reads logits in 16 bits; it is predicted as PyTorch's on such logits";
const UNFUSED: &str = "one kernel per parameter and operation is predicted as fused kernels";
pub(super) const CONFIG_JSON: &str = "the sizes of the model's own config.json are predicted";
const DROPOUT: &str = "MPT models are predicted without dropout";
const ENCODER_DECODER: &str =
    "of LLM Foundry's models, mpt_causal_lm and hf_causal_lm alone are read";

/// Fields of `config.json` that a configuration can replace.
pub(super) const OVERRIDES: &[Key] = &[
    integer("n_positions", "model.max_seq_len"),
    integer("max_position_embeddings", "model.max_seq_len"),
    integer("n_layer", "model.layers"),
    integer("num_hidden_layers", "model.layers"),
    integer("n_embd", "model.hidden"),
    integer("hidden_size", "model.hidden"),
    integer("n_head", "model.heads"),
    integer("num_attention_heads", "model.heads"),
    integer("num_key_value_heads", "model.kv_heads"),
    integer("intermediate_size", "model.ffn"),
    integer("vocab_size", "model.vocab"),
];

const KEYS: &[Key] = &[
    integer("max_seq_len", "train.seq_len"),
    fact("global_train_batch_size", Fact::GlobalBatch),
    with("device_train_microbatch_size", micro_batch),
    // MosaicML's launcher (`mcli`) has the number of GPUs next to the configuration.
    fact("compute.gpus", Fact::Processes),
    fact("gpu_num", Fact::Processes),
    with("precision", precision),
    with("expandable_segments", |node| {
        let value = node.truth()?.to_string();
        Ok(Effect::Set("fsdp.expandable_segments", value))
    }),
    lost(
        "max_split_size_mb",
        "the allocator is predicted with PyTorch's other defaults",
    ),
    with("compile_config", compiled_regions),
    with("compile_config.mode", compiled),
    with("compile_config.backend", compiled),
    decisive("tp_config", TENSOR),
    // Composer up to 0.24.
    key("deepspeed_config", To::File(&DEEPSPEED)),
    with("model.name", |node| {
        Ok(match node.full().as_str() {
            "mpt_causal_lm" => Effect::Fact(Fact::Mpt, 1),
            "hf_causal_lm" => set("model.implementation", "transformers"),
            _ => Effect::Decisive(ENCODER_DECODER),
        })
    }),
    key("model.pretrained_model_name_or_path", To::Model),
    key("model.peft_config", To::File(&PEFT)),
    with("model.use_flash_attention_2", flash_attention),
    with("model.attn_implementation", attention),
    lost("model.config_overrides", CONFIG_JSON),
    decisive(
        "model.load_in_8bit",
        "LLM Foundry does not train models in 8 bits",
    ),
    integer("model.d_model", "model.hidden"),
    integer("model.n_heads", "model.heads"),
    integer("model.n_layers", "model.layers"),
    integer("model.head_dim", "model.head_dim"),
    integer("model.vocab_size", "model.vocab"),
    integer("model.max_seq_len", "model.max_seq_len"),
    number("model.norm_eps", "model.norm_eps"),
    with("model.expansion_ratio", |node| {
        Ok(Effect::Fact(Fact::FfnRatio, node.number()?.to_bits()))
    }),
    with("model.no_bias", |node| {
        Ok(Effect::Fact(Fact::NoBias, node.truth()?.into()))
    }),
    lost(
        "model.attention_bias",
        "biases are predicted as `no_bias` says",
    ),
    with("model.learned_pos_emb", |node| {
        Ok(if node.truth()? {
            Effect::Aside("the default")
        } else {
            Effect::Fact(Fact::Positions, Positions::None as u64)
        })
    }),
    with("model.tie_word_embeddings", |node| {
        let value = node.truth()?.to_string();
        Ok(Effect::Set("model.tie_embeddings", value))
    }),
    with("model.norm_type", |node| {
        Ok(match node.full().as_str() {
            "layernorm" | "low_precision_layernorm" => Effect::Fact(Fact::RmsNorm, 0),
            "rmsnorm" | "low_precision_rmsnorm" | "triton_rmsnorm" => {
                Effect::Fact(Fact::RmsNorm, 1)
            }
            _ => return Err(node.expected("layernorm, rmsnorm, or their low_precision_ forms")),
        })
    }),
    with("model.loss_fn", |node| {
        Ok(match node.full().as_str() {
            "fused_crossentropy" => Effect::Assume(UPCAST, "false".to_owned(), FUSED_LOSS),
            "torch_crossentropy" => Effect::Set(UPCAST, "true".to_owned()),
            _ => return Err(node.expected("fused_crossentropy or torch_crossentropy")),
        })
    }),
    lost("model.emb_pdrop", DROPOUT),
    lost("model.resid_pdrop", DROPOUT),
    lost("model.attn_config.attn_pdrop", DROPOUT),
    with("model.attn_config.attn_impl", |node| {
        Ok(match node.full().as_str() {
            "flash" => Effect::Fact(Fact::AttentionLibrary, 0),
            "triton" => Effect::Fact(Fact::AttentionLibrary, 1),
            "torch" => Effect::Lost("attention of separate kernels is predicted as a fused one"),
            "flex" => Effect::Aside(KERNELS),
            _ => return Err(node.expected("flash, triton, torch or flex")),
        })
    }),
    with("model.attn_config.attn_type", |node| {
        Ok(match node.full().as_str() {
            "multihead_attention" => Effect::Aside("the default"),
            "multiquery_attention" => Effect::Set("model.kv_heads", "1".to_owned()),
            "grouped_query_attention" => Effect::Aside("kv_n_heads says how many"),
            _ => {
                let names = "multihead_attention, multiquery_attention or grouped_query_attention";
                return Err(node.expected(names));
            }
        })
    }),
    integer("model.attn_config.kv_n_heads", "model.kv_heads"),
    with("model.attn_config.alibi", |node| {
        if_true(node, set(POSITIONS, "alibi"))
    }),
    with("model.attn_config.rope", |node| {
        if_true(node, set(POSITIONS, "rotary"))
    }),
    number("model.attn_config.rope_theta", "model.rope_theta"),
    lost("model.attn_config.clip_qkv", "clamping is not predicted"),
    lost(
        "model.attn_config.qk_ln",
        "norms of queries and keys are not predicted",
    ),
    lost(
        "model.attn_config.qk_gn",
        "norms of queries and keys are not predicted",
    ),
    lost(
        "model.attn_config.prefix_lm",
        "attention is predicted as causal",
    ),
    with("model.attn_config.sliding_window_size", |node| {
        Ok(match node.integer()? {
            -1 => Effect::Aside("the whole sequence"),
            // The window of `flash_attn` does not count the query itself.
            _ => Effect::Set("model.sliding_window", (node.count()? + 1).to_string()),
        })
    }),
    lost(
        "model.attn_config.attn_logit_softcapping",
        "soft caps of logits are not predicted",
    ),
    lost(
        "model.final_logit_softcapping",
        "soft caps of logits are not predicted",
    ),
    with("model.attn_config.fused_qkv", |node| {
        Ok(if node.truth()? {
            Effect::Aside("the default")
        } else {
            Effect::Lost("queries, keys and values are predicted as one projection")
        })
    }),
    with("model.ffn_config.ffn_type", |node| {
        Ok(match node.full().as_str() {
            "mptmlp" => Effect::Aside("the default"),
            "mptglu" => Effect::Set("model.gated_mlp", "true".to_owned()),
            "te_ln_mlp" => Effect::Lost("Transformer Engine's layer is predicted as MPT's own"),
            "mb_moe" | "mb_dmoe" | "torch_dmoe" => {
                Effect::Decisive("models with MegaBlocks' experts are not read from their sizes")
            }
            _ => return Err(node.expected("mptmlp, mptglu, te_ln_mlp, mb_moe or mb_dmoe")),
        })
    }),
    integer("model.ffn_config.ffn_hidden_size", "model.ffn"),
    with("model.ffn_config.ffn_act_fn.name", |node| {
        Ok(match node.full().as_str() {
            "gelu" => Effect::Aside("the default"),
            name @ ("silu" | "relu") => set("model.activation", name),
            _ => Effect::Lost("the activation is predicted as GELU"),
        })
    }),
    with("model.fc_type", |node| {
        Ok(match node.full().as_str() {
            "torch" => Effect::Aside("the default"),
            _ => Effect::Lost("linear layers are predicted as those of PyTorch"),
        })
    }),
    decisive(
        "model.block_overrides",
        "models with blocks of several kinds are not read from their sizes",
    ),
    lost(
        "model.activation_checkpointing_target",
        "whole blocks are predicted as recomputed",
    ),
    with("optimizer.name", |node| {
        Ok(match node.full().as_str() {
            "decoupled_adamw" => Effect::Assume("train.optimizer", quoted("adamw"), UNFUSED),
            "adamw" => set("train.optimizer", "adamw"),
            "decoupled_lionw" | "adalr_lion" | "clip_lion" => {
                Effect::Assume("train.optimizer", quoted("lion"), UNFUSED)
            }
            "decoupled_lionw_8b" => in_8_bits("lion"),
            "decoupled_sgdw" => set("train.optimizer", "sgd"),
            _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
        })
    }),
    number("optimizer.lr", "train.lr"),
    number("optimizer.eps", "train.eps"),
    number("optimizer.weight_decay", "train.weight_decay"),
    with("optimizer.betas", betas),
    with("scheduler.t_warmup", |node| {
        let text = node.full();
        let steps = text.strip_suffix("ba").and_then(|n| n.parse::<u64>().ok());
        Ok(match steps {
            Some(steps) => Effect::Set("train.warmup_steps", steps.to_string()),
            None => Effect::Aside(VALUES),
        })
    }),
    with("algorithms.gradient_clipping.clipping_threshold", clip),
    with("algorithms.gradient_clipping.clipping_type", |node| {
        Ok(match node.full().as_str() {
            "norm" => Effect::Aside("as predicted"),
            "value" | "adaptive" => Effect::Lost("clipping is predicted by the global norm"),
            _ => return Err(node.expected("norm, value or adaptive")),
        })
    }),
    lost(
        "algorithms",
        "algorithms that change the model are not predicted",
    ),
];

const POSITIONS: &str = "model.position_embedding";

/// Why `FULL` is an approximation.
const FULL: &str = "weights are gathered in float32 and cast under autocast; they are predicted as gathered in the type of computation";

const FSDP_KEYS: &[Key] = &[
    with("sharding_strategy", fsdp::strategy),
    choice("mixed_precision", mixed_precision),
    with("mixed_precision.param_dtype", |node| {
        Ok(Effect::Mixed(Dtype::of(node)?))
    }),
    with("mixed_precision.reduce_dtype", |node| {
        Ok(set("precision.reduce_dtype", Dtype::of(node)?.name()))
    }),
    with("activation_checkpointing", full_recompute),
    with("activation_checkpointing_reentrant", |node| {
        Ok(Effect::Fact(Fact::Reentrant, node.truth()?.into()))
    }),
    with("activation_cpu_offload", offloaded_activations),
    with("backward_prefetch", fsdp::backward_prefetch),
    with("forward_prefetch", fsdp::forward_prefetch),
    with("limit_all_gathers", fsdp::limited_gathers),
    lost(
        "backward_prefetch_limit",
        "one unit is predicted as prefetched",
    ),
    lost(
        "forward_prefetch_limit",
        "one unit is predicted as prefetched",
    ),
    decisive(
        "cpu_offload",
        "this job does not start: Composer does not support FSDP's offload to the CPU",
    ),
    with("data_parallel_shard_degree", shard_ranks),
    with("data_parallel_replicate_degree", replicas),
    lost(
        "keep_low_precision_grads",
        "gradients are predicted as float32",
    ),
    decisive(
        "process_group",
        "process groups by name are not modeled: data_parallel_shard_degree and data_parallel_replicate_degree say the same",
    ),
    lost("ignored_modules", "all parameters are predicted as sharded"),
    lost(
        "min_params",
        "units by size are predicted as one unit per block",
    ),
    lost(
        "te_checkpoint_wrapper",
        "recompute is predicted as PyTorch's",
    ),
    lost(
        "te_shard_fp8_weight",
        "weights are predicted as gathered in 16 bits",
    ),
];

const FSDP_ASIDES: &[(&str, &[&str])] = &[
    (
        SAVING,
        &[
            "state_dict_type",
            "sync_module_states",
            "load_monolith_rank0_only",
            "load_fsdp_monolith_rank0_only",
            "sharded_ckpt_prefix_dir",
            "load_planner",
            "save_planner",
        ],
    ),
    (
        "FSDP1 only, without effect on a prediction",
        &["use_orig_params", "auto_wrap", "flatten_parameters"],
    ),
    (LOGGING, &["verbose"]),
    (VALUES, &["mixed_precision.buffer_dtype"]),
];

const ASIDES: &[(&str, &[&str])] = &[
    (
        "values that other keys refer to",
        &[
            "variables",
            "data_local",
            "data_remote",
            "global_seed",
            "tokenizer_name",
            "model_name",
            "model_name_or_path",
            "icl_max_seq_len",
        ],
    ),
    (
        DATA,
        &[
            "tokenizer",
            "train_loader",
            "max_duration",
            "train_subset_num_batches",
            "spin_dataloaders",
            "model.attn_config.attn_uses_sequence_id",
        ],
    ),
    (
        EVALUATION,
        &[
            "eval_loader",
            "eval_loaders",
            "eval_interval",
            "eval_first",
            "eval_subset_num_batches",
            "device_eval_batch_size",
            "device_eval_microbatch_size",
            "icl_tasks",
            "icl_tasks_str",
            "icl_seq_len",
            "icl_subset_num_batches",
            "eval_gauntlet",
            "eval_gauntlet_str",
            "model_gauntlet",
            "model.additional_eval_metrics",
        ],
    ),
    (
        LOGGING,
        &[
            "run_name",
            "loggers",
            "progress_bar",
            "log_to_console",
            "console_log_interval",
            "python_log_level",
            "log_config",
            "callbacks",
            "metadata",
            "flatten_metadata",
            "profiler",
            "model.use_train_metrics",
            "model.additional_train_metrics",
            "model.verbose",
        ],
    ),
    (
        SAVING,
        &[
            "save_folder",
            "save_interval",
            "save_num_checkpoints_to_keep",
            "save_filename",
            "save_latest_filename",
            "save_overwrite",
            "save_weights_only",
            "save_ignore_keys",
            "load_path",
            "load_weights_only",
            "load_strict_model_weights",
            "load_ignore_keys",
            "only_hf_checkpoint",
            "only_composer_checkpoint",
            "autoresume",
            "model.pretrained",
            "model.pretrained_lora_id_or_path",
            "model.init_device",
            "model.use_auth_token",
            "model.use_cache",
            "model.trust_remote_code",
            "model.should_save_peft_only",
            "model.allow_embedding_resizing",
        ],
    ),
    (
        VALUES,
        &[
            "seed",
            "scheduler",
            "accumulate_train_batch_on_tokens",
            "model.init_config",
            "model.logit_scale",
            "model.embedding_fraction",
            "model.attn_config.softmax_scale",
            "model.attn_config.alibi_bias_max",
            "model.attn_config.rope_impl",
            "model.attn_config.rope_dail_config",
            "model.attn_config.rope_hf_config",
        ],
    ),
    (
        LAUNCH,
        &[
            "dist_timeout",
            "code_paths",
            "cuda_load_lazy",
            "integrations",
            "command",
            "image",
            "name",
            "cluster",
            "gpu_type",
            "scheduling",
            "env_variables",
            "compute",
        ],
    ),
    (
        "computed from the batch sizes",
        &[
            "n_gpus",
            "device_train_batch_size",
            "device_train_grad_accum",
        ],
    ),
    (
        "as predicted",
        &[
            "model.use_pad_tok_in_ffn",
            "model.config_overrides.max_seq_len",
            "model.config_overrides.attn_config",
        ],
    ),
    (
        "of the layers that ffn_type names",
        &[
            "model.ffn_config.memory_optimized_mlp",
            "model.ffn_config.mlp_impl",
            "model.ffn_config.mlp_type",
            "model.ffn_config.moe_lbl_in_fp32",
            "model.ffn_config.moe_loss_weight",
            "model.ffn_config.moe_num_experts",
            "model.ffn_config.moe_top_k",
            "model.ffn_config.moe_world_size",
            "model.ffn_config.moe_jitter_eps",
            "model.ffn_config.moe_normalize_expert_weights",
            "model.ffn_config.uniform_expert_assignment",
            "model.ffn_config.fc_type",
        ],
    ),
];

/// Reads the micro-batch. Composer starts with all sequences of a rank in one micro-batch, and
/// halves it until it fits.
fn micro_batch(node: &Node) -> Result<Effect, String> {
    const AUTO: &str = "Composer halves the micro-batch until it fits: one per step is predicted, --set train.micro_batch=N and train.grad_accum=M say another";
    if node.is_auto() {
        return Ok(Effect::Assume("train.grad_accum", "1".to_owned(), AUTO));
    }
    Ok(Effect::Fact(Fact::RankMicroBatch, node.count()?))
}

/// Reads Composer's `Precision`.
fn precision(node: &Node) -> Result<Effect, String> {
    const FP8: &str = "layers of Transformer Engine in 8 bits are predicted in bfloat16";
    Ok(match node.full().as_str() {
        "amp_bf16" | "bf16" => Effect::Mixed(Dtype::Bf16),
        "amp_fp16" | "fp16" | "amp" => Effect::Mixed(Dtype::F16),
        "fp32" => Effect::Mixed(Dtype::F32),
        "amp_fp8" => Effect::All(vec![Effect::Mixed(Dtype::Bf16), Effect::Lost(FP8)]),
        _ => return Err(node.expected("amp_bf16, amp_fp16, amp_fp8 or fp32")),
    })
}

/// Reads the types of FSDP by their names in `get_mixed_precision`.
fn mixed_precision(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().to_ascii_uppercase().as_str() {
        "PURE" => Effect::Fact(Fact::ComputeReduction, 1),
        "DEFAULT" => Effect::Fact(Fact::ComputeReduction, 0),
        "FULL" => Effect::All(vec![
            Effect::Fact(Fact::ComputeReduction, 0),
            Effect::Lost(FULL),
        ]),
        _ => return Err(node.expected("PURE, DEFAULT or FULL")),
    })
}

/// Compiles the model, whose units are wrapped before (`Trainer`).
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn compiled(_: &Node) -> Result<Effect, String> {
    Ok(Effect::Assume(
        "compile.mode",
        quoted("regions"),
        "compiled with the default mode",
    ))
}
