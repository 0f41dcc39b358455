//! Questions over many runs; answered by the crate over polars where it is built in.

use super::super::output::{Failure, Out, Status};
use shardlab_reports::store::Store;

#[derive(clap::Args)]
pub(super) struct Args {
    /// What to ask
    #[arg(
        value_name = "ARGUMENTS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    arguments: Vec<String>,
}

pub(super) fn run(
    args: &Args,
    _store: &Store,
    _json: bool,
    _out: &mut Out,
) -> Result<Status, Failure> {
    let _ = &args.arguments;
    Err(Failure::bad_input(
        "this binary is built without queries: build it with `cargo build --release --features frames` (polars takes minutes)",
    ))
}
