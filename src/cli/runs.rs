//! `shardlab runs`: lists, shows, names and removes saved runs.

mod filter;
mod list;
mod prune;
mod query;
mod show;

use super::keep::{From, unsaved};
use super::output::{Failure, Out, Status};
use filter::Filter;
use shardlab_reports::store::StoreError;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    from: From,
    /// Newest first, and no more than N
    #[arg(long, value_name = "N")]
    last: Option<usize>,
    /// Print one JSON object per run
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Show one run in full
    Show(show::Args),
    /// Name a run, or remove a name; a name that exists moves to the new run
    #[command(alias = "name")]
    Tag(show::TagArgs),
    /// Remove runs by age, by number, or by filters
    Prune(prune::Args),
    /// Query saved runs: group, join, quantiles, history of a metric, Parquet and CSV
    #[cfg_attr(not(feature = "frames"), command(hide = true))]
    Query(Box<query::Args>),
}

impl std::convert::From<StoreError> for Failure {
    fn from(e: StoreError) -> Self {
        unsaved(None, &e)
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if args.verb.is_some() && (!args.filter.is_empty() || args.last.is_some()) {
        return Err(Failure::bad_input(
            "filters go after the verb, for example `shardlab runs prune --scenario NAME`",
        ));
    }
    let store = args.from.store();
    match &args.verb {
        None => list::run(args, &store, out),
        Some(Verb::Show(of)) => show::run(of, &store, args.json, out),
        Some(Verb::Tag(of)) => show::tag(of, &store, out),
        Some(Verb::Prune(of)) => prune::run(of, &store, args.json, out),
        Some(Verb::Query(of)) => query::run(of, &store, args.json, out),
    }
}
