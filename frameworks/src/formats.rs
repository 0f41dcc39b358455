//! The formats of the frameworks. Each file has the table of a framework's keys.

mod accelerate;
mod axolotl;
mod deepspeed;
mod fsdp;
mod llama_factory;
mod megatron;
mod nemo;
mod peft;
mod script;
mod torchtitan;
mod torchtune;
mod trainer;

pub(crate) use accelerate::ACCELERATE;
pub(crate) use axolotl::AXOLOTL;
pub(crate) use deepspeed::DEEPSPEED;
pub(crate) use llama_factory::LLAMA_FACTORY;
pub(crate) use megatron::{MEGATRON, MEGATRON_YAML};
pub(crate) use nemo::NEMO;
pub(crate) use peft::PEFT;
pub(crate) use script::{TRAINER_SCRIPT, arguments};
pub(crate) use torchtitan::TORCHTITAN;
pub(crate) use torchtune::TORCHTUNE;
pub(crate) use trainer::TRAINER;

/// All formats.
#[cfg(test)]
pub(crate) const ALL: [&crate::table::Format; 11] = [
    &ACCELERATE,
    &AXOLOTL,
    &DEEPSPEED,
    &LLAMA_FACTORY,
    &MEGATRON,
    &NEMO,
    &PEFT,
    &TORCHTITAN,
    &TORCHTUNE,
    &TRAINER,
    &TRAINER_SCRIPT,
];
