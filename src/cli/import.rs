//! `shardlab import`: imports traces, snapshots and flight records of PyTorch jobs.

mod json;
mod print;
mod view;

use super::args::{Overrides, load, plan};
use super::keep::{SaveByDefault, Saved};
use super::output::{Failure, Out, Status, say};
use shardlab_import::snapshot::SnapshotOptions;
use shardlab_import::{ImportError, RunImport};
use shardlab_plan::memory::AllocatorSettings;
use shardlab_plan::units::Bytes;
use shardlab_reports::RunView;
use std::path::{Path, PathBuf};

const NOTES: &str = "\
FILE is recognized by its content, whatever its name, compressed by gzip or not:
  trace      JSON of the PyTorch profiler (Kineto): one per rank, of the same steps
  snapshot   memory snapshot of PyTorch; a pickle with code is refused
  execution  execution trace of PyTorch: structure without times
  flight     dump of NCCL's flight recorder, pickle or JSON: one per rank
  sqlite     export of Nsight Systems (units and phases are not verified with exports of real jobs)

A trace becomes a measured run that `runs`, `compare` and `report` read. What could not be placed is
counted and listed, and so is what the trace does not determine.

Examples:
  shardlab import trace.json.gz --name base
  shardlab import 'iteration_10/rank*_trace.json.gz' --json
  shardlab import comm_traces/rank_* --scenario job.toml
  shardlab import snapshot.pickle --alloc-conf expandable_segments:True";

#[derive(clap::Args)]
#[command(after_help = NOTES)]
pub(super) struct Args {
    /// Files or globs
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Replay memory snapshots under these settings of PYTORCH_CUDA_ALLOC_CONF (repeatable)
    #[arg(long, value_name = "SETTINGS")]
    alloc_conf: Vec<AllocatorSettings>,
    /// Memory limit of the process for such replays, such as 40GiB [default: unlimited]
    #[arg(long, value_name = "SIZE", value_parser = super::args::size)]
    device_memory: Option<Bytes>,
    /// Compare flight records with the program of this scenario: a file, or the name of a shipped
    /// one
    #[arg(long, value_name = "SCENARIO")]
    scenario: Option<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    save: SaveByDefault,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<Status, Failure> {
    let place = args.save.place()?;
    if let Some(place) = &place {
        place.probe()?;
    }
    let files = shardlab_import::source::expand(&args.files).map_err(failure)?;
    let program = match &args.scenario {
        Some(path) => Some(plan(&load(path, &args.overrides.set)?)?),
        None => None,
    };
    let options = shardlab_import::Options {
        snapshot: SnapshotOptions {
            settings: args.alloc_conf.clone(),
            limit: args.device_memory,
        },
        program: program.as_ref(),
    };
    let import = shardlab_import::import_with(&files, &name(&files), &options).map_err(failure)?;
    let mut saved = Saved::Unasked;
    if let (Some(place), Some(run)) = (&place, &import.run) {
        saved = place.save(&view::of(run))?;
    }
    if args.json {
        out.json(&json::of(&import, saved.id()))?;
    } else {
        print::all(&import, out)?;
    }
    out.flush()?;
    saved.say();
    if place.as_ref().is_some_and(super::keep::Place::is_asked) && import.run.is_none() {
        say("warning: no trace is among the files, so there is no run to save");
    }
    Ok(Status::Done)
}

/// Returns the run that traces show.
pub(super) fn view_of_files(files: &[PathBuf]) -> Result<RunView, Failure> {
    let files = shardlab_import::source::expand(files).map_err(failure)?;
    let import = shardlab_import::import(&files, &name(&files)).map_err(failure)?;
    match &import.run {
        Some(run) => Ok(view::of(run)),
        None => Err(Failure::bad_input(format_args!(
            "{}: a trace of the PyTorch profiler is expected",
            files.first().map_or_else(String::new, |f| shown(f))
        ))),
    }
}

/// Converts a failure to import. All errors except read errors are bad input.
pub(super) fn failure(e: ImportError) -> Failure {
    match &e {
        ImportError::Io { source, .. } if source.kind() != std::io::ErrorKind::NotFound => {
            Failure::run(e)
        }
        _ => Failure::bad_input(e),
    }
}

/// Returns the name of a run: that of its first file, without the parts for the rank and the
/// format.
pub(super) fn name(files: &[PathBuf]) -> String {
    let first = files.first().and_then(|f| f.file_name());
    let name = first
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    let stem = [".gz", ".json", ".trace", ".pt"]
        .iter()
        .fold(name.as_str(), |n, end| n.strip_suffix(end).unwrap_or(n));
    let end = stem.find("rank").unwrap_or(stem.len());
    let stem = stem[..end].trim_end_matches(['-', '_', '.', '*']);
    if stem.is_empty() {
        "trace".to_owned()
    } else {
        stem.replace(['*', '?', '[', ']'], "")
    }
}

/// Formats a path as a name in messages and comments.
pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Returns the names of a run's units, including the root if it holds parameters.
fn units(run: &RunImport) -> Vec<&str> {
    run.facts.units.iter().map(|u| u.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_named_after_their_files() {
        for (file, expected) in [
            ("a/fsdp2-units-rank0.trace.json.gz", "fsdp2-units"),
            ("trace.json", "trace"),
            ("rank0_trace.json.gz", "trace"),
            ("host_1.pt.trace.json", "host_1"),
            ("job-rank*.json.gz", "job"),
        ] {
            assert_eq!(name(&[file.into()]), expected);
        }
    }
}
