//! Frameworks whose jobs are not read. Their keys resemble those of other frameworks, so that they
//! are recognized and refused by name.

use crate::shell::Command;
use crate::tree::Node;

/// verl's training on rewards. Its supervised fine-tuning is read.
const VERL: &str = "verl's training on rewards";

/// SpecForge, which trains the draft models of speculative decoding.
const SPECFORGE: &str = "SpecForge";
const OLMO_CORE: &str = "OLMo-core";

/// Frameworks by the arguments of their programs that have several of them.
const ARGUMENTS: [(&str, &[&str]); 2] = [
    (
        "slime",
        &[
            "--rollout-function-path",
            "--rollout-batch-size",
            "--hf-checkpoint",
        ],
    ),
    (
        "the FSDP example of AWS",
        &[
            "--max-context-width",
            "--hidden-width",
            "--num-key-value-heads",
        ],
    ),
];

/// A framework with the paths that occur in its configurations only.
const FILES: [(&str, &[&str]); 9] = [
    (
        SPECFORGE,
        &[
            "model.target_model_path",
            "model.draft_model_config",
            "training.ttt_length",
        ],
    ),
    (
        "AReaL",
        &[
            "actor.mb_spec",
            "cluster.name_resolve",
            "cluster.fileroot",
            "allocation_mode",
            "gconfig",
        ],
    ),
    (
        "prime-rl",
        &[
            "orchestrator",
            "renderer",
            "model.optimization_dtype",
            "trainer.model",
            "trainer.optim",
            "deployment.num_train_gpus",
            "weight_broadcast",
            "monitors.wandb",
            "inference.vllm",
            "data.loss_mask",
        ],
    ),
    (
        OLMO_CORE,
        &["train_module", "data_loader.global_batch_size"],
    ),
    ("nanotron", &["data_stages", "tokens.micro_batch_size"]),
    (
        VERL,
        &[
            "actor_rollout_ref",
            "algorithm.adv_estimator",
            "ppo_mini_batch_size",
            "reward_fn_key",
            "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
        ],
    ),
    (
        "NeMo RL",
        &[
            "policy.train_global_batch_size",
            "policy.megatron_cfg",
            "policy.generation",
        ],
    ),
    ("picotron", &["distributed.pp_engine"]),
    ("LLaMA-Factory 1", &["dist_config", "kernel_config"]),
];

/// Frameworks by the names of their programs and modules.
const PROGRAMS: [(&str, &str); 5] = [
    ("olmo_core", OLMO_CORE),
    ("specforge", SPECFORGE),
    ("openrlhf", "OpenRLHF"),
    ("verl.trainer", VERL),
    ("run_grpo", "NeMo RL"),
];

/// Returns the framework of a configuration, if it is one of these.
pub(super) fn name(root: &Node) -> Option<&'static str> {
    let is = |(_, signs): &&(&str, &[&str])| signs.iter().any(|path| root.has(path));
    FILES.iter().find(is).map(|(name, _)| *name)
}

/// Returns the framework that a command starts, if it is one of these.
pub(super) fn program(command: &Command) -> Option<&'static str> {
    let is = |(text, _): &&(&str, &str)| command.names(text);
    let found = PROGRAMS.iter().find(is).map(|(_, name)| *name);
    found.or_else(|| {
        let mut frameworks = ARGUMENTS.iter();
        let has = |sign: &&&str| command.arguments.has(sign);
        let several = |signs: &[&str]| signs.iter().filter(has).count() > 1;
        frameworks.find_map(|(name, signs)| several(signs).then_some(*name))
    })
}

/// Returns why a job is refused, and what can be done.
pub(super) fn message(framework: &str) -> String {
    if framework == VERL {
        return format!(
            "{VERL} (PPO, GRPO) is not read: a step generates, scores and trains with several models; of verl, its \
             SFT trainers are read. For the update of the policy alone, name the folder of the model's config.json \
             instead, and give the batch and the sharding with --set, such as --set train.micro_batch=1"
        );
    }
    if framework == SPECFORGE {
        return format!(
            "{SPECFORGE}'s training of draft models for speculative decoding is not modeled: for a decoder of the same \
             shapes, name the folder of its config.json, and give the batch and the sharding with --set"
        );
    }
    format!(
        "configurations of {framework} are not read: name the folder of the model's config.json instead, and give the \
         batch and the sharding with --set, such as --set train.micro_batch=1"
    )
}
