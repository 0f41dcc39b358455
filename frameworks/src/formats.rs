//! The formats of the frameworks. Each file has the table of a framework's keys.

mod accelerate;
mod axolotl;
mod bridge;
mod deepspeed;
mod fsdp;
mod litgpt;
mod llama_factory;
mod llm_foundry;
mod megatron;
mod nemo;
mod peft;
mod script;
mod swift;
mod torchtitan;
mod torchtune;
mod trainer;
mod veomni;
mod verl;

pub(crate) use accelerate::ACCELERATE;
pub(crate) use axolotl::AXOLOTL;
pub(crate) use bridge::MEGATRON_BRIDGE;
pub(crate) use deepspeed::DEEPSPEED;
pub(crate) use fsdp::{BACKWARD_POST, FSDP};
pub(crate) use litgpt::{Command as LitGptCommand, LITGPT, LITGPT_SCRIPT, litgpt_names};
pub(crate) use llama_factory::LLAMA_FACTORY;
pub(crate) use llm_foundry::{FUSED_LOSS, LLM_FOUNDRY, LLM_FOUNDRY_SCRIPT, UPCAST};
pub(crate) use megatron::{MEGATRON, MEGATRON_YAML};
pub(crate) use nemo::{NEMO, NEMO_SCRIPT};
pub(crate) use peft::PEFT;
pub(crate) use script::{
    LAUNCH_SCRIPT, LLAMA_FACTORY_SCRIPT, TRAINER_SCRIPT, TRL_SCRIPT, has_arguments, nested_names,
    python_names,
};
pub(crate) use swift::{SWIFT, SWIFT_FSDP, SWIFT_MEGATRON};
pub(crate) use torchtitan::{TORCHTITAN, TORCHTITAN_SCRIPT};
pub(crate) use torchtune::{NO_TRAINING, TORCHTUNE, TORCHTUNE_SCRIPT};
pub(crate) use trainer::{TRAINER, chunked_nll};
pub(crate) use veomni::{VEOMNI, VEOMNI_SCRIPT, veomni_flat, veomni_section};
pub(crate) use verl::{VERL, VERL_SCRIPT};

/// All formats.
#[cfg(test)]
pub(crate) const ALL: [&crate::table::Format; 28] = [
    &ACCELERATE,
    &AXOLOTL,
    &DEEPSPEED,
    &LAUNCH_SCRIPT,
    &LITGPT,
    &LITGPT_SCRIPT,
    &LLAMA_FACTORY,
    &LLAMA_FACTORY_SCRIPT,
    &LLM_FOUNDRY,
    &LLM_FOUNDRY_SCRIPT,
    &MEGATRON,
    &MEGATRON_BRIDGE,
    &NEMO,
    &NEMO_SCRIPT,
    &PEFT,
    &SWIFT,
    &SWIFT_MEGATRON,
    &TORCHTITAN,
    &TORCHTITAN_SCRIPT,
    &TORCHTUNE,
    &TORCHTUNE_SCRIPT,
    &TRAINER,
    &TRAINER_SCRIPT,
    &TRL_SCRIPT,
    &VEOMNI,
    &VEOMNI_SCRIPT,
    &VERL,
    &VERL_SCRIPT,
];
