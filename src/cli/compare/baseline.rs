//! Compares baselines of the gate with runs.

use super::super::output::Failure;
use shardlab_plan::record::RunKind;
use shardlab_plan::scenario::find_shipped;
use shardlab_reports::RunView;
use shardlab_reports::gate::baseline::{FOLDERS, folder, is_baseline, path_of};
use shardlab_reports::gate::{Baseline, Facts};
use std::path::{Path, PathBuf};

/// Prefix of an argument that names the baseline of a scenario.
const PREFIX: &str = "baseline:";

/// A baseline that has been read.
pub(super) struct Kept {
    pub(super) facts: Facts,
    pub(super) path: PathBuf,
}

/// Returns the baseline that an argument refers to, if it does: `baseline:SCENARIO`, or a baseline
/// file.
pub(super) fn of(argument: &Path, at: Option<&Path>) -> Result<Option<Kept>, Failure> {
    let (path, name) = match argument.to_str().and_then(|a| a.strip_prefix(PREFIX)) {
        Some(name) => {
            let folder = at.map(Path::to_owned).or_else(folder).ok_or_else(|| {
                Failure::bad_input(format_args!(
                    "{PREFIX}{name}: there is no folder {}; give another one with --baseline",
                    FOLDERS.join(" or ")
                ))
            })?;
            (path_of(&folder, name), name.to_owned())
        }
        None => {
            let text = argument
                .extension()
                .filter(|e| *e == "toml")
                .and_then(|_| std::fs::read_to_string(argument).ok());
            if !text.as_deref().is_some_and(is_baseline) {
                return Ok(None);
            }
            (argument.to_owned(), String::new())
        }
    };
    let facts = Baseline::read(&path, &name)?.facts;
    Ok(Some(Kept { facts, path }))
}

/// Returns the scenario of a baseline: the shipped scenario with its name, or the file with its
/// name in this folder.
pub(super) fn scenario(kept: &Kept) -> Result<PathBuf, Failure> {
    let name = &kept.facts.scenario;
    let file = PathBuf::from(format!("{name}.toml"));
    if find_shipped(name).is_some() {
        Ok(PathBuf::from(name))
    } else if file.is_file() {
        Ok(file)
    } else {
        Err(Failure::bad_input(format_args!(
            "{}: its scenario `{name}` is neither shipped nor in {}; give its file after the baseline",
            kept.path.display(),
            file.display()
        )))
    }
}

impl Kept {
    /// Returns the baseline's training run if `measured` is set and it has one, or else its
    /// prediction. Also returns the origin of the view.
    pub(super) fn view(&self, measured: bool) -> Result<(RunView, String), Failure> {
        let wanted = if measured {
            RunKind::Exec
        } else {
            RunKind::Sim
        };
        let kinds = [wanted, RunKind::Sim];
        let view = kinds.into_iter().find_map(|k| self.facts.run_view(k));
        let view = view.ok_or_else(|| Failure::run("a baseline holds a prediction"))?;
        Ok((view, format!("baseline {}", self.path.display())))
    }
}
