//! Scenarios that the user names: their own kernels, timed in steps of a few of their layers.

use super::steps::{Observed, On, Totals, run_scenario};
use super::{Trial, render};
use crate::device::{DeviceFactory, FailureKind};
use crate::engine::ExecError;
use crate::train::TrainError;
use shardlab_plan::config::Scenario;
use shardlab_plan::scenario;
use std::path::PathBuf;
use std::time::Duration;

/// A scenario whose kernels are measured.
#[derive(Clone, Debug)]
pub struct Own {
    /// File, or the name of a shipped one.
    pub scenario: PathBuf,
    /// Overrides of its keys.
    pub sets: Vec<String>,
}

impl Own {
    /// What it is called in notes.
    pub(super) fn name(&self) -> String {
        self.scenario.display().to_string()
    }

    /// Whether it can be loaded, and its parts planned, before anything is measured.
    ///
    /// # Errors
    /// [`TrainError::Plan`], if not.
    pub fn check(&self) -> Result<(), TrainError> {
        self.whole()?;
        let part = self.part(1, 1)?;
        let planned = shardlab_plan::plan(&part);
        let why = |e| {
            let name = self.name();
            TrainError::Plan(format!("{name}, one layer of it on one rank: {e}"))
        };
        planned.map(drop).map_err(why)
    }

    fn whole(&self) -> Result<Scenario, TrainError> {
        self.load(&[])
    }

    /// The scenario with so many layers on so many ranks, which all hold a part of everything.
    fn part(&self, layers: u32, ranks: u32) -> Result<Scenario, TrainError> {
        self.load(&[
            format!("model.layers={layers}"),
            format!("mesh.dp_shard={ranks}"),
            "mesh.dp_outer=1".to_owned(),
        ])
    }

    fn load(&self, more: &[String]) -> Result<Scenario, TrainError> {
        let sets = [&self.sets[..], more].concat();
        scenario::load(&self.scenario, &sets).map_err(|e| TrainError::Plan(e.to_string()))
    }

    /// Runs steps of it: of as many layers as it has, at most `most`, and of fewer where there is no memory for them.
    ///
    /// # Errors
    /// [`TrainError`] when it cannot be loaded, planned or performed.
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

/// Kernels of the user's scenarios. How warm a device is, and what else it does, decides the clock of its arithmetic, which is not the same in a few steps
/// of one rank and in training: whoever can predict steps finds for each scenario the factor with which its own are predicted.
#[derive(Debug)]
pub struct Added {
    /// Where they were measured.
    pub(super) source: String,
    /// By scenario: kernels of one rank at full clock, and steps in which nothing was recorded.
    pub(super) all: Vec<(Totals, Trial)>,
}

impl Added {
    /// A run of each scenario's part.
    pub fn trials(&self) -> impl ExactSizeIterator<Item = &Trial> {
        self.all.iter().map(|(_, trial)| trial)
    }

    /// Tables of all, as text that may stand before the tables of a profile; arithmetic of each scenario takes so many times as long as it was
    /// measured, once where no factor is given.
    #[must_use]
    pub fn tables(&self, factors: &[f64]) -> String {
        let mut steps = Totals::default();
        for (i, (totals, _)) in self.all.iter().enumerate() {
            steps.absorb(totals, factors.get(i).copied().unwrap_or(1.0));
        }
        render::added(&steps, &|_| self.source.clone())
    }
}

/// Tries with so many, and with half as many as long as that is the reason why not.
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

/// Whether there was no memory, when the session was opened or on the way.
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

    fn own(name: &str, sets: &[&str]) -> Own {
        Own {
            scenario: PathBuf::from(name),
            sets: sets.iter().map(|&s| s.to_owned()).collect(),
        }
    }

    #[test]
    fn a_part_has_few_layers_and_all_of_the_rest() {
        let whole = own("peers-8b", &["compile.mode=regions", "mesh.dp_shard=8"]);
        let part = whole.part(4, 2).unwrap();
        assert_eq!((part.model.layers, part.mesh.dp_shard), (4, 2));
        let program = shardlab_plan::plan(&part).unwrap();
        assert_eq!(program.meta.world, 2);
        let all = whole.whole().unwrap();
        assert_eq!((all.model.layers, all.mesh.dp_shard), (32, 8));
        assert_eq!(
            (part.model.hidden, part.compile, part.train),
            (all.model.hidden, all.compile, all.train)
        );
        whole.check().unwrap();
        let wrong = own("peers-8b", &["model.heads=31"]).check();
        assert!(wrong.is_err_and(|e| e.is_bad_input()));
    }

    /// A machine has not the memory for two layers of 405 billion parameters, nor for one of them: both are tried.
    #[test]
    fn what_does_not_fit_is_tried_with_fewer_layers() {
        let on = On::cpu();
        let huge = own("llama3-405b-1024xh100", &["model.vocab=16777216"]);
        let error = huge.observe(&on, 2, 1, Duration::ZERO).err().unwrap();
        assert!(is_out_of_memory(&error), "{error}");
        assert!(!is_out_of_memory(&TrainError::NoNames));
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
