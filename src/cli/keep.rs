//! Where runs are saved and read from, for all subcommands that do either.

use super::output::{Failure, say};
use super::parallel_sizes;
use crate::predict::Prediction;
use shardlab_plan::scenario;
use shardlab_reports::store::{Cap, DEFAULT_DIR, Id, Store, StoreError, is_run_dir, open_dir};
use shardlab_reports::{RunView, view};
use std::path::{Path, PathBuf};

/// Folder of runs if `--store` is not given; `off` disables saving.
const VARIABLE: &str = "SHARDLAB_STORE";
/// Maximum number of runs and bytes in that folder.
const LIMIT: &str = "SHARDLAB_STORE_LIMIT";

/// How a verb saves its run by default.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct Folder {
    /// Save the run in this folder; default: runs, or SHARDLAB_STORE
    #[arg(long, value_name = "DIR", conflicts_with = "no_store")]
    store: Option<PathBuf>,
    /// Do not save this run (SHARDLAB_STORE=off never saves)
    #[arg(long)]
    no_store: bool,
}

/// Options of a verb that saves its runs unless asked not to, since measurements are expensive.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct SaveByDefault {
    #[command(flatten)]
    folder: Folder,
    /// Give the saved run this name; a named run is never removed to make room
    #[arg(long, value_name = "NAME", conflicts_with = "no_store")]
    name: Option<String>,
}

/// Options of a verb that saves its runs only on request.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct SaveOnRequest {
    /// Save the run for `runs`, `compare` and `report`; SHARDLAB_STORE names another folder than
    /// runs
    #[arg(long)]
    save: bool,
    /// Save the run under this name; a named run is never removed to make room
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Save the run in this folder
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Do not save the run, which is the default
    #[arg(long, hide = true, conflicts_with_all = ["save", "name", "store"])]
    no_store: bool,
}

/// Place where a command saves its run.
#[derive(Debug)]
pub(super) struct Place {
    store: Store,
    /// Name of the run.
    name: Option<String>,
    /// The option that asked for saving. If saving fails, the command fails. Without such an
    /// option, the failure is only a warning.
    asked: Option<&'static str>,
    /// Limit on the folder. Folders given with `--store` belong to the user and have no limit.
    cap: Option<Cap>,
}

/// Value of `SHARDLAB_STORE`.
enum Variable {
    Unset,
    Off,
    Dir(PathBuf),
}

impl Variable {
    fn read() -> Self {
        match std::env::var_os(VARIABLE) {
            Some(off) if off == "off" => Self::Off,
            Some(dir) if !dir.is_empty() => Self::Dir(dir.into()),
            _ => Self::Unset,
        }
    }
}

fn cap() -> Result<Option<Cap>, Failure> {
    match std::env::var(LIMIT) {
        Ok(text) if !text.is_empty() => {
            Cap::parse(&text).map_err(|e| Failure::bad_input(format_args!("{LIMIT}: {e}")))
        }
        _ => Ok(Some(Cap::default())),
    }
}

impl Folder {
    /// Returns the store, unless it is disabled.
    pub(super) fn store(&self) -> Option<Store> {
        if self.no_store {
            return None;
        }
        match (&self.store, Variable::read()) {
            (Some(dir), _) => Some(Store::at(dir)),
            (None, Variable::Off) => None,
            (None, Variable::Dir(dir)) => Some(Store::at(dir)),
            (None, Variable::Unset) => Some(Store::at(DEFAULT_DIR)),
        }
    }
}

impl SaveByDefault {
    /// Returns where to save the run, unless saving is disabled.
    pub(super) fn place(&self) -> Result<Option<Place>, Failure> {
        let named = self.name.as_ref().map(|_| "--name");
        let Some(store) = self.folder.store() else {
            return refused(named);
        };
        let explicit = self.folder.store.as_ref().map(|_| "--store");
        Place::new(
            store,
            self.name.clone(),
            explicit.or(named),
            explicit.is_some(),
        )
        .map(Some)
    }
}

impl SaveOnRequest {
    /// Returns where to save the runs, if saving is requested.
    pub(super) fn place(&self, scenarios: usize) -> Result<Option<Place>, Failure> {
        if self.name.is_some() && scenarios > 1 {
            return Err(Failure::bad_input(
                "--name names one run: give one scenario, or use --save",
            ));
        }
        let (store, asked) = match (&self.store, &self.name, Variable::read()) {
            (Some(dir), ..) => (Store::at(dir), "--store"),
            (None, None, _) if !self.save => return Ok(None),
            (None, name, Variable::Off) => {
                return refused(Some(name.as_ref().map_or("--save", |_| "--name")));
            }
            (None, name, variable) => {
                let dir = match variable {
                    Variable::Dir(dir) => dir,
                    _ => DEFAULT_DIR.into(),
                };
                (Store::at(dir), name.as_ref().map_or("--save", |_| "--name"))
            }
        };
        let explicit = self.store.is_some();
        Place::new(store, self.name.clone(), Some(asked), explicit).map(Some)
    }
}

/// Handles a disabled store, which is an error if an option asks for one.
fn refused(option: Option<&str>) -> Result<Option<Place>, Failure> {
    match option {
        None => Ok(None),
        Some(option) => Err(Failure::bad_input(format_args!(
            "{option}: {VARIABLE} is off, so there is no folder to save in; give --store DIR"
        ))),
    }
}

impl Place {
    fn new(
        store: Store,
        name: Option<String>,
        asked: Option<&'static str>,
        explicit: bool,
    ) -> Result<Self, Failure> {
        if let Some(name) = &name {
            Store::check_name(name).map_err(|e| unsaved(Some("--name"), &e))?;
        }
        let cap = if explicit { None } else { cap()? };
        Ok(Self {
            store,
            name,
            asked,
            cap,
        })
    }

    /// Returns whether an option asks for saving the run.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Checks, before a long computation, that a requested folder is writable.
    pub(super) fn probe(&self) -> Result<(), Failure> {
        match self.asked {
            None => Ok(()),
            asked => probe(&self.store, asked),
        }
    }

    /// Saves a run, names it, and makes room for it. A failure is only a warning if saving was not
    /// requested.
    pub(super) fn save(&self, run: &RunView) -> Result<Saved, Failure> {
        match (self.try_save(run), self.asked) {
            (Ok(saved), _) => Ok(saved),
            (Err(e), None) => Ok(Saved::Not(format!(
                "the run was not saved: {e} (--no-store turns saving off)"
            ))),
            (Err(e), asked) => Err(unsaved(asked, &e)),
        }
    }

    fn try_save(&self, run: &RunView) -> Result<Saved, StoreError> {
        let saved = self.store.save_once(run, &self.store.known()?)?;
        if let Some(name) = &self.name {
            self.store.name(name, &saved.id)?;
        }
        let removed = match self.cap {
            Some(cap) if !saved.before => (self.store.enforce(cap, &saved.id)?, cap),
            _ => (0, Cap::default()),
        };
        let dir = self.store.dir().display();
        let called = match &self.name {
            Some(name) => format!("{} ({name})", saved.id.tail()),
            None => saved.id.tail().to_owned(),
        };
        let mut text = match saved.before {
            true => format!("already saved as {called} in {dir}"),
            false => format!("saved as {called} in {dir}"),
        };
        if let (removed @ 1.., cap) = removed {
            let runs = if removed == 1 { "run" } else { "runs" };
            text += &format!(
                "\nremoved the {removed} oldest {runs} without a name: {dir} holds at most {cap} ({LIMIT} changes that)"
            );
        }
        Ok(Saved::As(saved.id, text))
    }
}

/// Checks that the place of a store is writable. A full disk is reported after the results.
pub(super) fn probe(store: &Store, option: Option<&str>) -> Result<(), Failure> {
    match store.writable() {
        Err(e) if e.is_bad_input() => Err(unsaved(option, &e)),
        _ => Ok(()),
    }
}

/// Returns the failure for a run that cannot be saved.
pub(super) fn unsaved(option: Option<&str>, e: &StoreError) -> Failure {
    let message = match option {
        Some(option) => format!("{option}: {e}"),
        None => e.to_string(),
    };
    if e.is_bad_input() {
        Failure::bad_input(message)
    } else {
        Failure::run(message)
    }
}

/// Outcome of saving a run.
#[derive(Debug)]
pub(super) enum Saved {
    /// Saving was not requested.
    Unasked,
    /// Saved with this id; the text is the same in words.
    As(Id, String),
    /// Saving failed, for this reason.
    Not(String),
}

impl Saved {
    /// Returns the id of the saved run.
    pub(super) fn id(&self) -> Option<&Id> {
        match self {
            Self::As(id, _) => Some(id),
            Self::Unasked | Self::Not(_) => None,
        }
    }

    /// Reports the outcome on stderr.
    pub(super) fn say(&self) {
        match self {
            Self::Unasked => {}
            Self::As(_, text) => say(text),
            Self::Not(reason) => say(format_args!("warning: {reason}")),
        }
    }
}

/// The `--store` option of verbs that read runs.
#[derive(clap::Args, Clone, Debug, Default)]
pub(super) struct From {
    /// Folder of the saved runs; default: runs, or SHARDLAB_STORE
    #[arg(long, value_name = "DIR", global = true)]
    store: Option<PathBuf>,
}

impl From {
    /// Returns the store.
    pub(super) fn store(&self) -> Store {
        if let Some(dir) = &self.store {
            return Store::at(dir);
        }
        match Variable::read() {
            Variable::Dir(dir) => Store::at(dir),
            Variable::Off | Variable::Unset => Store::at(DEFAULT_DIR),
        }
    }

    /// Returns the saved run that an argument refers to; `None` if it is a scenario, or neither.
    pub(super) fn find(&self, argument: &Path) -> Result<Option<RunView>, Failure> {
        let name = argument.to_string_lossy();
        if is_run_dir(argument) {
            return open_dir(argument).map(Some).map_err(Failure::bad_input);
        }
        if scenario::is_stdin(argument)
            || argument.exists()
            || scenario::find_shipped(&name).is_some()
        {
            return Ok(None);
        }
        let store = self.store();
        match store.resolve(&name) {
            Ok(id) => store.open(&id).map(Some).map_err(Failure::bad_input),
            Err(_) => Ok(None),
        }
    }
}

/// Returns the view of a prediction whose scenario was read from this file with these overrides.
pub(super) fn view_of(p: &Prediction, path: &Path, overrides: &[String]) -> RunView {
    with_source(
        RunView::new(&p.run, &p.program, &p.scenario),
        path,
        overrides,
    )
}

/// Adds the path and the text of the scenario, and the variables that override it, to a view.
pub(crate) fn with_source(mut run: RunView, path: &Path, overrides: &[String]) -> RunView {
    run.scenario = view::ScenarioView {
        source: path.display().to_string(),
        text: scenario::text(path).unwrap_or_default(),
        overrides: overrides.to_vec(),
        ..run.scenario
    };
    run.run.environment.extend(parallel_sizes::given());
    run
}
