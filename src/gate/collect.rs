//! Collects the facts that a gate compares: plans, checks and simulates a scenario, and trains it
//! on the CPU.

use super::plant::Plant;
use crate::predict::{PredictError, Profiles};
use shardlab_exec::engine::ExecOptions;
use shardlab_exec::train::{Flow, Observer, RunOptions, StepReport, TrainError, train};
use shardlab_plan::check::check;
use shardlab_plan::{Program, Scenario};
use shardlab_reports::RunView;
use shardlab_reports::gate::{Curve, Facts, Measured};
use shardlab_sim::Options;
use std::sync::Arc;
use std::time::Duration;

/// Reason why there are no facts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// The scenario has no plan or no prediction.
    #[error(transparent)]
    Predict(#[from] PredictError),
    /// The fault cannot be injected into this program.
    #[error("{scenario}: --inject-fault {plant}: {reason}")]
    Plant {
        /// Scenario.
        scenario: String,
        /// Name of the fault.
        plant: &'static str,
        /// Reason.
        reason: &'static str,
    },
    /// The training run failed. (A NaN or infinite loss is a finding, not a failure.)
    #[error("{scenario}: {error}")]
    Train {
        /// Scenario.
        scenario: String,
        /// Reason.
        error: TrainError,
    },
    /// The user stopped the command.
    #[error("interrupted")]
    Interrupted,
}

impl GateError {
    /// Returns whether the user's input is the cause, rather than the run.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Predict(e) => e.is_bad_input(),
            Self::Plant { .. } => true,
            Self::Train { error, .. } => error.is_bad_input(),
            Self::Interrupted => false,
        }
    }
}

/// Default time without progress after which a training run is aborted.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Settings for collecting facts, shared by the command line and the dashboard.
pub struct Collect<'a> {
    /// Hardware profiles.
    pub profiles: &'a Profiles,
    /// Whether to train scenarios whose hardware is the CPU.
    pub exec: bool,
    /// Time without progress after which a training run is aborted.
    pub timeout: Duration,
    /// A fault to inject into every program.
    pub plant: Option<Plant>,
    /// Callback before each stage and after every step. Returns whether to stop.
    pub stop: &'a dyn Fn() -> bool,
}

impl Collect<'_> {
    /// Returns the program of a scenario, with the injected fault if there is one.
    ///
    /// # Errors
    /// Returns [`GateError`] if the scenario cannot be planned, or the fault cannot be injected.
    pub fn program(&self, scenario: &Scenario) -> Result<Program, GateError> {
        let program = shardlab_plan::plan(scenario).map_err(|error| PredictError::Plan {
            scenario: scenario.name.clone(),
            error,
        })?;
        match self.plant {
            None => Ok(program),
            Some(plant) => plant.into(program).map_err(|reason| GateError::Plant {
                scenario: scenario.name.clone(),
                plant: plant.name(),
                reason,
            }),
        }
    }

    /// Collects the facts of a scenario.
    ///
    /// # Errors
    /// Returns [`GateError`] if the scenario cannot be planned or predicted, the fault cannot be
    /// injected, the training run fails, or the user stops the command.
    pub fn facts(&self, scenario: &Scenario, set: &[String]) -> Result<Facts, GateError> {
        let profile = self
            .profiles
            .get(&scenario.mesh.hardware)
            .map_err(PredictError::from)?;
        self.going()?;
        let program = Arc::new(self.program(scenario)?);
        self.going()?;
        let report = check(&program);
        self.going()?;
        let predicted =
            shardlab_sim::simulate(&program, &profile, &Options::default()).map_err(|error| {
                PredictError::Sim {
                    scenario: scenario.name.clone(),
                    error,
                }
            })?;
        self.going()?;
        let mut facts = Facts::new(scenario, set, &program, &predicted, &report);
        if self.exec && on_cpu(scenario) {
            facts.measured = Some(self.measure(scenario, &program)?);
        }
        Ok(facts)
    }

    fn going(&self) -> Result<(), GateError> {
        if (self.stop)() {
            Err(GateError::Interrupted)
        } else {
            Ok(())
        }
    }

    /// Trains the scenario once per seed.
    fn measure(&self, scenario: &Scenario, program: &Arc<Program>) -> Result<Measured, GateError> {
        let mut views = Vec::new();
        let mut ended = Vec::new();
        for seed in 0..u64::from(scenario.gate.seeds) {
            let options = RunOptions {
                seed: Some(seed),
                exec: ExecOptions {
                    timeout: self.timeout,
                    ..ExecOptions::default()
                },
                ..RunOptions::default()
            };
            let mut steps = Steps {
                losses: Vec::new(),
                grad_norms: Vec::new(),
                stop: self.stop,
            };
            match train(scenario, program, options, &mut steps) {
                Ok(outcome) if outcome.interrupted => return Err(GateError::Interrupted),
                Ok(outcome) => views.push(RunView::of(outcome.run, program, scenario)),
                // Divergence is a fact about convergence, not a failure of the machine.
                Err(error @ TrainError::Diverged { .. }) => ended.push(Curve {
                    seed,
                    losses: steps.losses,
                    grad_norms: steps.grad_norms,
                    ended: Some(error.to_string()),
                }),
                Err(error) => {
                    return Err(GateError::Train {
                        scenario: scenario.name.clone(),
                        error,
                    });
                }
            }
        }
        let mut measured = Measured::new(&views).unwrap_or_else(|| Measured {
            environment: std::collections::BTreeMap::new(),
            digest: program.digest(),
            memory: None,
            curves: Vec::new(),
        });
        measured.curves.extend(ended);
        measured.curves.sort_by_key(|c| c.seed);
        Ok(measured)
    }
}

/// Returns whether this machine can train the scenario: CPU scenarios run on any machine.
#[must_use]
pub fn on_cpu(scenario: &Scenario) -> bool {
    scenario.mesh.hardware == "cpu"
}

/// Keeps the steps of a run that ends early.
struct Steps<'a> {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    stop: &'a dyn Fn() -> bool,
}

impl Observer for Steps<'_> {
    fn step(&mut self, report: &StepReport) -> Flow {
        self.losses.push(report.loss);
        self.grad_norms.push(report.grad_norm.unwrap_or(f64::NAN));
        if (self.stop)() {
            Flow::Stop
        } else {
            Flow::Continue
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::path::Path;

    #[test]
    fn every_stage_can_be_stopped() {
        let scenario = shardlab_plan::scenario::load(Path::new("small-linear"), &[]).unwrap();
        let profiles = Profiles::default();
        // Stops before planning, checking, simulating and outlining.
        for stage in 0..=4 {
            let asked = Cell::new(0);
            let stop = || asked.replace(asked.get() + 1) == stage;
            let collect = Collect {
                profiles: &profiles,
                exec: false,
                timeout: Duration::from_secs(60),
                plant: None,
                stop: &stop,
            };
            let facts = collect.facts(&scenario, &[]);
            match stage {
                4 => assert!(facts.is_ok()),
                _ => assert!(matches!(facts, Err(GateError::Interrupted)), "{stage}"),
            }
        }
    }
}
