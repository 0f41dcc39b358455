//! Megatron-LM's arguments, from a shell script or from the file that `--yaml-cfg` names.

use crate::convert::{
    DATA, EVALUATION, EXCHANGE_SMS, KERNELS, LAUNCH, LOGGING, PREFERENCES, SAVING, VALUES,
    allocator, decay_of_matrices, float8_format, float8_gather, float8_recipe, float8_transposes,
    forced_routing, if_true, mixed_bf16, mixed_f16, set,
};
use crate::derive::{Activation, CAPTURED, FLEX_BACKENDS, Positions};
use crate::table::{
    CAPACITY, Dtype, Effect, Engine, Fact, Fallback, Format, Key, SHARED_OVERLAP, Table, To,
    choice, decisive, fact, integer, key, lost, number, with,
};
use crate::tree::Node;
use shardlab_plan::config::RecomputeModule;

/// Arguments of a script.
pub(crate) static MEGATRON: Format = Format {
    tables: &[
        Table {
            under: "",
            prefix: "--",
            keys: &[key("yaml-cfg", To::File(&MEGATRON_YAML))],
            asides: &[],
        },
        TABLE,
    ],
    ..FORMAT
};

/// The file that `--yaml-cfg` names.
pub(crate) static MEGATRON_YAML: Format = FORMAT;

/// Reads which layers have experts: all of them, or all after the first ones. Accepts Python
/// expressions such as `[0]*3+[1]*58`.
fn expert_layers(node: &Node) -> Result<Effect, String> {
    let full = node.full();
    let text: String = full.chars().filter(|c| !" ()\"'".contains(*c)).collect();
    let times = |part: &str, digit: &str| {
        let rest = part.strip_prefix('[')?.strip_prefix(digit)?;
        let rest = rest.strip_prefix(']')?;
        match rest.strip_prefix('*') {
            Some(n) => n.parse::<u64>().ok(),
            None => rest.is_empty().then_some(1),
        }
    };
    let parts: Vec<&str> = text.split('+').collect();
    let dense = match parts[..] {
        ["1"] => Some(0),
        [all] => times(all, "1").map(|_| 0),
        [first, others] => times(others, "1").and(times(first, "0")),
        _ => None,
    };
    Ok(match dense {
        Some(0) => Effect::Aside("as predicted"),
        Some(n) => Effect::Set("model.dense_layers", n.to_string()),
        None => Effect::Decisive("this order of dense layers and experts is not modeled"),
    })
}

/// Why the name of a sharding strategy has no effect.
const HSDP: &str = "the outer sharding strategy decides";

const fn positions(positions: Positions) -> Effect {
    Effect::Fact(Fact::Positions, positions as u64)
}

/// Notes that the layers are of different kinds.
fn other_layers(node: &Node) -> Result<Effect, String> {
    Ok(match node.value {
        crate::tree::Value::Bool(false) => Effect::Aside("off"),
        _ => Effect::Fact(Fact::OtherLayers, 1),
    })
}

/// Reads Transformer Engine's formats, which turn on 8-bit matmuls.
pub(super) fn float8_on(node: &Node) -> Result<Effect, String> {
    let on = Effect::Fact(Fact::Float8, 1);
    Ok(match node.full().as_str() {
        "e4m3" => Effect::All(vec![on, float8_format(node)?]),
        "hybrid" => on,
        _ => Effect::Aside("off"),
    })
}

const FORMAT: Format = Format {
    name: "Megatron-LM",
    tables: &[TABLE],
    engine: Some(Engine::MegatronOptimizer),
    accelerated: false,
    reduces_in_f32: false,
    flat: true,
    open: false,
    defaults: DEFAULTS,
};

pub(super) const TABLE: Table = Table {
    under: "",
    prefix: "--",
    keys: KEYS,
    asides: ASIDES,
};

const DEFAULTS: &[Fallback] = &[
    Fallback {
        key: "train.clip_norm",
        value: "1.0",
        why: "Megatron's default",
    },
    Fallback {
        key: "fsdp.expandable_segments",
        value: "false",
        why: "PyTorch's default",
    },
];

const KEYS: &[Key] = &[
    with("PYTORCH-CUDA-ALLOC-CONF", allocator),
    with("PYTORCH-ALLOC-CONF", allocator),
    integer("num-layers", "model.layers"),
    integer("hidden-size", "model.hidden"),
    integer("ffn-hidden-size", "model.ffn"),
    integer("num-attention-heads", "model.heads"),
    integer("num-query-groups", "model.kv_heads"),
    integer("kv-channels", "model.head_dim"),
    integer("max-position-embeddings", "model.max_seq_len"),
    fact("vocab-size", Fact::Vocab),
    fact("make-vocab-size-divisible-by", Fact::VocabMultiple),
    integer("padded-vocab-size", "model.vocab"),
    number("rotary-base", "model.rope_theta"),
    number("norm-epsilon", "model.norm_eps"),
    with("swiglu", |node| {
        if_true(
            node,
            Effect::Fact(Fact::Activation, Activation::Swiglu as u64),
        )
    }),
    with("squared-relu", |node| {
        if_true(
            node,
            Effect::Fact(Fact::Activation, Activation::SquaredRelu as u64),
        )
    }),
    with("quick-geglu", |node| {
        if_true(
            node,
            Effect::Fact(Fact::Activation, Activation::QuickGeglu as u64),
        )
    }),
    with("openai-gelu", |node| {
        if_true(
            node,
            Effect::Fact(Fact::Activation, Activation::Gelu as u64),
        )
    }),
    choice("position-embedding-type", |node| {
        Ok(match node.text() {
            Some("rope" | "yarn" | "mrope") => positions(Positions::Rotary),
            Some("none") => positions(Positions::None),
            Some("learned_absolute") => positions(Positions::Learned),
            _ => Effect::Lost("these positions are predicted as learned ones"),
        })
    }),
    with("use-rotary-position-embeddings", |node| {
        if_true(node, positions(Positions::Rotary))
    }),
    with("use-llama2-rotary-position-embeddings", |node| {
        if_true(node, positions(Positions::Rotary))
    }),
    with("no-position-embedding", |node| {
        Ok(if node.truth()? {
            Effect::Aside("rotary embeddings need no table")
        } else {
            Effect::Aside("off")
        })
    }),
    with("disable-bias-linear", |node| {
        if_true(node, Effect::Fact(Fact::NoBias, 1))
    }),
    with("normalization", |node| {
        let rms = node.full() == "RMSNorm";
        Ok(Effect::Fact(Fact::RmsNorm, rms.into()))
    }),
    with("apply-layernorm-1p", |node| {
        if_true(node, Effect::Fact(Fact::UnitOffset, 1))
    }),
    with("group-query-attention", |node| {
        Ok(Effect::Fact(Fact::GroupedQueries, node.truth()?.into()))
    }),
    number("rotary-percent", "model.partial_rotary_factor"),
    with("multi-latent-attention", |node| {
        if_true(node, Effect::Fact(Fact::Latent, 1))
    }),
    integer("kv-lora-rank", "model.kv_lora_rank"),
    integer("q-lora-rank", "model.q_lora_rank"),
    fact("qk-head-dim", Fact::QkHead),
    integer("qk-pos-emb-head-dim", "model.qk_rope_head_dim"),
    integer("v-head-dim", "model.v_head_dim"),
    with("hybrid-layer-pattern", other_layers),
    with("hybrid-override-pattern", other_layers),
    with("is-hybrid-model", other_layers),
    with("heterogeneous-layers-config-path", other_layers),
    with("heterogeneous-layers-config-encoded-json", other_layers),
    with("linear-attention-freq", other_layers),
    with("encoder-num-layers", other_layers),
    with("mtp-num-layers", |node| {
        Ok(match node.count()? {
            0 => Effect::Aside("off"),
            _ => Effect::Lost("layers that predict later tokens are not predicted"),
        })
    }),
    lost(
        "window-attn-skip-freq",
        "attention is predicted over all positions",
    ),
    lost("enable-full-sharding-in-hsdp", HSDP),
    with("untie-embeddings-and-output-weights", |node| {
        if_true(
            node,
            Effect::Set("model.tie_embeddings", "false".to_owned()),
        )
    }),
    with("add-qkv-bias", |node| {
        if_true(node, set("model.bias", "qkv"))
    }),
    with("qk-layernorm", |node| {
        if_true(node, Effect::Set("model.qk_norm", "true".to_owned()))
    }),
    integer("seq-length", "train.seq_len"),
    integer("micro-batch-size", "train.micro_batch"),
    fact("global-batch-size", Fact::GlobalBatch),
    number("clip-grad", "train.clip_norm"),
    number("lr", "train.lr"),
    number("min-lr", "train.min_lr"),
    with("weight-decay", decay_of_matrices),
    number("adam-eps", "train.eps"),
    integer("lr-warmup-iters", "train.warmup_steps"),
    with("lr-decay-style", crate::convert::schedule),
    with("optimizer", |node| {
        Ok(match node.text() {
            Some("adam" | "adamw") => set("train.optimizer", "adamw"),
            Some("sgd") => set("train.optimizer", "sgd"),
            _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
        })
    }),
    fact("nproc-per-node", Fact::GpusPerNode),
    fact("nnodes", Fact::Nodes),
    fact("tensor-model-parallel-size", Fact::Tensor),
    fact("pipeline-model-parallel-size", Fact::Pipeline),
    fact("context-parallel-size", Fact::Context),
    fact("expert-model-parallel-size", Fact::Expert),
    fact("num-experts", Fact::Experts),
    integer("moe-router-topk", "model.top_k"),
    integer("moe-ffn-hidden-size", "model.expert_ffn"),
    integer(
        "moe-shared-expert-intermediate-size",
        "model.shared_expert_ffn",
    ),
    with("moe-shared-expert-gate", |node| {
        if_true(
            node,
            Effect::Set("model.shared_expert_gate", "true".to_owned()),
        )
    }),
    with("moe-shared-expert-overlap", |node| {
        if_true(node, Effect::Set(SHARED_OVERLAP, "true".to_owned()))
    }),
    with("moe-layer-freq", expert_layers),
    with("moe-router-score-function", |node| {
        Ok(match node.text() {
            Some("softmax") => Effect::Aside("as predicted"),
            Some("sigmoid") => set("model.router", "sigmoid"),
            _ => return Err(node.expected("softmax or sigmoid")),
        })
    }),
    with("moe-router-pre-softmax", |node| {
        if_true(node, Effect::Fact(Fact::PreSoftmax, 1))
    }),
    integer("moe-router-num-groups", "model.router_groups"),
    integer("moe-router-group-topk", "model.router_group_top_k"),
    number("moe-router-topk-scaling-factor", "model.route_scale"),
    with("moe-router-enable-expert-bias", |node| {
        if_true(node, Effect::Set("model.router_bias", "true".to_owned()))
    }),
    number(
        "moe-router-bias-update-rate",
        "model.router_bias_update_speed",
    ),
    with("moe-router-force-load-balancing", forced_routing),
    number("moe-aux-loss-coeff", "model.aux_loss"),
    number("moe-z-loss-coeff", "model.z_loss"),
    choice("moe-router-load-balancing-type", |node| {
        Ok(match node.text() {
            Some("aux_loss") => Effect::Aside("as predicted"),
            Some("seq_aux_loss") => set("model.aux_loss_kind", "sequence"),
            Some("none") => Effect::Fact(Fact::Balancing, 0),
            _ => Effect::Lost("the load-balancing loss is predicted as aux_loss"),
        })
    }),
    with("moe-token-dispatcher-type", |node| {
        let found = match node.text() {
            Some("allgather") => 0,
            // Older versions also have a sequential dispatcher.
            Some("alltoall" | "alltoall_seq") => 1,
            Some("flex") => 2,
            _ => return Err(node.expected("allgather, alltoall or flex")),
        };
        Ok(Effect::Fact(Fact::TokenDispatcher, found))
    }),
    with("moe-flex-dispatcher-backend", |node| {
        match FLEX_BACKENDS.iter().position(|n| node.text() == Some(n)) {
            Some(n) => Ok(Effect::Fact(Fact::FlexBackend, n as u64)),
            None => Err(node.expected(&FLEX_BACKENDS.join(", "))),
        }
    }),
    with("moe-enable-deepep", |node| {
        if_true(node, Effect::Fact(Fact::FlexBackend, 0))
    }),
    lost("moe-flex-dispatcher-num-sms", EXCHANGE_SMS),
    lost("moe-deepep-num-sms", EXCHANGE_SMS),
    lost("moe-hybridep-num-sms", EXCHANGE_SMS),
    lost("moe-hybridep-num-blocks-permute", EXCHANGE_SMS),
    lost("moe-hybridep-num-blocks-unpermute", EXCHANGE_SMS),
    with("moe-dispatch-fwd-dtype", payload),
    with("moe-combine-bwd-dtype", payload),
    lost(
        "moe-expert-rank-capacity-factor",
        "tokens above the capacity of a rank are predicted as kept",
    ),
    with("moe-layer-recompute", |node| {
        if_true(node, Effect::Fact(Fact::RecomputeMoe, 1))
    }),
    integer("moe-latent-size", "model.expert_latent"),
    number("moe-expert-capacity-factor", CAPACITY),
    with("moe-pad-expert-input-to-capacity", |node| {
        if_true(node, Effect::Fact(Fact::PadToCapacity, 1))
    }),
    with("use-distributed-optimizer", |node| {
        Ok(Effect::Fact(
            Fact::DistributedOptimizer,
            node.truth()?.into(),
        ))
    }),
    with("use-precision-aware-optimizer", |node| {
        Ok(Effect::Fact(
            Fact::PrecisionAwareOptimizer,
            node.truth()?.into(),
        ))
    }),
    with("use-megatron-fsdp", |node| {
        if_true(node, Effect::Engine(Engine::Megatron))
    }),
    with("use-custom-fsdp", |node| {
        if_true(node, Effect::Engine(Engine::Megatron))
    }),
    with("use-torch-fsdp2", |node| {
        if_true(
            node,
            Effect::All(vec![
                Effect::Engine(Engine::Fsdp),
                Effect::Fact(Fact::FsdpVersion, 2),
            ]),
        )
    }),
    with("torch-fsdp2-no-reshard-after-forward", |node| {
        if_true(node, Effect::Fact(Fact::Reshard, 0))
    }),
    with("megatron-fsdp-version", |node| {
        Ok(match node.integer()? {
            1 => Effect::Aside("as predicted"),
            _ => set("fsdp.policy", "megatron_v2"),
        })
    }),
    with("data-parallel-sharding-strategy", |node| {
        Ok(match node.text() {
            Some(name @ ("no_shard" | "optim" | "optim_grads" | "optim_grads_params")) => {
                set("fsdp.strategy", name)
            }
            _ => return Err(node.expected("no_shard, optim, optim_grads or optim_grads_params")),
        })
    }),
    with("outer-dp-sharding-strategy", |node| {
        Ok(match node.text() {
            Some(name @ ("no_shard" | "optim")) => set("fsdp.outer_strategy", name),
            _ => return Err(node.expected("no_shard or optim")),
        })
    }),
    fact("num-distributed-optimizer-instances", Fact::DpReplicate),
    with("fsdp-double-buffer", |node| {
        if_true(node, set("fsdp.allocator", "double_buffer"))
    }),
    with("fsdp-db-use-persist-buf-on-alloc-fail", |node| {
        if_true(
            node,
            Effect::Set("fsdp.persist_on_alloc_fail", "true".to_owned()),
        )
    }),
    with("suggested-communication-unit-size", |node| {
        let half = node.count()? / 2;
        Ok(Effect::Set(
            "fsdp.prefetch_forward",
            format!("{{ elements = {} }}", half.max(1)),
        ))
    }),
    with("create-all-gather-group", |node| {
        if_true(
            node,
            Effect::Set("fsdp.separate_communicators", "true".to_owned()),
        )
    }),
    with("calculate-per-token-loss", |node| {
        if_true(node, Effect::Set("fsdp.per_token_loss", "true".to_owned()))
    }),
    with("ddp-average-in-collective", |node| {
        if_true(
            node,
            Effect::Set("fsdp.average_in_collective", "true".to_owned()),
        )
    }),
    with("no-check-for-nan-in-loss-and-grad", |node| {
        if_true(node, Effect::Set("fsdp.nan_check", "false".to_owned()))
    }),
    with("bf16", mixed_bf16),
    with("fp16", mixed_f16),
    with("grad-reduce-in-bf16", |node| {
        if_true(
            node,
            Effect::All(vec![
                set("precision.main_grads", "bf16"),
                set("precision.reduce_dtype", "bf16"),
            ]),
        )
    }),
    with("accumulate-allreduce-grads-in-fp32", |node| {
        if_true(node, Effect::Fact(Fact::Float32Gradients, 1))
    }),
    with("main-params-dtype", |node| {
        Ok(set("precision.main_params", Dtype::of(node)?.name()))
    }),
    with("main-grads-dtype", |node| {
        Ok(set("precision.main_grads", Dtype::of(node)?.name()))
    }),
    with("megatron-fsdp-main-params-dtype", |node| {
        Ok(set("precision.main_params", Dtype::of(node)?.name()))
    }),
    with("megatron-fsdp-main-grads-dtype", |node| {
        Ok(set("precision.main_grads", Dtype::of(node)?.name()))
    }),
    with("megatron-fsdp-grad-comm-dtype", |node| {
        Ok(set("precision.reduce_dtype", Dtype::of(node)?.name()))
    }),
    with("exp-avg-dtype", |node| {
        Ok(set("precision.moments", Dtype::of(node)?.name()))
    }),
    with("exp-avg-sq-dtype", |node| {
        Ok(set("precision.moments", Dtype::of(node)?.name()))
    }),
    with("recompute-granularity", |node| {
        Ok(match node.text() {
            Some("full") => set("train.recompute", "full"),
            _ => Effect::Fact(Fact::RecomputeSelective, 1),
        })
    }),
    with("recompute-activations", |node| {
        if_true(node, Effect::Fact(Fact::RecomputeSelective, 1))
    }),
    fact("recompute-num-layers", Fact::RecomputeLayers),
    with("recompute-method", |node| {
        let block = node.full() == "block";
        Ok(Effect::Fact(Fact::RecomputeBlock, block.into()))
    }),
    with("recompute-modules", recomputed),
    with("fp8-format", float8_on),
    with("fp8-recipe", float8_recipe),
    integer("num-layers-at-start-in-bf16", "precision.float8_first_bf16"),
    integer("num-layers-at-end-in-bf16", "precision.float8_last_bf16"),
    with("first-last-layers-bf16", |node| {
        if_true(node, Effect::Fact(Fact::Float8InnerBlocks, 1))
    }),
    with("fp8-param-gather", float8_gather),
    with("keep-fp8-transpose-cache", float8_transposes),
    with("use-nccl-ub", |node| {
        Ok(Effect::Fact(Fact::NcclUb, node.truth()?.into()))
    }),
    with("nccl-ub", |node| {
        Ok(Effect::Fact(Fact::NcclUb, node.truth()?.into()))
    }),
    with("optimizer-cpu-offload", |node| {
        Ok(Effect::Fact(Fact::OptimizerOffload, node.truth()?.into()))
    }),
    with("attention-dropout", dropout),
    with("hidden-dropout", dropout),
    with("cpu-offloading", |node| {
        if_true(
            node,
            Effect::Lost("activations are predicted on the device"),
        )
    }),
    // Options of slime, whose SFT has none of these.
    decisive("advantage-estimator", PREFERENCES),
    decisive("rm-type", PREFERENCES),
    decisive("custom-rm-path", PREFERENCES),
    lost("max-tokens-per-gpu", DYNAMIC),
    lost("use-dynamic-batch-size", DYNAMIC),
    lost("window-size", "attention is predicted over all positions"),
    lost(
        "step-batch-size-schedule",
        "the last batch size is predicted",
    ),
    lost("rampup-batch-size", "the last batch size is predicted"),
    lost(
        "empty-unused-memory-level",
        "the allocator's cache is predicted as kept",
    ),
    choice("cuda-graph-impl", |node| {
        let kind = match node.full().as_str() {
            "none" => 0,
            "local" | "transformer_engine" => 1,
            "full_iteration" => 2,
            _ => {
                return Err(node.expected("none, local, transformer_engine or full_iteration"));
            }
        };
        Ok(Effect::Fact(Fact::CudaGraph, kind))
    }),
    with("enable-cuda-graph", graph_per_layer),
    with("external-cuda-graph", graph_per_layer),
    with("cuda-graph-modules", captured_modules),
    with("cuda-graph-scope", captured_modules),
];

/// Reads a deprecated flag that is equivalent to `--cuda-graph-impl local` or `transformer_engine`.
fn graph_per_layer(node: &Node) -> Result<Effect, String> {
    if_true(node, Effect::Fact(Fact::CudaGraph, 1))
}

/// Reads which parts of blocks backward runs again.
fn recomputed(node: &Node) -> Result<Effect, String> {
    let bits = bits_of(node, RecomputeModule::WORDS)?;
    Ok(Effect::Fact(Fact::RecomputeModules, bits))
}

/// Reads which parts of a layer CUDA graphs capture.
fn captured_modules(node: &Node) -> Result<Effect, String> {
    let bits = bits_of(node, &CAPTURED)?;
    Ok(Effect::Fact(Fact::CudaGraphModules, bits))
}

/// Reads words of a list, as bits by their places in the list.
///
/// # Errors
/// Returns a message that says which words were expected.
fn bits_of(node: &Node, known: &[&str]) -> Result<u64, String> {
    let words = node.words().unwrap_or_else(|| node.full());
    let mut bits = 0;
    for word in words.split([' ', ',']).filter(|w| !w.is_empty()) {
        match known.iter().position(|name| *name == word) {
            Some(at) => bits |= 1 << at,
            None => return Err(node.expected(&known.join(", "))),
        }
    }
    Ok(bits)
}

/// Reads the element type in which tokens travel to their experts, or gradients back.
fn payload(node: &Node) -> Result<Effect, String> {
    Ok(match node.text() {
        Some("bf16") => Effect::Aside("as predicted"),
        _ => Effect::Lost("tokens are predicted to travel in the type of computation"),
    })
}

/// Reads a dropout probability.
fn dropout(node: &Node) -> Result<Effect, String> {
    Ok(match node.number()? {
        0.0 => Effect::Aside("off"),
        _ => Effect::Lost("kernels and masks of dropout are not predicted"),
    })
}

const DYNAMIC: &str = "micro-batches are predicted with a fixed number of sequences";

const ASIDES: &[(&str, &[&str])] = &[
    (
        LAUNCH,
        &[
            "node-rank",
            "master-addr",
            "master-port",
            "rdzv-id",
            "rdzv-backend",
            "rdzv-endpoint",
            "distributed-backend",
            "distributed-timeout-minutes",
            "exit-duration-in-mins",
            "exit-interval",
            "exit-signal-handler",
            "manual-gc",
            "manual-gc-interval",
            "num-workers",
            "log-dir",
            "tee",
            "redirects",
            "local-ranks-filter",
            "distributed-timeout-seconds-after-init",
            "nccl-communicator-config-path",
            "use-gloo-process-groups",
            "disable-gloo-process-groups",
            "enable-ft-package",
            "inprocess-restart",
            "enable-experimental",
            "no-async-grad-allreduce",
            "standalone",
            "max-restarts",
            "role",
            "use-tp-pp-dp-mapping",
            "use-cpu-initialization",
            "te-rng-tracker",
            "no-overlap-p2p-communication",
            "overlap-param-gather-with-optimizer-step",
            "align-grad-reduce",
            "no-align-param-gather",
            "high-priority-stream-groups",
        ],
    ),
    (
        DATA,
        &[
            "data-path",
            "mock-data",
            "split",
            "train-iters",
            "train-samples",
            "tokenizer-type",
            "train-data-path",
            "valid-data-path",
            "test-data-path",
            "data-args-path",
            "per-split-data-args-path",
            "dataset",
            "patch-tokenizer-type",
            "max-padding-length",
            "extra-vocab-size",
            "num-dataset-builder-threads",
            "dataloader-fast-cache-load",
            "dataloader-defer-npy-index-mmap",
            "tokenizer-metadata",
            "tokenizer-special-tokens",
            "tokenizer-hf-include-special-tokens",
            "epochs",
            "keep-last",
            "train-data",
            "valid-data",
            "fim-data",
            "sft",
            "sft-tokenizer-prompt-format",
            "legacy-tokenizer",
            "trust-remote-code",
            "phase-transition-iterations",
            "skip-train",
            "tokenizer-model",
            "vocab-file",
            "merge-file",
            "tiktoken-pattern",
            "data-cache-path",
            "reset-position-ids",
            "reset-attention-mask",
            "eod-mask-loss",
            "no-create-attention-mask-in-dataloader",
            "no-mmap-bin-files",
            "dataloader-type",
        ],
    ),
    (
        SAVING,
        &[
            "save",
            "load",
            "save-interval",
            "ckpt-format",
            "no-load-optim",
            "no-load-rng",
            "no-save-optim",
            "no-save-rng",
            "init-model-with-meta-device",
            "use-dist-ckpt",
            "auto-detect-ckpt-format",
            "dist-ckpt-strictness",
            "async-save",
            "finetune",
            "use-checkpoint-args",
            "dist-ckpt-format",
            "ckpt-fully-parallel-save",
            "ckpt-fully-parallel-load",
            "no-ckpt-fully-parallel-save",
            "ckpt-assume-constant-structure",
            "ckpt-convert-format",
            "ckpt-convert-save",
            "ckpt-convert-update-legacy-dist-opt-format",
            "exit-on-missing-checkpoint",
            "pretrained-checkpoint",
            "override-opt-param-scheduler",
            "override-opt_param-scheduler",
            "use-checkpoint-opt_param-scheduler",
            "persistent-save-interval",
            "non-persistent-save-interval",
            "non-persistent-ckpt-type",
            "dist-ckpt-workers",
            "dist-ckpt-optim-fully-reshardable",
            "no-use-tokenizer-model-from-checkpoint-args",
            "use-persistent-ckpt-worker",
            "ckpt-step",
            "save-retain-interval",
            "log-progress-interval",
        ],
    ),
    (EVALUATION, &["eval-iters", "eval-interval"]),
    (
        "an option of --cpu-offloading",
        &[
            "cpu-offloading-num-layers",
            "cpu-offloading-activations",
            "cpu-offloading-weights",
        ],
    ),
    (
        "an option of --optimizer-cpu-offload",
        &[
            "optimizer-offload-fraction",
            "overlap-cpu-optimizer-d2h-h2d",
            "use-torch-optimizer-for-cpu-offload",
            "no-pin-cpu-grads",
            "no-pin-cpu-params",
        ],
    ),
    (
        LOGGING,
        &[
            "log-interval",
            "log-throughput",
            "log-progress",
            "log-params-norm",
            "log-timers-to-tensorboard",
            "log-memory-to-tensorboard",
            "logging-level",
            "tensorboard-dir",
            "wandb-project",
            "wandb-exp-name",
            "wandb-save-dir",
            "profile",
            "profile-step-start",
            "profile-step-end",
            "profile-ranks",
            "record-memory-history",
            "timing-log-level",
            "timing-log-option",
            "log-batch-size-to-tensorboard",
            "log-validation-ppl-to-tensorboard",
            "tensorboard-queue-size",
            "tensorboard-log-interval",
            "log-num-zeros-in-grad",
            "log-loss-scale-to-tensorboard",
            "log-world-size-to-tensorboard",
            "log-learning-rate-to-tensorboard",
            "no-log-loss-scale-to-tensorboard",
            "no-log-learning-rate-to-tensorboard",
            "log-straggler",
            "disable-straggler-on-startup",
            "straggler-ctrlr-port",
            "straggler-minmax-count",
            "log-energy",
            "wandb-entity",
            "wandb-mode",
            "moe-per-layer-logging",
            "use-pytorch-profiler",
            "memory-snapshot-path",
            "barrier-with-L1-time",
            "no-barrier-with-level-1-timing",
            "check-for-spiky-loss",
            "check-for-large-grads",
            "rerun-mode",
            "no-one-logger",
            "one-logger-project",
            "one-logger-run-name",
        ],
    ),
    (
        VALUES,
        &[
            "seed",
            "adam-beta1",
            "adam-beta2",
            "lr-decay-iters",
            "lr-decay-samples",
            "lr-warmup-samples",
            "lr-warmup-fraction",
            "lr-warmup-init",
            "decoupled-lr",
            "decoupled-min-lr",
            "init-method-std",
            "rotary-seq-len-interpolation-factor",
            "rotary-scaling-factor",
            "rotary-scale-factor",
            "rope-scaling-factor",
            "use-rope-scaling",
            "rope-type",
            "original-max-position-embeddings",
            "mscale",
            "mscale-all-dim",
            "beta-fast",
            "beta-slow",
            "mrope-section",
            "rotary-interleaved",
            "no-rope-freq",
            "weight-decay-incr-style",
            "start-weight-decay",
            "end-weight-decay",
            "lr-wsd-decay-style",
            "lr-wsd-decay-iters",
            "lr-wsd-decay-samples",
            "sgd-momentum",
            "muon-momentum",
            "muon-num-ns-steps",
            "hysteresis",
            "min-loss-scale",
            "loss-scale-window",
            "mtp-loss-scaling-factor",
            "no-weight-decay-cond-type",
            "embedding-init-method-std",
            "init-method-xavier-uniform",
            "apply-residual-connection-post-layernorm",
            "initial-loss-scale",
            "loss-scale",
            "fp8-amax-history-len",
            "fp8-amax-compute-algo",
            "fp8-margin",
        ],
    ),
    (
        KERNELS,
        &[
            "attention-backend",
            "use-flash-attn",
            "attention-softmax-in-fp32",
            "no-attention-softmax-in-fp32",
            "apply-query-key-layer-scaling",
            "use-fused-weighted-squared-relu",
        ],
    ),
    (
        "as predicted",
        &[
            "use-mcore-models",
            "overlap-grad-reduce",
            "overlap-param-gather",
            "cross-entropy-loss-fusion",
            "cross-entropy-fusion-impl",
            "no-gradient-accumulation-fusion",
            "no-masked-softmax-fusion",
            "transformer-impl",
            "no-persist-layer-norm",
            "no-async-tensor-model-parallel-allreduce",
            "no-rope-fusion",
            "no-bias-swiglu-fusion",
            "moe-grouped-gemm",
            "moe-permute-fusion",
            "moe-permute-fusion-into-hybridep",
            "moe-hybridep-pad-uneven-dispatch-inputs",
            "moe-hybridep-num-sms-preprocessing",
            "moe-ncclep-zero-copy",
            "moe-router-dtype",
            "moe-router-fusion",
            "moe-token-drop-policy",
            "use-te",
            "use-legacy-models",
            "no-bias-dropout-fusion",
            "no-bias-gelu-fusion",
            "bias-swiglu-fusion",
            "use-fused-rmsnorm",
            "enable-one-logger",
            "tp-comm-bulk-dgrad",
            "batch-p2p-comm",
            "moe-use-legacy-grouped-gemm",
            "moe-router-padding-for-quantization",
            "fp16-lm-cross-entropy",
            "use-sharp",
            "ddp-bucket-size",
            "ddp-num-buckets",
            "ddp-pad-buckets-for-high-nccl-busbw",
            "gradient-reduce-div-fusion",
            "no-gradient-reduce-div-fusion",
            "delay-wgrad-compute",
            "overlap-moe-expert-parallel-comm",
            "mla-down-proj-fusion",
            "reuse-grad-buf-for-mxfp8-param-ag",
        ],
    ),
    (
        "part of an option that is off",
        &[
            "sequence-parallel",
            "tp-comm-overlap",
            "fsdp-manual-registration",
            "disable-symmetric-registration",
            "expert-tensor-parallel-size",
            "num-layers-per-virtual-pipeline-stage",
            "num-virtual-stages-per-pipeline-rank",
            "pipeline-model-parallel-layout",
            "decoder-first-pipeline-num-layers",
            "decoder-last-pipeline-num-layers",
            "account-for-embedding-in-pipeline-split",
            "account-for-loss-in-pipeline-split",
            "cp-comm-type",
            "hierarchical-context-parallel-sizes",
            "tp-comm-overlap-cfg",
            "distribute-saved-activations",
        ],
    ),
];
