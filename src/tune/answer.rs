//! The result of a search, for the command line.

use super::evaluate::{Evaluator, Scored};
use super::reasons::{self, Reason};
use super::search::Found;
use super::{Score, front};

/// Settings and their score.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// Differences from the current settings, in the syntax of `--set`.
    pub set: Vec<String>,
    /// Number of changes. Keys that belong together, such as micro-batch and accumulation, count as
    /// one.
    pub changes: usize,
    /// Score.
    pub score: Score,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The current settings.
    pub today: Proposal,
    /// The best settings, or those that are closest to fitting.
    pub best: Proposal,
    /// Whether the best settings fit, and are fast enough for the goal.
    pub found: bool,
    /// The reason for each change in the best settings, largest gain first.
    pub reasons: Vec<Reason>,
    /// The Pareto front of step time and reserved memory, fastest settings first.
    pub front: Vec<Proposal>,
    /// The settings with the fewest changes that tie with the best ones within the error of the
    /// predictions; `None` if they do not have fewer changes.
    pub simpler: Option<Proposal>,
    /// Lower bound of the time of steps within the limits, milliseconds; `None` if it is unknown.
    pub bound_ms: Option<f64>,
    /// Whether all settings were predicted.
    pub exact: bool,
    /// Number of combinations of settings.
    pub points: u64,
    /// Number of settings that were predicted.
    pub evaluated: usize,
    /// Whether the search was ended early.
    pub interrupted: bool,
}

impl Answer {
    /// Returns how much longer the best step is than the bound (0.01: 1 %), if there is a bound.
    #[must_use]
    pub fn gap(&self) -> Option<f64> {
        let bound = self.bound_ms.filter(|b| *b > 0.0)?;
        self.found
            .then(|| (self.best.score.effect.step_ms / bound - 1.0).max(0.0))
    }
}

pub(super) fn answer(eval: &Evaluator<'_>, found: Found) -> Answer {
    let order = found.order;
    let is_found = order.admits(&found.best.1);
    let proposal = |(point, score): &Scored| Proposal {
        set: eval.space.overrides(point),
        changes: point.changed().count(),
        score: score.clone(),
    };
    let simpler = is_found
        .then(|| front::simplest(eval, &order, &found.best))
        .flatten();
    Answer {
        today: proposal(&found.today),
        best: proposal(&found.best),
        found: is_found,
        reasons: reasons::reasons(eval, &found.best),
        front: front::front(eval).iter().map(proposal).collect(),
        simpler: simpler.as_ref().map(proposal),
        bound_ms: found.bound.map(|time| {
            let best = &found.best.1;
            best.effect.step_ms * time / best.time()
        }),
        exact: found.exact && !eval.stopped(),
        points: eval.space.size(),
        evaluated: eval.evaluated(),
        interrupted: eval.stopped(),
    }
}
