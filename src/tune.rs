//! Finds the best settings of a job within the memory of its device.
//!
//! ```text
//! keys ─ space ─▶ points ─ evaluate ─▶ scores ─ search ─▶ best ─┬─ reasons ─▶ answer
//!                    recompute, bound ─────────────┘            └─ front
//! ```
//!
//! The samples per optimizer step, the number of ranks and the engine do not change; `space` lists
//! the options that do. Every score is the full simulation of a plan. Results depend only on the
//! request, not on the number of threads.

mod answer;
mod bound;
mod climb;
mod evaluate;
mod front;
mod inverse;
mod keep;
mod reasons;
mod recompute;
mod score;
mod search;
mod space;
pub mod words;

#[cfg(test)]
mod tests;

pub use answer::{Answer, Proposal};
pub use evaluate::Watch;
pub(crate) use inverse::{Fewest, MORE_RANKS, fewest_gpus};
pub use inverse::{Largest, Size, largest};
pub(crate) use keep::all_but;
pub use keep::{Kept, freed, kept};
pub use reasons::{Changed, Reason};
pub use score::{Goal, Limits, Score};

use crate::analysis::whatif::Load;
use crate::predict::{Fit, PredictError, Prediction, Profiles, predict_light};
use evaluate::{Evaluator, predicted};
use shardlab_plan::Scenario;
use space::Space;

/// What is asked.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Loads the job with additional overrides.
    pub load: Load<'a>,
    /// Hardware profiles.
    pub profiles: &'a Profiles,
    /// What is best.
    pub goal: Goal,
    /// Memory that may be used.
    pub limits: Limits,
    /// Keys that do not change.
    pub kept: &'a [String],
    /// Additional axes: keys, with the values that they may have.
    pub free: &'a [(String, Vec<String>)],
    /// Seed of the random restarts.
    pub seed: u64,
}

/// Finds the best settings.
///
/// # Errors
/// Fails if the job cannot be predicted with its own settings. Settings that are impossible or do
/// not fit are not errors.
pub fn tune(request: &Request<'_>, watch: &dyn Watch) -> Result<Answer, PredictError> {
    let today = predict_light(&(request.load)(&[])?, request.profiles)?;
    let space = Space::new(&today, request);
    let score = without_limit(&today, request);
    let predict = |scenario: &Scenario| predicted(scenario, request, true);
    let evaluator = Evaluator::new(&space, request, watch, &predict, score.clone());
    let found = search::search(
        &evaluator,
        (space.today(), score),
        request.seed,
        search::EXACT,
    );
    let mut answer = answer::answer(&evaluator, found);
    answer.today.score = Score::of(&today, request.limits);
    Ok(answer)
}

/// Returns the score of the current settings without the limit of the device, as all other points
/// are scored: freeing cached memory makes a step longer.
fn without_limit(today: &Prediction, request: &Request<'_>) -> Score {
    let is_tight = matches!(today.fit, Fit::Tight { .. });
    let again = is_tight
        .then(|| predicted(&today.scenario, request, true))
        .flatten();
    again.unwrap_or_else(|| Score::of(today, request.limits))
}
