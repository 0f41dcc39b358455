//! `shardlab tune`: finds the best settings of a job within the memory of its GPUs.

mod json;
mod print;
mod report;

use super::args::{profiles, size};
use super::emit::EmitArgs;
use super::interrupt;
use super::output::{Failure, Out, Status, say, writable, write_file};
use super::progress::Progress;
use super::report::Form;
use super::subject::{JobArgs, Subject};
use crate::analysis::verdict::Verdict;
use crate::predict::{Prediction, Profiles, predict};
use crate::tune::{
    Answer, Fewest, Goal, Kept, Limits, MORE_RANKS, Request, Score, Size, Watch, all_but,
    fewest_gpus, freed, kept, largest, tune,
};
use shardlab_plan::scenario::ScenarioError;
use shardlab_plan::units::Bytes;
use shardlab_plan::{Scenario, scenario};
use shardlab_sim::Options;
use std::path::PathBuf;

const NOTES: &str = "\
JOB is what `shardlab fit` reads: the configuration of a framework, a config.json, or a scenario.

The model, the samples per optimizer step, the number of GPUs and the engine stay the same. The search changes micro-batch size and accumulation, mesh and sharding, units, resharding, prefetch, the type and time of reductions, recompute, loss, offload, compilation and the allocator, as far as model and policy allow. --keep fixes a key, --free adds one.

Every combination of settings that is compared is planned and simulated. If there are few, all are tried. If there are many, bounds exclude those whose computation alone takes longer than the best step, and those that do not fit even with the leanest choice of all other options. `gap` is the distance from the best step to the bound of the remaining ones.

Of settings that are equal within 0.5 %, the one with the fewest changes is chosen. The simplest alternative has even fewer, and ties within the error of the predictions.

Ctrl-C ends the search with the best settings so far.

Exit status: 0 if settings were found, 1 if none fits, 2 for bad input, 3 if the search was interrupted.

Examples:
  shardlab tune llama3-8b-8xh100
  shardlab tune sft.yaml --gpus 8xh100 --budget 70GiB --keep train.micro_batch
  shardlab tune job.toml --free fsdp.policy --goal memory
  shardlab tune job.toml --longest-sequence
  shardlab tune job.toml --largest-micro-batch
  shardlab tune job.toml --report front.html";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Reserve at most this much memory per GPU, such as 70GiB [default: leave 5 % of the device
    /// free]
    #[arg(long, value_name = "SIZE", value_parser = budget)]
    budget: Option<Bytes>,
    /// What to optimize
    #[arg(long, value_enum, default_value_t)]
    goal: GoalArg,
    /// Keep the job's value of a key, or set it to another one (repeatable)
    #[arg(long, value_name = "SECTION.KEY[=VALUE]")]
    keep: Vec<String>,
    /// Change only this key (repeatable)
    #[arg(long, value_name = "SECTION.KEY")]
    only: Vec<String>,
    /// Also try all values of this key, such as fsdp.policy, or this value (repeatable)
    #[arg(long, value_name = "SECTION.KEY[=VALUE]")]
    free: Vec<String>,
    /// Seed of the random restarts of the search
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Find the longest sequence that fits instead
    #[arg(long, conflicts_with_all = ["fewest_gpus", "largest_micro_batch"])]
    longest_sequence: bool,
    /// Find the largest micro-batch that fits instead; a step then has more samples
    #[arg(long, conflicts_with = "fewest_gpus")]
    largest_micro_batch: bool,
    /// Find the fewest GPUs on which some settings fit, and the best settings for them
    #[arg(long)]
    fewest_gpus: bool,
    /// Also write the answer, with a drawing of the front, to this file: .html or .md
    #[arg(long, value_name = "FILE", conflicts_with_all = ["longest_sequence", "largest_micro_batch"])]
    report: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long, conflicts_with = "emit")]
    json: bool,
    #[command(flatten)]
    emit: EmitArgs,
}

/// Goals as they are given.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum GoalArg {
    /// The shortest step
    #[default]
    Throughput,
    /// The least reserved memory of steps that take no longer than today's
    Memory,
}

fn budget(text: &str) -> Result<Bytes, String> {
    let budget = size(text)?;
    if budget.0 == 0 {
        return Err("expected more than 0 bytes, such as 70GiB".to_owned());
    }
    Ok(budget)
}

/// Shows the best settings so far, and ends the search on a signal.
struct Follow(Progress);

impl Watch for Follow {
    fn stopped(&self) -> bool {
        interrupt::requested()
    }

    fn best(&self, evaluated: usize, score: &Score, fits: bool) {
        let best = if fits {
            let effect = &score.effect;
            format!(
                "best {:.1} ms per step, {} reserved",
                effect.step_ms, effect.peak_reserved
            )
        } else {
            "none fits so far".to_owned()
        };
        self.0
            .reached(format!("tuning: {evaluated} settings predicted, {best}"));
    }
}

/// A job, and the settings that the user fixes.
struct Job {
    subject: Subject,
    kept: Kept,
    free: Vec<(String, Vec<String>)>,
    /// The smallest number of GPUs, if `--fewest-gpus` asks for it.
    fewest: Option<Fewest>,
}

impl Job {
    fn read(args: &Args) -> Result<Self, Failure> {
        let mut subject = args.job.read()?;
        if let Some(refusal) = subject.refusal() {
            return Err(Failure::bad_input(refusal));
        }
        let base = subject.scenario()?;
        let mut kept = kept(&args.keep, &base).map_err(Failure::bad_input)?;
        let free = freed(&args.free, &kept).map_err(Failure::bad_input)?;
        if !args.only.is_empty() {
            let others = all_but(&args.only).map_err(Failure::bad_input)?;
            let is_free = |key: &String| free.iter().any(|(k, _)| k == key);
            kept.keys.extend(others.into_iter().filter(|k| !is_free(k)));
        }
        for (key, values) in &free {
            for value in values {
                let axis = format!("{key}=[{}]", quoted(value));
                scenario::check_axis(&axis).map_err(Failure::bad_input)?;
            }
        }
        let job = Self {
            subject,
            kept,
            free,
            fewest: None,
        };
        job.load(&[]).map_err(Failure::bad_input)?;
        Ok(job)
    }

    /// Returns the scenario with further overrides.
    fn load(&self, more: &[String]) -> Result<Scenario, ScenarioError> {
        self.subject.load(&self.overrides(more))
    }

    /// Returns the overrides of the mesh and the batch for the smallest number of GPUs.
    fn mesh(&self) -> &[String] {
        self.fewest.as_ref().map_or(&[], |fewest| &fewest.set)
    }

    /// Returns the settings that the user or the number of GPUs fixes. The search may have changed
    /// the batch of a GPU.
    fn fixed(&self, answer: &Answer) -> Vec<&String> {
        let best = &answer.best.set;
        let is_changed = |set: &&String| best.iter().any(|other| key(other) == key(set));
        let mesh = self.mesh().iter().filter(|set| !is_changed(set));
        self.kept.overrides.iter().chain(mesh).collect()
    }

    /// Returns the overrides of a proposal relative to the given job, each key once.
    fn overrides(&self, set: &[String]) -> Vec<String> {
        let all = [&self.kept.overrides[..], self.mesh(), set].concat();
        let is_last = |i: usize| !all[i + 1..].iter().any(|later| key(later) == key(&all[i]));
        let kept = (0..all.len()).filter(|i| is_last(*i));
        kept.map(|i| all[i].clone()).collect()
    }

    fn predict(&self, set: &[String], profiles: &Profiles) -> Result<Prediction, Failure> {
        let scenario = self.load(set).map_err(Failure::bad_input)?;
        Ok(predict(&scenario, profiles, &Options::default())?)
    }
}

/// Returns the key of an override.
fn key(set: &str) -> &str {
    set.split_once('=').map_or(set, |(key, _)| key)
}

/// Converts a value of `--free` to an item of a TOML list. Numbers, booleans, lists and tables stay
/// unchanged, and anything else becomes a string.
fn quoted(value: &str) -> String {
    let plain = value.starts_with(['[', '{', '"', '\''])
        || matches!(value, "true" | "false")
        || value.parse::<f64>().is_ok();
    if plain {
        value.to_owned()
    } else {
        format!("{value:?}")
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    interrupt::watch();
    let report = args.report.as_deref();
    let report = report.map(|path| Ok::<_, Failure>((path, Form::of("--report", path)?)));
    let report = report.transpose()?;
    if let Some((path, _)) = report {
        writable("--report", path)?;
    }
    let mut job = Job::read(args)?;
    let profiles = profiles();
    let follow = Follow(Progress::new("tuning", 1, args.json));
    let sizes = [
        (args.longest_sequence, Size::Sequence),
        (args.largest_micro_batch, Size::MicroBatch),
    ];
    if let Some((_, size)) = sizes.into_iter().find(|(asked, _)| *asked) {
        let found = ask(args, &job, &profiles, |r| largest(r, size, &follow))?;
        drop(follow);
        return print::largest(&job, size, &found, args.json, out);
    }
    if args.fewest_gpus {
        let fewest = ask(args, &job, &profiles, |r| fewest_gpus(r, &follow))?;
        match fewest {
            Some(fewest) => job.fewest = Some(fewest),
            None => {
                drop(follow);
                let most = MORE_RANKS;
                say(format_args!(
                    "no settings fit, even on {most} times as many GPUs"
                ));
                return Ok(Status::CheckFailed);
            }
        }
    }
    let mut answer = ask(args, &job, &profiles, |r| tune(r, &follow))?;
    drop(follow);
    if let Some(fewest) = &job.fewest {
        // The search starts from the smallest number of GPUs, which is not today's job.
        answer.today.score = fewest.today.clone();
        answer.today.set.clear();
        since_today(&mut answer, &job.subject.scenario()?);
    }
    let best = job.predict(&answer.best.set, &profiles)?;
    let verdict = Verdict::of(&best);
    let next = next(&job, &answer);
    if let Some((path, form)) = report {
        let report = report::report(&job, &answer, &best, &verdict, &next);
        let text = report::text(&report, form);
        write_file("--report", path, |to| to.write_all(text.as_bytes()))?;
    }
    if let Some(emit) = args.emit.emit.filter(|_| answer.found) {
        let changes = job.overrides(&answer.best.set);
        args.emit
            .write(emit, &job.subject, &changes, &best.scenario, out)?;
        return Ok(status(&answer));
    }
    if args.json {
        out.json(&json::object(&job, &answer, &best, &verdict, &next))?;
    } else {
        print::answer(&job, &answer, &best, &verdict, &next, out)?;
    }
    out.flush()?;
    Ok(status(&answer))
}

/// Asks a question about a job.
fn ask<T>(
    args: &Args,
    job: &Job,
    profiles: &Profiles,
    question: impl FnOnce(&Request<'_>) -> Result<T, crate::predict::PredictError>,
) -> Result<T, Failure> {
    let load = |more: &[String]| job.load(more);
    let request = Request {
        load: &load,
        profiles,
        goal: match args.goal {
            GoalArg::Throughput => Goal::Throughput,
            GoalArg::Memory => Goal::Memory,
        },
        limits: Limits {
            budget: args.budget,
        },
        kept: &job.kept.keys,
        free: &job.free,
        seed: args.seed,
    };
    Ok(question(&request)?)
}

/// Replaces the batches that changes start from by those of the job.
fn since_today(answer: &mut Answer, job: &Scenario) {
    for reason in &mut answer.reasons {
        for changed in &mut reason.changed {
            match changed.key.as_str() {
                "train.micro_batch" => changed.from = job.train.micro_batch.to_string(),
                "train.grad_accum" => changed.from = job.train.grad_accum.to_string(),
                _ => {}
            }
        }
        reason.changed.retain(|changed| changed.from != changed.to);
    }
}

/// Returns what to do next.
fn next(job: &Job, answer: &Answer) -> String {
    if !answer.found {
        return "more GPUs (`--fewest-gpus` finds how many), a shorter sequence \
                (`--longest-sequence`), or a smaller batch"
            .to_owned();
    }
    let set = job.overrides(&answer.best.set);
    if set.is_empty() {
        return "nothing to change".to_owned();
    }
    print::next(job, &set)
}

fn status(answer: &Answer) -> Status {
    if answer.interrupted {
        say(format_args!(
            "interrupted: {} settings were predicted",
            answer.evaluated
        ));
        return Status::RunFailed;
    }
    if answer.found {
        Status::Done
    } else {
        say("no settings fit; those that come closest are shown");
        Status::CheckFailed
    }
}
