//! `shardlab sweep`: all combinations of some options.

mod points;
mod select;
mod write;

use super::args::{Overrides, percent, profiles, size};
use super::interrupt;
use super::keep::view_of;
use super::output::{Failure, Out, Status, writable};
use super::progress::Progress;
use crate::predict::Prediction;
use points::{Outcome, evaluate};
use select::{Selection, Sort};
use shardlab_plan::scenario::sweep_of;
use shardlab_plan::units::Bytes;
use shardlab_reports::store::{Store, StoreError};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const NOTES: &str = "\
Under `fits`: yes; tight (it does, but within a step the allocator has to give cached memory back to the device,
which waits for all of its work); short (it does, but leaves less than --headroom); no; ? (the device's memory is not known).
Under `front`: points that no other that fits beats both in time per token and in reserved memory.
The last line names the fastest point that fits, within --max-memory and --headroom where they are given; where that one is tight, another
line names the fastest that is not.";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Scenario file, or the name of a shipped one; its [sweep] section gives axes
    #[arg(value_name = "SCENARIO")]
    scenario: PathBuf,
    /// A further axis, for example 'fsdp.prefetch_forward=[0, 1, 2]' (repeatable)
    ///
    /// Keys joined by commas are set together: 'mesh.dp_shard,mesh.dp_outer=[[16, 1], [8, 2]]'.
    #[arg(long = "axis", value_name = "SECTION.KEY=[V1, V2]")]
    axes: Vec<String>,
    #[command(flatten)]
    overrides: Overrides,
    /// Write all points as CSV, whatever the options below leave out
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object a point
    #[arg(long)]
    json: bool,
    /// Order of the points; default: axes, or tokens with --top
    #[arg(long, value_enum)]
    sort: Option<Sort>,
    /// Show only points that fit the device's memory
    #[arg(long)]
    fits: bool,
    /// Show only points that reserve no more memory than this, such as 60GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_memory: Option<Bytes>,
    /// What leaves less of the device's memory free counts as not fitting, for example 5%
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    headroom: Option<f64>,
    /// Show only the first so many points
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    top: Option<u32>,
    /// Keep every point in this folder, without timelines; default: none is kept
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
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
    let keys: Vec<String> = sweep.keys().map(str::to_owned).collect();
    let keeper = Keeper::new(args)?;
    if let Some(path) = &args.csv {
        writable("--csv", path)?;
    }
    let headroom = args.headroom.unwrap_or(0.0);
    let progress = Progress::new("predicting", total, args.json);
    let points = evaluate(
        sweep.points,
        headroom,
        &profiles(),
        &progress,
        &|p, settings| {
            keeper.keep(p, settings);
        },
    );
    drop(progress);
    let missing = points
        .iter()
        .filter(|p| matches!(p.outcome, Outcome::Missing))
        .count();
    let selection = Selection {
        sort: match (args.sort, args.top) {
            (Some(sort), _) => sort,
            (None, Some(_)) => Sort::Tokens,
            (None, None) => Sort::Axes,
        },
        fits: args.fits,
        max_memory: args.max_memory,
        headroom: args.headroom,
        top: args.top.map(|n| n as usize),
    };
    let table = write::Table::new(&keys, &points, &selection);
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
    let failed = points.iter().find_map(|p| match &p.outcome {
        Outcome::Failed(e) if !e.is_bad_input() => Some(e),
        _ => None,
    });
    match failed {
        Some(e) => Err(Failure::run(e)),
        None => Ok(Status::Done),
    }
}
