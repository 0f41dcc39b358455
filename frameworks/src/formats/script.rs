//! Commands that start a script with the arguments of the Trainer and of TRL. Arguments of
//! `torchrun`, `accelerate launch` or `deepspeed` may come before the name of the script.

use super::accelerate::{self, ACCELERATE};
use super::deepspeed::DEEPSPEED;
use super::{fsdp, llama_factory, trainer};
use crate::convert::{
    DATA, LAUNCH, STORAGE, adapter, allocator, double_quantization, eight_bits, four_bits,
    four_bits_twice, if_true, reentrant,
};
use crate::table::{
    Dtype, Effect, Engine, Fact, Format, Key, Table, To, decisive, fact, integer, key, lost, with,
};
use crate::tree::{Name, Node, Value};

/// Arguments that only such scripts have; any one of them is enough.
const SIGNS: [&str; 2] = ["--model-name-or-path", "--per-device-train-batch-size"];

/// A command that names configuration files, with options of its launcher and options that replace
/// those of the files, under the names of the Trainer or of Axolotl.
pub(crate) static LAUNCH_SCRIPT: Format = Format {
    name: "a launch script",
    tables: &[
        LAUNCHER,
        accelerate::SIZES,
        accelerate::VARIABLES,
        trainer::TABLE,
        trainer::TRL_TABLE,
        Table {
            under: "",
            prefix: "",
            keys: &[
                integer("micro_batch_size", "train.micro_batch"),
                integer("sequence_len", "train.seq_len"),
            ],
            asides: &[],
        },
    ],
    engine: None,
    accelerated: false,
    reduces_in_f32: false,
    flat: false,
    open: true,
    defaults: &[],
};

pub(crate) static TRAINER_SCRIPT: Format = Format {
    name: trainer::NAME,
    tables: &[
        trainer::TABLE,
        trainer::TRL_TABLE,
        LAUNCHER,
        accelerate::SIZES,
        accelerate::VARIABLES,
        Table {
            under: "",
            prefix: "",
            keys: accelerate::PLUGIN,
            asides: &[],
        },
        // Without their prefix, names such as `version` are arguments of many scripts.
        fsdp::table("fsdp_"),
    ],
    engine: Some(Engine::Ddp),
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: true,
    defaults: trainer::DEFAULTS,
};

/// Arguments of `trl sft`.
pub(crate) static TRL_SCRIPT: Format = Format {
    name: "TRL",
    tables: &[
        Table {
            under: "",
            prefix: "",
            keys: &[key(
                "accelerate_config",
                To::Preset(trl_launch, &ACCELERATE),
            )],
            asides: &[],
        },
        trainer::TABLE,
        trainer::TRL_TABLE,
        LAUNCHER,
        accelerate::SIZES,
        accelerate::VARIABLES,
    ],
    engine: Some(Engine::Ddp),
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: true,
    defaults: trainer::DEFAULTS,
};

/// Reads the name of a configuration of Accelerate that TRL ships (`trl/accelerate_configs`). All
/// of them compute in bfloat16.
fn trl_launch(node: &Node) -> Option<Effect> {
    let zero = |stage| {
        vec![
            Effect::Engine(Engine::DeepSpeed),
            Effect::Fact(Fact::ZeroStage, stage),
        ]
    };
    let fsdp = |version| {
        vec![
            Effect::Engine(Engine::Fsdp),
            Effect::Fact(Fact::FsdpVersion, version),
        ]
    };
    let mut effects = match node.text()? {
        "zero1" => zero(1),
        "zero2" => zero(2),
        "zero3" => zero(3),
        "fsdp1" => fsdp(1),
        "fsdp2" => fsdp(2),
        "multi_gpu" => vec![Effect::Engine(Engine::Ddp)],
        "single_gpu" => vec![Effect::Fact(Fact::OneProcess, 1)],
        _ => return None,
    };
    effects.push(Effect::Mixed(Dtype::Bf16));
    Some(Effect::All(effects))
}

/// Variables of the environment from which launchers start processes.
pub(super) const ENVIRONMENT: Table = Table {
    under: "",
    prefix: "",
    keys: &[
        fact("NPROC_PER_NODE", Fact::GpusPerNode),
        fact("NNODES", Fact::Nodes),
    ],
    asides: &[(LAUNCH, &["CUDA_VISIBLE_DEVICES"])],
};

/// LLaMA-Factory's arguments after `llamafactory-cli train`.
pub(crate) static LLAMA_FACTORY_SCRIPT: Format = Format {
    name: llama_factory::NAME,
    tables: &[
        llama_factory::TABLE,
        trainer::TABLE,
        LAUNCHER,
        accelerate::SIZES,
        accelerate::VARIABLES,
        ENVIRONMENT,
    ],
    engine: Some(Engine::Ddp),
    accelerated: true,
    reduces_in_f32: false,
    flat: false,
    open: true,
    defaults: llama_factory::DEFAULTS,
};

/// Options of launchers.
pub(super) const LAUNCHER: Table = Table {
    under: "",
    prefix: "",
    keys: LAUNCHERS,
    asides: ASIDES,
};

const LAUNCHERS: &[Key] = &[
    with("PYTORCH_CUDA_ALLOC_CONF", allocator),
    with("PYTORCH_ALLOC_CONF", allocator),
    key("config_file", To::File(&ACCELERATE)),
    key("config", To::AnyFile),
    fact("nproc_per_node", Fact::GpusPerNode),
    fact("nnodes", Fact::Nodes),
    fact("num_gpus", Fact::GpusPerNode),
    fact("num_nodes", Fact::Nodes),
    fact("num_processes", Fact::Processes),
    fact("num_machines", Fact::Nodes),
    with("mixed_precision", accelerate::mixed_precision),
    with("use_fsdp", accelerate::uses_fsdp),
    with("use_deepspeed", |node| {
        if_true(node, Effect::Engine(Engine::DeepSpeed))
    }),
    with("include", included),
    key("deepspeed_config", To::File(&DEEPSPEED)),
    // Arguments that scripts in the style of Alpaca and DeepSpeed-Chat define themselves.
    integer("model_max_length", "train.seq_len"),
    integer("max_seq_len", "train.seq_len"),
    integer("max_len", "train.seq_len"),
    integer("max_sequence_length", "train.seq_len"),
    integer("seq_len", "train.seq_len"),
    integer("seq_length", "train.seq_len"),
    integer("sequence_length", "train.seq_len"),
    integer("context_length", "train.seq_len"),
    // Arguments of transformers' run_clm.py and of ProLong.
    integer("block_size", "train.seq_len"),
    with("per_device_max_tokens", |node| {
        Ok(Effect::Assume(
            "train.seq_len",
            node.count()?.to_string(),
            "the tokens of a micro-batch are predicted as one packed sequence",
        ))
    }),
    key("model_name", To::MaybeModel),
    with("lora_dim", |node| {
        Ok(match node.count()? {
            0 => Effect::Aside("no adapters"),
            n => Effect::All(vec![
                Effect::Fact(Fact::Adapter, 1),
                Effect::Set("lora.r", n.to_string()),
            ]),
        })
    }),
    with("offload", |node| {
        if_true(node, Effect::Fact(Fact::OffloadOptimizer, 1))
    }),
    with("lora_enable", adapter),
    // Arguments of Qwen-VL's and LLaVA's training scripts.
    with("tune_mm_vision", |node| tuned(node, Fact::FrozenVision)),
    with("tune_mm_mlp", |node| tuned(node, Fact::FrozenProjector)),
    with("tune_mm_llm", |node| tuned(node, Fact::FrozenLanguage)),
    decisive("tune_mm_mlp_adapter", PROJECTOR),
    lost(
        "vision_tower",
        "the vision tower is not predicted, only the language model",
    ),
    with("q_lora", four_bits_twice),
    // Arguments of PEFT's example for fine-tuning, which many scripts copy.
    with("use_peft_lora", adapter),
    with("use_4bit_quantization", four_bits),
    with("use_8bit_quantization", eight_bits),
    with("use_nested_quant", double_quantization),
    with("use_reentrant", reentrant),
    // Arguments of LMFlow.
    with("use_lisa", |node| if_true(node, Effect::Decisive(LISA))),
    lost(
        "customized_optim",
        "AdamW is predicted in place of LMFlow's own optimizers",
    ),
    // Arguments of qlora.py, which LLaVA's script has, too.
    with("bits", bits),
    with("double_quant", double_quantization),
    with("source_max_len", part_of_length),
    with("target_max_len", part_of_length),
    with("full_finetune", |node| {
        Ok(Effect::Fact(Fact::Adapter, (!node.truth()?).into()))
    }),
    lost("use_loftq", "initial values of adapters are not predicted"),
    lost(
        "use_unsloth",
        "Unsloth's kernels are predicted as those of transformers",
    ),
];

/// Why LLaVA's first stage is refused: the model's `config.json` describes neither of the parts.
const PROJECTOR: &str =
    "training only the projector between a vision tower and a language model is not modeled";

/// Why jobs with LISA are refused.
const LISA: &str = "training of some blocks at a time (LISA) is not modeled";

/// Reads the bits per element of the frozen model: 4, 8 or 16. Scales of 4 bits have 8 bits by
/// default (`double_quant`).
fn bits(node: &Node) -> Result<Effect, String> {
    match node.count()? {
        4 => Ok(Effect::Fact(Fact::FourBitsToo, 2)),
        8 => Ok(Effect::Fact(Fact::EightBits, 1)),
        16 | 32 => Ok(Effect::Aside("not quantized")),
        _ => Err(node.expected("4, 8, 16 or 32")),
    }
}

/// Reads the longest question or answer of qlora.py; their sum is the length of sequences.
fn part_of_length(node: &Node) -> Result<Effect, String> {
    node.count()?;
    Ok(Effect::Aside("part of the length of sequences"))
}

/// Reads whether a part of a vision-language model is trained.
fn tuned(node: &Node, frozen: Fact) -> Result<Effect, String> {
    Ok(Effect::Fact(frozen, (!node.truth()?).into()))
}

const ASIDES: &[(&str, &[&str])] = &[
    (STORAGE, &["bnb_4bit_quant_storage_dtype"]),
    (
        DATA,
        &[
            "chat_template_format",
            "add_special_tokens",
            "append_concat_token",
            "splits",
        ],
    ),
    (
        LAUNCH,
        &[
            "node_rank",
            "machine_rank",
            "master_addr",
            "master_port",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "rdzv_id",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_conf",
            "hostfile",
            "deepspeed_hostfile",
            "deepspeed_multinode_launcher",
            "launcher",
            "standalone",
            "max_restarts",
            "multi_gpu",
            "gpu_ids",
            "module",
            "same_network",
            "tee",
            "use_parallelism_config",
            "log_dir",
            "role",
            "enable_cpu_affinity",
            "num_cpu_threads_per_process",
        ],
    ),
];

/// Counts the GPUs in DeepSpeed's `--include localhost:0,1,2,3`. Several hosts are joined by `@`.
fn included(node: &Node) -> Result<Effect, String> {
    let text = node.full();
    let hosts: Vec<&str> = text.split('@').collect();
    let gpus = hosts
        .iter()
        .map(|host| host.split_once(':').map(|(_, ids)| ids.split(',').count()));
    let all: Option<usize> = gpus.sum();
    Ok(match all {
        Some(n) => Effect::Fact(Fact::Processes, n as u64),
        None => Effect::Aside("the launcher finds the GPUs of these hosts"),
    })
}

/// Returns whether the arguments of a command are those of the Trainer.
pub(crate) fn has_arguments(command: &Node) -> bool {
    SIGNS.iter().any(|sign| command.has(sign))
}

/// Returns arguments with the names that they have in Python.
pub(crate) fn python_names(command: &Node) -> Node {
    let renamed = command.entries().iter().map(|(name, node)| {
        let text = match name.text.strip_prefix("--") {
            Some(argument) => argument.replace('-', "_"),
            None => name.text.clone(),
        };
        let name = Name { text, at: name.at };
        (name, node.clone())
    });
    Node::new(command.at, Value::Map(renamed.collect()))
}

/// Returns the arguments of a command as a configuration has them: `--train.lr 1` in the map
/// `train`.
pub(crate) fn nested_names(arguments: &Node) -> Node {
    let mut entries: Vec<(Name, Node)> = Vec::new();
    for (name, node) in arguments.entries() {
        nest(&mut entries, &name.text, name, node);
    }
    Node::new(arguments.at, Value::Map(entries))
}

/// Adds an entry at a path with dots.
pub(super) fn nest(entries: &mut Vec<(Name, Node)>, path: &str, name: &Name, node: &Node) {
    let at = name.at;
    let Some((first, rest)) = path.split_once('.') else {
        let text = path.to_owned();
        entries.push((Name { text, at }, node.clone()));
        return;
    };
    let found = entries
        .iter_mut()
        .find(|(n, v)| n.text == first && matches!(v.value, Value::Map(_)));
    if let Some((
        _,
        Node {
            value: Value::Map(inner),
            ..
        },
    )) = found
    {
        nest(inner, rest, name, node);
        return;
    }
    let mut inner = Vec::new();
    nest(&mut inner, rest, name, node);
    let text = first.to_owned();
    entries.push((Name { text, at }, Node::new(at, Value::Map(inner))));
}
