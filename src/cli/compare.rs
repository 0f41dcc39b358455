//! `shardlab compare`: compares scenarios, saved runs and revisions.

mod ask;
mod baseline;
mod binary;
mod input;
mod matrix;
mod pair;

use super::args::Overrides;
use super::exec::device::DeviceArgs;
use super::interrupt;
use super::keep::From;
use super::output::{Failure, Out, Status};
use crate::gate::against::Revision;
use ask::Maker;
use input::Plan;
use shardlab_reports::compare::{Matrix, Tolerance};
use shardlab_reports::stats;
use std::path::PathBuf;

const EXAMPLES: &str = "\
RUN is a scenario (a file, or the name of a shipped one), the folder of a
saved run, its id or the start of it, last, last~N, a name given with
`shardlab runs tag`, or a baseline of the gate: its file, or
baseline:SCENARIO.

Two runs are explained; more are shown in a table. A single scenario is
compared with itself under --set-b, --exec-b, --binary-b or --rev-b, a single
baseline with its scenario as it is now.

  # What does prefetching buy?
  shardlab compare scenarios/llama3-8b-4xh200.toml \\
      --set-b fsdp.prefetch_forward=0
  # Predicted vs. measured
  shardlab compare llama-tiny --exec-b
  # Against a saved run called `baseline`
  shardlab compare baseline scenarios/small-native.toml
  # A table with the best run of each column marked
  shardlab compare prefetch-0 prefetch-1 prefetch-2
  # The gate's baseline against today's prediction
  shardlab compare baseline:llama-tiny
  # Another git revision, which is built first
  shardlab compare small-native --rev-a origin/main
  # Another binary, measured in turns
  shardlab compare small-native --exec --rounds 5 \\
      --binary-a ../old/target/release/shardlab";

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Scenarios, saved runs or baselines
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
    /// Override a key of the first run's scenario only (repeatable)
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set_a: Vec<String>,
    /// Override a key of the second run's scenario only (repeatable)
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set_b: Vec<String>,
    /// Measure every scenario on this machine instead of predicting it
    #[arg(long)]
    exec: bool,
    /// Measure the first run
    #[arg(long)]
    exec_a: bool,
    /// Measure the second run
    #[arg(long)]
    exec_b: bool,
    /// Use this binary for the first run: another revision, built elsewhere
    #[arg(long, value_name = "PROGRAM")]
    binary_a: Option<PathBuf>,
    /// Use this binary for the second run
    #[arg(long, value_name = "PROGRAM")]
    binary_b: Option<PathBuf>,
    /// Use this git revision for the first run; it is built first
    #[arg(long, value_name = "REV", conflicts_with = "binary_a")]
    rev_a: Option<String>,
    /// Use this git revision for the second run
    #[arg(long, value_name = "REV", conflicts_with = "binary_b")]
    rev_b: Option<String>,
    /// Folder of the gate's baselines, for baseline:SCENARIO [default: tests/baselines or
    /// baselines]
    #[arg(long, value_name = "DIR")]
    baseline: Option<PathBuf>,
    /// Steps of measured runs [default: train.steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    steps: Option<u64>,
    /// Measure in N rounds, the runs in turn; from 3 rounds on, the medians of the rounds are
    /// compared
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Relative change of a measured step time that matters
    #[arg(long, value_name = "FRACTION", default_value_t = 0.02, value_parser = threshold)]
    threshold: f64,
    /// Treat values within this share of each other as equal [default: 0.5%, or the error band of
    /// estimates]
    #[arg(long, value_name = "PERCENT")]
    tolerance: Option<Tolerance>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    from: From,
    /// Show all rows, also those in which nothing changed
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn threshold(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(x) if (0.0..1.0).contains(&x) => Ok(x),
        _ => Err("expected a number from 0 to below 1".into()),
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    interrupt::watch();
    let mut plans = plans(args)?;
    // The folders of the revisions are removed at the end of the comparison.
    let _revisions = revisions(args, &mut plans)?;
    let made = input::make(args, &plans)?;
    let separate = input::separate_calls(&made);
    if let [a, b] = made.as_slice() {
        let options = stats::Options {
            threshold: args.threshold,
            tolerance: args.tolerance.unwrap_or_else(|| {
                let runs = [&a.view.run, &b.view.run];
                Tolerance::of_bases(runs.into_iter().map(|run| run.basis.as_ref()))
            }),
            ..stats::Options::default()
        };
        let mut pair = shardlab_reports::compare::pair(a.side("A"), b.side("B"), &options);
        pair.warnings
            .extend(separate.filter(|_| pair.comparable.times()));
        if args.json {
            out.json(&pair)?;
        } else {
            pair::print(&pair, [a, b], args.all, out)?;
        }
        return Ok(Status::Done);
    }
    let labels: Vec<String> = (0..made.len()).map(label).collect();
    let runs: Vec<(&str, _)> = labels
        .iter()
        .zip(&made)
        .map(|(label, made)| (label.as_str(), &made.view))
        .collect();
    let matrix = Matrix::new(&runs, args.tolerance);
    if args.json {
        out.json(&matrix)?;
    } else {
        matrix::print(&matrix, &made, out)?;
        if let Some(warning) = separate {
            out.blank()?;
            out.paragraph(0, &format!("Warning: {warning}"))?;
        }
    }
    Ok(Status::Done)
}

/// Returns the label of the i-th run: `A`, `B`, … `Z`, `27`, …
fn label(i: usize) -> String {
    match u8::try_from(i) {
        Ok(i @ 0..26) => char::from(b'A' + i).to_string(),
        _ => (i + 1).to_string(),
    }
}

/// Builds the revisions whose binaries make runs.
fn revisions(args: &Args, plans: &mut [Plan]) -> Result<Vec<Revision>, Failure> {
    let mut built = Vec::new();
    for (plan, rev) in plans.iter_mut().zip([&args.rev_a, &args.rev_b]) {
        if let (Plan::Scenario(ask), Some(rev)) = (plan, rev) {
            let revision = super::gate::build(rev)?;
            ask.maker = Some(Maker {
                name: format!("revision {rev}"),
                program: revision.binary().0,
            });
            built.push(revision);
        }
    }
    Ok(built)
}

/// Returns the inputs of the comparison, in order.
fn plans(args: &Args) -> Result<Vec<Plan>, Failure> {
    let own = |side: usize| match side {
        0 => (&args.set_a, args.exec_a, &args.binary_a, &args.rev_a),
        _ => (&args.set_b, args.exec_b, &args.binary_b, &args.rev_b),
    };
    let differs = |side: usize| {
        let (set, exec, binary, revision) = own(side);
        !set.is_empty() || exec || binary.is_some() || revision.is_some()
    };
    let store = args.from.store();
    let mut paths = args.runs.clone();
    let mut further = None;
    if paths.len() == 1 {
        match baseline::of(&paths[0], args.baseline.as_deref())? {
            // The baseline is compared with the current state of its scenario.
            Some(kept) => {
                further = Some(kept.facts.set.clone());
                paths.push(baseline::scenario(&kept)?);
            }
            None if differs(0) || differs(1) => paths.push(paths[0].clone()),
            None => {
                return Err(Failure::bad_input(
                    "nothing to compare with: give a second run, or --set-b, --exec-b, --binary-b or --rev-b",
                ));
            }
        }
    }
    if paths.len() > 2 && (differs(0) || differs(1)) {
        return Err(Failure::bad_input(
            "--set-a, --exec-b and other options of one side need two runs",
        ));
    }
    let plan = |(i, path): (usize, PathBuf)| {
        if let Some(kept) = baseline::of(&path, args.baseline.as_deref())? {
            let (set, _, binary, revision) = own(i);
            if i < 2 && (!set.is_empty() || binary.is_some() || revision.is_some()) {
                return Err(Failure::bad_input(format_args!(
                    "{} is a baseline: --set, --binary and --rev only apply to scenarios",
                    path.display()
                )));
            }
            return Ok(Plan::Baseline(Box::new(kept)));
        }
        let mut set = args.overrides.set.clone();
        let (mut exec, mut maker) = (args.exec, None);
        if i < 2 {
            let (own_set, own_exec, own_binary, own_revision) = own(i);
            set.extend(further.iter().flatten().filter(|_| i == 1).cloned());
            set.extend(own_set.iter().cloned());
            exec |= own_exec;
            let program = own_binary.clone().or_else(|| {
                // The path of the binary is known after the revision has been built.
                own_revision.as_ref().map(PathBuf::from)
            });
            maker = program.map(|program| Maker {
                name: program.display().to_string(),
                program,
            });
        }
        Plan::new(path, set, exec, maker, &store)
    };
    paths.into_iter().enumerate().map(plan).collect()
}
