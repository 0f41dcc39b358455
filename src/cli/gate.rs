//! `shardlab gate`: reports whether anything has regressed since the baseline, and whether the step
//! is within its budgets.

mod measured;
mod own;
mod print;
mod selftest;

use super::args::{Overrides, load, profiles};
use super::interrupt;
use super::keep::From;
use super::output::{Failure, Out, Status, say};
use super::progress::Progress;
use crate::analysis::warnings;
use crate::gate::against::{AgainstError, Binary, Commit, Revision, Scratch, Tree};
use crate::gate::collect::{Collect, GateError, TIMEOUT, on_cpu};
use crate::gate::plant::Plant;
use shardlab_plan::config::GatePreset;
use shardlab_plan::{Scenario, scenario};
use shardlab_reports::gate::baseline::{self, Baseline, BaselineError, Blessed};
use shardlab_reports::gate::{Facts, Finding, Limits, Verdict, format, judge};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

const NOTES: &str = "\
The scenario's [gate] section says what to compare and with which tolerances; `--set gate.KEY=VALUE` overrides it, and `shardlab schema` lists the keys. With gate.max_memory or gate.max_step_ms no baseline is needed.

Exit status:
  0  within limits and budgets
  1  a regression, a step that does not fit or is over its budget, a broken rule; with --preset strict any change
  2  bad input: a scenario, an option, a revision, or a baseline that is missing or unreadable (all other scenarios are still judged)
  3  a run failed, a file could not be written, or the old side could not be run or compared";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Scenario files, or names of shipped ones
    #[arg(
        value_name = "SCENARIO",
        required_unless_present = "measured",
        conflicts_with = "measured"
    )]
    scenarios: Vec<PathBuf>,
    /// Judge the user's own job instead of scenarios: traces of the PyTorch profiler, or a saved
    /// run; --baseline is another of them, not needed with a budget
    #[arg(long, value_name = "FILE|RUN", num_args = 1.., conflicts_with_all = ["bless", "run", "selftest", "inject_fault"])]
    measured: Vec<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
    /// What the gate is for. budget: the step has to fit and to stay within its budgets, and growth
    /// beyond a tolerance fails; strict: every change fails, for better or worse [default:
    /// gate.preset of the scenario, else budget]
    #[arg(long, value_name = "PRESET", value_parser = ["budget", "strict"])]
    preset: Option<String>,
    /// Folder of baselines (SCENARIO.toml each), or the file of one; not needed for scenarios with
    /// a budget
    #[arg(long, value_name = "DIR|FILE")]
    baseline: Option<PathBuf>,
    /// Write the baselines instead of comparing
    #[arg(long, requires = "baseline", conflicts_with_all = ["against", "against_rev", "selftest"])]
    bless: bool,
    /// Compare with another shardlab binary: its baselines, and interleaved measured runs
    #[arg(long, value_name = "BINARY", conflicts_with_all = ["baseline", "against_rev"])]
    against: Option<PathBuf>,
    /// Compare with a git revision: with its versions of the scenarios, or in shardlab's own
    /// repository with its build
    #[arg(long, value_name = "REV", conflicts_with = "baseline")]
    against_rev: Option<String>,
    /// Number of interleaved pairs of measured runs, old and new; 0: none
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = pairs)]
    pairs: usize,
    /// Pass ARG to `exec` on both sides of the measured pairs (repeatable)
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    exec_arg: Vec<String>,
    /// Judge this measured run: a file written by `exec --json`, or the id, name or folder of a
    /// saved run; several runs of one scenario are seeds (repeatable)
    #[arg(long, value_name = "FILE|RUN")]
    run: Vec<PathBuf>,
    #[command(flatten)]
    from: From,
    /// Do not train scenarios whose hardware is the CPU
    #[arg(long)]
    no_exec: bool,
    /// Abort a training run if no rank makes progress for SECONDS
    #[arg(long, value_name = "SECONDS", default_value_t = TIMEOUT.as_secs() as u32, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
    /// Inject a known fault, to see the gate fail
    #[arg(
        long,
        alias = "plant",
        value_enum,
        value_name = "FAULT",
        conflicts_with = "bless"
    )]
    inject_fault: Option<Plant>,
    /// Inject every known fault in turn; fail unless the gate catches each
    #[arg(long, conflicts_with_all = ["baseline", "against", "against_rev", "inject_fault", "run"])]
    selftest: bool,
    /// Print every comparison, not only those that fail
    #[arg(long, conflicts_with = "json")]
    all: bool,
    /// Print one JSON object per scenario
    #[arg(long)]
    json: bool,
    /// Write a JUnit report
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Write a summary in Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write annotations and a job summary for GitHub Actions [default: if GITHUB_ACTIONS is true]
    #[arg(long)]
    github: bool,
}

impl Args {
    /// Returns the overrides, including those implied by other flags. A self-test checks the gate
    /// itself, so it uses the strictest limits.
    fn set(&self) -> Vec<String> {
        let preset = self.preset.as_deref();
        let preset = preset.or_else(|| self.selftest.then_some("strict"));
        let preset = preset.map(|p| format!("gate.preset={p}"));
        preset
            .into_iter()
            .chain(self.overrides.set.clone())
            .collect()
    }
}

fn pairs(text: &str) -> Result<usize, String> {
    let fewest = shardlab_reports::gate::ratio::MIN_RUNS;
    match text.parse() {
        Ok(n) if n == 0 || (fewest..=1000).contains(&n) => Ok(n),
        _ => Err(format!("0, or a number from {fewest} to 1000 is expected")),
    }
}

impl std::convert::From<GateError> for Failure {
    fn from(e: GateError) -> Self {
        if e.is_bad_input() {
            Self::bad_input(e)
        } else {
            Self::run(e)
        }
    }
}

impl std::convert::From<BaselineError> for Failure {
    fn from(e: BaselineError) -> Self {
        Self::bad_input(e)
    }
}

impl std::convert::From<AgainstError> for Failure {
    fn from(e: AgainstError) -> Self {
        if e.is_bad_input() {
            Self::bad_input(e)
        } else {
            Self::run(e)
        }
    }
}

/// Builds a revision of the repository that contains the working folder.
pub(super) fn build(revision: &str) -> Result<Revision, Failure> {
    built(Commit::find(Path::new("."), revision)?)
}

fn built(commit: Commit) -> Result<Revision, Failure> {
    // The first build takes minutes.
    let _ = writeln!(
        std::io::stderr(),
        "building {} (cargo build --release, kept in target/gate-old)",
        commit.revision
    );
    Ok(Revision::build(commit)?)
}

/// A scenario that the gate judges.
struct Job {
    path: PathBuf,
    scenario: Scenario,
    limits: Limits,
}

impl Job {
    fn load(path: &Path, set: &[String]) -> Result<Self, Failure> {
        let scenario = load(path, set)?;
        let places = scenario::places(path, set).map_err(Failure::bad_input)?;
        // A name without a path is a shipped scenario, whose file is in this repository.
        let file = if path.exists() {
            path.display().to_string()
        } else {
            format!("scenarios/{}.toml", scenario.name)
        };
        Ok(Self {
            path: path.to_owned(),
            limits: Limits::new(&scenario.gate, &places, Some(&file)),
            scenario,
        })
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    out.outlive_reader();
    // All errors in the input are found before the first run.
    let set = args.set();
    if !args.measured.is_empty() {
        return own::run(args, &set, out);
    }
    let jobs: Vec<Job> = args
        .scenarios
        .iter()
        .map(|path| Job::load(path, &set))
        .collect::<Result<_, _>>()?;
    distinct(&jobs)?;
    for job in &jobs {
        for warning in warnings::of_scenario(&job.scenario, &job.path, &set) {
            say(format_args!("{}: warning: {warning}", job.scenario.name));
        }
    }
    let profiles = profiles();
    let collect = Collect {
        profiles: &profiles,
        exec: !args.no_exec,
        timeout: Duration::from_secs(u64::from(args.timeout)),
        plant: args.inject_fault,
        stop: &interrupt::requested,
    };
    interrupt::watch();
    if args.selftest {
        return selftest::run(args, &jobs, &collect, out);
    }
    let given = measured::read(&args.run, &jobs, &collect, &args.from.store())?;
    // Other binaries write to the same terminal, and blessing writes as it proceeds.
    let silent = args.against.is_none() && args.against_rev.is_none() && !args.bless;
    let progress = silent.then(|| Progress::new("judging", jobs.len(), args.json));
    let facts = |job: &Job| -> Result<Facts, Failure> {
        let runs = given.get(&job.scenario.name);
        let collect = Collect {
            exec: collect.exec && runs.is_none(),
            ..collect
        };
        let mut facts = collect.facts(&job.scenario, &args.overrides.set)?;
        if let Some(progress) = &progress {
            progress.step();
        }
        if let Some(runs) = runs {
            facts.measured = Some(runs.clone());
        }
        Ok(facts)
    };
    if args.bless {
        return bless(args, &jobs, &facts, out);
    }
    let compared = compare(args, &jobs, &collect, &facts)?;
    drop(progress);
    report(args, &compared.verdicts, out)?;
    if !compared.missing.is_empty() {
        return Err(Failure::bad_input(compared.missing.join("\n")));
    }
    if !compared.verdicts.iter().all(|v| v.pass) {
        return Ok(Status::CheckFailed);
    }
    if compared.alone {
        return Err(Failure::run(
            "the old side has nothing to compare with, for any scenario of this call",
        ));
    }
    Ok(Status::Done)
}

/// The result of comparing.
struct Compared {
    verdicts: Vec<Verdict>,
    /// Reasons why baselines are not available, one line per scenario.
    missing: Vec<String>,
    /// Whether every verdict is about the new side alone.
    alone: bool,
}

/// Rejects scenarios with equal names. Baselines are found by name, so such scenarios would share
/// one.
fn distinct(jobs: &[Job]) -> Result<(), Failure> {
    let mut seen: BTreeMap<&str, &Path> = BTreeMap::new();
    for job in jobs {
        if let Some(other) = seen.insert(&job.scenario.name, &job.path) {
            return Err(Failure::bad_input(format_args!(
                "{} and {} are both named `{}`; a baseline is found by that name",
                other.display(),
                job.path.display(),
                job.scenario.name
            )));
        }
    }
    Ok(())
}

fn compare(
    args: &Args,
    jobs: &[Job],
    collect: &Collect<'_>,
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
) -> Result<Compared, Failure> {
    if let Some(rev) = &args.against_rev {
        let commit = Commit::find(Path::new("."), rev)?;
        if commit.is_shardlab() {
            let revision = built(commit)?;
            return against(args, jobs, &revision.binary(), facts);
        }
        return against_files(args, jobs, &commit.files()?, collect, facts);
    }
    match (&args.against, &args.baseline) {
        (Some(old), _) => against(args, jobs, &Binary(old.clone()), facts),
        (None, Some(at)) => with_files(jobs, at, facts),
        (None, None) => by_budgets(jobs, facts),
    }
}

/// Judges scenarios by their budgets, without any baseline.
fn by_budgets(
    jobs: &[Job],
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
) -> Result<Compared, Failure> {
    if let Some(job) = jobs.iter().find(|j| !j.limits.stand_alone()) {
        let name = &job.scenario.name;
        return Err(Failure::bad_input(match job.limits.preset {
            GatePreset::Strict => format!(
                "`{name}`: preset strict compares with a baseline: give --baseline, --against or --against-rev"
            ),
            GatePreset::Budget => format!(
                "`{name}` has neither a baseline nor a budget: give --baseline, or set gate.max_memory or gate.max_step_ms"
            ),
        }));
    }
    let verdict = |job: &Job| {
        Ok(judge::alone(
            facts(job)?,
            &job.limits,
            "no baseline was compared",
        ))
    };
    let verdicts: Result<_, Failure> = jobs.iter().map(verdict).collect();
    Ok(Compared {
        verdicts: verdicts?,
        missing: Vec::new(),
        alone: false,
    })
}

/// Compares with baselines in files. A scenario without a baseline is judged by its budgets, and
/// fails if it has none.
fn with_files(
    jobs: &[Job],
    at: &Path,
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
) -> Result<Compared, Failure> {
    if jobs.len() > 1 && at.is_file() {
        return Err(Failure::bad_input(format_args!(
            "{}: one file is the baseline of one scenario, not of {}",
            at.display(),
            jobs.len()
        )));
    }
    let read = |job: &Job| {
        let name = &job.scenario.name;
        let read = match Baseline::read(&baseline::path_of(at, name), name) {
            Err(BaselineError::Missing { .. }) if job.limits.stand_alone() => return Ok(None),
            other => other.map_err(|e| (e.to_string(), e.place()))?,
        };
        if read.facts.scenario != *name {
            let reason = format!(
                "{}: is the baseline of `{}`, not of `{name}`",
                read.file, read.facts.scenario
            );
            return Err((reason, None));
        }
        Ok(Some(read))
    };
    let (mut verdicts, mut missing) = (Vec::new(), Vec::new());
    for job in jobs {
        verdicts.push(match read(job) {
            Ok(Some(baseline)) => judge(&baseline, &facts(job)?, &job.limits),
            Ok(None) => {
                let path = baseline::path_of(at, &job.scenario.name);
                let reason = format!(
                    "no baseline was compared: {} does not exist",
                    path.display()
                );
                judge::alone(facts(job)?, &job.limits, &reason)
            }
            Err((reason, fault)) => {
                let verdict = judge::missing(facts(job)?, &job.limits, &reason, fault);
                missing.push(reason);
                verdict
            }
        });
    }
    Ok(Compared {
        verdicts,
        missing,
        alone: false,
    })
}

/// Compares with the output of another binary, in the same call.
fn against(
    args: &Args,
    jobs: &[Job],
    old: &Binary,
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
) -> Result<Compared, Failure> {
    old.knows_gates()?;
    let scratch = Scratch::new("gate-baselines")?;
    let set = &args.overrides.set;
    let mut verdicts = Vec::new();
    let mut alone = true;
    for job in jobs {
        if interrupt::requested() {
            return Err(Failure::run("interrupted"));
        }
        let made = old.bless(&job.path, set, !args.no_exec, scratch.path())?;
        let name = &job.scenario.name;
        let read = made.and_then(|()| {
            let read = Baseline::read(&baseline::path_of(scratch.path(), name), name);
            read.map_err(|e| e.to_string())
        });
        let now = facts(job)?;
        let baseline = match read {
            // The files of the old side are removed before the user can look at them.
            Ok(mut read) => {
                read.file.clear();
                read
            }
            Err(reason) => {
                verdicts.push(judge::alone(
                    now,
                    &job.limits,
                    &format!("the old side has nothing to compare with: {reason}"),
                ));
                continue;
            }
        };
        alone = false;
        let verdict = judge(&baseline, &now, &job.limits);
        verdicts.push(match interleaved(args, job, old, &job.path)? {
            Some(finding) => verdict.with(finding),
            None => verdict,
        });
    }
    Ok(Compared {
        verdicts,
        missing: Vec::new(),
        alone,
    })
}

/// Compares with a revision's versions of the scenarios, read by this binary. A new scenario is
/// judged by the rules that need no counterpart.
fn against_files(
    args: &Args,
    jobs: &[Job],
    tree: &Tree,
    collect: &Collect<'_>,
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
) -> Result<Compared, Failure> {
    let set = args.set();
    let me = this_binary()?;
    let versions = jobs.iter().map(|job| tree.version_of(&job.path));
    let versions: Vec<Option<PathBuf>> = versions.collect::<Result<_, _>>()?;
    let mut verdicts = Vec::new();
    let mut alone = true;
    for (job, old) in jobs.iter().zip(versions) {
        let by_itself = |reason: &str| -> Result<Verdict, Failure> {
            Ok(judge::alone(facts(job)?, &job.limits, reason))
        };
        let revision = tree.revision();
        let Some(old) = old else {
            let path = job.path.display();
            verdicts.push(by_itself(&format!(
                "no baseline was compared: {path} is new since {revision}"
            ))?);
            alone = false;
            continue;
        };
        let before = match scenario::load(&old, &set) {
            Ok(before) => Collect {
                plant: None,
                ..*collect
            }
            .facts(&before, &args.overrides.set),
            Err(e) => {
                verdicts.push(by_itself(&format!(
                    "the version of {revision} cannot be read: {e}"
                ))?);
                continue;
            }
        };
        let before = match before {
            Err(e) if e.is_bad_input() => {
                verdicts.push(by_itself(&format!(
                    "the version of {revision} cannot be predicted: {e}"
                ))?);
                continue;
            }
            other => other?,
        };
        alone = false;
        let verdict = judge(&Baseline::of(before), &facts(job)?, &job.limits);
        verdicts.push(match interleaved(args, job, &me, &old)? {
            Some(finding) => verdict.with(finding),
            None => verdict,
        });
    }
    Ok(Compared {
        verdicts,
        missing: Vec::new(),
        alone,
    })
}

fn this_binary() -> Result<Binary, Failure> {
    std::env::current_exe()
        .map(Binary)
        .map_err(|e| Failure::run(format_args!("cannot find this binary: {e}")))
}

/// Compares measured times of the old and the new side, if runs are requested. On the old side, the
/// scenario has another path.
fn interleaved(
    args: &Args,
    job: &Job,
    old: &Binary,
    at: &Path,
) -> Result<Option<Finding>, Failure> {
    use shardlab_reports::gate::ratio::{self, Side};
    let trains = on_cpu(&job.scenario) || !args.exec_arg.is_empty();
    if args.pairs == 0 || args.no_exec || !trains {
        return Ok(None);
    }
    let new = this_binary()?;
    let mut planted = args.exec_arg.clone();
    if let Some(plant) = args.inject_fault {
        planted.extend(["--inject-fault".to_owned(), plant.name().to_owned()]);
    }
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for side in ratio::order(args.pairs) {
        if interrupt::requested() {
            return Err(Failure::run("interrupted"));
        }
        let set = &args.overrides.set;
        match side {
            Side::Old => before.push(old.step_ms(at, set, &args.exec_arg)?),
            Side::New => after.push(new.step_ms(&job.path, set, &planted)?),
        }
    }
    ratio::judge(&before, &after, &job.limits)
        .map(Some)
        .map_err(|e| Failure::run(format_args!("{}: {e}", job.scenario.name)))
}

fn bless(
    args: &Args,
    jobs: &[Job],
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
    out: &mut Out,
) -> Result<Status, Failure> {
    let Some(at) = &args.baseline else {
        return Err(Failure::bad_input(
            "--bless needs --baseline: the folder or file to write",
        ));
    };
    let single = baseline::path_of(at, "x") == *at;
    if single && jobs.len() > 1 {
        return Err(Failure::bad_input(format_args!(
            "--baseline {}: one file is the baseline of one scenario, not of {}",
            at.display(),
            jobs.len()
        )));
    }
    for job in jobs {
        let name = &job.scenario.name;
        baseline::replaceable(&baseline::path_of(at, name), name)?;
    }
    for job in jobs {
        let name = &job.scenario.name;
        let now = facts(job)?;
        let path = baseline::path_of(at, name);
        let before = Baseline::read(&path, name).ok();
        let done = baseline::bless(&path, &now).map_err(|e| match e {
            // For a caller that needs a baseline, exit status 2 means an unknown scenario.
            BaselineError::Io { .. } => Failure::run(e),
            other => other.into(),
        })?;
        let word = match done {
            Blessed::Created => "created",
            Blessed::Updated => "updated",
            Blessed::Unchanged => "unchanged",
        };
        let changes = before.filter(|_| done == Blessed::Updated).map(|b| {
            judge(
                &b,
                &now,
                &Limits {
                    preset: GatePreset::Strict,
                    ..job.limits.clone()
                },
            )
        });
        if args.json {
            out.json(&serde_json::json!({
                "scenario": name,
                "baseline": path.display().to_string(),
                "done": word,
                "changes": changes.as_ref().map(|v| v.failing().collect::<Vec<_>>()),
            }))?;
            continue;
        }
        out.line(format_args!("{}: {word}", path.display()))?;
        if now.memory.capacity.is_some_and(|c| now.memory.device > c) {
            out.paragraph(2, "note: this step does not fit the device")?;
        }
        if let Some(change) = changes.as_ref().and_then(|v| v.change.as_ref()) {
            out.paragraph(2, change)?;
        }
        for f in changes.iter().flat_map(Verdict::failing) {
            out.paragraph(2, &format::sentence(f))?;
        }
    }
    Ok(Status::Done)
}

/// Prints and writes the requested reports. Printing comes first, so that no verdict is lost if a
/// file cannot be written.
fn report(args: &Args, verdicts: &[Verdict], out: &mut Out) -> Result<(), Failure> {
    if args.json {
        for verdict in verdicts {
            out.json(verdict)?;
        }
    } else {
        print::verdicts(args.all, verdicts, out)?;
    }
    let on_github = std::env::var_os("GITHUB_ACTIONS").is_some_and(|v| v == "true");
    if args.github || on_github {
        let annotations = format::github(verdicts);
        // Standard output contains only the JSON objects, because the CI runner reads both streams.
        if args.json {
            eprint!("{annotations}");
        } else {
            out.text(annotations)?;
        }
    }
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).map_err(|e| {
            // A partial report is removed, but not a pipe or a device.
            if path.is_file() {
                let _ = std::fs::remove_file(path);
            }
            Failure::run(format_args!("{}: {e}", path.display()))
        })
    };
    let mut written = Ok(());
    if let Some(path) = &args.junit {
        written = written.and(write(path, format::junit(verdicts)));
    }
    if let Some(path) = &args.markdown {
        written = written.and(write(path, format::markdown(verdicts)));
    }
    let summary = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|p| !p.is_empty());
    if let Some(path) = summary.filter(|_| args.github || on_github) {
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)?;
        file.write_all(format::markdown(verdicts).as_bytes())?;
    }
    written
}
