//! NeMo Automodel's YAML.

use super::script::LAUNCHER;
use crate::convert::{
    CONTEXT, DATA, DISTILLATION, DROPOUT, EVALUATION, EXCHANGE_SMS, LAUNCH, LOGGING, NF4, SAVING,
    STORAGE, VALUES, all_linear, betas, clip, compiled_blocks, double_quantization, eight_bits,
    excluded_modules, float8, float8_ahead, float8_gather, float8_recipe, four_bits,
    full_recompute, if_true, replicas, round_robin_routing, schedule, set, shard_ranks, targets,
    weights,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Float8Scaling, Format, Key, Table, To, decisive, fact,
    integer, key, lost, number, quoted, with,
};
use crate::tree::{Node, Value};

/// Name of the format.
const NAME: &str = "NeMo Automodel";

pub(crate) static NEMO: Format = FORMAT;

/// A command of `automodel` with options such as `--step_scheduler.local_batch_size 2`.
pub(crate) static NEMO_SCRIPT: Format = Format {
    tables: &[TABLE, LAUNCHER],
    ..FORMAT
};

const FORMAT: Format = Format {
    name: NAME,
    tables: &[TABLE],
    engine: Some(Engine::Fsdp),
    accelerated: false,
    reduces_in_f32: true,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

const TABLE: Table = Table {
    under: "",
    prefix: "",
    keys: KEYS,
    asides: ASIDES,
};

const DEFAULTS: &[Fallback] = &[
    super::fsdp::TORCH_SEGMENTS,
    Fallback {
        key: "moe.dispatcher",
        value: "\"deepep\"",
        why: "AutoModel's default where DeepEP is installed",
    },
];

const KEYS: &[Key] = &[
    key("model.pretrained_model_name_or_path", To::Model),
    key("model.config.pretrained_model_name_or_path", To::Model),
    with("model.torch_dtype", weights),
    fact("step_scheduler.global_batch_size", Fact::GlobalBatch),
    integer("step_scheduler.local_batch_size", "train.micro_batch"),
    integer("dataset.seq_len", "train.seq_len"),
    integer("dataset.seq_length", "train.seq_len"),
    with("packed_sequence.packed_sequence_size", packed),
    with("packed_sequence.pack_size", packed),
    fact("packed_sequence.max_length", Fact::SampleLength),
    with("distributed.mp_policy.param_dtype", |node| {
        Ok(Effect::Mixed(Dtype::of(node)?))
    }),
    with("distributed.mp_policy.reduce_dtype", |node| {
        Ok(set("precision.reduce_dtype", Dtype::of(node)?.name()))
    }),
    with("quantization.load_in_4bit", four_bits),
    with("quantization.load_in_8bit", eight_bits),
    with(
        "quantization.bnb_4bit_use_double_quant",
        double_quantization,
    ),
    with("model.dtype", weights),
    with("model.attn_implementation", attention),
    with("fp8.filter_fqns", super::torchtitan::float8_filters),
    lost("fp8.emulate", "8-bit matmuls are predicted on tensor cores"),
    with("peft.exclude_modules", |node| match &node.value {
        Value::List(_) => excluded_modules(node),
        _ => Err(node.expected("a list of names")),
    }),
    lost(
        "peft.moe_rank_scaling",
        "adapters are predicted with one rank",
    ),
    with("freeze_config.freeze_vision_tower", |node| {
        frozen(node, Fact::FrozenVision)
    }),
    with("freeze_config.freeze_language_model", |node| {
        frozen(node, Fact::FrozenLanguage)
    }),
    lost(
        "freeze_config.freeze_embeddings",
        "current versions of AutoModel do not read it: embeddings are predicted as trained",
    ),
    lost("freeze_config", FROZEN),
    lost("model.freeze_router", FROZEN),
    lost("ema", "a moving average of the weights is not predicted"),
    lost("qat", "fake quantization is not modeled"),
    lost("model.num_nextn_predict_layers", MTP),
    lost("model.text_config.mtp_num_hidden_layers", MTP),
    fact(
        "distributed.fsdp2_forward_prefetch_depth",
        Fact::ForwardPrefetchDepth,
    ),
    fact(
        "distributed.fsdp2_backward_prefetch_depth",
        Fact::BackwardPrefetchDepth,
    ),
    lost("optimizer.store_param_remainders", MASTER),
    lost(
        "optimizer.master_weight_bits",
        "the bits of FlashAdamW that extend the weights are not predicted",
    ),
    lost("optimizer.master_weight_dtype", MASTER),
    with("recipe", recipe),
    with("model._target_", class),
    integer("model.n_layer", "model.layers"),
    integer("model.n_embd", "model.hidden"),
    integer("model.n_head", "model.heads"),
    integer("model.n_positions", "model.max_seq_len"),
    integer("model.vocab_size", "model.vocab"),
    decisive("model.drafter_path", DRAFTER),
    decisive("model.stage", IMAGES),
    decisive("teacher_model", DISTILLATION),
    decisive("recipe_args", SPECULATIVE),
    decisive("dflash", SPECULATIVE),
    decisive(
        "dllm",
        "training of diffusion language models is not modeled",
    ),
    decisive("flow_matching", "diffusion models are not modeled"),
    decisive("data", "diffusion models are not modeled"),
    with("distributed.strategy", strategy),
    with("distributed._target_", strategy),
    with("distributed.dp_size", |node| {
        Ok(if node.integer()? > 0 {
            Effect::Lost("the number of GPUs decides")
        } else {
            Effect::Aside("what remains after the other sizes")
        })
    }),
    with("distributed.dp_replicate_size", replicas),
    with("distributed.dp_shard_size", shard_ranks),
    fact("distributed.tp_size", Fact::Tensor),
    fact("distributed.cp_size", Fact::Context),
    fact("distributed.pp_size", Fact::Pipeline),
    fact("distributed.ep_size", Fact::Expert),
    with("distributed.activation_checkpointing", |node| {
        Ok(match node.text() {
            Some("selective") => Effect::Assume(
                "train.recompute",
                quoted("selective"),
                "predicted with the operations that PyTorch's examples save",
            ),
            _ => full_recompute(node)?,
        })
    }),
    with("distributed.reshard_after_forward", |node| {
        Ok(Effect::Fact(Fact::Reshard, node.truth()?.into()))
    }),
    with("distributed.moe.reshard_after_forward", |node| {
        Ok(Effect::Fact(Fact::ExpertReshard, node.truth()?.into()))
    }),
    lost(
        "distributed.moe.lm_head_precision",
        "the head is predicted in the type of computation",
    ),
    lost(
        "distributed.moe.mp_policy",
        "the policy of distributed.mp_policy is predicted",
    ),
    with("distributed.activation_checkpointing_scope", |node| {
        Ok(match node.text() {
            Some("all" | "language") => Effect::Aside("as predicted"),
            _ => Effect::Lost("blocks of the language model are predicted as recomputed"),
        })
    }),
    with("parallelizer.activation_checkpointing", full_recompute),
    with("model.backend.dispatcher", dispatcher),
    with("model.backend.enable_deepep", |node| {
        Ok(Effect::Lost(if node.truth()? {
            "current versions ignore it, and dispatcher decides; earlier ones used DeepEP"
        } else {
            "current versions ignore it, and dispatcher decides; earlier ones gathered tokens"
        }))
    }),
    lost("model.backend.dispatcher_num_sms", EXCHANGE_SMS),
    with("model.backend.fake_balanced_gate", round_robin_routing),
    with("model.backend.fake_gate_noise", |node| {
        Ok(if node.number()? > 0.0 {
            let random = Effect::Fact(Fact::RandomChoices, 1);
            let popular = Effect::Lost("experts are predicted as equally popular");
            Effect::All(vec![random, popular])
        } else {
            Effect::Aside("off")
        })
    }),
    with("model.backend.experts", |node| {
        Ok(match node.text() {
            Some("gmm" | "te" | "torch_mm") => Effect::Aside("as predicted"),
            Some("torch_mm_mxfp8") => Effect::Lost("experts are predicted in 16 bits"),
            _ => Effect::Lost("experts are predicted as grouped matmuls"),
        })
    }),
    with("model.backend.rms_norm", fused_kernels),
    with("model.backend.te_fp8", te_fp8),
    lost(
        "model.backend.compile_attn",
        "attention is predicted as the rest of the block",
    ),
    lost(
        "model.backend.cuda_graph",
        "kernels are predicted as launched by the host",
    ),
    lost(
        "model.transformer_engine_fp8",
        "matmuls are predicted in 16 bits",
    ),
    with("distributed.enable_fsdp2_prefetch", |node| {
        Ok(Effect::Fact(Fact::ExplicitPrefetch, node.truth()?.into()))
    }),
    with("distributed.defer_fsdp_grad_sync", |node| {
        Ok(set(
            "fsdp.gradient_sync",
            if node.truth()? { "last" } else { "every" },
        ))
    }),
    with("distributed.enable_compile", compiled_blocks),
    with("distributed.offload_policy", |node| {
        if_true(node, Effect::Fact(Fact::OffloadAll, 1)).or(Ok(Effect::Fact(Fact::OffloadAll, 1)))
    }),
    with("distributed.zero_dp_strategy", |node| {
        Ok(match node.integer()? {
            0 => set("fsdp.strategy", "no_shard"),
            1 => set("fsdp.strategy", "optim"),
            2 => set("fsdp.strategy", "optim_grads"),
            3 => set("fsdp.strategy", "optim_grads_params"),
            _ => return Err(node.expected("0 to 3")),
        })
    }),
    with("distributed.fsdp_double_buffer", |node| {
        if_true(node, set("fsdp.allocator", "double_buffer"))
    }),
    with("compile.enabled", compiled_blocks),
    with("clip_grad_norm.max_norm", clip),
    with("max_grad_norm", clip),
    with("optimizer._target_", |node| {
        let name = node.full();
        Ok(match name.rsplit('.').next().unwrap_or(&name) {
            "Adam" | "AdamW" => set("train.optimizer", "adamw"),
            "FusedAdam" => Effect::All(vec![
                set("train.optimizer", "adamw"),
                Effect::Fact(Fact::FusedAdam, 1),
            ]),
            "SGD" => set("train.optimizer", "sgd"),
            _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
        })
    }),
    number("optimizer.lr", "train.lr"),
    number("optimizer.eps", "train.eps"),
    number("optimizer.weight_decay", "train.weight_decay"),
    with("optimizer.betas", betas),
    with("optimizer.master_weights", |node| {
        if_true(
            node,
            Effect::Assume(
                "precision.main_params",
                quoted("f32"),
                "the optimizer's float32 copies are predicted as the only weights that a rank keeps",
            ),
        )
    }),
    with("optimizer.exp_avg_dtype", |node| {
        Ok(set("precision.moments", Dtype::of(node)?.name()))
    }),
    with("optimizer.exp_avg_sq_dtype", |node| {
        Ok(set("precision.moments", Dtype::of(node)?.name()))
    }),
    with("lr_scheduler.lr_decay_style", schedule),
    number("lr_scheduler.min_lr", "train.min_lr"),
    integer("lr_scheduler.lr_warmup_steps", "train.warmup_steps"),
    with("loss_fn._target_", |node| {
        let name = node.full();
        Ok(
            if name.contains("Fused") || name.contains("Linear") || name.contains("chunked") {
                Effect::Assume(
                    "train.loss",
                    quoted("chunked"),
                    "the fused loss is predicted as the chunked one",
                )
            } else {
                set("train.loss", "materialized")
            },
        )
    }),
    with("loss_fn.fp32_upcast", |node| {
        Ok(if node.truth()? {
            Effect::Aside("the default")
        } else {
            Effect::Set("precision.loss_fp32_upcast", "false".to_owned())
        })
    }),
    fact("benchmark.num_nodes", Fact::Nodes),
    with("peft._target_", |_| Ok(Effect::Fact(Fact::Adapter, 1))),
    integer("peft.dim", "lora.r"),
    number("peft.alpha", "lora.lora_alpha"),
    with("peft.match_all_linear", all_linear),
    with("peft.target_modules", targets),
    lost("peft.dropout", DROPOUT),
    lost(
        "peft.use_triton",
        "adapters are predicted as PyTorch's kernels",
    ),
    with("fp8.enabled", float8),
    with("fp8.recipe_name", float8_recipe),
    with("fp8.enable_fsdp_float8_all_gather", float8_gather),
    with("fp8.precompute_float8_dynamic_scale_for_fsdp", float8_ahead),
    lost(
        "distributed.patch_is_packed_sequence",
        "the host is predicted without this synchronization",
    ),
    lost(
        "distributed.defer_rs_grad_sync",
        "gradients are reduced as their unit finishes",
    ),
];

const FROZEN: &str = "what is frozen is predicted as trained: name it with --set fsdp.frozen";
const MTP: &str = "layers that predict later tokens are not predicted";
const MASTER: &str = "weights are predicted with float32 copies of their shards";
const CONTRASTIVE: &str = "contrastive training of encoders is not modeled";
const DRAFTER: &str = "a draft model that is trained with the model is not modeled";
const IMAGES: &str = "models that make images are not modeled";
const SPECULATIVE: &str = "training of draft models for speculative decoding is not modeled";

const ASIDES: &[(&str, &[&str])] = &[
    (NF4, &["quantization.bnb_4bit_quant_type"]),
    (
        STORAGE,
        &[
            "quantization.bnb_4bit_compute_dtype",
            "quantization.bnb_4bit_quant_storage",
        ],
    ),
    (
        LAUNCH,
        &[
            "skypilot",
            "nemo_run",
            "prewarm",
            "step_scheduler.gc_every_steps",
            "dist_env",
            "ci",
            "distributed.backend",
            "slurm",
            "launcher",
        ],
    ),
    (
        DATA,
        &[
            "dataset",
            "dataloader",
            "packed_sequence",
            "processor",
            "tokenizer",
            "step_scheduler.num_epochs",
            "step_scheduler.max_steps",
        ],
    ),
    (
        EVALUATION,
        &[
            "validation_dataset",
            "validation_dataloader",
            "step_scheduler.val_every_steps",
            "tool_call_eval",
        ],
    ),
    (
        SAVING,
        &[
            "checkpoint",
            "step_scheduler.ckpt_every_steps",
            "model.trust_remote_code",
            "model.force_hf",
            "model.cache_dir",
            "model.output_hidden_states",
            "model.text_config",
            "step_scheduler.save_checkpoint_every_epoch",
            "embedding_row_repair",
            "model.config",
        ],
    ),
    (
        LOGGING,
        &[
            "wandb",
            "mlflow",
            "benchmark",
            "step_scheduler.log_remote_every_steps",
            "logging",
            "comet",
            "nvtx",
            "moe_metrics",
            "performance",
        ],
    ),
    (
        VALUES,
        &[
            "rng",
            "seed",
            "lr_scheduler",
            "optimizer.foreach",
            "optimizer.fused",
            "optimizer.bias_correction",
            "optimizer.warmup_ratio",
            "optimizer.min_lr_ratio",
            "optimizer.adam_w_mode",
            "neftune",
            "temperature",
            "kd_ratio",
            "kd_loss_fn",
            "model.mtp_loss_scaling_factor",
            "loss_fn",
        ],
    ),
    (
        "as predicted",
        &[
            "distributed.moe",
            "model.backend",
            "model.use_liger_kernel",
            "model.use_sdpa_patching",
            "distributed.mp_policy",
            "distributed.autocast_dtype",
            "fp8.force_recompute_fp8_weight_in_bwd",
            "peft.use_memory_efficient_lora",
        ],
    ),
    (
        "part of an option that is off",
        &[
            "distributed.sequence_parallel",
            "distributed.enable_async_tensor_parallel",
            "distributed.tp_plan",
            "distributed.pipeline",
            "distributed.multi_gpu",
            "distributed.multimodal",
            "parallelizer",
            "autopipeline",
            "compile",
        ],
    ),
    (CONTEXT, &["distributed.cp_rotate_method"]),
];

/// Reads whether norms, and with them rotations, activations and permutations, are fused kernels.
fn fused_kernels(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("te" | "quack") => Effect::Fact(Fact::FusedKernels, 1),
        _ => Effect::Aside("as predicted"),
    })
}

/// Returns whether a recipe or a model of this name is for contrastive training.
fn is_contrastive(name: &str) -> bool {
    name.contains("BiEncoder") || name.contains("CrossEncoder")
}

/// Reads the recipe, and refuses those that are not predicted.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn recipe(node: &Node) -> Result<Effect, String> {
    let name = node.full();
    Ok(if is_contrastive(&name) {
        Effect::Decisive(CONTRASTIVE)
    } else if name.contains("ForMultimodal") {
        Effect::Decisive(IMAGES)
    } else {
        Effect::Aside(LAUNCH)
    })
}

/// Reads the class that builds the model.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn class(node: &Node) -> Result<Effect, String> {
    let name = node.full();
    let has = |part: &str| name.contains(part);
    Ok(if is_contrastive(&name) {
        Effect::Decisive(CONTRASTIVE)
    } else if has("WithDrafter") {
        Effect::Decisive(DRAFTER)
    } else if has("SequenceClassification") {
        Effect::Lost("the head is predicted as config.json has it")
    } else if has("build_gpt2_model") {
        set("model.family", "gpt2")
    } else {
        Effect::Aside(SAVING)
    })
}

/// Reads how tokens reach the ranks of their experts.
fn dispatcher(node: &Node) -> Result<Effect, String> {
    let deepep = Effect::Fact(Fact::TokenDispatcher, 2);
    let like_deepep = |why| Ok(Effect::All(vec![deepep.clone(), Effect::Lost(why)]));
    match node.text() {
        // DTensors are gathered, and partial sums are reduced and scattered.
        Some("torch") => Ok(Effect::Fact(Fact::TokenDispatcher, 0)),
        Some("deepep" | "hybridep") => Ok(deepep),
        Some("uccl_ep") => like_deepep("the exchange of UCCL-EP is predicted as that of DeepEP"),
        Some("mok") => like_deepep(
            "Mixture-of-Kittens, which fuses the exchange with the experts, is predicted as DeepEP and experts",
        ),
        _ => Err(node.expected("torch, deepep, hybridep, uccl_ep or mok")),
    }
}

/// Reads the 8-bit recipe of Transformer Engine's layers: `{ recipe: mxfp8 }`.
fn te_fp8(node: &Node) -> Result<Effect, String> {
    let recipe = node.get("recipe").and_then(Node::text);
    let scaling = match recipe {
        Some("block") => Float8Scaling::Block,
        Some("mxfp8") => Float8Scaling::Mx,
        _ => Float8Scaling::Tensor,
    };
    let why = "all linear layers are predicted in 8 bits, not only those of Transformer Engine";
    Ok(Effect::All(vec![
        Effect::Fact(Fact::Float8, 1),
        scaling.effect(),
        Effect::Lost(why),
    ]))
}

/// Reads the length of packed sequences. Without one, sequences are not packed.
fn packed(node: &Node) -> Result<Effect, String> {
    Ok(match node.count()? {
        0 => Effect::Aside("not packed"),
        n => Effect::Fact(Fact::PackedLength, n),
    })
}

/// Reads the attention implementation. Only `eager` has other kernels than the predicted ones.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn attention(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("eager") => Effect::All(vec![
            set("model.attn_implementation", "eager"),
            Effect::Assume(
                "model.implementation",
                quoted("transformers"),
                "eager attention is predicted in the code of transformers",
            ),
        ]),
        _ => Effect::Aside("as predicted"),
    })
}

/// Reads whether a part of a vision-language model is frozen.
fn frozen(node: &Node, fact: Fact) -> Result<Effect, String> {
    Ok(Effect::Fact(fact, node.truth()?.into()))
}

fn strategy(node: &Node) -> Result<Effect, String> {
    let name = node.full().to_ascii_lowercase();
    Ok(match name.rsplit('.').next().unwrap_or(&name) {
        "fsdp2" | "fsdp2manager" => Effect::All(vec![
            Effect::Engine(Engine::Fsdp),
            Effect::Fact(Fact::FsdpVersion, 2),
        ]),
        "megatron_fsdp" | "megatronfsdpmanager" => Effect::Engine(Engine::Megatron),
        "ddp" | "ddpmanager" => Effect::Engine(Engine::Ddp),
        _ => return Err(node.expected("fsdp2, megatron_fsdp or ddp")),
    })
}
