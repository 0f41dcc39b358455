//! Kernels of the user's scenarios, timed in steps with a few of their layers.

use super::steps::{Observed, On, Totals, run_scenario};
use super::{Trial, render};
use crate::device::{DeviceFactory, FailureKind};
use crate::engine::ExecError;
use crate::train::TrainError;
use shardlab_plan::config::Scenario;
use shardlab_plan::scenario;
use std::path::PathBuf;
use std::time::Duration;

/// Numbers of layers. A scenario must be plannable with one of them. The first layers may differ
/// from the others; for example, they may be dense in a model with experts.
const FEW_LAYERS: [u32; 4] = [1, 2, 4, 8];

/// A scenario whose kernels are measured.
#[derive(Clone, Debug)]
pub struct UserScenario {
    /// Path of a file, or name of a shipped scenario.
    pub scenario: PathBuf,
    /// Overrides of its keys.
    pub sets: Vec<String>,
}

impl UserScenario {
    /// Returns the name for notes.
    pub(super) fn name(&self) -> String {
        self.scenario.display().to_string()
    }

    /// Checks that the scenario can be loaded and planned, before anything is measured.
    ///
    /// # Errors
    /// [`TrainError::Plan`] if it cannot.
    pub fn check(&self) -> Result<(), TrainError> {
        let layers = self.whole()?.model.layers;
        let plan = |n: u32| {
            let planned = shardlab_plan::plan(&self.part(n, 1)?);
            let why = |e| {
                let (name, s) = (self.name(), if n == 1 { "" } else { "s" });
                TrainError::Plan(format!("{name}, {n} layer{s} of it on one rank: {e}"))
            };
            planned.map(drop).map_err(why)
        };
        let few = FEW_LAYERS.into_iter().filter(|n| *n <= layers);
        let mut tried = few.map(plan);
        let first = tried.next().unwrap_or(Ok(()));
        first.or_else(|e| tried.find_map(Result::ok).ok_or(e))
    }

    fn whole(&self) -> Result<Scenario, TrainError> {
        self.load(&[])
    }

    /// Loads the scenario with given numbers of layers and ranks. All ranks have a part of
    /// everything.
    fn part(&self, layers: u32, ranks: u32) -> Result<Scenario, TrainError> {
        self.load(&[
            format!("model.layers={layers}"),
            format!("mesh.dp_shard={ranks}"),
            "mesh.dp_replicate=1".to_owned(),
        ])
    }

    fn load(&self, more: &[String]) -> Result<Scenario, TrainError> {
        let sets = [&self.sets[..], more].concat();
        scenario::load(&self.scenario, &sets).map_err(|e| TrainError::Plan(e.to_string()))
    }

    /// Runs steps of the scenario with all its layers, but at most `most`, and fewer if memory is
    /// insufficient.
    ///
    /// # Errors
    /// Returns [`TrainError`] if the scenario cannot be loaded, planned or run.
    pub(super) fn observe<F: DeviceFactory>(
        &self,
        on: &On<'_, F>,
        most: u32,
        ranks: u32,
        time: Duration,
    ) -> Result<Observed, TrainError> {
        let layers = self.whole()?.model.layers.min(most);
        fewer_until(layers, is_out_of_memory, |layers| {
            run_scenario(on, &self.part(layers, ranks)?, time)
        })
    }
}

/// Kernels of the user's scenarios. The clock of a device's arithmetic depends on its temperature
/// and on its other work, which differ between a few steps of one rank and training. A caller that
/// can predict steps therefore determines a factor for each scenario.
#[derive(Debug)]
pub struct AddedKernels {
    /// Machine of the measurements.
    pub(super) source: String,
    /// By scenario: kernels of one rank at the full clock, and steps without recording.
    pub(super) all: Vec<(Totals, Trial)>,
}

impl AddedKernels {
    /// Returns a run of each scenario's part.
    pub fn trials(&self) -> impl ExactSizeIterator<Item = &Trial> {
        self.all.iter().map(|(_, trial)| trial)
    }

    /// Returns the tables of all scenarios, as text that precedes the tables of a profile. The
    /// arithmetic of each scenario is multiplied by its factor (default: 1).
    #[must_use]
    pub fn tables(&self, factors: &[f64]) -> String {
        let mut steps = Totals::default();
        for (i, (totals, _)) in self.all.iter().enumerate() {
            steps.absorb(totals, factors.get(i).copied().unwrap_or(1.0));
        }
        render::added(&steps, &|_| self.source.clone())
    }
}

/// Calls `attempt(n)`, and halves `n` while the error satisfies `is_reason`.
fn fewer_until<T, E>(
    most: u32,
    is_reason: impl Fn(&E) -> bool,
    mut attempt: impl FnMut(u32) -> Result<T, E>,
) -> Result<T, E> {
    let mut n = most.max(1);
    loop {
        match attempt(n) {
            Err(e) if is_reason(&e) && n > 1 => n /= 2,
            result => return result,
        }
    }
}

/// Returns whether memory was insufficient, at the start of the session or later.
fn is_out_of_memory(e: &TrainError) -> bool {
    match e {
        TrainError::Engine(ExecError::Device(_)) => true,
        TrainError::Engine(e) => e
            .first()
            .is_some_and(|f| f.kind == FailureKind::OutOfMemory),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user_scenario(name: &str, sets: &[&str]) -> UserScenario {
        UserScenario {
            scenario: PathBuf::from(name),
            sets: sets.iter().map(|&s| s.to_owned()).collect(),
        }
    }

    #[test]
    fn a_part_has_few_layers_and_all_of_the_rest() {
        let whole = user_scenario("peers-8b", &["compile.mode=regions", "mesh.dp_shard=8"]);
        let part = whole.part(4, 2).unwrap();
        assert_eq!((part.model.layers, part.mesh.dp_shard), (4, 2));
        let program = shardlab_plan::plan(&part).unwrap();
        assert_eq!(program.meta.mesh.world(), 2);
        let all = whole.whole().unwrap();
        assert_eq!((all.model.layers, all.mesh.dp_shard), (32, 8));
        assert_eq!(
            (part.model.hidden, part.compile, part.train),
            (all.model.hidden, all.compile, all.train)
        );
        whole.check().unwrap();
        // With a single layer, that layer would be dense.
        user_scenario("small-moe", &[]).check().unwrap();
        let wrong = user_scenario("peers-8b", &["model.heads=31"]).check();
        assert!(wrong.is_err_and(|e| e.is_bad_input()));
    }

    /// No machine has enough memory for two layers of 405 billion parameters, or for one. Both
    /// numbers are tried.
    #[test]
    fn what_does_not_fit_is_tried_with_fewer_layers() {
        let on = On::cpu();
        let huge = user_scenario("llama3-405b-1024xh100", &["model.vocab=16777216"]);
        let error = huge.observe(&on, 2, 1, Duration::ZERO).err().unwrap();
        assert!(is_out_of_memory(&error), "{error}");
        assert!(!is_out_of_memory(&TrainError::NoNames {
            why: String::new()
        }));
    }

    #[test]
    fn layers_are_halved_until_there_is_room() {
        let room = |limit: u32| {
            move |n: u32| {
                if n <= limit { Ok(n) } else { Err("room") }
            }
        };
        let tried = |limit| fewer_until(8, |e| *e == "room", room(limit));
        assert_eq!(tried(8), Ok(8));
        assert_eq!(tried(3), Ok(2));
        assert_eq!(tried(0), Err("room"));
        let other = fewer_until(
            8,
            |e| *e == "room",
            |n| Err::<u32, _>(if n > 4 { "room" } else { "else" }),
        );
        assert_eq!(other, Err("else"));
    }
}
