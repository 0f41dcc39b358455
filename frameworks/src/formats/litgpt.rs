//! Configurations of LitGPT: `finetune_full`, `finetune_lora` and `pretrain`.
//!
//! Sources: `litgpt/finetune/{full,lora}.py`, `litgpt/pretrain.py` and `litgpt/args.py`.

use super::script::{self, LAUNCHER};
use crate::adapters::Targets;
use crate::convert::{
    ADAPTER, DATA, EVALUATION, LAUNCH, LOGGING, NF4, PAGED, SAVING, VALUES, betas, clip, if_true,
    in_8_bits, in_32_bits, ranks, set,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Fallback, Format, Key, Table, To, choice, decisive, fact, integer,
    key, lost, number, with,
};
use crate::tree::{Name, Node, Value};

const NAME: &str = "LitGPT";
/// Name of the entry for the subcommand of a script.
const COMMAND: &str = "litgpt";

pub(crate) static LITGPT: Format = FORMAT;

/// A command with the same keys as options.
pub(crate) static LITGPT_SCRIPT: Format = Format {
    tables: &[TABLE, LAUNCHER],
    ..FORMAT
};

const FORMAT: Format = Format {
    name: NAME,
    tables: &[TABLE],
    engine: Some(Engine::Fsdp),
    accelerated: false,
    reduces_in_f32: false,
    flat: false,
    open: false,
    defaults: DEFAULTS,
};

const DEFAULTS: &[Fallback] = &[
    Fallback {
        key: "fsdp.expandable_segments",
        value: "false",
        why: "PyTorch's default",
    },
    Fallback {
        key: "model.implementation",
        value: "\"transformers\"",
        why: "LitGPT's norms and rotary embeddings are separate kernels, like those of transformers",
    },
    Fallback {
        key: "model.attn_implementation",
        value: "\"sdpa\"",
        why: "LitGPT calls scaled_dot_product_attention",
    },
];

const TABLE: Table = Table {
    under: "",
    prefix: "",
    keys: KEYS,
    asides: ASIDES,
};

/// What a configuration of LitGPT is for, stored as a [`Fact::LitGpt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Full,
    Lora,
    Pretrain,
}

const KEYS: &[Key] = &[
    with(COMMAND, |node| {
        Ok(match node.full().as_str() {
            "finetune_full" => Effect::Fact(Fact::LitGpt, Command::Full as u64),
            "finetune" | "finetune_lora" => Effect::Fact(Fact::LitGpt, Command::Lora as u64),
            "pretrain" => Effect::Fact(Fact::LitGpt, Command::Pretrain as u64),
            _ => Effect::Decisive(ADAPTER),
        })
    }),
    key("checkpoint_dir", To::Model),
    key("model_name", To::Model),
    decisive("model_config", SIZES),
    with("precision", precision),
    with("devices", |node| ranks(node, Fact::GpusPerNode)),
    fact("num_nodes", Fact::Nodes),
    with("strategy", |node| {
        Ok(match node.full().as_str() {
            "fsdp" => Effect::Aside("as LitGPT's code says"),
            _ => {
                Effect::Decisive("LitGPT's code fixes the strategy: other strategies are not read")
            }
        })
    }),
    fact("train.global_batch_size", Fact::GlobalBatch),
    integer("train.micro_batch_size", "train.micro_batch"),
    integer("train.max_seq_length", "train.seq_len"),
    integer("train.lr_warmup_steps", "train.warmup_steps"),
    with("train.max_norm", clip),
    with("train.tie_embeddings", |node| {
        if_true(node, Effect::Set("model.tie_embeddings", "true".to_owned()))
    }),
    with("quantize", |node| {
        let bits = |n| Effect::Fact(Fact::FourBits, n);
        Ok(match node.full().as_str() {
            "bnb.nf4" => bits(1),
            "bnb.nf4-dq" => bits(2),
            "bnb.fp4" => Effect::All(vec![bits(1), Effect::Lost(NF4)]),
            "bnb.fp4-dq" => Effect::All(vec![bits(2), Effect::Lost(NF4)]),
            "bnb.int8-training" => Effect::Fact(Fact::EightBits, 1),
            _ => {
                let names = "bnb.nf4, bnb.nf4-dq, bnb.fp4, bnb.fp4-dq or bnb.int8-training";
                return Err(node.expected(names));
            }
        })
    }),
    integer("lora_r", "lora.r"),
    number("lora_alpha", "lora.lora_alpha"),
    number("lora_dropout", "lora.lora_dropout"),
    with("lora_query", |node| layers(node, &["q_proj"])),
    with("lora_key", |node| layers(node, &["k_proj"])),
    with("lora_value", |node| layers(node, &["v_proj"])),
    with("lora_projection", |node| layers(node, &["o_proj"])),
    with("lora_mlp", |node| {
        layers(node, &["gate_proj", "up_proj", "down_proj"])
    }),
    lost("lora_head", "adapters of the output projection"),
    choice("optimizer", optimizer),
    with("optimizer.class_path", optimizer),
    number("optimizer.init_args.lr", "train.lr"),
    number("optimizer.init_args.eps", "train.eps"),
    number("optimizer.init_args.weight_decay", "train.weight_decay"),
    with("optimizer.init_args.betas", betas),
    with("optimizer.init_args.fused", |node| {
        Ok(if node.truth()? {
            Effect::Aside("as predicted")
        } else {
            Effect::Lost("the optimizer is predicted with fused kernels")
        })
    }),
];

/// Why the sizes in `model_config` are not used.
const SIZES: &str = "sizes in model_config are not read: --model FOLDER, with a config.json of the same sizes, gives the model";

const ASIDES: &[(&str, &[&str])] = &[
    (
        SAVING,
        &[
            "out_dir",
            "resume",
            "initial_checkpoint_dir",
            "train.save_interval",
            "access_token",
        ],
    ),
    (
        DATA,
        &[
            "data",
            "tokenizer_dir",
            "train.epochs",
            "train.max_tokens",
            "train.max_steps",
            "train.max_time",
        ],
    ),
    (EVALUATION, &["eval"]),
    (LOGGING, &["logger_name", "log", "train.log_interval"]),
    (
        VALUES,
        &[
            "seed",
            "train.min_lr",
            "train.lr_warmup_fraction",
            "optimizer.init_args",
        ],
    ),
    (LAUNCH, &["compiler"]),
];

/// Reads Fabric's precision.
fn precision(node: &Node) -> Result<Effect, String> {
    Ok(match node.full().as_str() {
        "bf16-true" => Effect::Weights(Dtype::Bf16),
        "16-true" => Effect::Weights(Dtype::F16),
        "bf16-mixed" => Effect::Mixed(Dtype::Bf16),
        "16-mixed" => Effect::Mixed(Dtype::F16),
        "32-true" | "32" => Effect::Mixed(Dtype::F32),
        _ => return Err(node.expected("bf16-true, bf16-mixed, 16-true, 16-mixed or 32-true")),
    })
}

fn layers(node: &Node, names: &[&str]) -> Result<Effect, String> {
    if_true(node, Effect::Targets(Targets::named(names)))
}

/// Reads the class of the optimizer.
#[expect(clippy::unnecessary_wraps, reason = "the type of conversions")]
fn optimizer(node: &Node) -> Result<Effect, String> {
    let name = node.full();
    Ok(match name.rsplit('.').next().unwrap_or(&name) {
        "AdamW" | "Adam" => set("train.optimizer", "adamw"),
        "SGD" => set("train.optimizer", "sgd"),
        "AdamW8bit" => in_8_bits("adamw"),
        "PagedAdamW8bit" => Effect::All(vec![in_8_bits("adamw"), Effect::Lost(PAGED)]),
        "PagedAdamW" => Effect::All(vec![in_32_bits("adamw"), Effect::Lost(PAGED)]),
        _ => Effect::Lost("this optimizer is not modeled: AdamW is predicted"),
    })
}

/// Returns the arguments of a LitGPT command as a configuration has them: `--train.epochs 1` in the
/// map `train`, and the positional argument, a model, under the name that the subcommand gives it.
pub(crate) fn litgpt_names(arguments: &Node, subcommand: Node, model: Option<Node>) -> Node {
    let mut entries = Vec::new();
    let name = if subcommand.text() == Some("pretrain") {
        "model_name"
    } else {
        "checkpoint_dir"
    };
    if let Some(node) = model {
        let text = name.to_owned();
        entries.push((Name { text, at: node.at }, node));
    }
    let text = COMMAND.to_owned();
    let at = subcommand.at;
    entries.insert(0, (Name { text, at }, subcommand));
    for (name, node) in arguments.entries() {
        script::nest(&mut entries, &name.text, name, node);
    }
    Node::new(arguments.at, Value::Map(entries))
}
