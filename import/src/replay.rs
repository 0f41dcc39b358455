//! A tape without a model: the kernels, parameters and activations of each unit as a trace shows
//! them. They can be sharded in a new way.
//!
//! Kernels keep their measured times. What the engine itself launches (gathers, reductions, the
//! copies around them, the optimizer) is left out, because the policy that shards the tape adds its
//! own.

mod lives;
mod modules;
mod passes;

use crate::RunImport;
use crate::facts::Facts;
use crate::infer::{self, Inferred};
use shardlab_plan::compile::tape::Tape;
use shardlab_plan::config::Units;
use shardlab_plan::ir::{Const, DType};
use shardlab_plan::units::{Flops, Picos};

/// A tape made from a trace.
#[derive(Clone, Debug)]
pub struct Traced {
    /// The tape of one micro-batch.
    pub tape: Tape,
    /// Measured times of the tape's kernels.
    pub times: Vec<Picos>,
    /// A scenario with the options that the trace shows. Its model is a placeholder.
    pub scenario: Inferred,
    /// The recorded units, as patterns over the modules of the tape.
    pub units: Units,
    /// What the tape lacks.
    pub notes: Vec<String>,
    /// Nanoseconds per step that the recorded host waits for its `DataLoader`.
    pub data_wait: u64,
}

/// Makes a tape of an imported run.
///
/// # Errors
/// Fails if the trace shows no complete step, no units, or no kernels in their forward pass. The
/// error is the reason as text.
pub fn tape(run: &RunImport, name: &str) -> Result<Traced, String> {
    if run.measured.run.step_samples.is_empty() {
        return Err("the trace contains no complete step".into());
    }
    let units = modules::build(&run.facts, &run.measured)?;
    let passes = passes::build(run, &units)?;
    let mut notes = run.facts.mesh_gaps.clone();
    if run.facts.data_wait > 0 {
        notes.push(format!(
            "the host waits {:.1} ms per step for its DataLoader, which the replay leaves out",
            run.facts.data_wait as f64 / 1e6
        ));
    }
    if run.measured.activations.is_empty() {
        notes.push(
            "memory of activations: the trace was recorded without profile_memory=True, so it is not part of the peak; a snapshot of the same steps adds it"
                .into(),
        );
    }
    if run.facts.units.iter().any(|u| u.parameters.is_empty()) {
        notes.push(
            "shapes of parameters: each unit is one flat parameter, so padding may differ".into(),
        );
    }
    notes.push(
        "measured times contain the contention with the recorded run's collectives; none is added"
            .into(),
    );
    let tokens = run.measured.run.tokens;
    let micro_batches = run
        .facts
        .accumulation
        .as_ref()
        .map_or(1, |a| a.value)
        .max(1);
    let tokens = tokens / u64::from(micro_batches);
    Ok(Traced {
        tape: Tape {
            modules: units.modules,
            params: units.params,
            storages: passes.storages,
            consts: inputs(tokens),
            kernels: passes.kernels,
            operands: passes.operands,
            forward: passes.forward,
            backward: passes.backward,
            eval: Vec::new(),
            loss: None,
            eval_loss: None,
            model_flops: Flops(run.measured.flops / u64::from(micro_batches)),
            tokens,
            ..Tape::default()
        },
        times: passes.times,
        scenario: infer::options(&run.facts, name, blocks(&run.facts)),
        units: match units.patterns.is_empty() {
            true => Units::Root,
            false => Units::Patterns(units.patterns),
        },
        data_wait: run.facts.data_wait,
        notes,
    })
}

/// Returns the tokens and labels of a micro-batch, as 64-bit integers.
fn inputs(tokens: u64) -> Vec<Const> {
    let input = |name| Const {
        name,
        bytes: shardlab_plan::units::Bytes(8 * tokens),
        dtype: DType::I64,
        per_micro_batch: true,
    };
    match tokens {
        0 => Vec::new(),
        _ => vec![input("tokens"), input("labels")],
    }
}

fn blocks(facts: &Facts) -> usize {
    let blocks = facts
        .units
        .iter()
        .filter(|u| crate::facts::is_block(&u.name));
    blocks.count()
}
