//! The command line, with one file per subcommand.
//!
//! Results go to stdout, everything else to stderr. Exit status: 0 for success, 1 if a check or
//! gate failed, 2 for bad input, 3 if the run itself failed. If the reader closes the pipe early
//! (`| head`), the program ends successfully.

mod args;
mod budget;
mod calibrate;
mod check;
mod checkpoint;
mod communicators;
mod compare;
mod completions;
#[cfg(feature = "dash")]
mod dash;
mod emit;
mod exec;
mod explain;
mod fit;
mod frames;
mod gate;
mod import;
mod infer;
mod interrupt;
mod keep;
mod output;
mod overview;
mod parallel_sizes;
mod plan;
mod progress;
mod recordings;
mod reference;
mod replay;
mod report;
mod runs;
mod scenarios;
mod schema;
mod sim;
mod subject;
mod sweep;
mod table;
mod text;
mod tune;
mod validate;
mod verdict;

#[cfg(feature = "dash")]
pub(crate) use {
    exec::{device::DeviceArgs, events, utilisation},
    keep::with_source,
    table::option_of,
};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use output::{Failure, Out, Status};
use std::io::ErrorKind;
use std::process::ExitCode;

const NOTES: &str = "\
Without a command, shardlab shows the GPUs of this machine and the models that fit on them.

SCENARIO is a file, the name of a shipped scenario (`shardlab scenarios` lists them), or - for standard input.

Output is as wide as the terminal, or as COLUMNS says.

Exit status:
  0  done
  1  a check failed
  2  bad input: a scenario, an option or a table is wrong
  3  the run failed or was interrupted, or output could not be written (a full disk, for example)";

/// Predict how fast an FSDP training step is and how much memory it needs, and run it.
#[derive(Parser)]
#[command(name = "shardlab", version, about, after_help = NOTES, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    overview: overview::Args,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Predict step time, overlap and memory
    Sim(sim::Args),
    /// Predict whether a job fits, from its configuration for Accelerate, torchtitan and others
    Fit(fit::Args),
    /// Find the best settings of a job: the shortest step within the memory of its GPUs
    Tune(tune::Args),
    /// Train on this machine with the program that `sim` predicts
    Exec(exec::Args),
    /// Print the program: every instruction of a step, and the rule that it comes from
    Plan(plan::Args),
    /// Prove that programs are free of races, leaks and mismatched collectives
    Check(check::Args),
    /// Show where a step's time and memory go, and what each option would change
    ///
    /// Times in the column `at ms` count from the start of the step, as in `sim --trace`.
    Explain(explain::Args),
    /// Predict all combinations of some options
    Sweep(sweep::Args),
    /// Compare runs: what differs, and why
    Compare(compare::Args),
    /// List, show, name and remove saved runs
    Runs(Box<runs::Args>),
    /// Write an HTML or Markdown report on scenarios and saved runs
    Report(report::Args),
    /// Check for regressions against a baseline, for CI: memory, time, convergence, program
    Gate(Box<gate::Args>),
    /// Write checkpoints of `exec` for PyTorch (torch.distributed.checkpoint), and read PyTorch's
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Import traces, memory snapshots and flight records of PyTorch jobs
    Import(import::Args),
    /// Write the scenario that a trace shows
    Infer(infer::Args),
    /// Shard the model of a trace again, with other options
    Replay(replay::Args),
    /// Compare predictions with measurements
    Validate(validate::Args),
    /// Measure this machine and write its hardware profile
    Calibrate(calibrate::Args),
    /// Explore scenarios, timelines, sweeps and live training in the terminal
    #[cfg(feature = "dash")]
    Dash(dash::Args),
    /// List the shipped scenarios and hardware profiles
    Scenarios(scenarios::Args),
    /// Print the JSON Schema of scenario files, or a page of the reference
    Schema(schema::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
}

/// Returns the command with its help wrapped for the terminal.
fn command() -> clap::Command {
    fn laid_out(command: clap::Command) -> clap::Command {
        let notes = command.get_after_help().map(ToString::to_string);
        let command = match notes {
            Some(notes) => command.after_help(text::help(&notes)),
            None => command,
        };
        command.mut_subcommands(laid_out)
    }
    laid_out(Cli::command()).term_width(text::sentence())
}

/// Runs the command line with the arguments of the process.
#[must_use]
pub fn main() -> ExitCode {
    let parsed = command()
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        // Requests for help and version are not errors. Neither is a pipe that is closed while they
        // are printed.
        Err(e) => {
            let code = u8::try_from(e.exit_code()).unwrap_or(Status::BAD_INPUT);
            return match e.print() {
                Err(e) if e.kind() != ErrorKind::BrokenPipe => {
                    Failure::from(e).report(&mut Out::stdout())
                }
                _ => ExitCode::from(code),
            };
        }
    };
    let mut out = Out::stdout();
    let done = match &cli.command {
        Some(command) => run(command, &mut out),
        None => overview::run(&cli.overview, &mut out),
    };
    let result = done.and_then(|status| {
        out.flush()?;
        Ok(status)
    });
    match result {
        Ok(status) => status.code(),
        Err(failure) => failure.report(&mut out),
    }
}

fn run(command: &Command, out: &mut Out) -> Result<Status, Failure> {
    match command {
        Command::Sim(args) => sim::run(args, out),
        Command::Fit(args) => fit::run(args, out),
        Command::Tune(args) => tune::run(args, out),
        Command::Exec(args) => exec::run(args, out),
        Command::Plan(args) => plan::run(args, out),
        Command::Check(args) => check::run(args, out),
        Command::Explain(args) => explain::run(args, out),
        Command::Sweep(args) => sweep::run(args, out),
        Command::Compare(args) => compare::run(args, out),
        Command::Runs(args) => runs::run(args, out),
        Command::Report(args) => report::run(args, out),
        Command::Gate(args) => gate::run(args, out),
        Command::Checkpoint(command) => checkpoint::run(command, out),
        Command::Import(args) => import::run(args, out),
        Command::Infer(args) => infer::run(args, out),
        Command::Replay(args) => replay::run(args, out),
        Command::Validate(args) => validate::run(args, out),
        Command::Calibrate(args) => calibrate::run(args, out),
        #[cfg(feature = "dash")]
        Command::Dash(args) => dash::run(args, out),
        Command::Scenarios(args) => scenarios::run(args, out),
        Command::Schema(args) => schema::run(args, Cli::command(), out),
        Command::Completions(args) => completions::run(args, Cli::command(), out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
