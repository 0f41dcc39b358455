//! `shardlab gate`: is this tree as good as the baseline?

mod measured;
mod print;
mod selftest;

use super::args::{Overrides, load, profiles};
use super::interrupt;
use super::keep::From;
use super::output::{Failure, Out, Status};
use super::progress::Progress;
use crate::gate::against::{AgainstError, Binary, Revision, Scratch};
use crate::gate::collect::{Collect, GateError, TIMEOUT, on_cpu};
use crate::gate::plant::Plant;
use shardlab_plan::{Scenario, scenario};
use shardlab_reports::gate::baseline::{self, Baseline, BaselineError, Blessed};
use shardlab_reports::gate::{Facts, Finding, Limits, Verdict, format, judge};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

const NOTES: &str = "\
What is compared, and with what tolerance, is in the scenario's [gate] section, or in --set gate.KEY=VALUE
(`shardlab schema` lists the keys). A better value beyond its tolerance fails too: baselines stay tight.

Exit status:
  0  nothing is worse, nothing asks for a new baseline
  1  a regression, an improvement or a change beyond its limit
  2  bad input: a scenario, an option; or a baseline that is missing or cannot be read: the other scenarios
     have been judged and reported all the same
  3  a run failed, a baseline could not be written, or the old side could not be run or compared with";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Scenario files, or names of shipped ones
    #[arg(value_name = "SCENARIO", required = true)]
    scenarios: Vec<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
    /// Folder of baselines (SCENARIO.toml each), or the file of one
    #[arg(long, value_name = "DIR|FILE", required_unless_present_any = ["against", "against_rev", "selftest"])]
    baseline: Option<PathBuf>,
    /// Write the baselines instead of comparing
    #[arg(long, requires = "baseline", conflicts_with_all = ["against", "against_rev", "selftest"])]
    bless: bool,
    /// Compare with another shardlab binary: its baselines, and interleaved measured runs
    #[arg(long, value_name = "BINARY", conflicts_with_all = ["baseline", "against_rev"])]
    against: Option<PathBuf>,
    /// Likewise with a git revision of this repository, which is built first
    #[arg(long, value_name = "REV", conflicts_with = "baseline")]
    against_rev: Option<String>,
    /// Interleaved pairs of measured runs, old and new; 0: none
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = pairs)]
    pairs: usize,
    /// A further argument of `exec` in both sides of the measured pairs (repeatable)
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    exec_arg: Vec<String>,
    /// A measured run: a file that `exec --json` printed, a kept run's id, name or folder; several of one scenario are
    /// seeds (repeatable)
    #[arg(long, value_name = "FILE|RUN")]
    run: Vec<PathBuf>,
    #[command(flatten)]
    from: From,
    /// Do not train scenarios whose hardware is the CPU
    #[arg(long)]
    no_exec: bool,
    /// Give a training run up when nothing moves for so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = TIMEOUT.as_secs() as u32, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
    /// Plant a known fault first, to see the gate fail
    #[arg(long, value_enum, value_name = "FAULT", conflicts_with = "bless")]
    plant: Option<Plant>,
    /// Plant every known fault in turn and fail unless the gate sees each
    #[arg(long, conflicts_with_all = ["baseline", "against", "against_rev", "plant", "run"])]
    selftest: bool,
    /// Print every comparison, not only those that fail
    #[arg(long, conflicts_with = "json")]
    all: bool,
    /// Print one JSON object a scenario
    #[arg(long)]
    json: bool,
    /// Write a JUnit report
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Write a summary in Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Annotations and job summary for GitHub Actions; on by itself where GITHUB_ACTIONS is true
    #[arg(long)]
    github: bool,
}

fn pairs(text: &str) -> Result<usize, String> {
    let fewest = shardlab_reports::gate::ratio::FEWEST;
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

/// Builds a revision of the repository that the call is made in.
pub(super) fn build(revision: &str) -> Result<Revision, Failure> {
    // It takes minutes the first time.
    let _ = writeln!(
        std::io::stderr(),
        "building {revision} (cargo build --release, kept in target/gate-old)"
    );
    Ok(Revision::build(Path::new("."), revision)?)
}

/// A scenario under the gate.
struct Job {
    path: PathBuf,
    scenario: Scenario,
    limits: Limits,
}

impl Job {
    fn load(path: &Path, set: &[String]) -> Result<Self, Failure> {
        let scenario = load(path, set)?;
        let places = scenario::places(path, set).map_err(Failure::bad_input)?;
        // A bare name means a shipped scenario, whose file lies in this repository.
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
    // Everything that can be wrong with the input is found before the first run.
    let jobs: Vec<Job> = args
        .scenarios
        .iter()
        .map(|path| Job::load(path, &args.overrides.set))
        .collect::<Result<_, _>>()?;
    distinct(&jobs)?;
    let profiles = profiles();
    let collect = Collect {
        profiles: &profiles,
        exec: !args.no_exec,
        timeout: Duration::from_secs(u64::from(args.timeout)),
        plant: args.plant,
        stop: &interrupt::requested,
    };
    interrupt::watch();
    if args.selftest {
        return selftest::run(args, &jobs, &collect, out);
    }
    let given = measured::read(&args.run, &jobs, &collect, &args.from.store())?;
    // Other binaries write to the same terminal, and blessing writes as it goes.
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
    let compared = compare(args, &jobs, &facts)?;
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

/// What comes of comparing.
struct Compared {
    verdicts: Vec<Verdict>,
    /// Why baselines cannot be had, one line a scenario.
    missing: Vec<String>,
    /// Every verdict is about the new side alone.
    alone: bool,
}

/// Baselines are found by name: two scenarios of one name would share one.
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
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
) -> Result<Compared, Failure> {
    let revision = match &args.against_rev {
        Some(rev) => Some(build(rev)?),
        None => None,
    };
    let old = revision
        .as_ref()
        .map(Revision::binary)
        .or_else(|| args.against.clone().map(Binary));
    match (&old, &args.baseline) {
        (Some(old), _) => against(args, jobs, old, facts),
        (None, Some(at)) => with_files(jobs, at, facts),
        // clap asks for one of them.
        (None, None) => Err(Failure::bad_input("--baseline or --against is needed")),
    }
}

/// With baselines that lie in files. A scenario that has none there fails, and it is judged by what needs none.
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
        let read = Baseline::read(&baseline::path_of(at, name), name)
            .map_err(|e| (e.to_string(), e.place()))?;
        if read.facts.scenario != *name {
            let reason = format!(
                "{}: is the baseline of `{}`, not of `{name}`",
                read.file, read.facts.scenario
            );
            return Err((reason, None));
        }
        Ok(read)
    };
    let (mut verdicts, mut missing) = (Vec::new(), Vec::new());
    for job in jobs {
        verdicts.push(match read(job) {
            Ok(baseline) => judge(&baseline, &facts(job)?, &job.limits),
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

/// With what another binary says in the same call.
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
            // The old side's files are gone when the user looks for them.
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
        let mut verdict = judge(&baseline, &now, &job.limits);
        let runs = args.pairs > 0 && !args.no_exec;
        if runs && (on_cpu(&job.scenario) || !args.exec_arg.is_empty()) {
            let finding = interleaved(args, job, old)?;
            let findings = verdict.findings.into_iter().chain([finding]).collect();
            verdict = Verdict::new(verdict.scenario, findings);
        }
        verdicts.push(verdict);
    }
    Ok(Compared {
        verdicts,
        missing: Vec::new(),
        alone,
    })
}

/// Measured time, old against new.
fn interleaved(args: &Args, job: &Job, old: &Binary) -> Result<Finding, Failure> {
    use shardlab_reports::gate::ratio::{self, Side};
    let new = std::env::current_exe()
        .map(Binary)
        .map_err(|e| Failure::run(format_args!("cannot find this binary: {e}")))?;
    let mut planted = args.exec_arg.clone();
    if let Some(plant) = args.plant {
        planted.extend(["--plant".to_owned(), plant.name().to_owned()]);
    }
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for side in ratio::order(args.pairs) {
        if interrupt::requested() {
            return Err(Failure::run("interrupted"));
        }
        let set = &args.overrides.set;
        match side {
            Side::Old => before.push(old.step_ms(&job.path, set, &args.exec_arg)?),
            Side::New => after.push(new.step_ms(&job.path, set, &planted)?),
        }
    }
    ratio::judge(&before, &after, &job.limits)
        .map_err(|e| Failure::run(format_args!("{}: {e}", job.scenario.name)))
}

fn bless(
    args: &Args,
    jobs: &[Job],
    facts: &dyn Fn(&Job) -> Result<Facts, Failure>,
    out: &mut Out,
) -> Result<Status, Failure> {
    // clap asks for it.
    let Some(at) = &args.baseline else {
        return Err(Failure::bad_input("--bless needs --baseline"));
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
            // To whoever asks for a baseline in order to compare with it, exit status 2 means an unknown scenario.
            BaselineError::Io { .. } => Failure::run(e),
            other => other.into(),
        })?;
        let word = match done {
            Blessed::Created => "created",
            Blessed::Updated => "updated",
            Blessed::Unchanged => "unchanged",
        };
        let changes = before
            .filter(|_| done == Blessed::Updated)
            .map(|b| judge(&b, &now, &job.limits));
        if args.json {
            out.json(&serde_json::json!({
                "scenario": name,
                "baseline": path.display().to_string(),
                "done": word,
                "changes": changes.as_ref().map(|v| v.failures().collect::<Vec<_>>()),
            }))?;
            continue;
        }
        out.line(format_args!("{}: {word}", path.display()))?;
        if now.memory.capacity.is_some_and(|c| now.memory.device > c) {
            out.paragraph(2, "note: this step does not fit the device")?;
        }
        for f in changes.iter().flat_map(Verdict::failures) {
            out.paragraph(2, &format::sentence(f))?;
        }
    }
    Ok(Status::Done)
}

/// Says and writes everything that was asked for: first what is printed, because a file that cannot be written takes no verdict with it.
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
        // Standard output is the objects' alone; the runner reads both.
        if args.json {
            eprint!("{annotations}");
        } else {
            out.text(annotations)?;
        }
    }
    let write = |path: &Path, text: String| {
        std::fs::write(path, text)
            .map_err(|e| Failure::run(format_args!("{}: {e}", path.display())))
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
