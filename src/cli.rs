//! The command line: one file a verb.
//!
//! Results go to stdout, everything else to stderr. Exit status: 0 done, 1 a check or gate failed, 2 bad input, 3 the
//! run itself failed. A reader that closes the pipe early (`| head`) ends the program successfully.

mod args;
mod calibrate;
mod check;
mod compare;
mod completions;
#[cfg(feature = "dash")]
mod dash;
mod exec;
mod explain;
mod gate;
mod interrupt;
mod keep;
mod output;
mod plan;
mod progress;
mod report;
mod runs;
mod scenarios;
mod schema;
mod sim;
mod sweep;
mod table;
mod validate;

#[cfg(feature = "dash")]
pub(crate) use {
    exec::{device::DeviceArgs, events, utilisation},
    keep::with_source,
    table::option_of,
};

use clap::{CommandFactory, Parser, Subcommand};
use output::{Failure, Out, Status};
use std::process::ExitCode;

const EXIT_STATUS: &str = "\
Exit status:
  0  done
  1  a check failed
  2  bad input: a scenario, an option, a table
  3  the run itself failed, or was interrupted

A SCENARIO is a file, or the name of a shipped one (`shardlab scenarios` lists them).";

/// Predict what a fully sharded (FSDP) training step costs, and why.
#[derive(Parser)]
#[command(name = "shardlab", version, about, after_help = EXIT_STATUS, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Predict step time, overlap and memory of scenarios
    Sim(sim::Args),
    /// Train for real: perform the program on this machine, ranks as threads
    Exec(exec::Args),
    /// Print the program of a scenario: every instruction of a step, with the rule that made it
    Plan(plan::Args),
    /// Prove that programs are free of races, leaks and mismatched collectives
    Check(check::Args),
    /// Say what a step's time and memory are made of, and what each option would change
    ///
    /// Times at which something is (`at ms`) count from the step's begin, as in the file of `sim --trace`.
    Explain(explain::Args),
    /// Predict all combinations of some options
    Sweep(sweep::Args),
    /// Compare runs: what is different, and what the difference comes from
    Compare(compare::Args),
    /// List, show, name and remove kept runs
    Runs(Box<runs::Args>),
    /// Write a page (HTML) or Markdown over scenarios and kept runs
    Report(report::Args),
    /// Compare with a baseline, for CI: memory, convergence, time, program, proofs
    Gate(Box<gate::Args>),
    /// Compare predictions with a table of measured runs
    Validate(validate::Args),
    /// Measure this machine, as a hardware profile for predictions
    Calibrate(calibrate::Args),
    /// Everything in the terminal: options, timelines, live training, sweeps, comparisons
    #[cfg(feature = "dash")]
    Dash(dash::Args),
    /// List the shipped scenarios
    Scenarios(scenarios::Args),
    /// Print the JSON Schema of scenario files
    Schema(schema::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
}

/// Runs the command line on the process's arguments.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version are no errors; printing them may hit a closed pipe, which is none either.
        Err(e) => {
            let code = u8::try_from(e.exit_code()).unwrap_or(Status::BAD_INPUT);
            let _ = e.print();
            return ExitCode::from(code);
        }
    };
    let mut out = Out::stdout();
    let result = run(&cli.command, &mut out).and_then(|status| {
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
        Command::Exec(args) => exec::run(args, out),
        Command::Plan(args) => plan::run(args, out),
        Command::Check(args) => check::run(args, out),
        Command::Explain(args) => explain::run(args, out),
        Command::Sweep(args) => sweep::run(args, out),
        Command::Compare(args) => compare::run(args, out),
        Command::Runs(args) => runs::run(args, out),
        Command::Report(args) => report::run(args, out),
        Command::Gate(args) => gate::run(args, out),
        Command::Validate(args) => validate::run(args, out),
        Command::Calibrate(args) => calibrate::run(args, out),
        #[cfg(feature = "dash")]
        Command::Dash(args) => dash::run(args, out),
        Command::Scenarios(args) => scenarios::run(args, out),
        Command::Schema(args) => schema::run(args, out),
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
