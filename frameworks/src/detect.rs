//! Recognizes the format of a file by its content and its name.

mod others;
mod script;

use crate::error::ConfigError;
use crate::formats::{
    ACCELERATE, AXOLOTL, DEEPSPEED, LITGPT, LLAMA_FACTORY, LLM_FOUNDRY, MEGATRON_BRIDGE,
    MEGATRON_YAML, NEMO, PEFT, SWIFT, SWIFT_MEGATRON, TORCHTITAN, TORCHTUNE, TRAINER, VEOMNI, VERL,
};
use crate::table::Format;
use crate::tree::{Node, Value};
use crate::{shell, toml_file, yaml};
use std::path::Path;

/// Maximum size of a file in bytes; longer files, such as logs of long runs, are truncated.
const MAX_BYTES: u64 = 64 << 20;

/// Text that torchtitan prints before its configuration in a log.
const LOGGED: [&str; 2] = ["Running with configs: ", "Running with args: "];

/// Paths that occur in one framework only, the most distinctive first. Any one of them is enough.
const SIGNS: [(&Format, &[&str]); 15] = [
    (&PEFT, &["peft_type"]),
    (
        &VEOMNI,
        &[
            "train.accelerator",
            "train.data_parallel_mode",
            "train.ulysses_parallel_size",
            "train.bsz_warmup_ratio",
            "train.lr_warmup_ratio",
            "train.dyn_bsz",
            "model.ops_implementation",
            "model.accelerator",
            "data.train_path",
        ],
    ),
    (
        &LLM_FOUNDRY,
        &[
            "device_train_microbatch_size",
            "global_train_batch_size",
            "variables.global_train_batch_size",
        ],
    ),
    (
        &LITGPT,
        &[
            "train.save_interval",
            "train.max_seq_length",
            "train.lr_warmup_steps",
            "train.lr_warmup_fraction",
        ],
    ),
    (
        &VERL,
        &[
            "model.partial_pretrain",
            "data.micro_batch_size_per_gpu",
            "data.max_token_len_per_gpu",
            "ulysses_sequence_parallel_size",
            "engine.ulysses_sequence_parallel_size",
        ],
    ),
    (
        &MEGATRON_BRIDGE,
        &[
            "train.train_iters",
            "train.micro_batch_size",
            "ddp.grad_reduce_in_fp32",
            "ddp.use_distributed_optimizer",
            "ddp.use_megatron_fsdp",
            "dist.use_megatron_fsdp",
            "scheduler.lr_warmup_iters",
            "model.moe_token_dispatcher_type",
            "model.tensor_model_parallel_size",
        ],
    ),
    (
        &NEMO,
        &["step_scheduler", "model._target_", "distributed.strategy"],
    ),
    (
        &TORCHTUNE,
        &[
            "model._component_",
            "checkpointer._component_",
            "optimizer._component_",
        ],
    ),
    (
        &TORCHTITAN,
        &[
            "training.local_batch_size",
            "training.seq_len",
            "parallelism",
            "model.flavor",
            "job",
        ],
    ),
    (&AXOLOTL, &["base_model", "sequence_len"]),
    (
        &LLAMA_FACTORY,
        &[
            "finetuning_type",
            "cutoff_len",
            "infer_backend",
            "export_dir",
        ],
    ),
    (
        &ACCELERATE,
        &[
            "distributed_type",
            "compute_environment",
            "deepspeed_config",
        ],
    ),
    (
        &DEEPSPEED,
        &[
            "zero_optimization",
            "train_micro_batch_size_per_gpu",
            "train_batch_size",
            "bf16.enabled",
            "fp16.enabled",
        ],
    ),
    (
        &MEGATRON_YAML,
        &[
            "language_model.num_layers",
            "model_parallel",
            "num_layers",
            "hidden_size",
        ],
    ),
    (
        &TRAINER,
        &[
            "model_name_or_path",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "gradient_checkpointing",
            "fsdp",
            "fsdp_config",
            "deepspeed",
            "output_dir",
        ],
    ),
];

/// Parses the text of a file and recognizes its format.
///
/// # Errors
/// Fails on an unknown format or a syntax error.
#[cfg(test)]
pub(crate) fn parse(file: &str, text: &str) -> Result<(&'static Format, Node), ConfigError> {
    parse_as(file, text, None)
}

/// Parses the text of a file. If the format is given, it may have too few keys to be recognized.
///
/// # Errors
/// Fails on a syntax error, or if the format is neither given nor known.
pub(crate) fn parse_as(
    file: &str,
    text: &str,
    format: Option<&'static Format>,
) -> Result<(&'static Format, Node), ConfigError> {
    let ends = |ending: &str| file.to_ascii_lowercase().ends_with(ending);
    if let Some(logged) = logged(text) {
        return Ok((&TORCHTITAN, yaml::parse(file, &logged)?));
    }
    if let Some(commands) = commands_of_task(file, text) {
        return script::format(file, shell::parse(file, &commands)?);
    }
    if is_shell(file, text) {
        return script::format(file, shell::parse(file, text)?);
    }
    let root = if ends(".toml") {
        toml_file::parse(file, text)?
    } else {
        lifted(yaml::parse(file, text)?)
    };
    if let Some(format) = format {
        return Ok((format, root));
    }
    if let Some(other) = others::name(&root) {
        return Err(ConfigError::at(file, root.at, others::message(other)));
    }
    if ["tuner_type", "train_type"]
        .iter()
        .any(|sign| root.has(sign))
    {
        let of_megatron = root.has("micro_batch_size") || root.has("global_batch_size");
        let format = if of_megatron { &SWIFT_MEGATRON } else { &SWIFT };
        return Ok((format, root));
    }
    let found = SIGNS
        .iter()
        .find(|(_, signs)| signs.iter().any(|path| root.has(path)));
    match found {
        Some((format, _)) => Ok((format, root)),
        None if root.has("run") && OF_TASKS.iter().any(|key| root.has(key.trim_end_matches(':'))) => {
            let message = "a task of SkyPilot is read if its commands are a block of text (`run: |`): write them as \
                           one, or give the script or the configuration that they start";
            Err(ConfigError::at(file, root.at, message.to_owned()))
        }
        None => Err(ConfigError::File {
            file: file.to_owned(),
            message:
                "the format is not known: expected a configuration of Accelerate, the Hugging \
                      Face Trainer, Axolotl, LLaMA-Factory, torchtune, torchtitan, DeepSpeed, \
                      Megatron-LM, Megatron-Bridge, NeMo Automodel, ms-swift, LLM Foundry, LitGPT, verl, VeOmni or PEFT"
                    .to_owned(),
        }),
    }
}

/// Returns whether a configuration is of a framework that is refused by name.
pub(crate) fn is_refused(root: &Node) -> bool {
    others::name(root).is_some()
}

/// Moves the configuration within a job of MosaicML's launcher (`mcli`), which is in `parameters`,
/// to the top level.
fn lifted(root: Node) -> Node {
    let own = |parameters: &Node| {
        let (_, signs) = SIGNS.iter().find(|(f, _)| f.name == LLM_FOUNDRY.name)?;
        signs.iter().any(|path| parameters.has(path)).then_some(())
    };
    if root.get(PARAMETERS).and_then(own).is_none() {
        return root;
    }
    let (inner, around): (Vec<_>, Vec<_>) = root
        .entries()
        .iter()
        .cloned()
        .partition(|(name, _)| name.text == PARAMETERS);
    let inner = inner
        .iter()
        .flat_map(|(_, node)| node.entries().iter().cloned());
    let entries = inner.chain(around).collect();
    Node::new(root.at, Value::Map(entries))
}

/// Section of an `mcli` job with the configuration.
const PARAMETERS: &str = "parameters";

/// Returns the commands in a task of SkyPilot, which are the text of its key `run`. All other lines
/// are empty so that positions stay the same.
fn commands_of_task(file: &str, text: &str) -> Option<String> {
    let is_yaml = [".yaml", ".yml"].iter().any(|e| file.ends_with(e));
    let has = |key: &&str| {
        text.lines()
            .any(|l| l.trim_end().split(' ').next() == Some(*key))
    };
    if !is_yaml || !OF_TASKS.iter().any(has) {
        return None;
    }
    let is_block = |line: &str| {
        let rest = line.strip_prefix("run:").map(str::trim);
        rest.is_some_and(|r| r.starts_with('|'))
    };
    let start = text.lines().position(is_block)?;
    let inside = |line: &str| line.is_empty() || line.starts_with([' ', '\t']);
    let mut ended = false;
    let lines = text.lines().enumerate().map(|(i, line)| {
        ended |= i > start && !inside(line);
        if i > start && !ended { line } else { "" }
    });
    Some(lines.map(|line| format!("{line}\n")).collect())
}

/// Keys of which a task of SkyPilot has at least one.
const OF_TASKS: [&str; 4] = ["resources:", "num_nodes:", "setup:", "file_mounts:"];

/// Returns whether a file is a shell script.
pub(crate) fn is_script(file: &str, text: &str) -> bool {
    commands_of_task(file, text).is_some() || is_shell(file, text)
}

fn is_shell(file: &str, text: &str) -> bool {
    let file = file.to_ascii_lowercase();
    let ends = |ending: &&str| file.ends_with(ending);
    [".sh", ".slurm", ".sbatch"].iter().any(ends) || text.starts_with("#!")
}

/// Returns the text of a file.
pub(crate) fn text(path: &Path) -> Result<String, ConfigError> {
    let io = |source| ConfigError::Io {
        path: path.to_owned(),
        source,
    };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > MAX_BYTES {
        return Err(ConfigError::file(path, "the file is larger than 64 MiB"));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let line = e.as_bytes()[..e.utf8_error().valid_up_to()]
            .iter()
            .filter(|b| **b == b'\n');
        ConfigError::file(path, format!("line {} is not UTF-8", line.count() + 1))
    })?;
    Ok(text.trim_start_matches('\u{feff}').to_owned())
}

/// Returns the configuration in a torchtitan log. Everything else is replaced by blanks so that
/// positions stay the same.
fn logged(text: &str) -> Option<String> {
    let after = LOGGED
        .iter()
        .find_map(|mark| Some(text.find(mark)? + mark.len()))?;
    let start = after + text[after..].find('{')?;
    let mut depth = 0_usize;
    let mut quote: Option<char> = None;
    let mut escaped = false;
    let end = text[start..].char_indices().find_map(|(i, c)| {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(q) if c == q => quote = None,
            Some(_) => {}
            None => match c {
                '"' | '\'' => quote = Some(c),
                '{' => depth += 1,
                '}' => {
                    depth -= 1;
                    if depth == 0 {
                        return Some(start + i + 1);
                    }
                }
                _ => {}
            },
        }
        None
    })?;
    let before = text[..start]
        .chars()
        .map(|c| if c == '\n' { '\n' } else { ' ' });
    Some(before.chain(text[start..end].chars()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(file: &str, text: &str) -> &'static str {
        parse(file, text).unwrap().0.name
    }

    #[test]
    fn formats_are_recognized_by_content() {
        for (file, text, expected) in [
            (
                "a.yaml",
                "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}",
                "Accelerate",
            ),
            ("a.yml", "base_model: x\nsequence_len: 1", "Axolotl"),
            (
                "a.yaml",
                "model_name_or_path: x\nfinetuning_type: full",
                "LLaMA-Factory",
            ),
            (
                "a.json",
                "{\"output_dir\": \"x\", \"bf16\": true}",
                "the Hugging Face Trainer",
            ),
            (
                "a.json",
                "{\"zero_optimization\": {\"stage\": 2}}",
                "DeepSpeed",
            ),
            ("a.toml", "[training]\nseq_len = 1\n", "torchtitan"),
            (
                "a.yaml",
                "model:\n  _component_: torchtune.models.llama3.llama3_8b",
                "torchtune",
            ),
            (
                "a.yaml",
                "step_scheduler: {local_batch_size: 1}",
                "NeMo Automodel",
            ),
            (
                "a.sh",
                "torchrun pretrain_gpt.py --num-layers 2",
                "Megatron-LM",
            ),
            (
                "a.sh",
                "torchrun train.py --model_name_or_path x",
                "the Hugging Face Trainer",
            ),
            (
                "a.yaml",
                "global_train_batch_size: 8\nfsdp_config: {mixed_precision: PURE}",
                "LLM Foundry",
            ),
            (
                "a.yaml",
                "checkpoint_dir: x\ntrain: {micro_batch_size: 1, max_seq_length: 512}",
                "LitGPT",
            ),
            (
                "a.yaml",
                "data: {micro_batch_size_per_gpu: 4}\nmodel: {partial_pretrain: x}",
                "verl",
            ),
            (
                "a.yaml",
                "model: {model_path: x}\ntrain: {micro_batch_size: 1, data_parallel_mode: fsdp2}",
                "VeOmni",
            ),
            (
                "a.log",
                "[titan] x\n[titan] Running with args: {'job': {'a': None}} x",
                "torchtitan",
            ),
        ] {
            assert_eq!(name(file, text), expected, "{text}");
        }
        let error = parse("a.yaml", "hello: 1")
            .map(|_| ())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("a.yaml: the format is not known"),
            "{error}"
        );
    }

    #[test]
    fn a_logged_configuration_keeps_its_place() {
        let log = "line\n[titan] Running with configs: {\n  \"training\": {\n    \"seq_len\": 8192\n  }\n}\nnext {\n";
        let (_, root) = parse("a.log", log).unwrap();
        let length = root.get("training.seq_len").unwrap();
        assert_eq!((length.at.line, length.count()), (4, Ok(8192)));
    }
}
