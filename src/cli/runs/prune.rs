//! Removes runs.

use super::super::output::{Failure, Out, Status};
use super::filter::Filter;
use super::list;
use serde_json::json;
use shardlab_reports::store::{Entry, Listing, Store, day};
use std::collections::BTreeSet;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    filter: Filter,
    /// Keep the newest N of the runs that match the filters
    #[arg(long, value_name = "N")]
    keep: Option<usize>,
    /// Only runs saved more than DAYS days ago
    #[arg(long, value_name = "DAYS")]
    older_than: Option<u64>,
    /// Also remove incomplete runs
    #[arg(long)]
    unfinished: bool,
    /// Dry run: only list what would be removed
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(
    args: &Args,
    store: &Store,
    json: bool,
    out: &mut Out,
) -> Result<Status, Failure> {
    let selects = !args.filter.is_empty() || args.keep.is_some() || args.older_than.is_some();
    if !selects && !args.unfinished {
        return Err(Failure::bad_input(
            "what should be removed? Give --keep N, --older-than DAYS, --unfinished, or a filter such as --scenario NAME",
        ));
    }
    let Listing { runs, skipped } = store.list()?;
    let mut doomed = if selects {
        args.filter.apply(runs)?
    } else {
        Vec::new()
    };
    if let Some(keep) = args.keep {
        // Sorted oldest first, so the newest runs are at the end.
        doomed.truncate(doomed.len().saturating_sub(keep));
    }
    if let Some(days) = args.older_than {
        let limit = day(days);
        doomed.retain(|e| e.id.day() < limit.as_str());
    }
    let named: BTreeSet<_> = store.names()?.into_iter().map(|(_, id)| id).collect();
    let spared = doomed.len();
    doomed.retain(|e| !named.contains(&e.id));
    let spared = spared - doomed.len();
    let litter: Vec<_> = skipped
        .iter()
        .filter(|s| args.unfinished && s.litter)
        .collect();
    if !args.dry_run {
        for entry in &doomed {
            store.remove(&entry.id)?;
        }
        for s in &litter {
            store.remove_litter(s)?;
        }
    }
    if json {
        let ids: Vec<String> = doomed.iter().map(|e: &Entry| e.id.to_string()).collect();
        out.json(&json!({
            "removed": ids,
            "unfinished": litter.len(),
            "named_and_kept": spared,
            "dry_run": args.dry_run,
        }))?;
        return Ok(Status::Done);
    }
    if !doomed.is_empty() {
        out.text(list::table(&doomed))?;
        out.blank()?;
    }
    let verb = if args.dry_run {
        "would be removed"
    } else {
        "removed"
    };
    out.line(format_args!(
        "{} runs and {} incomplete ones {verb}",
        doomed.len(),
        litter.len()
    ))?;
    if spared > 0 {
        out.line(format_args!("{spared} are kept because they have names"))?;
    }
    Ok(Status::Done)
}
