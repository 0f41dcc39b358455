//! `shardlab completions`: prints a script that completes subcommands and options in a shell.

use super::output::{Failure, Out, Status};
use clap_complete::Shell;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Shell to print the script for
    #[arg(value_enum)]
    shell: Shell,
}

pub(super) fn run(
    args: &Args,
    mut command: clap::Command,
    out: &mut Out,
) -> Result<Status, Failure> {
    // The generator panics if its writer fails, so the script is written to memory first.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "shardlab", &mut script);
    std::io::Write::write_all(out, &script)?;
    Ok(Status::Done)
}
