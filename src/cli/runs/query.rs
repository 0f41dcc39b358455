//! Queries over many runs, executed by polars if it is built in.

use super::super::output::{Failure, Out, Status};
use super::filter::Filter;
use shardlab_reports::store::Store;
use std::path::PathBuf;

#[cfg(feature = "frames")]
mod answer;

const EXAMPLES: &str = "\
METRIC and KEY are names in `shardlab runs show RUN --json`: metrics such as step_ms.median or memory.peak_reserved_bytes (the
end of a name is enough where only one ends so), fields such as kind or program_digest, options such as fsdp.policy, facts
such as git_revision. With --spans the rows are kernels and collectives (name, work, unit_name, phase, duration_us).

  shardlab runs query --by scenario --by fsdp.prefetch_forward --metric step_ms.median
  shardlab runs query --spans --by name --metric duration_us --agg count --agg p50 --agg p99
  shardlab runs query --history step_ms.median --by scenario --scenario llama-tiny
  shardlab runs query --versus kind=sim,exec --on program_digest --metric step_ms.median
  shardlab runs query --parquet runs.parquet
  shardlab runs query --table sweep.csv --by fsdp.prefetch_forward --metric step_ms --agg min --agg median";

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    filter: Filter,
    /// Query spans instead of runs
    #[arg(long)]
    spans: bool,
    /// Query a table instead of the saved runs: a .csv or .parquet file, such as the points of
    /// `sweep --csv`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["spans", "history"])]
    table: Option<PathBuf>,
    /// Group by this (repeatable)
    #[arg(long, value_name = "KEY")]
    by: Vec<String>,
    /// Metrics to report (repeatable); default: step time, peak of reserved memory, last loss; with
    /// --spans duration_us
    #[arg(long, value_name = "METRIC")]
    metric: Vec<String>,
    /// How to aggregate the numbers of a group: count, mean, std, min, max, sum, median, or a
    /// quantile such as p95 (repeatable); default: median
    #[arg(long, value_name = "WHAT")]
    agg: Vec<String>,
    /// The runs in order of time with this metric and its change from run to run
    #[arg(long, value_name = "METRIC", conflicts_with_all = ["spans", "metric", "agg"])]
    history: Option<String>,
    /// Join the runs where KEY is A with those where it is B: medians and their ratio
    #[arg(long, value_name = "KEY=A,B", conflicts_with_all = ["spans", "history", "by", "agg"])]
    versus: Option<String>,
    /// Key that joined runs must share (repeatable); default: program_digest
    #[arg(long, value_name = "KEY", requires = "versus")]
    on: Vec<String>,
    /// Order of the rows
    #[arg(long, value_name = "COLUMN")]
    sort: Option<String>,
    /// Largest first
    #[arg(long, requires = "sort")]
    descending: bool,
    /// Show at most N rows
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Write the answer as CSV (without a query: all columns of all runs)
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write the answer as Parquet
    #[arg(long, value_name = "FILE")]
    parquet: Option<PathBuf>,
}

#[cfg(feature = "frames")]
pub(super) fn run(
    args: &Args,
    store: &Store,
    json: bool,
    out: &mut Out,
) -> Result<Status, Failure> {
    answer::run(args, store, json, out)
}

#[cfg(not(feature = "frames"))]
pub(super) fn run(_: &Args, _: &Store, _: bool, _: &mut Out) -> Result<Status, Failure> {
    super::super::frames::needed("runs query").map(|()| Status::Done)
}
