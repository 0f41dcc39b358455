//! Rules of individual frameworks: settings that their code fixes without a key.

mod automodel;
mod axolotl;
mod bridge;
mod litgpt;
mod llm_foundry;
mod megatron;
mod peft;
mod swift;
mod torchtitan;
mod torchtune;
mod trl;
mod veomni;
mod verl;
mod vision;

use crate::adapters::Targets;
use crate::draft::Draft;
use crate::error::ConfigError;
use crate::formats::{
    AXOLOTL, LITGPT, LLAMA_FACTORY, LLM_FOUNDRY, MEGATRON, MEGATRON_BRIDGE, NEMO, PEFT, SWIFT,
    SWIFT_MEGATRON, TORCHTITAN, TORCHTUNE, TRAINER, TRL_SCRIPT, VEOMNI, VERL,
};
use crate::table::{Dtype, Effect, Fact, Format};

/// A rule. It fails if another key gives a different value.
type Rule = fn(&mut Draft) -> Result<(), ConfigError>;
/// The same for a number of data-parallel ranks.
type RankRule = fn(&mut Draft, u64) -> Result<(), ConfigError>;

/// The rules of a framework, in the order in which they are applied.
pub(super) struct Rules {
    /// Refuses jobs that train nothing, before their model is looked up.
    pub(super) refuse: fn(&mut Draft),
    /// Sets quantities that no key of the files gives.
    pub(super) defaults: Rule,
    /// Sets the micro-batch or the gradient accumulation.
    pub(super) batch: RankRule,
    /// Sets what depends on the mesh.
    pub(super) sharding: RankRule,
    /// Sets which parameters are trained, before the engine is decided.
    pub(super) model: Rule,
    /// Sets what depends on the policy and the dtypes.
    pub(super) last: Rule,
    /// Whether keys for sizes change the model that another key names.
    pub(super) resizes_models: bool,
    /// Whether the checkpoint wrappers that FSDP's options request can be reentrant.
    pub(super) reentrant_wrappers: bool,
}

const NO_RULES: Rules = Rules {
    refuse: |_| (),
    defaults: |_| Ok(()),
    batch: |_, _| Ok(()),
    sharding: |_, _| Ok(()),
    model: |_| Ok(()),
    last: |_| Ok(()),
    resizes_models: false,
    reentrant_wrappers: false,
};

/// Returns the tokens per chunk of a loss that divides those of a micro-batch; `None` if their
/// number is not known.
fn chunk_tokens(draft: &Draft, chunks: u64) -> Option<u64> {
    let number = |key| draft.value(key)?.parse::<u64>().ok();
    let (sequences, length) = number("train.micro_batch").zip(number("train.seq_len"))?;
    let tokens = sequences.saturating_mul(length).div_ceil(chunks);
    Some(tokens.max(1))
}

/// Compiles the loss, unless it contains the output layer. `row` is the key that says so, if any.
///
/// # Errors
/// Fails if another key gives a different value.
fn compile_loss(draft: &mut Draft, row: Option<usize>) -> Result<(), ConfigError> {
    const KEY: &str = "compile.loss";
    let mut contained = ["chunked", "checkpointed_chunks"].iter();
    let is_contained = contained.any(|loss| draft.is("train.loss", loss));
    match row {
        Some(row) if is_contained => {
            draft.approximates(row, "a loss in chunks is predicted as one kernel per chunk");
        }
        None if is_contained => {}
        Some(row) => draft.set(row, KEY, "true".to_owned())?,
        None => draft.assume(KEY, "true", "this version also compiles the loss"),
    }
    Ok(())
}

/// Frameworks with rules. A format of the same name has the same rules.
static RULES: [(&Format, Rules); 16] = [
    (
        &MEGATRON,
        Rules {
            last: megatron::units,
            ..NO_RULES
        },
    ),
    (
        &TORCHTITAN,
        Rules {
            sharding: torchtitan::step,
            last: torchtitan::units,
            ..NO_RULES
        },
    ),
    (
        &TORCHTUNE,
        Rules {
            refuse: torchtune::refuse,
            last: torchtune::last,
            defaults: torchtune::defaults,
            ..NO_RULES
        },
    ),
    (
        &SWIFT,
        Rules {
            defaults: swift::defaults,
            batch: swift::batch,
            model: vision::as_swift,
            ..NO_RULES
        },
    ),
    (
        &AXOLOTL,
        Rules {
            defaults: axolotl::defaults,
            ..NO_RULES
        },
    ),
    (
        &TRL_SCRIPT,
        Rules {
            defaults: trl::defaults,
            ..NO_RULES
        },
    ),
    (
        &TRAINER,
        Rules {
            defaults: trl::defaults_of_trainer,
            model: vision::as_qwen_vl,
            ..NO_RULES
        },
    ),
    (
        &SWIFT_MEGATRON,
        Rules {
            defaults: swift::megatron_defaults,
            last: megatron::units,
            model: vision::as_swift,
            ..NO_RULES
        },
    ),
    (
        &MEGATRON_BRIDGE,
        Rules {
            defaults: bridge::defaults,
            last: megatron::units,
            ..NO_RULES
        },
    ),
    (
        &LLAMA_FACTORY,
        Rules {
            model: vision::as_llama_factory,
            ..NO_RULES
        },
    ),
    (
        &LLM_FOUNDRY,
        Rules {
            defaults: llm_foundry::defaults,
            batch: llm_foundry::batch,
            resizes_models: true,
            reentrant_wrappers: true,
            ..NO_RULES
        },
    ),
    (
        &LITGPT,
        Rules {
            defaults: litgpt::defaults,
            sharding: litgpt::sharding,
            ..NO_RULES
        },
    ),
    (
        &VERL,
        Rules {
            defaults: verl::defaults,
            ..NO_RULES
        },
    ),
    (
        &VEOMNI,
        Rules {
            defaults: veomni::defaults,
            sharding: veomni::sharding,
            resizes_models: true,
            ..NO_RULES
        },
    ),
    (
        &NEMO,
        Rules {
            model: automodel::model,
            last: automodel::ignore_experts,
            ..NO_RULES
        },
    ),
    // Frameworks with defaults of their own come before.
    (
        &PEFT,
        Rules {
            defaults: peft::targets,
            ..NO_RULES
        },
    ),
];

/// Returns the rules of the frameworks that the formats of files belong to.
pub(super) fn rules(formats: &[&'static Format]) -> Vec<&'static Rules> {
    let is_used = |of: &Format| formats.iter().any(|f| f.name == of.name);
    let used = RULES.iter().filter(|(of, _)| is_used(of));
    used.map(|(_, rules)| rules).collect()
}

/// Returns whether a framework shards parameters in the dtype in which they are loaded, where
/// Accelerate makes float32 copies of them.
pub(super) fn keeps_weights(draft: &Draft, formats: &[&'static Format]) -> bool {
    let is_axolotl = formats.iter().any(|f| f.name == AXOLOTL.name);
    is_axolotl && axolotl::keeps_weights(draft)
}

/// Returns whether the files have one of some keys.
fn has(draft: &Draft, keys: &[&str]) -> bool {
    draft.rows.iter().any(|r| keys.contains(&r.key.as_str()))
}

/// Computes in bfloat16, the dtype of most checkpoints, if no key gives another one.
fn in_bf16(draft: &mut Draft, why: &str) -> Result<(), ConfigError> {
    if draft.mixed.is_some() || draft.weights.is_some() {
        return Ok(());
    }
    let row = draft.suppose("torch_dtype", "bfloat16", why);
    let effects = vec![Effect::Weights(Dtype::Bf16), Effect::Mixed(Dtype::Bf16)];
    draft.apply(row, Effect::All(effects))
}

/// Puts adapters, if they are trained, on all linear layers of the blocks.
fn all_linear(draft: &mut Draft, why: &str) -> Result<(), ConfigError> {
    let trained = draft.fact(Fact::Adapter).is_some_and(|a| a.value == 1);
    if !trained || draft.has_targets() {
        return Ok(());
    }
    let row = draft.suppose("target_modules", "all-linear", why);
    draft.apply(row, Effect::Targets(Targets::AllLinear))
}

/// Turns on Megatron's distributed optimizer unless a key turns it off.
fn distributed_optimizer(draft: &mut Draft, why: &str) {
    let key = "use_distributed_optimizer";
    draft.suppose_fact(Fact::DistributedOptimizer, 1, key, "true", why);
}
