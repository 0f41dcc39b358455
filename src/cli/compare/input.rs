//! The inputs of a comparison: reads saved runs, and predicts or measures scenarios.

use super::super::args::{load, plan, profiles};
use super::super::exec::view_of_outcome;
use super::super::interrupt;
use super::super::keep::{view_of, with_source};
use super::super::output::Failure;
use super::super::progress::Progress;
use super::ask::{Ask, Maker};
use super::baseline::Kept;
use super::{Args, binary};
use crate::predict::{Profiles, predict};
use shardlab_exec::engine::ExecOptions;
use shardlab_exec::train::{Flow, Observer, RunOptions, StepReport};
use shardlab_plan::record::{Basis, RunKind};
use shardlab_plan::scenario::{find_shipped, is_stdin, nearest, shipped};
use shardlab_reports::RunView;
use shardlab_reports::compare::Side;
use shardlab_reports::stats::median;
use shardlab_reports::store::{Id, Store, StoreError, is_run_dir, open_dir};
use shardlab_sim::Options;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Minimum number of rounds for comparing the medians of rounds instead of the steps of a single
/// round.
const MEDIANS_FROM: u32 = 3;

/// Number of rounds that are kept while others are measured. Those closest to the median so far are
/// kept, because a run with all of its spans is large.
const CANDIDATES: usize = 8;

/// One of the inputs to compare.
pub(super) enum Plan {
    /// A run in a folder.
    Folder(PathBuf),
    /// A saved run.
    Kept(Store, Id),
    /// A baseline of the gate.
    Baseline(Box<Kept>),
    /// A scenario.
    Scenario(Box<Ask>),
}

/// A run that has been read or made.
pub(super) struct Made {
    pub(super) view: RunView,
    /// Median step time of each round if there are several, milliseconds.
    pub(super) medians: Vec<f64>,
    /// Origin of the run.
    pub(super) origin: String,
    /// Whether this call made the run.
    pub(super) is_new: bool,
}

impl Made {
    /// Returns the run with a label.
    pub(super) fn side<'a>(&'a self, label: &'a str) -> Side<'a> {
        Side {
            label,
            run: &self.view,
            medians: &self.medians,
        }
    }
}

impl Plan {
    pub(super) fn new(
        path: PathBuf,
        set: Vec<String>,
        exec: bool,
        maker: Option<Maker>,
        store: &Store,
    ) -> Result<Self, Failure> {
        let name = path.to_string_lossy().into_owned();
        let kept = if path.is_dir() {
            if !is_run_dir(&path) {
                return Err(Failure::bad_input(format_args!(
                    "{name} is a folder, but not that of a saved run (it has no run.json)"
                )));
            }
            Some(Self::Folder(path.clone()))
        } else if !is_stdin(&path) && !path.is_file() && find_shipped(&name).is_none() {
            match store.resolve(&name) {
                Ok(id) => Some(Self::Kept(store.clone(), id)),
                Err(e) => return Err(unknown(&name, &path, &set, e)),
            }
        } else {
            None
        };
        let Some(kept) = kept else {
            if maker.is_some() && is_stdin(&path) {
                return Err(Failure::bad_input(
                    "-: another binary cannot read this standard input: write the scenario to a file",
                ));
            }
            let scenario = load(&path, &set)?;
            return Ok(Self::Scenario(Box::new(Ask {
                path,
                set,
                exec,
                maker,
                scenario,
            })));
        };
        if !set.is_empty() || exec || maker.is_some() {
            return Err(Failure::bad_input(format_args!(
                "{name} is a saved run: --set, --exec, --binary and --rev only apply to scenarios"
            )));
        }
        Ok(kept)
    }
}

/// Reports an argument that is neither a scenario nor a run, with the most similar names.
fn unknown(name: &str, path: &Path, set: &[String], error: StoreError) -> Failure {
    let looks_like_file = path.extension().is_some() || path.components().count() > 1;
    if looks_like_file && let Err(e) = load(path, set) {
        return e;
    }
    let StoreError::Unknown { dir, help, .. } = &error else {
        return error.into();
    };
    let near = nearest(name, shipped().iter().map(|(n, _)| *n));
    let near = near.map_or_else(String::new, |n| format!("; the nearest scenario is `{n}`"));
    Failure::bad_input(format_args!(
        "no scenario or saved run is called `{name}`{near}; runs in {}: {help}",
        dir.display()
    ))
}

/// Describes where a prediction comes from: `predicted`, `predicted, estimated ± 2.2 % in 5 runs`.
fn origin(basis: Option<&Basis>) -> String {
    match basis.filter(|b| b.is_estimate()) {
        Some(basis) => {
            let error = basis.step_error();
            let error = error.map_or_else(|| ", error unknown".to_owned(), |e| format!(" {e}"));
            format!("predicted, estimated{error}")
        }
        None => "predicted".to_owned(),
    }
}

/// Makes or reads every run. Measured runs take turns, round by round.
pub(super) fn make(args: &Args, plans: &[Plan]) -> Result<Vec<Made>, Failure> {
    let profiles = profiles();
    let progress = Progress::new("comparing", plans.len() * args.rounds as usize, args.json);
    let mut made: Vec<Option<Made>> = plans.iter().map(|_| None).collect();
    let mut recorded: Vec<Rounds> = plans.iter().map(|_| Rounds::default()).collect();
    for round in 0..args.rounds {
        for at in turn(round, plans.len()) {
            let (plan, made) = (&plans[at], &mut made[at]);
            let repeated = matches!(plan, Plan::Scenario(ask) if ask.exec);
            if round > 0 && !repeated || matches!(plan, Plan::Baseline(_)) {
                continue;
            }
            if interrupt::requested() {
                return Err(Failure::run("interrupted"));
            }
            let next = one(args, plan, &profiles)?;
            progress.step();
            if repeated && args.rounds > 1 {
                recorded[at].add(round, next);
            } else {
                *made = Some(next);
            }
        }
    }
    for (made, rounds) in made.iter_mut().zip(recorded) {
        *made = rounds.typical(args.rounds).or(made.take());
    }
    // A baseline shows its training run if it is compared with training runs, and its prediction if
    // it is compared with predictions.
    let trained = made.iter().flatten();
    let trained = args.exec || trained.clone().any(|m| m.view.run.kind.is_measured());
    for (plan, made) in plans.iter().zip(&mut made) {
        if let Plan::Baseline(kept) = plan {
            let (view, origin) = kept.view(trained)?;
            *made = Some(Made {
                view,
                medians: Vec::new(),
                origin,
                is_new: false,
            });
        }
    }
    // There is at least one round, and each round makes every run.
    Ok(made.into_iter().flatten().collect())
}

/// Returns the runs in the order of a round: A B, B A, A B and so on. A slow change of the machine
/// then affects all runs alike.
fn turn(round: u32, runs: usize) -> Vec<usize> {
    match round % 2 {
        0 => (0..runs).collect(),
        _ => (0..runs).rev().collect(),
    }
}

/// The measured rounds of a run.
#[derive(Default)]
struct Rounds {
    /// Median step time of each round, milliseconds.
    medians: Vec<f64>,
    /// Rounds that may be the median one, with their numbers, counted from 1.
    candidates: Vec<(u32, Made)>,
}

impl Rounds {
    /// Adds a round, counted from 0.
    fn add(&mut self, round: u32, made: Made) {
        let ms = made.view.step_ms();
        if ms.is_finite() {
            self.medians.push(ms);
        }
        self.candidates.push((round + 1, made));
        if self.candidates.len() > CANDIDATES {
            self.sort();
            self.candidates.pop();
        }
    }

    /// Sorts the candidates: the closest to the median of the rounds first.
    fn sort(&mut self) {
        let middle = median(&self.medians);
        let apart = |made: &Made| (made.view.step_ms() - middle).abs();
        self.candidates
            .sort_by(|(_, a), (_, b)| apart(a).total_cmp(&apart(b)));
    }

    /// Returns the round with the median step time, with the medians of all rounds if there are
    /// enough to compare.
    fn typical(mut self, rounds: u32) -> Option<Made> {
        self.sort();
        let (round, mut made) = self.candidates.into_iter().next()?;
        made.origin += &format!(", the median of {rounds} rounds: round {round}");
        if rounds >= MEDIANS_FROM {
            made.medians = self.medians;
        }
        Some(made)
    }
}

fn one(args: &Args, plan: &Plan, profiles: &Profiles) -> Result<Made, Failure> {
    let (view, origin) = match plan {
        Plan::Folder(dir) => (
            open_dir(dir).map_err(Failure::bad_input)?,
            dir.display().to_string(),
        ),
        Plan::Kept(store, id) => (
            store.open(id).map_err(Failure::bad_input)?,
            format!("saved {id}"),
        ),
        Plan::Baseline(kept) => kept.view(args.exec)?,
        Plan::Scenario(ask) => {
            let what = if ask.exec { "measured" } else { "predicted" };
            match &ask.maker {
                Some(maker) => (
                    binary::run(maker, ask, args.steps, &args.device)?,
                    format!("{what} by {}", maker.name),
                ),
                None if ask.exec => (measured(args, ask)?, "measured now".into()),
                None => {
                    let p = predict(&ask.scenario, profiles, &Options::default())?;
                    (
                        view_of(&p, &ask.path, &ask.set),
                        origin(p.run.basis.as_ref()),
                    )
                }
            }
        }
    };
    Ok(Made {
        view,
        medians: Vec::new(),
        origin,
        is_new: matches!(plan, Plan::Scenario(_)),
    })
}

/// Warns if runs were measured in several calls. Imported traces are measurements of other
/// programs, whose users know how they were made.
pub(super) fn separate_calls(made: &[Made]) -> Option<String> {
    let measured = |m: &&Made| m.view.run.kind == RunKind::Exec;
    let measured: Vec<&Made> = made.iter().filter(measured).collect();
    (measured.len() > 1 && measured.iter().any(|m| !m.is_new)).then(|| {
        "the runs were measured in separate calls, between which the state of a machine changes: a difference \
         of their times may have no other cause. `shardlab compare SCENARIO --exec --rounds 5` measures runs in \
         turns."
            .to_owned()
    })
}

/// A progress display that shows nothing and stops training on Ctrl-C.
struct Quiet;

impl Observer for Quiet {
    fn step(&mut self, _: &StepReport) -> Flow {
        interrupt::flow()
    }
}

fn measured(args: &Args, ask: &Ask) -> Result<RunView, Failure> {
    let program = Arc::new(plan(&ask.scenario)?);
    let mut exec = ExecOptions {
        record: true,
        ..ExecOptions::default()
    };
    let device = args.device.settled(&ask.scenario);
    device.apply(&mut exec, ask.scenario.mesh.world());
    let options = RunOptions {
        steps: args.steps,
        exec,
        ..RunOptions::default()
    };
    let outcome = device.train(&ask.scenario, &program, options, &mut Quiet)?;
    if outcome.interrupted {
        return Err(Failure::run("interrupted"));
    }
    let view = view_of_outcome(&ask.scenario, &program, &outcome);
    Ok(with_source(view, &ask.path, &ask.set))
}

#[cfg(test)]
mod tests {
    use super::turn;

    #[test]
    fn rounds_alternate() {
        let all: Vec<usize> = (0..3).flat_map(|round| turn(round, 2)).collect();
        assert_eq!(all, [0, 1, 1, 0, 0, 1]);
    }
}
