//! `shardlab sweep`: all combinations of some options.

mod points;
mod write;

use super::args::{Overrides, profiles};
use super::interrupt;
use super::keep::view_of;
use super::output::{Failure, Out, Status, writable};
use crate::predict::Prediction;
use points::{Outcome, evaluate};
use shardlab_plan::scenario::sweep_of;
use shardlab_reports::store::{Store, StoreError};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Scenario file, or the name of a shipped one; its [sweep] section gives axes
    #[arg(value_name = "SCENARIO")]
    scenario: PathBuf,
    /// A further axis, for example 'fsdp.prefetch_forward=[0, 1, 2]' (repeatable)
    #[arg(long = "axis", value_name = "SECTION.KEY=[V1, V2]")]
    axes: Vec<String>,
    #[command(flatten)]
    overrides: Overrides,
    /// Write all points as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object a point
    #[arg(long)]
    json: bool,
    /// Order of the table
    #[arg(long, value_enum, default_value_t = Sort::Axes)]
    sort: Sort,
    /// Keep every point in this folder, without timelines; default: none is kept
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    /// As the axes run
    Axes,
    /// Shortest step first
    Step,
    /// Most tokens a second first
    Tokens,
    /// Least exposed time first
    Exposed,
    /// Least allocated memory first
    Allocated,
    /// Least reserved memory first
    Reserved,
}

/// Keeps the points of a sweep where that is asked for.
struct Keeper<'a> {
    args: &'a Args,
    store: Option<Store>,
    kept: AtomicUsize,
    failed: OnceLock<StoreError>,
}

impl<'a> Keeper<'a> {
    fn new(args: &'a Args) -> Result<Self, Failure> {
        let store = args.store.as_ref().map(Store::at);
        if let Some(store) = &store {
            store.writable().map_err(unkept)?;
        }
        Ok(Self {
            args,
            store,
            kept: AtomicUsize::new(0),
            failed: OnceLock::new(),
        })
    }

    fn keep(&self, p: &Prediction, settings: &[(String, String)]) {
        let Some(store) = &self.store else { return };
        let mut overrides = self.args.overrides.set.clone();
        overrides.extend(settings.iter().map(|(key, value)| format!("{key}={value}")));
        match store.save(&view_of(p, &self.args.scenario, &overrides)) {
            Ok(_) => _ = self.kept.fetch_add(1, Ordering::Relaxed),
            // The first reason is enough.
            Err(e) => _ = self.failed.set(e),
        }
    }

    fn end(self) -> Result<(), Failure> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        if let Some(e) = self.failed.into_inner() {
            return Err(unkept(e));
        }
        let kept = self.kept.into_inner();
        eprintln!("kept {kept} points in {}", store.dir().display());
        Ok(())
    }
}

fn unkept(e: StoreError) -> Failure {
    Failure::bad_input(format_args!("--store {e}"))
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    interrupt::watch();
    let sweep =
        sweep_of(&args.scenario, &args.overrides.set, &args.axes).map_err(Failure::bad_input)?;
    let total = sweep.points.len();
    let axes = sweep.axes;
    let keeper = Keeper::new(args)?;
    if let Some(path) = &args.csv {
        writable("--csv", path)?;
    }
    let outcomes = evaluate(sweep.points, &profiles(), &|p, settings| {
        keeper.keep(p, settings);
    });
    let missing = outcomes
        .iter()
        .filter(|o| matches!(o, Outcome::Missing))
        .count();
    let table = write::Table::new(&axes, &outcomes, args.sort);
    // What cannot be written is told last: it takes nothing else with it.
    let written = args.csv.as_ref().map_or(Ok(()), |path| {
        let written = table.csv(path);
        written.map_err(|e| Failure::bad_input(format_args!("--csv {}: {e}", path.display())))
    });
    if args.json {
        table.json(out)?;
    } else {
        table.print(out)?;
    }
    out.flush()?;
    written?;
    keeper.end()?;
    if missing > 0 {
        eprintln!("interrupted: {missing} of {total} points are missing");
        return Ok(Status::RunFailed);
    }
    let failed = outcomes.iter().find_map(|o| match o {
        Outcome::Failed(e) if !e.is_bad_input() => Some(e),
        _ => None,
    });
    match failed {
        Some(e) => Err(Failure::run(e)),
        None => Ok(Status::Done),
    }
}
