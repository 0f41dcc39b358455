//! `shardlab report`: writes runs as an HTML page or as Markdown.

mod png;

use super::args::{Overrides, load, profiles};
use super::frames::{self, Points, Summary};
use super::keep::{From, view_of};
use super::output::{Failure, Out, Status, say, write_file};
use super::progress::Progress;
use super::table::option_of;
use crate::analysis::warnings;
use crate::predict::{PredictError, Prediction, predict};
use shardlab_plan::units::Bytes;
use shardlab_reports::RunView;
use shardlab_reports::report::{Block, Item, Report, Table, html, markdown};
use shardlab_reports::shell;
use shardlab_reports::store::{Store, is_run_dir, minute, open_dir};
use shardlab_sim::Options;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Maximum number of runs in one report. A longer page would not be readable.
const MAX_RUNS: usize = 200;
/// Maximum length of the options in a run's label, in characters.
const LONG: usize = 48;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Scenario files or names, which are predicted, and saved runs by id, name or folder; all
    /// others are compared with the first
    #[arg(value_name = "SCENARIO|RUN", required = true)]
    runs: Vec<String>,
    #[command(flatten)]
    overrides: Overrides,
    /// Override a key for every run but the first (repeatable); with one scenario: compare it with
    /// and without these overrides
    #[arg(long = "set-b", value_name = "SECTION.KEY=VALUE")]
    set_b: Vec<String>,
    #[command(flatten)]
    from: From,
    /// File to write: .html or .md
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
    /// Title of the report [default: the names of the runs]
    #[arg(long)]
    title: Option<String>,
    /// Predict the scenarios over this axis, for example 'fsdp.prefetch_forward=[0, 1, 2]'
    /// (repeatable)
    #[arg(long = "axis", value_name = "SECTION.KEY=[V1, V2]")]
    axes: Vec<String>,
    /// Add a table of medians by this option or axis (repeatable; in a build with
    /// `--features frames`)
    #[arg(long, value_name = "SECTION.KEY")]
    by: Vec<String>,
    /// Also write every plot as a PNG, into a folder next to the file
    #[arg(long)]
    png: bool,
}

/// The format of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Html,
    Markdown,
}

impl Form {
    /// Returns the format for the file name in an option.
    pub(super) fn of(option: &str, path: &Path) -> Result<Self, Failure> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("html") => Ok(Self::Html),
            Some("md") => Ok(Self::Markdown),
            _ => Err(Failure::bad_input(format_args!(
                "{option} {}: expected a name that ends in .html or .md",
                path.display()
            ))),
        }
    }
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let form = Form::of("--out", &args.out)?;
    if !args.by.is_empty() {
        frames::needed("report --by")?;
    }
    let progress = Progress::new("predicting", 1, false);
    let mut warnings = BTreeSet::new();
    let items = items(args, &progress, &mut warnings)?;
    drop(progress);
    let mut report = Report::new(args.title.as_deref(), &items);
    if !args.by.is_empty() {
        let table = medians(&items, &args.by)?;
        if let Some(summary) = report.sections.first_mut() {
            summary.blocks.push(Block::Table(table));
        }
    }
    for warning in &warnings {
        say(format_args!("warning: {warning}"));
        report.about.push(format!("Warning: {warning}"));
    }
    report.about.push(made());
    let pictures = args.png.then(|| pictures(&args.out)).flatten();
    if let Some((folder, _)) = &pictures {
        let is_new = !folder.exists();
        write_pictures(&report, folder).inspect_err(|_| {
            if is_new {
                let _ = std::fs::remove_dir_all(folder);
            }
        })?;
    }
    let text = match form {
        Form::Html => html(&report),
        Form::Markdown => markdown(&report, |plot| {
            let (_, name) = pictures.as_ref()?;
            Some(format!("{name}/{}.png", plot.name))
        }),
    };
    write_file("--out", &args.out, |to| to.write_all(text.as_bytes()))?;
    let runs = match items.len() {
        1 => "1 run".to_owned(),
        n => format!("{n} runs"),
    };
    out.line(format_args!(
        "{}: {runs}, {} KiB",
        args.out.display(),
        text.len().div_ceil(1024)
    ))?;
    Ok(Status::Done)
}

/// Returns a line on when and how the report was made.
pub(super) fn made() -> String {
    let words = std::env::args_os().skip(1);
    let words: Vec<String> = words.map(|w| w.to_string_lossy().into_owned()).collect();
    let command = shell::joined(words.iter().map(String::as_str));
    format!(
        "Made {} with shardlab {}: shardlab {command}",
        minute(),
        env!("CARGO_PKG_VERSION")
    )
}

/// Returns the medians of the runs, grouped by some options.
fn medians(items: &[Item], by: &[String]) -> Result<Table, Failure> {
    const METRICS: [&str; 3] = ["step ms", "exposed ms", "reserved GiB"];
    let settings: BTreeSet<&str> = items
        .iter()
        .flat_map(|item| item.view.scenario.settings.keys())
        .map(String::as_str)
        .collect();
    let rows = items.iter().map(|item| {
        let value = |key: &&str| {
            let set = item.view.scenario.settings.get(*key);
            set.cloned().unwrap_or_default()
        };
        let reserved = item.view.run.memory.reserved().map_or(f64::NAN, Bytes::gib);
        let numbers = [item.view.step_ms(), item.view.exposed_ms(), reserved];
        // Unknown values have an empty cell.
        let shown = |x: f64| {
            if x.is_nan() {
                String::new()
            } else {
                x.to_string()
            }
        };
        let cells = settings.iter().map(value);
        cells.chain(numbers.map(shown)).collect()
    });
    let points = Points::of(settings.iter().copied().chain(METRICS), rows)?;
    let summarized = points.summarized(&Summary {
        by,
        metrics: &METRICS,
        aggregates: &["median"],
    })?;
    Ok(Table {
        caption: format!("Medians by {}", by.join(", ")),
        head: summarized.titles,
        rows: summarized.rows,
    })
}

/// Writes every plot as a PNG into a folder.
fn write_pictures(report: &Report, folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .map_err(|e| Failure::unwritten(format_args!("--png {}", folder.display()), &e))?;
    for plot in report.plots() {
        let path = folder.join(format!("{}.png", plot.name));
        let png = png::render(&plot.standalone())
            .map_err(|e| Failure::run(format_args!("{}: {e}", path.display())))?;
        write_file("--png", &path, |to| to.write_all(&png))?;
    }
    Ok(())
}

/// Returns the folder of the pictures, and its path relative to the report.
fn pictures(out: &Path) -> Option<(PathBuf, String)> {
    let name = format!("{}-plots", out.file_stem()?.to_string_lossy());
    Some((out.with_file_name(&name), name))
}

fn items(
    args: &Args,
    progress: &Progress,
    warnings: &mut BTreeSet<String>,
) -> Result<Vec<Item>, Failure> {
    let store = args.from.store();
    let mut items = Vec::new();
    let mut ids = Vec::new();
    // A single scenario with options for a second run is used twice, as in `compare`.
    let alone = args.runs.len() == 1 && !args.set_b.is_empty();
    let again = args.runs.iter().filter(|_| alone);
    for (i, name) in args.runs.iter().chain(again).enumerate() {
        let mut set = args.overrides.set.clone();
        if i > 0 {
            set.extend(args.set_b.iter().cloned());
        }
        match resolve(args, &set, &store, name, progress, warnings)? {
            Found::Kept(id, view) => {
                items.push(Item {
                    label: String::new(),
                    view: *view,
                    axes: vec![],
                });
                ids.push((items.len() - 1, id));
            }
            Found::Predicted(some) => items.extend(some),
        }
        if items.len() > MAX_RUNS {
            return Err(Failure::bad_input(format_args!(
                "more than {MAX_RUNS} runs; use `shardlab sweep --csv` or `shardlab runs` for that many"
            )));
        }
    }
    name_kept(&mut items, &ids);
    Ok(items)
}

/// What an argument refers to.
enum Found {
    /// A saved run and its name.
    Kept(String, Box<RunView>),
    /// A scenario, or every point of its axes.
    Predicted(Vec<Item>),
}

/// Labels saved runs with their names. If several runs have the same scenario, the labels also
/// contain the options in which they differ.
fn name_kept(items: &mut [Item], ids: &[(usize, String)]) {
    let scenario = |at: usize| items[at].view.scenario.name.as_str();
    let options = |at: usize| items[at].view.scenario.overrides.as_slice();
    let label = |&(at, ref id): &(usize, String)| {
        let alike = |other: &usize| scenario(*other) == scenario(at);
        let others: Vec<usize> = ids.iter().map(|i| i.0).filter(alike).collect();
        let differs = |o: &&String| others.iter().any(|other| !options(*other).contains(o));
        let own: Vec<&str> = options(at)
            .iter()
            .filter(differs)
            .map(|o| option_of(o))
            .collect();
        let own = own.join(" ");
        match own.len() {
            1..=LONG => format!("{} {own} ({id})", scenario(at)),
            _ => format!("{} ({id})", scenario(at)),
        }
    };
    let labels: Vec<String> = ids.iter().map(label).collect();
    for ((at, _), label) in ids.iter().zip(labels) {
        items[*at].label = label;
    }
}

/// Predicts a scenario or every point of its axes, or reads a saved run. Adds the warnings about
/// predicted ones.
fn resolve(
    args: &Args,
    set: &[String],
    store: &Store,
    name: &str,
    progress: &Progress,
    found: &mut BTreeSet<String>,
) -> Result<Found, Failure> {
    let path = Path::new(name);
    if is_run_dir(path) {
        let view = open_dir(path).map_err(Failure::bad_input)?;
        let folder = path
            .file_name()
            .map_or_else(|| name.into(), |n| n.to_string_lossy());
        return Ok(Found::Kept(folder.into_owned(), Box::new(view)));
    }
    let scenario = match load(path, set) {
        Ok(scenario) => scenario,
        // An error in an existing scenario is reported; any other argument may be a run.
        Err(e) if path.exists() || name.ends_with(".toml") => return Err(e),
        Err(e) => {
            let Ok(id) = store.resolve(name) else {
                return Err(e);
            };
            let view = store.open(&id).map_err(Failure::bad_input)?;
            // A name is more informative than an id, and the end of an id is enough to distinguish
            // runs.
            let called = if name.contains(id.tail()) {
                id.tail()
            } else {
                name
            };
            return Ok(Found::Kept(called.to_owned(), Box::new(view)));
        }
    };
    let mut warn = |p: &Prediction, set: &[String]| {
        let all = warnings::of_scenario(&p.scenario, path, set);
        found.extend(all.iter().map(ToString::to_string));
    };
    let profiles = profiles();
    if args.axes.is_empty() {
        let p = predict(&scenario, &profiles, &Options::default())?;
        let own: Vec<&str> = set[args.overrides.set.len()..]
            .iter()
            .map(String::as_str)
            .collect();
        let label = match own.as_slice() {
            [] => p.scenario.name.clone(),
            own => format!("{} {}", p.scenario.name, own.join(" ")),
        };
        warn(&p, set);
        let view = view_of(&p, path, set);
        let axes = vec![];
        return Ok(Found::Predicted(vec![Item { label, view, axes }]));
    }
    let sweep =
        shardlab_plan::scenario::sweep_of(path, set, &args.axes).map_err(Failure::bad_input)?;
    if sweep.points.len() > MAX_RUNS {
        return Err(Failure::bad_input(format_args!(
            "{} points; a report shows at most {MAX_RUNS}",
            sweep.points.len()
        )));
    }
    let mut items = Vec::new();
    for point in sweep.points {
        let label = point
            .settings
            .iter()
            .map(|(k, v)| format!("{}={v}", k.rsplit('.').next().unwrap_or(k)))
            .collect::<Vec<_>>()
            .join(" ");
        // Impossible combinations are skipped.
        let predicted = point
            .scenario
            .map_err(PredictError::from)
            .and_then(|s| predict(&s, &profiles, &Options::default()));
        match predicted {
            Ok(p) => {
                let settings = point.settings.iter().map(|(k, v)| format!("{k}={v}"));
                let set: Vec<String> = set.iter().cloned().chain(settings).collect();
                warn(&p, &set);
                items.push(Item {
                    label,
                    view: view_of(&p, path, &set),
                    axes: point.settings,
                });
            }
            Err(e) if e.is_bad_input() => {
                progress.pause(|| eprintln!("skipped {label}: {}", e.reason()));
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(Found::Predicted(items))
}
