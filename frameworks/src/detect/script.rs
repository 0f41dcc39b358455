//! Recognizes the framework that a command's arguments belong to.

use super::others;
use crate::convert::PREFERENCES;
use crate::error::ConfigError;
use crate::formats::{
    LAUNCH_SCRIPT, LITGPT_SCRIPT, LLAMA_FACTORY_SCRIPT, LLM_FOUNDRY_SCRIPT, MEGATRON,
    MEGATRON_BRIDGE, NEMO_SCRIPT, SWIFT, SWIFT_MEGATRON, TORCHTITAN_SCRIPT, TORCHTUNE_SCRIPT,
    TRAINER_SCRIPT, TRL_SCRIPT, VEOMNI_SCRIPT, VERL_SCRIPT, has_arguments, litgpt_names,
    nested_names, python_names,
};
use crate::shell::Command;
use crate::table::Format;
use crate::tree::{Node, Value};

/// Arguments of Megatron-LM that other programs do not have; any one of them is enough.
const MEGATRON_SIGNS: [&str; 12] = [
    "--yaml-cfg",
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--micro-batch-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--use-mcore-models",
    "--use-megatron-fsdp",
    "--transformer-impl",
    "--recompute-granularity",
];
/// Sections of Megatron-Bridge that a command can override.
const BRIDGE_SIGNS: [&str; 3] = ["train", "model", "ddp"];
/// Arguments of ms-swift for what is trained, in its versions 4, 3 and 2.
const SWIFT_SIGNS: [&str; 3] = ["--tuner-type", "--train-type", "--sft-type"];
/// Subcommands of ms-swift that train.
const TRAINING: [&str; 3] = ["sft", "pt", "rlhf"];

/// Subcommands of LitGPT that train.
const OF_LITGPT: [&str; 6] = [
    "finetune",
    "finetune_lora",
    "finetune_full",
    "finetune_adapter",
    "finetune_adapter_v2",
    "pretrain",
];
/// Words in names of scripts that train on preferences or rewards.
const ON_PREFERENCES: [&str; 9] = [
    "dpo", "ipo", "kto", "orpo", "ppo", "grpo", "rloo", "reward", "rlhf",
];
/// Words in names of scripts and folders with supervised training.
const SUPERVISED: [&str; 4] = ["sft", "supervised", "pretrain", "pretraining"];
/// Names of scripts that do not say what they train on.
const ANY_TRAINING: [&str; 4] = ["main", "train", "run", "finetune"];
/// Number of folders above a script whose names can say what it trains on.
const FOLDERS: usize = 3;
/// torchtitan's option for its configuration.
const TITAN_CONFIG: &str = "--job.config-file";
/// Beginnings of VeOmni's arguments.
const VEOMNI_SIGNS: [&str; 4] = [
    "--train.",
    "--data.train-path",
    "--model.model-path",
    "--model.config-path",
];
/// Launchers of LLM Foundry.
const OF_FOUNDRY: [&str; 2] = ["composer", "llmfoundry"];

/// Returns the format of a command and its arguments.
///
/// # Errors
/// Fails if the arguments are of no framework that is known here.
pub(super) fn format(file: &str, command: Command) -> Result<(&'static Format, Node), ConfigError> {
    if command.runs("swift", &TRAINING) {
        let arguments = with_environment(&command);
        return Ok((&SWIFT, python_names(&arguments)));
    }
    if command.runs("trl", &["sft"]) {
        return Ok((&TRL_SCRIPT, python_names(&with_accelerate(&command))));
    }
    if command.runs("trl", &["dpo", "grpo", "kto", "reward", "rloo"]) {
        return Err(ConfigError::at(file, command.arguments.at, PREFERENCES));
    }
    if command.runs("megatron", &TRAINING) {
        return Ok((&SWIFT_MEGATRON, with_environment(&command)));
    }
    if command.runs("litgpt", &OF_LITGPT)
        && let Some(subcommand) = command.after("litgpt", 1)
    {
        let model = command.after("litgpt", 2);
        let arguments = python_names(&command.arguments);
        return Ok((&LITGPT_SCRIPT, litgpt_names(&arguments, subcommand, model)));
    }
    if command.names("verl.trainer") && command.names("sft_trainer") {
        return Ok((&VERL_SCRIPT, python_names(&command.arguments)));
    }
    // Options of these programs resemble those of other frameworks.
    if let Some(other) = others::program(&command) {
        let at = command.arguments.at;
        return Err(ConfigError::at(file, at, others::message(other)));
    }
    if OF_FOUNDRY.iter().any(|name| command.starts(name)) {
        return Ok((&LLM_FOUNDRY_SCRIPT, python_names(&command.arguments)));
    }
    let arguments = &command.arguments;
    let has = |signs: &[&str]| signs.iter().any(|sign| arguments.has(sign));
    if has(&SWIFT_SIGNS) && arguments.has("--model") {
        let of_megatron = command.names("megatron") || has(&MEGATRON_SIGNS);
        return Ok(if of_megatron {
            (&SWIFT_MEGATRON, with_environment(&command))
        } else {
            (&SWIFT, python_names(&with_environment(&command)))
        });
    }
    if command.runs("llamafactory-cli", &["train"]) || has(&["--finetuning-type"]) {
        let arguments = with_variables(&command, |_| true);
        return Ok((&LLAMA_FACTORY_SCRIPT, python_names(&arguments)));
    }
    if command.names("axolotl") {
        return Ok((&LAUNCH_SCRIPT, python_names(arguments)));
    }
    if command.runs("tune", &["run"]) {
        return Ok((&TORCHTUNE_SCRIPT, python_names(arguments)));
    }
    if command.starts("automodel") {
        return Ok((&NEMO_SCRIPT, nested_names(&python_names(arguments))));
    }
    if command.names("torchtitan") || has_section(arguments, &[TITAN_CONFIG]) {
        let arguments = renamed(arguments, TITAN_CONFIG, "--config");
        return Ok((&TORCHTITAN_SCRIPT, nested_names(&python_names(&arguments))));
    }
    if has_section(arguments, &VEOMNI_SIGNS) {
        let arguments = python_names(&with_environment(&command));
        return Ok((&VEOMNI_SCRIPT, nested_names(&arguments)));
    }
    if has_arguments(arguments) {
        let supervised = command.names_word(&SUPERVISED);
        let by_folder = !supervised && command.folder_has_word(&ON_PREFERENCES);
        if command.names_word(&ON_PREFERENCES) || by_folder {
            return Err(ConfigError::at(file, arguments.at, PREFERENCES));
        }
        if !supervised
            && command.names_word(&ANY_TRAINING)
            && let Some(folder) = preferences_in(file)
        {
            let message = format!(
                "{PREFERENCES}, and the name of the folder `{folder}` says that this script does so: copy the script \
                 to another folder if it does not"
            );
            return Err(ConfigError::at(file, arguments.at, message));
        }
    }
    if has_arguments(arguments) {
        return Ok((&TRAINER_SCRIPT, python_names(&with_accelerate(&command))));
    }
    if has(&MEGATRON_SIGNS) {
        return Ok((&MEGATRON, command.arguments));
    }
    if has(&BRIDGE_SIGNS) {
        return Ok((&MEGATRON_BRIDGE, command.arguments));
    }
    if has(&["--config", "--config-file", "--deepspeed-config"]) {
        return Ok((&LAUNCH_SCRIPT, python_names(arguments)));
    }
    let message = "the command has no arguments of a framework that is known here: expected those of \
                   Megatron-LM (--num-layers, --micro-batch-size), of the Hugging Face Trainer \
                   (--model_name_or_path, --per_device_train_batch_size) or of ms-swift, or a configuration file"
        .to_owned();
    Err(ConfigError::at(file, arguments.at, message))
}

/// Returns the name of the nearest folder of a file that says what is trained on, if that is
/// preferences or rewards: `step2_dpo_finetuning`.
fn preferences_in(file: &str) -> Option<String> {
    let path = std::path::absolute(file).ok()?;
    let folders = path.ancestors().skip(1).take(FOLDERS);
    for folder in folders.filter_map(|f| f.file_name()?.to_str()) {
        let name = folder.to_ascii_lowercase();
        let has = |words: &[&str]| {
            name.split(['_', '-', '.'])
                .any(|part| words.contains(&part))
        };
        if has(&SUPERVISED) {
            return None;
        }
        if has(&ON_PREFERENCES) {
            return Some(folder.to_owned());
        }
    }
    None
}

/// Returns whether an argument starts with one of some texts.
fn has_section(arguments: &Node, signs: &[&str]) -> bool {
    let names = arguments.entries().iter().map(|(name, _)| &name.text);
    names
        .into_iter()
        .any(|name| signs.iter().any(|sign| name.starts_with(sign)))
}

/// Returns the arguments with another name for one of them.
fn renamed(arguments: &Node, from: &str, to: &str) -> Node {
    let mut arguments = arguments.clone();
    if let Value::Map(entries) = &mut arguments.value {
        for (name, _) in entries.iter_mut().filter(|(name, _)| name.text == from) {
            to.clone_into(&mut name.text);
        }
    }
    arguments
}

/// Beginnings of the variables that Accelerate reads.
const OF_ACCELERATE: [&str; 2] = ["ACCELERATE_", "FSDP_"];

/// Returns the arguments with the variables of the environment that start processes.
fn with_environment(command: &Command) -> Node {
    with_variables(command, |name| {
        !OF_ACCELERATE.iter().any(|of| name.starts_with(of))
    })
}

/// Returns the arguments with the variables of the environment that Accelerate reads.
fn with_accelerate(command: &Command) -> Node {
    with_variables(command, |name| {
        OF_ACCELERATE.iter().any(|of| name.starts_with(of))
    })
}

fn with_variables(command: &Command, keeps: impl Fn(&str) -> bool) -> Node {
    let mut entries = command.arguments.entries().to_vec();
    let variables = command.environment.iter();
    entries.extend(variables.filter(|(name, _)| keeps(&name.text)).cloned());
    Node::new(command.arguments.at, Value::Map(entries))
}
