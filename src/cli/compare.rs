//! `shardlab compare`: scenarios, kept runs and revisions against one another.

mod binary;
mod input;
mod matrix;
mod pair;

use super::args::Overrides;
use super::exec::device::DeviceArgs;
use super::interrupt;
use super::keep::From;
use super::output::{Failure, Out, Status};
use input::Plan;
use shardlab_reports::compare::Matrix;
use shardlab_reports::stats;
use std::path::PathBuf;

const EXAMPLES: &str = "\
RUN is a scenario (file, or name of a shipped one), the folder of a kept run, its id or the beginning of it, last, last~N, or
a name given with `shardlab runs name`. Two runs are explained, more are put into a table. One scenario alone is compared
with itself under what --set-b, --exec-b or --binary-b say.

  shardlab compare scenarios/llama3-8b-4xh200.toml --set-b fsdp.prefetch_forward=0
  shardlab compare llama-tiny --exec-b                        # predicted against measured
  shardlab compare baseline scenarios/small-native.toml       # against a kept run of that name
  shardlab compare prefetch-0 prefetch-1 prefetch-2           # a table, the best marked
  shardlab compare small-native --binary-a ../old/target/release/shardlab   # revision against revision";

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Scenarios or kept runs
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
    /// Measure the first
    #[arg(long)]
    exec_a: bool,
    /// Measure the second
    #[arg(long)]
    exec_b: bool,
    /// Let this shardlab make the first run: another revision, built elsewhere
    #[arg(long, value_name = "PROGRAM")]
    binary_a: Option<PathBuf>,
    /// Let this shardlab make the second run
    #[arg(long, value_name = "PROGRAM")]
    binary_b: Option<PathBuf>,
    /// Steps of measured runs; default: train.steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    steps: Option<u64>,
    /// Measure in so many rounds, each side in turn; from 3 on one median a run is judged
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Relative change of the step time that matters
    #[arg(long, value_name = "FRACTION", default_value_t = 0.02, value_parser = threshold)]
    threshold: f64,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    from: From,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn threshold(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(x) if (0.0..1.0).contains(&x) => Ok(x),
        _ => Err("a number from 0 to below 1 is expected".into()),
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    interrupt::watch();
    let plans = plans(args)?;
    let made = input::make(args, &plans)?;
    if let [a, b] = made.as_slice() {
        let options = stats::Options {
            threshold: args.threshold,
            ..stats::Options::default()
        };
        let pair = shardlab_reports::compare::pair(a.side("A"), b.side("B"), &options);
        if args.json {
            out.json(&pair)?;
        } else {
            pair::print(&pair, [a, b], out)?;
        }
        return Ok(Status::Done);
    }
    let labels: Vec<String> = (0..made.len()).map(label).collect();
    let runs: Vec<(&str, _)> = labels
        .iter()
        .zip(&made)
        .map(|(label, made)| (label.as_str(), &made.view))
        .collect();
    let matrix = Matrix::new(&runs);
    if args.json {
        out.json(&matrix)?;
    } else {
        matrix::print(&matrix, &made, out)?;
    }
    Ok(Status::Done)
}

/// `A`, `B`, … `Z`, `27`, …
fn label(i: usize) -> String {
    match u8::try_from(i) {
        Ok(i @ 0..26) => char::from(b'A' + i).to_string(),
        _ => (i + 1).to_string(),
    }
}

/// What is to be compared, in order.
fn plans(args: &Args) -> Result<Vec<Plan>, Failure> {
    let own = |side: usize| match side {
        0 => (&args.set_a, args.exec_a, &args.binary_a),
        _ => (&args.set_b, args.exec_b, &args.binary_b),
    };
    let differs = |side: usize| {
        let (set, exec, binary) = own(side);
        !set.is_empty() || exec || binary.is_some()
    };
    let mut paths = args.runs.clone();
    if paths.len() == 1 {
        if !differs(0) && !differs(1) {
            return Err(Failure::bad_input(
                "one run alone is compared with nothing: give a second one, or --set-b, --exec-b or --binary-b",
            ));
        }
        paths.push(paths[0].clone());
    }
    if paths.len() > 2 && (differs(0) || differs(1)) {
        return Err(Failure::bad_input(
            "the options of one side (--set-a, --exec-b, …) are for two runs",
        ));
    }
    let store = args.from.store();
    paths
        .into_iter()
        .enumerate()
        .map(|(i, path)| {
            let mut set = args.overrides.set.clone();
            let (mut exec, mut binary) = (args.exec, None);
            if i < 2 {
                let (own_set, own_exec, own_binary) = own(i);
                set.extend(own_set.iter().cloned());
                exec |= own_exec;
                binary.clone_from(own_binary);
            }
            Plan::new(path, set, exec, binary, &store)
        })
        .collect()
}
