//! `shardlab sweep`: predicts all combinations of some options.

mod points;
mod select;
mod write;

use super::args::{Overrides, fraction, profiles, size};
use super::keep::{probe, unsaved, view_of};
use super::output::{Failure, Out, Status, say, writable, write_file};
use super::progress::Progress;
use super::{frames, interrupt};
use crate::analysis::pareto::Tolerance;
use crate::analysis::verdict::HEADROOM;
use crate::analysis::warnings;
use crate::predict::Prediction;
use points::{Outcome, Point, count_changes, evaluate};
use select::{Selection, Sort};
use shardlab_plan::scenario::{self, nearest, sweep_of};
use shardlab_plan::units::Bytes;
use shardlab_reports::store::{Known, Saved, Store, StoreError};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const NOTES: &str = "\
Column `fits`:
  yes    fits
  tight  fits, but only after the caching allocator frees blocks mid-step (each cudaFree synchronizes the device)
  short  fits, but leaves less memory free than --headroom
  no     out of memory; times assume that it fits
  ?      the device's memory is not known

Column `front`: Pareto-optimal points (time per token vs. reserved memory) among those that fit. Differences below --tolerance do not count.

The last lines name the fastest point that fits, within --max-memory and --headroom, and the points that are equal to it. Of equal points, the one that reserves the least memory is the best, then the one closest to the scenario. If that point is `tight`, a further line names the best one that is not.

Example:
  shardlab sweep llama3-8b-4xh200 --axis 'fsdp.prefetch_forward=[0, 1, 2]' --axis 'train.micro_batch=[1, 2]'";

/// The option that saves points.
const STORE: Option<&str> = Some("--store");

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Scenario file, name of a shipped scenario, or - for standard input; its [sweep] section
    /// gives axes
    #[arg(value_name = "SCENARIO")]
    scenario: PathBuf,
    /// Add an axis, for example 'fsdp.prefetch_forward=[0, 1, 2]' (repeatable)
    ///
    /// Join keys with commas to vary them together: 'mesh.dp_shard,mesh.dp_replicate=[[16, 1], [8,
    /// 2]]'.
    #[arg(long = "axis", value_name = "SECTION.KEY=[V1, V2]")]
    axes: Vec<String>,
    #[command(flatten)]
    overrides: Overrides,
    /// Write all points as CSV, including those that the options below leave out
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write all points as Parquet (in a build with `--features frames`)
    #[arg(long, value_name = "FILE")]
    parquet: Option<PathBuf>,
    /// Summarize the points that fit by an axis instead of listing all (repeatable; in a build with
    /// `--features frames`)
    #[arg(long, value_name = "SECTION.KEY", conflicts_with = "json")]
    by: Vec<String>,
    /// Print one JSON object per point
    #[arg(long)]
    json: bool,
    /// Order of the points [default: axes, or tokens with --top]
    #[arg(long, value_enum)]
    sort: Option<Sort>,
    /// Show only points that fit the device's memory
    #[arg(long)]
    fits: bool,
    /// Exit with status 1 if no point fits, within --max-memory and --headroom if given
    #[arg(long)]
    check: bool,
    /// Show only points that reserve at most this much memory, such as 60GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_memory: Option<Bytes>,
    /// Require this share of device memory to stay free; 0 turns it off [default: 5%]
    #[arg(long, value_name = "PERCENT", value_parser = fraction)]
    headroom: Option<f64>,
    /// Treat times and memory within this share of each other as equal [default: 0.5%, or the error
    /// band of estimates]
    #[arg(long, value_name = "PERCENT")]
    tolerance: Option<Tolerance>,
    /// Show only the first N points that fit, or the first N if none fits
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    top: Option<u32>,
    /// With --top: count points that do not fit, too
    #[arg(long, requires = "top", conflicts_with = "fits")]
    all: bool,
    /// Save every point in this folder, without timelines; default: none is saved
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
}

/// Saves the points of a sweep, if requested.
struct Saver<'a> {
    args: &'a Args,
    store: Option<(Store, Known)>,
    saved: AtomicUsize,
    before: AtomicUsize,
    failed: OnceLock<StoreError>,
}

impl<'a> Saver<'a> {
    fn new(args: &'a Args) -> Result<Self, Failure> {
        let open = |dir: &PathBuf| -> Result<(Store, Known), Failure> {
            let store = Store::at(dir);
            probe(&store, STORE)?;
            let known = store.known().map_err(|e| unsaved(STORE, &e))?;
            Ok((store, known))
        };
        Ok(Self {
            args,
            store: args.store.as_ref().map(open).transpose()?,
            saved: AtomicUsize::new(0),
            before: AtomicUsize::new(0),
            failed: OnceLock::new(),
        })
    }

    fn save(&self, p: &Prediction, overrides: &[String]) {
        let Some((store, known)) = &self.store else {
            return;
        };
        match store.save_once(&view_of(p, &self.args.scenario, overrides), known) {
            Ok(Saved { before: true, .. }) => _ = self.before.fetch_add(1, Ordering::Relaxed),
            Ok(_) => _ = self.saved.fetch_add(1, Ordering::Relaxed),
            // Only the first reason is kept.
            Err(e) => _ = self.failed.set(e),
        }
    }

    fn end(self) -> Result<(), Failure> {
        let Some((store, _)) = &self.store else {
            return Ok(());
        };
        if let Some(e) = self.failed.into_inner() {
            return Err(unsaved(STORE, &e));
        }
        let before = match self.before.into_inner() {
            0 => String::new(),
            n => format!("; {n} were already there"),
        };
        let (saved, dir) = (self.saved.into_inner(), store.dir().display());
        say(format_args!("saved {saved} points in {dir}{before}"));
        Ok(())
    }
}

/// Returns the overrides of a point with these settings of the axes.
fn set_with(args: &Args, settings: &[(String, String)]) -> Vec<String> {
    let mut overrides = args.overrides.set.clone();
    overrides.extend(settings.iter().map(|(key, value)| format!("{key}={value}")));
    overrides
}

/// Checks that these keys are axes.
fn axes_of(by: &[String], keys: &[String]) -> Result<(), Failure> {
    if let Some(key) = by.iter().find(|key| !keys.contains(key)) {
        let near = nearest(key, keys.iter().map(String::as_str));
        let help = near.map_or_else(String::new, |near| format!("; the nearest is `{near}`"));
        return Err(Failure::bad_input(format_args!(
            "--by {key}: no axis has this key{help}"
        )));
    }
    Ok(())
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    interrupt::watch();
    let sweep =
        sweep_of(&args.scenario, &args.overrides.set, &args.axes).map_err(Failure::bad_input)?;
    let total = sweep.points.len();
    let keys: Vec<String> = sweep.keys().map(str::to_owned).collect();
    if args.parquet.is_some() {
        frames::needed("sweep --parquet")?;
    }
    if !args.by.is_empty() {
        frames::needed("sweep --by")?;
        axes_of(&args.by, &keys)?;
    }
    let saver = Saver::new(args)?;
    for (option, path) in [("--csv", &args.csv), ("--parquet", &args.parquet)] {
        if let Some(path) = path {
            writable(option, path)?;
        }
    }
    let headroom = args.headroom.unwrap_or(HEADROOM);
    let progress = Progress::new("predicting", total, args.json);
    let mut points = evaluate(
        sweep.points,
        headroom,
        &profiles(),
        &progress,
        &|p, settings| {
            let set = set_with(args, settings);
            saver.save(p, &set);
            warnings::of_scenario(&p.scenario, &args.scenario, &set)
        },
    );
    drop(progress);
    count_changes(&mut points, &keys, |more| {
        let set = [&args.overrides.set[..], more].concat();
        scenario::load(&args.scenario, &set).ok()
    });
    let selection = selection(args, &points);
    let table = write::Table::new(&keys, &points, &selection);
    // The points are printed first, so that they are not lost if a file cannot be written.
    let written = args.csv.as_ref().map_or(Ok(()), |path| {
        write_file("--csv", path, |to| table.csv(to).map_err(Into::into))
    });
    let written = written.and_then(|()| match &args.parquet {
        Some(path) => table.points()?.parquet(path),
        None => Ok(()),
    });
    if args.json {
        table.json(out)?;
    } else if !args.by.is_empty() {
        table.summary(&args.by, out)?;
    } else {
        table.print(out)?;
    }
    out.flush()?;
    written?;
    saver.end()?;
    status(args, &points, &selection)
}

/// Returns the points that the options select, and their order.
fn selection(args: &Args, points: &[Point]) -> Selection {
    Selection {
        sort: match (args.sort, args.top) {
            (Some(sort), _) => sort,
            (None, Some(_)) => Sort::Tokens,
            (None, None) => Sort::Axes,
        },
        fits: args.fits,
        max_memory: args.max_memory,
        headroom: args.headroom,
        tolerance: args.tolerance.unwrap_or_else(|| {
            let done = points.iter().filter_map(|p| p.done());
            Tolerance::of_bases(done.map(|n| n.basis.as_ref()))
        }),
        top: args.top.map(|n| n as usize),
        all: args.all,
    }
}

/// Returns the exit status of a sweep. An interrupted one has points that are missing.
///
/// # Errors
/// If the prediction of a point failed for another reason than bad input.
fn status(args: &Args, points: &[Point], selection: &Selection) -> Result<Status, Failure> {
    let total = points.len();
    let missing = points
        .iter()
        .filter(|p| matches!(p.outcome, Outcome::Missing))
        .count();
    if missing > 0 {
        say(format_args!(
            "interrupted: {missing} of {total} points are missing"
        ));
        return Ok(Status::RunFailed);
    }
    let failed = points.iter().find_map(|p| match &p.outcome {
        Outcome::Failed(e) if !e.is_bad_input() => Some(e),
        _ => None,
    });
    match failed {
        Some(e) => Err(Failure::run(e)),
        None if args.check && !selection.any_fits(points) => {
            say(format_args!("check failed: none of {total} points fits"));
            Ok(Status::CheckFailed)
        }
        None => Ok(Status::Done),
    }
}
