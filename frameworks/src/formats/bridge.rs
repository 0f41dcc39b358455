//! Megatron-Bridge (NVIDIA NeMo): YAML that overrides a recipe, and commands with overrides such as
//! `model.moe_token_dispatcher_type=flex`. Sections hold options of Megatron-Core under its names.
//!
//! Sources: `src/megatron/bridge/training/{config,mixed_precision}.py`, `recipes/common.py`, and
//! the options of `scripts/training/run_recipe.py`.

use super::{fsdp, megatron};
use crate::convert::{DATA, LAUNCH, LOGGING, SAVING, VALUES, if_true, set, targets};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Float8Scaling, Format, Key, Table, To, fact, integer,
    key, lost, number, with,
};
use crate::tree::Node;

pub(crate) static MEGATRON_BRIDGE: Format = Format {
    name: "Megatron-Bridge",
    tables: &[
        Table {
            under: "",
            prefix: "--",
            keys: KEYS,
            asides: ASIDES,
        },
        // The section `model` has the same name without dashes.
        Table {
            under: "",
            prefix: "",
            keys: &[with("--model", |_| Ok(Effect::Lost(RECIPE)))],
            asides: &[],
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
            key: "train.clip_norm",
            value: "1.0",
            why: "Megatron's default",
        },
        Fallback {
            key: "moe.dispatcher",
            value: "\"all_to_all\"",
            why: "the default of Megatron-Bridge's models",
        },
        fsdp::TORCH_SEGMENTS,
    ],
};

const RECIPE: &str = "what the recipe sets and these overrides do not is not read: --set gives it";

const FROZEN: &str = "what is frozen is predicted as trained: name it with --set fsdp.frozen";

const KEYS: &[Key] = &[
    with("recipe", |_| Ok(Effect::Lost(RECIPE))),
    key("hf-path", To::Model),
    key("hf-model-path", To::Model),
    key("config-file", To::AnyFile),
    key("config", To::AnyFile),
    with("mode", |node| {
        Ok(match node.text() {
            Some("lora") => Effect::Fact(Fact::Adapter, 1),
            Some("dora") => Effect::All(vec![
                Effect::Fact(Fact::Adapter, 1),
                Effect::Set("lora.use_dora", "true".to_owned()),
            ]),
            _ => Effect::Fact(Fact::Adapter, 0),
        })
    }),
    with("mixed-precision", precision),
    with("fp8", megatron::float8_on),
    lost("freeze-language-model", FROZEN),
    lost("freeze-vision-model", FROZEN),
    lost("freeze-vision-projection", FROZEN),
    with("grad-reduce-in-fp32", |node| {
        let dtype = if node.truth()? {
            Dtype::F32
        } else {
            Dtype::Bf16
        };
        Ok(set("precision.main_grads", dtype.name()))
    }),
    with("average-in-collective", |node| {
        if_true(
            node,
            Effect::Set("fsdp.average_in_collective", "true".to_owned()),
        )
    }),
    integer("dim", "lora.r"),
    number("alpha", "lora.lora_alpha"),
    with("target-modules", linear_layers),
    integer("-mb", "train.micro_batch"),
    fact("-gb", Fact::GlobalBatch),
    integer("-sl", "train.seq_len"),
    fact("-tp", Fact::Tensor),
    fact("-pp", Fact::Pipeline),
    fact("-cp", Fact::Context),
    fact("-ep", Fact::Expert),
];

const ASIDES: &[(&str, &[&str])] = &[
    (
        LAUNCH,
        &[
            "inprocess-restart",
            "no-sync",
            "rerun-state-machine",
            "-etp",
            "-vp",
            "-ms",
            "step-func",
            "max-steps",
            "distributed-backend",
            "use-decentralized-pg",
            "external-gpu-device-mapping",
        ],
    ),
    (
        SAVING,
        &[
            "checkpoint",
            "tokenizer",
            "pretrained-checkpoint",
            "save-dir",
            "load-dir",
            "fully-parallel-save",
            "async-strategy",
            "hf-source-path",
        ],
    ),
    (
        LOGGING,
        &[
            "logger",
            "profiling",
            "straggler",
            "nvrx-straggler",
            "ft",
            "tensor-inspect",
            "wandb-experiment-name",
            "mlflow-experiment",
            "log-dir",
            "skip-train-metrics-log",
        ],
    ),
    (DATA, &["dataset", "validation"]),
    (VALUES, &["rng", "scheduler", "warmup-iters", "finetune-lr"]),
    (
        "as predicted",
        &[
            "overlap-grad-reduce",
            "overlap-param-gather",
            "gradient-accumulation-fusion",
            "apply-rope-fusion",
            "bias-activation-fusion",
            "bias-dropout-fusion",
            "masked-softmax-fusion",
            "check-for-nan-in-grad",
        ],
    ),
];

/// Reads the name of a precision: `bf16_with_fp8_current_scaling_mixed`.
fn precision(node: &Node) -> Result<Effect, String> {
    let name = node.full();
    let dtype = if name.starts_with("fp16") {
        Dtype::F16
    } else {
        Dtype::Bf16
    };
    let scaling = [
        ("fp8_current_scaling", Float8Scaling::Tensor),
        ("fp8_delayed_scaling", Float8Scaling::Tensor),
        ("fp8_subchannel_scaling", Float8Scaling::Block),
        ("mxfp8", Float8Scaling::Mx),
    ];
    let mixed = Effect::Mixed(dtype);
    if name.contains("nvfp4") {
        let why = "matmuls are predicted in 16 bits, not in NVFP4";
        return Ok(Effect::All(vec![mixed, Effect::Lost(why)]));
    }
    let Some((_, scaling)) = scaling.iter().find(|(part, _)| name.contains(part)) else {
        return Ok(mixed);
    };
    let mut effects = vec![mixed, Effect::Fact(Fact::Float8, 1), scaling.effect()];
    if name.contains("current_scaling") {
        effects.push(Effect::Fact(Fact::Float8InnerBlocks, 1));
        effects.push(Effect::Fact(Fact::Float8Gather, 1));
    }
    if name.contains("delayed_scaling") {
        effects.push(Effect::Lost("scales are predicted from the current maxima"));
    }
    Ok(Effect::All(effects))
}

/// Reads the layers that get adapters, under Megatron-Core's names.
fn linear_layers(node: &Node) -> Result<Effect, String> {
    let words = node.words().unwrap_or_default();
    let all = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"];
    if all.iter().all(|name| words.contains(name)) {
        return Ok(Effect::Targets(crate::adapters::Targets::AllLinear));
    }
    let names: Vec<&str> = words
        .split([' ', ','])
        .flat_map(|name| match name {
            "linear_qkv" => &["q_proj", "k_proj", "v_proj"][..],
            "linear_proj" => &["o_proj"],
            "linear_fc1" => &["gate_proj", "up_proj"],
            "linear_fc2" => &["down_proj"],
            _ => &[],
        })
        .copied()
        .collect();
    if names.is_empty() {
        return targets(node);
    }
    Ok(Effect::Targets(crate::adapters::Targets::named(&names)))
}
