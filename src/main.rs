//! The `shardlab` command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    shardlab::cli::main()
}
