//! Finds the smallest change that makes a job fit: one option, or else two, or else three.

use super::attention::{self, ATTENTION};
use super::gpu_counts;
use super::options::{self, OFFLOAD};
use super::whatif::{self, Change, Effect, Load, WhatIf, is_settable};
use crate::predict::{Fit, Prediction, Profiles};
use rayon::prelude::*;
use shardlab_plan::Scenario;
use shardlab_plan::config::{OuterStrategy, Recompute, Reshard};
use std::cmp::Reverse;

/// Maximum number of options in a combination.
const MAX_OPTIONS: usize = 3;
/// Number of changes that combinations are made of. The changes that save the most are used.
const COMBINED: usize = 10;
/// Number of combinations per level that get one more option. The combinations that save the most
/// are used.
const EXTENDED: usize = 8;
/// Largest multiple of the sharding mesh to try if no change of options fits.
const MORE_GPUS: u64 = 64;
/// Relative saving of device memory above which a change is worth combining.
const WORTH_COMBINING: f64 = 0.002;

/// A change of one or more options, and its effect.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// Change.
    pub change: Change,
    /// Number of options that it changes.
    pub options: usize,
    /// Effect.
    pub effect: Effect,
}

/// Result of the search for a job that does not fit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Search {
    /// Changes with the fewest options that fit and leave the usual headroom, fastest first.
    pub solutions: Vec<Solution>,
    /// Changes with the fewest options that fit, but leave little headroom. Empty if leaving the
    /// usual headroom does not take more options.
    pub narrow: Vec<Solution>,
    /// The smallest number of GPUs on which the job fits, if no change of options is enough.
    pub more_gpus: Option<Solution>,
    /// Number of combinations that were simulated.
    pub tried: usize,
}

impl Search {
    /// Returns the smallest change that leaves headroom, or else the smallest change that fits.
    #[must_use]
    pub fn best(&self) -> Option<&Solution> {
        self.solutions.first().or(self.narrow.first())
    }
}

/// A change of one option. Two moves on the same axis exclude each other.
#[derive(Clone, Debug)]
struct Move {
    axis: &'static str,
    change: Change,
}

/// A combination of moves (indices, ascending) and its effect.
#[derive(Clone, Debug)]
struct Tried {
    moves: Vec<usize>,
    effect: Effect,
}

/// Searches for the smallest change that makes a job fit on the same GPUs without changing what it
/// computes: batch, model and precision stay the same. Returns `None` if the job already fits.
#[must_use]
pub fn search(base: &Prediction, profiles: &Profiles, load: Load<'_>) -> Option<Search> {
    if !matches!(base.fit, Fit::Exceeds { .. }) {
        return None;
    }
    let moves = moves(&base.scenario);
    let evaluate = |combination: Vec<usize>| -> Option<Tried> {
        let change = join(&moves, &combination);
        let what_if = whatif::try_one(change, &base.scenario, profiles, load)?;
        Some(Tried {
            moves: combination,
            effect: what_if.effect.ok()?,
        })
    };
    let all = |combinations: Vec<Vec<usize>>| -> Vec<Tried> {
        let tried = combinations.into_par_iter();
        tried.filter_map(&evaluate).collect()
    };

    let mut found = Search::default();
    let (fewest_layers, mut level) = rayon::join(
        || whatif::fewest_layers(base, profiles, load),
        || all((0..moves.len()).map(|i| vec![i]).collect()),
    );
    let singles = worth_combining(base, &level);
    let mut leanest: Option<Tried> = None;
    for options in 1..=MAX_OPTIONS {
        found.tried += level.len();
        leanest = level
            .iter()
            .chain(&leanest)
            .min_by_key(|t| t.effect.peak_device)
            .cloned();
        collect(&mut found, &moves, &level, options);
        if options == 1 {
            found
                .solutions
                .extend(fewest_layers.as_ref().and_then(one_option));
        }
        if !found.solutions.is_empty() || options == MAX_OPTIONS {
            break;
        }
        level = all(extend(&moves, &singles, level));
    }
    let fastest = |s: &Solution| Reverse((s.effect.tokens_per_s * 1e6) as u64);
    found.solutions.sort_by_key(fastest);
    found.narrow.sort_by_key(fastest);
    if found.best().is_none() {
        let leanest = leanest.map(|t| join(&moves, &t.moves));
        found.more_gpus = more_gpus(base, leanest, profiles, load);
    }
    Some(found)
}

/// Returns the smallest larger mesh on which the job fits, with the current options or with the
/// most economical ones.
fn more_gpus(
    base: &Prediction,
    leanest: Option<Change>,
    profiles: &Profiles,
    load: Load<'_>,
) -> Option<Solution> {
    let on = |shards: u64, with: Option<&Change>| -> Option<Solution> {
        let mut overrides = vec![format!("mesh.dp_shard={shards}")];
        overrides.extend(with.iter().flat_map(|c| c.overrides.clone()));
        let change = Change {
            label: overrides.join(" "),
            overrides,
        };
        let what_if = whatif::try_one(change, &base.scenario, profiles, load)?;
        let effect = what_if.effect.ok()?;
        leaves_room(&effect).then_some(Solution {
            change: what_if.change,
            options: 1 + usize::from(with.is_some()),
            effect,
        })
    };
    let mesh = &base.scenario.mesh;
    let now = u64::from(mesh.dp_shard);
    let counts = gpu_counts::shards(
        u64::from(mesh.world()) / now,
        u64::from(mesh.gpus_per_node),
        now,
        now * MORE_GPUS,
        |n| load(&[format!("mesh.dp_shard={n}")]).is_ok(),
    );
    gpu_counts::smallest(&counts, |n| {
        on(n, None).or_else(|| on(n, Some(leanest.as_ref()?)))
    })
}

/// Collects the combinations of `options` options that fit.
fn collect(found: &mut Search, moves: &[Move], level: &[Tried], options: usize) {
    let solution = |t: &Tried| Solution {
        change: join(moves, &t.moves),
        options,
        effect: t.effect.clone(),
    };
    let fitting = |t: &&Tried| t.effect.fit.is_ok();
    let (roomy, narrow): (Vec<&Tried>, Vec<&Tried>) = level
        .iter()
        .filter(fitting)
        .partition(|t| leaves_room(&t.effect));
    found.solutions.extend(roomy.into_iter().map(solution));
    // A tight fit with more options is no better than one with fewer.
    if found.solutions.is_empty() && found.narrow.is_empty() {
        found.narrow.extend(narrow.into_iter().map(solution));
    }
}

fn leaves_room(effect: &Effect) -> bool {
    effect.has_headroom && !matches!(effect.fit, Fit::Tight { .. })
}

fn one_option(what_if: &WhatIf) -> Option<Solution> {
    let effect = what_if.effect.as_ref().ok()?.clone();
    leaves_room(&effect).then(|| Solution {
        change: what_if.change.clone(),
        options: 1,
        effect,
    })
}

/// Returns the indices of the moves that save memory on their own, largest saving first.
fn worth_combining(base: &Prediction, singles: &[Tried]) -> Vec<usize> {
    let before = base.run.memory.peak_device.0 as f64;
    let mut worth: Vec<&Tried> = singles
        .iter()
        .filter(|t| (t.effect.peak_device.0 as f64) < (1.0 - WORTH_COMBINING) * before)
        .collect();
    worth.sort_by_key(|t| (t.effect.peak_device, Reverse(t.effect.tokens_per_s as u64)));
    worth.iter().take(COMBINED).map(|t| t.moves[0]).collect()
}

/// Returns the combinations of `level`, each with one more option.
fn extend(moves: &[Move], singles: &[usize], mut level: Vec<Tried>) -> Vec<Vec<usize>> {
    level.retain(|t| t.moves.iter().all(|i| singles.contains(i)));
    level.sort_by_key(|t| t.effect.peak_device);
    if level.first().is_some_and(|t| t.moves.len() > 1) {
        level.truncate(EXTENDED);
    }
    let mut all: Vec<Vec<usize>> = level
        .iter()
        .flat_map(|t| singles.iter().map(move |&next| (t, next)))
        .filter(|(t, next)| t.moves.iter().all(|&i| moves[i].axis != moves[*next].axis))
        .map(|(t, next)| {
            let mut combination = [&t.moves[..], &[next]].concat();
            combination.sort_unstable();
            combination
        })
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn join(moves: &[Move], combination: &[usize]) -> Change {
    let changes = || combination.iter().map(|&i| &moves[i].change);
    let labels: Vec<&str> = changes().map(|c| c.label.as_str()).collect();
    Change {
        label: labels.join(" + "),
        overrides: changes().flat_map(|c| c.overrides.clone()).collect(),
    }
}

/// Returns the single-option changes that may save memory without changing what is computed.
fn moves(base: &Scenario) -> Vec<Move> {
    let mut all = Vec::new();
    let mut one = |axis: &'static str, set: &[&str]| {
        if set.iter().all(|s| is_settable(&base.fsdp, s)) {
            let change = Change {
                label: set.join(" "),
                overrides: set.iter().map(|s| (*s).to_owned()).collect(),
            };
            all.push(Move { axis, change });
        }
    };
    let stronger: &[&str] = match base.train.recompute {
        Recompute::None | Recompute::Pointwise => {
            &["train.recompute=selective", "train.recompute=full"]
        }
        Recompute::Selective => &["train.recompute=full"],
        // If only some blocks are recomputed, a move recomputes all of them.
        Recompute::Full => &["train.recompute_layers=all"],
    };
    for set in stronger {
        one("recompute", &[*set]);
    }
    if base.train.recompute == Recompute::None {
        one("recompute", &["train.recompute=pointwise"]);
    }
    one("loss", &["train.loss=chunked"]);
    for (micro_batch, grad_accum) in smaller_batches(base) {
        let set = [
            format!("train.micro_batch={micro_batch}"),
            format!("train.grad_accum={grad_accum}"),
        ];
        one("batch", &set.each_ref().map(String::as_str));
    }
    for strategy in ["optim", "optim_grads", "optim_grads_params"] {
        one("strategy", &[&format!("fsdp.strategy={strategy}")]);
    }
    if base.fsdp.reshard_after_forward != Reshard::Always {
        one("reshard", &["fsdp.reshard_after_forward=true"]);
    }
    one("reshard root", &["fsdp.reshard_root=true"]);
    one("segments", &["fsdp.expandable_segments=true"]);
    one("optimizer", &["fsdp.optimizer_in_backward=true"]);
    one("reductions", &["fsdp.reduce_in_flight=1"]);
    one("next step", &["fsdp.prefetch_next_step=0"]);
    for depth in ["0", "1"] {
        let set = [
            format!("fsdp.prefetch_forward={depth}"),
            format!("fsdp.prefetch_backward={depth}"),
        ];
        one("prefetch", &set.each_ref().map(String::as_str));
    }
    for mode in ["regions", "blocks"] {
        one("compile", &[&format!("compile.mode={mode}")]);
    }
    if base.mesh.dp_outer > 1 && base.fsdp.outer_strategy == OuterStrategy::NoShard {
        one("outer", &["fsdp.outer_strategy=optim"]);
    }
    for state in options::values(OFFLOAD).skip(1) {
        one("offload", &[&format!("{OFFLOAD}={state}")]);
    }
    for name in attention::implementations(base) {
        one(ATTENTION, &[&format!("{ATTENTION}={name}")]);
    }
    let sharded = whatif::mesh(base).into_iter();
    let more = |change: &Change| {
        let key = |set: &String| set.strip_prefix("mesh.dp_shard=")?.parse::<u32>().ok();
        change.overrides.iter().find_map(key) > Some(base.mesh.dp_shard)
    };
    all.extend(sharded.filter(more).map(|change| Move {
        axis: "outer",
        change,
    }));
    all
}

/// Returns smaller micro-batches with proportionally more accumulation, so that the number of
/// samples per step stays the same.
fn smaller_batches(base: &Scenario) -> Vec<(u64, u64)> {
    let (batch, accum) = (base.train.micro_batch, u64::from(base.train.grad_accum));
    let divisors = (1..batch).rev().filter(|n| batch.is_multiple_of(*n));
    divisors.take(4).map(|n| (n, accum * (batch / n))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::predict;
    use shardlab_plan::scenario;
    use std::path::Path;

    fn found(name: &str, set: &[&str]) -> Option<Search> {
        let load = |more: &[String]| {
            let mut all: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
            all.extend_from_slice(more);
            scenario::load(Path::new(name), &all)
        };
        let profiles = Profiles::default();
        let options = shardlab_sim::Options::default();
        let base = predict(&load(&[]).unwrap(), &profiles, &options).unwrap();
        search(&base, &profiles, &load)
    }

    #[test]
    fn what_fits_needs_no_change() {
        assert_eq!(found("llama3-8b-4xh200", &[]), None);
    }

    /// `CPUOffloadPolicy` of `fully_shard` keeps all state on the host.
    #[test]
    fn offload_fits_where_nothing_else_does() {
        let set = [
            "fsdp.policy=fsdp2",
            "mesh.dp_shard=8",
            "train.micro_batch=1",
        ];
        let found = found("llama3-70b-64xh100", &set).unwrap();
        let best = found.best().unwrap();
        let all = "fsdp.offload=[\"params\", \"grads\", \"optimizer\"]";
        assert!(
            best.change.overrides.iter().any(|set| set == all),
            "{best:?}"
        );
    }

    /// If one option is enough, options are not combined.
    #[test]
    fn one_option_goes_before_two() {
        let set = ["mesh.hardware=h100-80", "train.recompute=none"];
        let found = found("llama3-8b-4xh200", &set).unwrap();
        let best = found.best().unwrap();
        assert_eq!(best.options, 1);
        assert!(best.effect.has_headroom, "{best:?}");
        assert!(found.solutions.iter().all(|s| s.options == 1));
        let labels: Vec<&str> = found
            .solutions
            .iter()
            .map(|s| s.change.label.as_str())
            .collect();
        assert!(labels.contains(&"train.recompute=full"), "{labels:?}");
        let speeds: Vec<f64> = found
            .solutions
            .iter()
            .map(|s| s.effect.tokens_per_s)
            .collect();
        assert!(speeds.is_sorted_by(|a, b| a >= b), "{speeds:?}");
    }

    /// Full recompute alone leaves little headroom; a second option leaves enough. Neither another
    /// engine nor another batch is proposed.
    #[test]
    fn two_options_are_found_where_one_is_not_enough() {
        let set = [
            "mesh.hardware=h100-80",
            "train.recompute=selective",
            "train.micro_batch=2",
        ];
        let found = found("llama3-70b-64xh100", &set).unwrap();
        let best = found.best().unwrap();
        assert_eq!(best.options, 2, "{best:?}");
        assert!(best.effect.has_headroom && best.effect.fit == Fit::Fits);
        assert!(found.narrow.iter().all(|s| s.options == 1), "{found:?}");
        for s in found.solutions.iter().chain(&found.narrow) {
            let sets = &s.change.overrides;
            let about = |key: &str| sets.iter().any(|set| set.starts_with(key));
            assert!(!about("fsdp.policy") && !about("precision."), "{sets:?}");
            assert_eq!(
                about("train.micro_batch"),
                about("train.grad_accum"),
                "{sets:?}"
            );
        }
    }

    #[test]
    fn what_cannot_fit_has_no_solution() {
        // Megatron-FSDP keeps no parameters in host memory.
        let set = ["mesh.dp_shard=2", "fsdp.policy=megatron"];
        let found = found("llama3-70b-64xh100", &set).unwrap();
        assert_eq!(found.best(), None);
        assert!(found.tried > 5, "{}", found.tried);
        // The job fits on a larger mesh.
        let more = found.more_gpus.unwrap();
        assert!(more.effect.has_headroom, "{more:?}");
        assert!(more.change.overrides[0].starts_with("mesh.dp_shard="));
    }
}
