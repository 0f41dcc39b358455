//! Where runs are kept, as every verb that makes or reads some has it.

use super::output::Failure;
use crate::predict::Prediction;
use shardlab_plan::scenario::find_shipped;
use shardlab_reports::store::{DEFAULT_DIR, Id, Store};
use shardlab_reports::{RunView, view};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Folder of runs where `--store` does not say; `off` keeps none.
const VARIABLE: &str = "SHARDLAB_STORE";

/// `--store` and `--no-store` of verbs that make runs.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct Keep {
    /// Folder to keep the run in; default: runs, or what SHARDLAB_STORE says
    #[arg(long, value_name = "DIR", conflicts_with = "no_store")]
    store: Option<PathBuf>,
    /// Keep no run (SHARDLAB_STORE=off does so always)
    #[arg(long)]
    no_store: bool,
}

impl Keep {
    /// Whether a folder was asked for by name.
    pub(super) fn asked(&self) -> bool {
        self.store.is_some()
    }

    /// The store, unless none is wanted.
    pub(super) fn place(&self) -> Option<Store> {
        if self.no_store {
            return None;
        }
        if let Some(dir) = &self.store {
            return Some(Store::at(dir));
        }
        match std::env::var_os(VARIABLE) {
            Some(off) if off == "off" => None,
            Some(dir) if !dir.is_empty() => Some(Store::at(dir)),
            _ => Some(Store::at(DEFAULT_DIR)),
        }
    }

    /// Makes sure, before what takes long, that a folder that was asked for by name can be written.
    pub(super) fn probe(&self) -> Result<(), Failure> {
        let Some(dir) = &self.store else {
            return Ok(());
        };
        let probed = Store::at(dir).writable();
        probed.map_err(|e| Failure::bad_input(format_args!("--store {e}")))
    }

    /// Keeps a run and says so on stderr.
    pub(super) fn save(&self, run: impl FnOnce() -> RunView) -> Result<Option<Id>, Failure> {
        let saved = self.save_silently(run)?;
        saved.say();
        Ok(saved.id().cloned())
    }

    /// Keeps a run. Where nobody asked for it by name, a folder that cannot be written is no failure.
    pub(super) fn save_silently(&self, run: impl FnOnce() -> RunView) -> Result<Saved, Failure> {
        let Some(store) = self.place() else {
            return Ok(Saved::Unasked);
        };
        match store.save(&run()) {
            Ok(id) => Ok(Saved::As(id, store.dir().to_owned())),
            Err(e) if self.asked() => Err(Failure::bad_input(format_args!("--store {e}"))),
            Err(e) => Ok(Saved::Not(format!(
                "the run is not kept: {e} (--no-store asks for that)"
            ))),
        }
    }
}

/// Whether a run has been kept.
#[derive(Debug)]
pub(super) enum Saved {
    /// None was to be.
    Unasked,
    /// Under this id in this folder.
    As(Id, PathBuf),
    /// It could not be: why.
    Not(String),
}

impl Saved {
    /// Its id.
    pub(super) fn id(&self) -> Option<&Id> {
        match self {
            Self::As(id, _) => Some(id),
            Self::Unasked | Self::Not(_) => None,
        }
    }

    /// Says so on stderr.
    pub(super) fn say(&self) {
        let text = match self {
            Self::Unasked => return,
            Self::As(id, dir) => format!("kept as {} in {}", id.tail(), dir.display()),
            Self::Not(reason) => format!("warning: {reason}"),
        };
        // Nothing can be done when even stderr is closed.
        let _ = writeln!(io::stderr(), "{text}");
    }
}

/// `--store` of verbs that read runs.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct From {
    /// Folder of the kept runs; default: runs, or what SHARDLAB_STORE says
    #[arg(long, value_name = "DIR", global = true)]
    store: Option<PathBuf>,
}

impl From {
    /// The store.
    pub(super) fn store(&self) -> Store {
        if let Some(dir) = &self.store {
            return Store::at(dir);
        }
        match std::env::var_os(VARIABLE) {
            Some(dir) if dir != "off" && !dir.is_empty() => Store::at(dir),
            _ => Store::at(DEFAULT_DIR),
        }
    }
}

/// The view of a prediction whose scenario came from this file with these overrides.
pub(super) fn view_of(p: &Prediction, path: &Path, overrides: &[String]) -> RunView {
    with_source(
        RunView::new(&p.run, &p.program, &p.scenario),
        path,
        overrides,
    )
}

/// A view with the place and the text of its scenario.
pub(crate) fn with_source(mut run: RunView, path: &Path, overrides: &[String]) -> RunView {
    run.scenario = view::ScenarioView {
        source: path.display().to_string(),
        text: text(path),
        overrides: overrides.to_vec(),
        ..run.scenario
    };
    run
}

/// The text that a scenario was loaded from; empty where it cannot be read again.
fn text(path: &Path) -> String {
    if let Ok(text) = std::fs::read_to_string(path) {
        return text;
    }
    let name = path.to_string_lossy();
    find_shipped(&name).map_or_else(String::new, |(_, text)| text.to_owned())
}
