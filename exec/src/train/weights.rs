//! Weights at the start of a run.

use super::layout::StateLayout;
use super::state::StateIo;
use super::{TrainError, adapter, hf, init};
use shardlab_plan::{Program, Scenario};
use std::path::Path;

/// Writes the initial weights: those of a Hugging Face folder and of a PEFT folder, or else those
/// of a seed.
///
/// # Errors
/// [`TrainError::Init`] if a folder does not fit the scenario, and errors of the memory.
pub(super) fn start(
    scenario: &Scenario,
    program: &Program,
    layout: &StateLayout,
    (weights, adapters, seed): (Option<&Path>, Option<&Path>, u64),
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let unfit = |e| TrainError::Init(Box::new(e));
    match weights {
        Some(dir) => {
            let (model, seq_len) = (&scenario.model, scenario.train.seq_len);
            hf::load(dir, program, model, seq_len, layout, io).map_err(unfit)?;
            init::adapters_from_seed(program, layout, seed, io)?;
        }
        None => init::from_seed(program, layout, seed, io)?,
    }
    match (adapters, &scenario.lora) {
        (None, Some(lora)) if lora.use_dora => adapter::start_magnitudes(program, layout, io),
        (None, _) => Ok(()),
        (Some(dir), Some(lora)) => adapter::load(dir, program, lora, layout, io).map_err(unfit),
        (Some(dir), None) => Err(TrainError::NoAdapters {
            path: dir.to_owned(),
        }),
    }
}

/// Returns the norm of all weights that files of adapters do not have.
///
/// # Errors
/// If a weight cannot be read.
pub(super) fn base_norm(
    program: &Program,
    layout: &StateLayout,
    io: &mut dyn StateIo,
) -> Result<f64, TrainError> {
    let norms = layout.weight_norms(io, program.params.len())?;
    let pairs = norms.iter().zip(&program.params);
    let squares = pairs
        .filter(|(_, p)| !p.is_saved_with_adapters())
        .map(|(n, _)| n * n);
    Ok(squares.sum::<f64>().sqrt())
}

/// Refuses to continue a run of adapters on other weights. Their rounding to 16 bits and the order
/// of sums change the norm less than the tolerance.
///
/// # Errors
/// Returns [`TrainError::OtherBase`] if the norms differ by more than the tolerance.
pub(super) fn check_base(ours: f64, theirs: Option<f64>) -> Result<(), TrainError> {
    const TOLERANCE: f64 = 2e-5;
    match theirs {
        Some(theirs) if (ours - theirs).abs() > TOLERANCE * theirs => {
            Err(TrainError::OtherBase { theirs, ours })
        }
        _ => Ok(()),
    }
}
