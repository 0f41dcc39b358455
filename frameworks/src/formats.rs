//! The formats of the frameworks. Each file has the table of a framework's keys.

mod accelerate;
mod axolotl;
mod bridge;
mod deepspeed;
mod fsdp;
mod llama_factory;
mod megatron;
mod nemo;
mod peft;
mod script;
mod swift;
mod torchtitan;
mod torchtune;
mod trainer;

pub(crate) use accelerate::ACCELERATE;
pub(crate) use axolotl::AXOLOTL;
pub(crate) use bridge::MEGATRON_BRIDGE;
pub(crate) use deepspeed::DEEPSPEED;
pub(crate) use llama_factory::LLAMA_FACTORY;
pub(crate) use megatron::{MEGATRON, MEGATRON_YAML};
pub(crate) use nemo::{NAME as NEMO_NAME, NEMO};
pub(crate) use peft::PEFT;
pub(crate) use script::{
    LAUNCH_SCRIPT, LLAMA_FACTORY_SCRIPT, TRAINER_SCRIPT, TRL_SCRIPT, has_arguments, python_names,
};
pub(crate) use swift::{SWIFT, SWIFT_MEGATRON};
pub(crate) use torchtitan::TORCHTITAN;
pub(crate) use torchtune::TORCHTUNE;
pub(crate) use trainer::TRAINER;

/// All formats.
#[cfg(test)]
pub(crate) const ALL: [&crate::table::Format; 17] = [
    &ACCELERATE,
    &AXOLOTL,
    &DEEPSPEED,
    &LAUNCH_SCRIPT,
    &LLAMA_FACTORY,
    &LLAMA_FACTORY_SCRIPT,
    &MEGATRON,
    &MEGATRON_BRIDGE,
    &NEMO,
    &PEFT,
    &SWIFT,
    &SWIFT_MEGATRON,
    &TORCHTITAN,
    &TORCHTUNE,
    &TRAINER,
    &TRAINER_SCRIPT,
    &TRL_SCRIPT,
];
