//! torchtune's recipe configurations.

use super::script::LAUNCHER;
use crate::adapters::Targets;
use crate::convert::{
    DATA, DISTILLATION, DROPOUT, EVALUATION, LAUNCH, LOGGING, PAGED, PREFERENCES, SAVING, VALUES,
    betas, clip, decomposed, float8, float8_recipe, four_bits_twice, full_recompute, if_true,
    in_8_bits, in_32_bits, offloaded_activations, replicas, set,
};
use crate::table::{
    COMPILED_BLOCKS, COMPILED_LOSS, Dtype, Effect, Engine, Fact, Fallback, Format, Key, Table,
    decisive, fact, integer, lost, number, quoted, with,
};
use crate::tree::{Node, Value};

pub(crate) static TORCHTUNE: Format = FORMAT;

/// `tune run` with overrides such as `batch_size=4`.
pub(crate) static TORCHTUNE_SCRIPT: Format = Format {
    tables: &[TABLE, LAUNCHER],
    ..FORMAT
};

const FORMAT: Format = Format {
    name: "torchtune",
    tables: &[TABLE],
    engine: Some(Engine::Fsdp),
    accelerated: false,
    reduces_in_f32: false,
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

const DEFAULTS: &[Fallback] = &[Fallback {
    key: "fsdp.expandable_segments",
    value: "false",
    why: "PyTorch's default",
}];

const KEYS: &[Key] = &[
    with("model._component_", model),
    integer("model.lora_rank", "lora.r"),
    number("model.lora_alpha", "lora.lora_alpha"),
    with("model.lora_attn_modules", |node| {
        // This is the only name that differs from those of transformers.
        let words = node
            .words()
            .ok_or_else(|| node.expected("a list of layers"))?;
        let names: Vec<&str> = words.split_whitespace().collect();
        let of = |name| {
            if name == "output_proj" {
                "o_proj"
            } else {
                name
            }
        };
        let names: Vec<&str> = names.into_iter().map(of).collect();
        Ok(Effect::Targets(Targets::named(&names)))
    }),
    with("model.apply_lora_to_mlp", |node| {
        let layers = Targets::named(&["gate_proj", "down_proj", "up_proj"]);
        if_true(node, Effect::Targets(layers))
    }),
    lost(
        "model.apply_lora_to_output",
        "adapters of the output projection",
    ),
    lost("model.lora_dropout", DROPOUT),
    with("model.use_dora", decomposed),
    with("model.quantize_base", four_bits_twice),
    integer("tokenizer.max_seq_len", "train.seq_len"),
    integer("batch_size", "train.micro_batch"),
    integer("gradient_accumulation_steps", "train.grad_accum"),
    with("clip_grad_norm", clip),
    number("optimizer.lr", "train.lr"),
    number("optimizer.weight_decay", "train.weight_decay"),
    number("optimizer.eps", "train.eps"),
    with("optimizer.betas", betas),
    with("optimizer._component_", |node| {
        let name = node.full();
        Ok(match name.rsplit('.').next().unwrap_or(&name) {
            "AdamW" | "Adam" => set("train.optimizer", "adamw"),
            "SGD" => set("train.optimizer", "sgd"),
            "AdamW8bit" => in_8_bits("adamw"),
            "PagedAdamW8bit" => Effect::All(vec![in_8_bits("adamw"), Effect::Lost(PAGED)]),
            "PagedAdamW" => Effect::All(vec![in_32_bits("adamw"), Effect::Lost(PAGED)]),
            "Lion8bit" => in_8_bits("lion"),
            "Lion" => set("train.optimizer", "lion"),
            _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
        })
    }),
    with("loss._component_", |node| {
        let name = node.full();
        if name.contains("DPO") {
            return Ok(Effect::All(vec![
                Effect::Fact(Fact::Pairs, 1),
                Effect::Fact(Fact::Reference, 1),
            ]));
        }
        if ["PPO", "GRPO", ".rlhf.", ".rl."]
            .iter()
            .any(|part| name.contains(part))
        {
            return Ok(Effect::Decisive(PREFERENCES));
        }
        Ok(if node.full().contains("LinearCrossEntropy") {
            set("train.loss", "saved_chunks")
        } else if node.full().contains("Chunked") {
            set("train.loss", "split_logits")
        } else {
            set("train.loss", "materialized")
        })
    }),
    integer("model.vocab_size", "model.vocab"),
    integer("model.num_layers", "model.layers"),
    integer("model.num_heads", "model.heads"),
    integer("model.num_kv_heads", "model.kv_heads"),
    integer("model.embed_dim", "model.hidden"),
    integer("model.intermediate_dim", "model.ffn"),
    integer("model.max_seq_len", "model.max_seq_len"),
    number("model.norm_eps", "model.norm_eps"),
    number("model.rope_base", "model.rope_theta"),
    lost("model.encoder_trainable", FROZEN),
    lost("model.decoder_trainable", FROZEN),
    lost("model.fusion_trainable", FROZEN),
    decisive("teacher_model", DISTILLATION),
    decisive("policy_model", PREFERENCES),
    decisive("reward_and_value_model", PREFERENCES),
    decisive("orchestration", PREFERENCES),
    decisive("inference", PREFERENCES),
    decisive("prompt", NO_TRAINING),
    decisive("tasks", NO_TRAINING),
    lost("quantizer", "fake quantization is not modeled"),
    with("fsdp.cpu_offload", |node| {
        Ok(Effect::Fact(Fact::OffloadAll, node.truth()?.into()))
    }),
    with("enable_activation_checkpointing", full_recompute),
    with("enable_fp8_training", float8),
    with("fp8_recipe_name", float8_recipe),
    lost("ac_mode", AC_MODE),
    lost("ac_option", AC_MODE),
    with("enable_activation_offloading", offloaded_activations),
    with("custom_sharded_layers", units),
    with("fsdp_cpu_offload", |node| {
        Ok(Effect::Fact(Fact::OffloadAll, node.truth()?.into()))
    }),
    with("fsdp_reshard_after_forward", |node| {
        Ok(Effect::Fact(Fact::Reshard, node.truth()?.into()))
    }),
    with("compile", |node| {
        let Value::Map(given) = &node.value else {
            let all = if node.truth()? {
                COMPILED_BLOCKS + COMPILED_LOSS
            } else {
                0
            };
            return Ok(Effect::Fact(Fact::CompiledParts, all));
        };
        // A part without a key is compiled.
        let mut parts = 0;
        for (name, bit) in [("model", COMPILED_BLOCKS), ("loss", COMPILED_LOSS)] {
            let key = given.iter().find(|(key, _)| key.text == name);
            if key.map_or(Ok(true), |(_, on)| on.truth())? {
                parts += bit;
            }
        }
        Ok(Effect::Fact(Fact::CompiledParts, parts))
    }),
    with("optimizer_in_bwd", |node| {
        if_true(
            node,
            Effect::Set("fsdp.optimizer_in_backward", "true".to_owned()),
        )
    }),
    with("dtype", |node| Ok(Effect::Weights(Dtype::of(node)?))),
    fact("tensor_parallel_dim", Fact::Tensor),
    fact("context_parallel_dim", Fact::Context),
    fact("expert_parallel_dim", Fact::Expert),
    with("data_parallel_replicate_dim", replicas),
    with("data_parallel_shard_dim", crate::convert::shard_ranks),
    integer("lr_scheduler.num_warmup_steps", "train.warmup_steps"),
];

pub(crate) const NO_TRAINING: &str =
    "this recipe trains nothing: give the configuration of a training recipe";
const FROZEN: &str = "what is frozen is predicted as trained: name it with --set fsdp.frozen";

/// Why torchtune's selective checkpointing is not predicted.
const AC_MODE: &str = "checkpointing by ac_mode is not modeled; enable_activation_checkpointing alone decides what is recomputed";

const ASIDES: &[(&str, &[&str])] = &[
    (
        SAVING,
        &[
            "output_dir",
            "checkpointer",
            "resume_from_checkpoint",
            "save_adapter_weights_only",
            "keep_last_n_checkpoints",
            "enable_async_checkpointing",
            "ref_checkpointer",
            "teacher_checkpointer",
            "save_every_n_steps",
            "save_every_n_epochs",
            "low_cpu_ram",
            "name",
        ],
    ),
    (
        DATA,
        &[
            "tokenizer",
            "dataset",
            "shuffle",
            "epochs",
            "max_steps_per_epoch",
            "train_on_input",
            "packed",
            "datasets",
            "collate_fn",
            "model.image_size",
        ],
    ),
    (
        EVALUATION,
        &["run_val_every_n_steps", "dataset_val", "batch_size_val"],
    ),
    (
        LOGGING,
        &[
            "metric_logger",
            "log_every_n_steps",
            "log_peak_memory_stats",
            "log_level",
            "profiler",
        ],
    ),
    (
        VALUES,
        &[
            "seed",
            "lr_scheduler._component_",
            "cudnn_deterministic_mode",
            "loss",
            "kd_loss",
            "kd_ratio",
            "model.attn_dropout",
        ],
    ),
    (
        LAUNCH,
        &["device", "tensor_parallel_plan", "parallelize_plan"],
    ),
    ("as predicted", &["optimizer.fused"]),
];

/// Reads the model builder: `torchtune.models.llama3_1.llama3_1_8b`.
fn model(node: &Node) -> Result<Effect, String> {
    let path = node.full();
    let builder = path.rsplit('.').next().unwrap_or(&path);
    let (four_bits, builder) = match builder.strip_prefix('q') {
        Some(rest) if rest.starts_with("lora_") => (true, rest),
        _ => (false, builder),
    };
    let (lora, builder) = match builder.strip_prefix("lora_") {
        Some(rest) => (true, rest),
        None => (false, builder),
    };
    let name = builder
        .trim_end_matches("_instruct")
        .trim_end_matches("_base")
        .replace("llama3_1", "llama-3.1")
        .replace("llama3_2", "llama-3.2")
        .replace("llama3_3", "llama-3.3")
        .replace("llama3_", "llama-3_")
        .replace("llama2", "llama-2")
        .replace("qwen2_5", "qwen2.5");
    // The remaining underscores are separators, or decimal points in sizes such as `0_5b`.
    let parts: Vec<&str> = name.split('_').collect();
    let name = match parts.as_slice() {
        [family, whole, tenths] if tenths.ends_with('b') => format!("{family}-{whole}.{tenths}"),
        _ => parts.join("-"),
    };
    let adapter = Effect::Fact(Fact::Adapter, lora.into());
    let mut effects = vec![Effect::Model(name), adapter];
    if four_bits {
        effects.push(Effect::Fact(Fact::FourBits, 2));
    }
    Ok(Effect::All(effects))
}

/// Reads the modules that are units in addition to the blocks.
fn units(node: &Node) -> Result<Effect, String> {
    let names = node
        .words()
        .ok_or_else(|| node.expected("a list of modules"))?;
    let mut units = vec![quoted("layers.*")];
    // Multimodal models have these modules in `decoder`.
    let names = names.split_whitespace();
    for name in names.map(|n| n.strip_prefix("decoder.").unwrap_or(n)) {
        if !matches!(name, "tok_embeddings" | "output" | "norm") {
            return Err(format!(
                "expected tok_embeddings, norm or output, got `{name}`"
            ));
        }
        units.push(quoted(name));
    }
    Ok(Effect::Set("fsdp.units", format!("[{}]", units.join(", "))))
}
