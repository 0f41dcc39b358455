//! `shardlab dash`: the terminal dashboard.

use super::args::Overrides;
use super::exec::device::DeviceArgs;
use super::fit::keys;
use super::output::{Failure, Out, Status};
use super::subject::{Subject, is_job};
use crate::dash::app::Tone;
use crate::dash::scenarios::{Changes, FrameworkJob};
use crate::dash::tables::Table;
use crate::dash::theme::Name;
use crate::dash::{Options, Source, run as show, state};
use shardlab_frameworks::Gpus;
use shardlab_plan::scenario::{self, is_example, shipped};
use shardlab_reports::gate::baseline;
use std::collections::BTreeMap;
use std::io::{IsTerminal, stdin, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Scenario files, folders of them, names of shipped ones, or the configuration of a framework
    /// as `shardlab fit` reads it; the shipped examples are listed after them
    #[arg(value_name = "SCENARIO|JOB")]
    scenarios: Vec<PathBuf>,
    /// GPUs of the job, such as 8xh100, 4x8xh200 (nodes first) or h100, which leaves the count to
    /// its configuration
    #[arg(long, value_name = "GPUS")]
    gpus: Option<Gpus>,
    #[command(flatten)]
    overrides: Overrides,
    /// Color theme; NO_COLOR is respected [default: that of last time, else dark]
    #[arg(long, value_name = "dark|light|safe|mono", value_parser = theme)]
    theme: Option<Name>,
    /// Do not capture the mouse
    #[arg(long)]
    no_mouse: bool,
    /// Do not restore or save the selection and edits
    #[arg(long)]
    no_state: bool,
    /// Folder of the gate's baselines [default: tests/baselines or baselines, whichever exists]
    #[arg(long, value_name = "DIR")]
    baseline: Option<PathBuf>,
    #[command(flatten)]
    folder: super::keep::Folder,
    #[command(flatten, next_help_heading = "Training")]
    device: DeviceArgs,
}

fn theme(text: &str) -> Result<Name, String> {
    Name::find(text).ok_or_else(|| "expected dark, light, safe or mono".to_owned())
}

pub(super) fn run(args: &Args, _: &mut Out) -> Result<Status, Failure> {
    let dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
    if !stdin().is_terminal() || !stdout().is_terminal() || dumb {
        return Err(Failure::bad_input(
            "dash needs a terminal; use `shardlab sim`, `sweep` and `compare` to print its contents",
        ));
    }
    let (jobs, scenarios): (Vec<PathBuf>, Vec<PathBuf>) =
        args.scenarios.iter().cloned().partition(|p| is_job(p));
    let job = job(&jobs, args.gpus.as_ref())?;
    if args.gpus.is_some() && job.is_none() {
        return Err(Failure::bad_input(
            "--gpus needs the configuration of a framework; a scenario says mesh.hardware and its sizes",
        ));
    }
    let (mut sources, mut asked) = sources(&scenarios)?;
    if let Some((source, _)) = &job {
        sources.insert(0, source.clone());
        asked += 1;
    }
    let changes = changes(&sources[..asked], &args.overrides.set)?;
    let select = sources[..asked].first().map(|s| s.key.clone());
    let options = Options {
        sources,
        select,
        changes,
        theme: args.theme,
        store: args.folder.store().map(|s| s.dir().to_owned()),
        baselines: args
            .baseline
            .clone()
            .or_else(baseline::folder)
            .unwrap_or_else(|| PathBuf::from("baselines")),
        state: if args.no_state {
            None
        } else {
            state::path(|name| std::env::var(name).ok())
        },
        mouse: !args.no_mouse,
        device: args.device.clone(),
    };
    show(options).map_err(|e| Failure::run(format_args!("the terminal failed: {e}")))?;
    Ok(Status::Done)
}

/// Reads the job of a framework, and writes its scenario to a temporary folder that is removed on
/// drop.
fn job(files: &[PathBuf], gpus: Option<&Gpus>) -> Result<Option<(Source, TempDir)>, Failure> {
    if files.is_empty() {
        return Ok(None);
    }
    let mut subject = Subject::read(files, gpus.cloned(), None, &[])?;
    if let Some(refusal) = subject.refusal() {
        return Err(Failure::bad_input(refusal));
    }
    let scenario = subject.scenario()?;
    let failed = |e| Failure::run(format_args!("no temporary folder: {e}"));
    let folder = tempfile::tempdir().map_err(failed)?;
    let path = folder.path().join(format!("{}.toml", scenario.name));
    std::fs::write(&path, subject.text()?).map_err(failed)?;
    let rows = subject.rows();
    let mut keys = Table::new(keys::heading(rows), &keys::HEAD);
    for row in keys::rows(rows) {
        keys.row(Tone::Plain, row);
    }
    keys.notes = keys::asides(rows);
    let mut words: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    if let Some(gpus) = gpus {
        words.extend(["--gpus".to_owned(), gpus.spec()]);
    }
    let about = format!("From {}.", subject.framework().unwrap_or_default());
    let mut source = Source::new(scenario.name, path, about);
    // Changes belong to the configuration, not to the temporary file.
    let key = std::fs::canonicalize(&files[0]).unwrap_or_else(|_| files[0].clone());
    source.key = key.to_string_lossy().into_owned();
    source.job = Some(FrameworkJob {
        words,
        keys: Arc::new(keys),
    });
    Ok(Some((source, folder)))
}

/// Returns the changes that `--set` makes to the requested scenarios, which come first in the list.
fn changes(sources: &[Source], set: &[String]) -> Result<BTreeMap<String, Changes>, Failure> {
    if set.is_empty() {
        return Ok(BTreeMap::new());
    }
    if sources.is_empty() {
        return Err(Failure::bad_input(
            "--set changes the scenarios given on the command line: name one",
        ));
    }
    let pairs = set.iter().filter_map(|s| s.split_once('='));
    let changes: Changes = pairs
        .map(|(k, v)| (k.trim().to_owned(), v.trim().to_owned()))
        .collect();
    // An invalid scenario in a folder stays in the list, with the reason.
    let sound = |s: &&Source| scenario::load(&s.path, &[]).is_ok();
    let of = |s: &Source| match scenario::load(&s.path, set) {
        Ok(_) => Ok((s.key.clone(), changes.clone())),
        Err(e) => Err(Failure::bad_input(e)),
    };
    sources.iter().filter(sound).map(of).collect()
}

/// Returns the scenarios of the list, requested ones first, and the number of requested ones.
fn sources(asked: &[PathBuf]) -> Result<(Vec<Source>, usize), Failure> {
    let mut all: Vec<Source> = Vec::new();
    for path in asked {
        for file in files(path)? {
            all.push(match scenario::load(&file, &[]) {
                Ok(scenario) => Source::new(scenario.name.clone(), file, scenario.about),
                // An invalid file in a folder must not hide the others, so the list shows the
                // reason.
                Err(e) if path.is_dir() => {
                    let stem = file.file_stem().unwrap_or_default();
                    // The message has one line, because a caret would need separate lines.
                    let why = format!("{e:#}");
                    Source::new(stem.to_string_lossy().into_owned(), file.clone(), why)
                }
                Err(e) => return Err(Failure::bad_input(e)),
            });
        }
    }
    let asked = all.len();
    for (name, text) in shipped() {
        if all.iter().any(|s| s.name == *name) {
            continue;
        }
        let about: Vec<&str> = text
            .lines()
            .map_while(|l| l.strip_prefix('#'))
            .map(str::trim)
            .collect();
        let source = Source::new((*name).to_owned(), PathBuf::from(name), about.join(" "));
        all.push(source.for_tests(!is_example(name)));
    }
    Ok((all, asked))
}

/// Returns the file itself, or the scenario files of a folder sorted by name.
fn files(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let failed = |e| Failure::bad_input(format_args!("{}: {e}", path.display()));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        if file.extension().is_some_and(|e| e == "toml") {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(Failure::bad_input(format_args!(
            "{} has no scenario files (.toml)",
            path.display()
        )));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_file_of_a_folder_is_listed_with_its_error() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("a.toml", "extends = \"llama-tiny\"\n");
        write("b.toml", "[model]\nlayer = 3\n");
        let (all, asked) = sources(&[folder.path().to_owned()]).unwrap();
        assert_eq!((asked, all[0].name.as_str()), (2, "a"));
        assert_eq!(all[1].name, "b");
        assert!(
            all[1].about.contains("b.toml:2:1")
                && all[1].about.contains("layers")
                && !all[1].about.contains('^'),
            "{}",
            all[1].about
        );
        // An invalid scenario that is requested by name is bad input.
        assert!(sources(&[folder.path().join("b.toml")]).is_err());
        // It does not prevent changes to the others.
        let set = |texts: &[&str]| texts.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        let changes = changes(&all[..asked], &set(&["train.lr=1", "train.lr = 2"])).unwrap();
        let lr = ("train.lr".to_owned(), "2".to_owned());
        let key = all[0].key.clone();
        assert_eq!(changes, BTreeMap::from([(key, Changes::from([lr]))]));
    }

    /// The scenario of a job is treated like one that is given as a file.
    #[test]
    fn the_job_of_a_framework_is_listed_first() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/frameworks");
        let file = data.join("torchtitan/llama3-8b.toml");
        assert!(is_job(&file) && !is_job(Path::new("llama-tiny")));
        let gpus: Gpus = "2x4xh100".parse().unwrap();
        let (source, folder) = job(std::slice::from_ref(&file), Some(&gpus))
            .unwrap()
            .unwrap();
        assert_eq!(source.name, "llama3-8b");
        assert!(source.path.starts_with(folder.path()));
        let scenario = scenario::load(&source.path, &[]).unwrap();
        assert_eq!(scenario.mesh.world(), 8);
        let of = source.job.unwrap();
        assert_eq!(of.words[1..], ["--gpus", "2x4xh100-80"]);
        assert!(
            of.keys
                .rows
                .iter()
                .any(|r| r.cells[1] == "training.local_batch_size")
        );
        assert!(job(&[], None).unwrap().is_none());
    }

    #[test]
    fn changes_have_to_be_possible_and_somebodys() {
        let said = |asked: &[&str], set: &[&str]| {
            let asked: Vec<PathBuf> = asked.iter().map(PathBuf::from).collect();
            let (all, asked) = sources(&asked).unwrap();
            let set: Vec<String> = set.iter().map(|t| (*t).to_owned()).collect();
            changes(&all[..asked], &set).map_err(|e| format!("{e:?}"))
        };
        assert_eq!(said(&["llama-tiny"], &[]), Ok(BTreeMap::new()));
        assert!(said(&[], &["train.lr=1"]).unwrap_err().contains("name one"));
        let wrong = said(&["llama-tiny"], &["train.lrr=1"]).unwrap_err();
        assert!(wrong.contains("`lrr`") && wrong.contains("lr"), "{wrong}");
        assert!(said(&["llama-tiny"], &["train.lr"]).is_err());
    }
}
