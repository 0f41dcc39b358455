//! Runs saved in a folder.
//!
//! ```text
//! runs/20261120-143455678-3f2a9c/    one folder per run, never changed once it has its name
//!     summary.json    the JSON contract of a run, with id, date, options: all that a list needs
//!     run.json        the rest of its view, and which tables belong to it
//!     scenario.toml   the scenario as it was read
//!     spans.csv  memory.csv  gaps.csv
//! runs/.unfinished-…  a run being written, or one whose writer was killed
//! runs/.removed-…     a run being removed
//! runs/.names/NAME    holds the id that NAME stands for
//! ```
//!
//! A run is written under a temporary name, flushed to disk and renamed, so every folder that is
//! named by an id is complete. Writers do not conflict: ids are unique, and if two writers choose
//! the same id, the later one chooses another. Incomplete folders are left out of lists and
//! reported with the reason.

mod cap;
mod entry;
mod error;
mod files;
mod id;
mod known;
mod read;
mod tables;
mod write;

pub use cap::Cap;
pub use entry::{Entry, Term};
pub use error::StoreError;
pub use id::{Id, day, minute};
pub use known::{Known, Saved};

use crate::view::RunView;
use shardlab_plan::scenario::nearest;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Default folder of runs.
pub const DEFAULT_DIR: &str = "runs";
/// Prefix of runs being written.
const UNFINISHED: &str = ".unfinished-";
/// Prefix of runs being removed.
const REMOVED: &str = ".removed-";
/// Folder of names.
const NAMES: &str = ".names";

/// A folder of runs. Saving the first run creates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    dir: PathBuf,
}

/// Content of a store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// Complete runs, oldest first.
    pub runs: Vec<Entry>,
    /// Other entries.
    pub skipped: Vec<Skipped>,
}

/// Anything in a store that is not a complete run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Path.
    pub path: PathBuf,
    /// Reason why it is left out.
    pub reason: String,
    /// Whether its writer or remover no longer exists, so that removing it loses nothing.
    pub litter: bool,
}

impl Store {
    /// Returns the store in a folder, which need not exist yet.
    #[must_use]
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Returns the folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Checks, before a long computation, that runs can be saved: creates a folder and removes it
    /// again.
    ///
    /// # Errors
    /// Returns [`StoreError::Io`] if they cannot be saved.
    pub fn writable(&self) -> Result<(), StoreError> {
        write::writable(self)
    }

    /// Saves a run, with facts about this machine added to its environment.
    ///
    /// # Errors
    /// Fails if the run cannot be written. In that case, it is not listed.
    pub fn save(&self, view: &RunView) -> Result<Id, StoreError> {
        write::save(self, &write::complete(view))
    }

    /// Reads a run.
    ///
    /// # Errors
    /// Fails if the run does not exist or is incomplete.
    pub fn open(&self, id: &Id) -> Result<RunView, StoreError> {
        open_dir(&self.path(id))
    }

    /// Returns the entry of one run for lists.
    ///
    /// # Errors
    /// Fails if the run does not exist or is incomplete.
    pub fn entry(&self, id: &Id) -> Result<Entry, StoreError> {
        Entry::read(&self.path(id))
    }

    /// Returns the folder of a run.
    #[must_use]
    pub fn path(&self, id: &Id) -> PathBuf {
        self.dir.join(id.as_str())
    }

    /// Lists all runs. A missing folder is an empty store.
    ///
    /// # Errors
    /// Fails if the folder cannot be read.
    pub fn list(&self) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        for name in self.names_in_dir()? {
            let path = self.dir.join(&name);
            if name.starts_with(UNFINISHED) {
                let litter = write::abandoned(&path);
                listing.skipped.push(Skipped {
                    reason: if litter {
                        "its writer stopped before it was complete".into()
                    } else {
                        "it is being written".into()
                    },
                    path,
                    litter,
                });
            } else if name.starts_with(REMOVED) {
                listing.skipped.push(Skipped {
                    path,
                    reason: "its removal was interrupted".into(),
                    litter: true,
                });
            } else if Id::parse(&name).is_some() {
                match Entry::read(&path) {
                    Ok(entry) => listing.runs.push(entry),
                    Err(e) => listing.skipped.push(Skipped {
                        path,
                        reason: e.reason(),
                        litter: false,
                    }),
                }
            }
        }
        listing.runs.sort_by(|a, b| a.id.cmp(&b.id));
        listing.skipped.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(listing)
    }

    /// Returns the ids of all runs, oldest first, complete or not, without reading them.
    ///
    /// # Errors
    /// Fails if the folder cannot be read.
    pub fn ids(&self) -> Result<Vec<Id>, StoreError> {
        let mut ids: Vec<Id> = self
            .names_in_dir()?
            .iter()
            .filter_map(|n| Id::parse(n))
            .collect();
        ids.sort();
        Ok(ids)
    }

    /// Returns the run that a text refers to. The text is an id, an unambiguous prefix of an id or
    /// of its last part, `last`, `last~N`, or a name given with [`Store::name`].
    ///
    /// # Errors
    /// Fails if there is no such run, or more than one. The message contains the most similar name.
    pub fn resolve(&self, text: &str) -> Result<Id, StoreError> {
        let ids = self.ids()?;
        if let Some(back) = back(text) {
            let at = ids.len().checked_sub(back + 1);
            return at.map(|i| ids[i].clone()).ok_or_else(|| {
                self.unknown(
                    text,
                    match ids.len() {
                        1 => "the store has 1 run".into(),
                        n => format!("the store has {n} runs"),
                    },
                )
            });
        }
        if let Some(id) = self.named(text)? {
            return Ok(id);
        }
        let matching: Vec<&Id> = ids.iter().filter(|id| id.matches(text)).collect();
        match matching.as_slice() {
            [one] => Ok((*one).clone()),
            [] => {
                let names = self.all_names()?;
                let tails = ids.iter().map(Id::tail);
                let near = nearest(text, names.iter().map(String::as_str).chain(tails));
                Err(self.unknown(
                    text,
                    match near {
                        Some(near) => format!("the nearest is `{near}`"),
                        None if ids.is_empty() => "the store is empty".into(),
                        None => format!("the newest is {}", ids[ids.len() - 1]),
                    },
                ))
            }
            several => {
                let shown: Vec<&str> = several.iter().take(4).map(|id| id.as_str()).collect();
                Err(self.unknown(
                    text,
                    format!("{} runs start with it: {}", several.len(), shown.join(", ")),
                ))
            }
        }
    }

    /// Rejects invalid names of runs.
    ///
    /// # Errors
    /// Fails if the name could be mistaken for an id or a path.
    pub fn check_name(name: &str) -> Result<(), StoreError> {
        valid(name)
    }

    /// Names a run. If another run has the name, that run loses it.
    ///
    /// # Errors
    /// Fails if the name could be mistaken for an id or a path, or cannot be written.
    pub fn name(&self, name: &str, id: &Id) -> Result<(), StoreError> {
        valid(name)?;
        let dir = self.dir.join(NAMES);
        write::create_dir(&dir)?;
        write::replace(&dir, name, format!("{id}\n").as_bytes())
    }

    /// Renames a run from `from` to `to` atomically, so that it can always be found by one of the
    /// two names. If another run has the name `to`, that run loses it.
    ///
    /// # Errors
    /// Fails if the old name does not exist, if the new one could be mistaken for an id or a path,
    /// or if it cannot be written.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StoreError> {
        valid(to)?;
        self.has_name(from)?;
        write::rename(&self.dir.join(NAMES), from, to)
    }

    /// Removes a name. Its run is kept, but may be pruned.
    ///
    /// # Errors
    /// Fails if there is no such name, or it cannot be removed.
    pub fn unname(&self, name: &str) -> Result<(), StoreError> {
        self.has_name(name)?;
        write::remove(&self.dir.join(NAMES), name)
    }

    /// Returns the names with their runs, sorted by name.
    ///
    /// # Errors
    /// Fails if the names cannot be read.
    pub fn names(&self) -> Result<Vec<(String, Id)>, StoreError> {
        let mut all = Vec::new();
        for name in self.all_names()? {
            if let Some(id) = self.named(&name)? {
                all.push((name, id));
            }
        }
        Ok(all)
    }

    /// Removes a run. Concurrent readers find either all of it or nothing.
    ///
    /// # Errors
    /// Fails if the run does not exist or cannot be removed.
    pub fn remove(&self, id: &Id) -> Result<(), StoreError> {
        let trash = self.dir.join(format!("{REMOVED}{id}"));
        let path = self.path(id);
        fs::rename(&path, &trash).map_err(|e| StoreError::io(&path, e))?;
        fs::remove_dir_all(&trash).map_err(|e| StoreError::io(&trash, e))
    }

    /// Removes folders that a stopped writer or remover left.
    ///
    /// # Errors
    /// Fails if the entry was not left by a stopped writer or remover, or cannot be removed.
    pub fn remove_litter(&self, skipped: &Skipped) -> Result<(), StoreError> {
        let own = skipped.path.parent() == Some(self.dir.as_path());
        if !own || !skipped.litter {
            return Err(StoreError::invalid(
                &skipped.path,
                "it is not left over from a stopped writer",
            ));
        }
        match fs::remove_dir_all(&skipped.path) {
            // Another process has removed it first.
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            other => other.map_err(|e| StoreError::io(&skipped.path, e)),
        }
    }

    fn named(&self, name: &str) -> Result<Option<Id>, StoreError> {
        if name.contains(['/', '\\']) || name.starts_with('.') || name.is_empty() {
            return Ok(None);
        }
        let path = self.dir.join(NAMES).join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Id::parse(text.trim())
                .map(Some)
                .ok_or_else(|| StoreError::invalid(&path, "it holds no run id")),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::io(&path, e)),
        }
    }

    /// Returns an error if no run has a name. A name whose file is invalid counts as existing.
    fn has_name(&self, name: &str) -> Result<(), StoreError> {
        let all = self.all_names()?;
        if all.iter().any(|n| n == name) {
            return Ok(());
        }
        let near = nearest(name, all.iter().map(String::as_str));
        Err(StoreError::NoName {
            name: name.to_owned(),
            dir: self.dir.clone(),
            help: near.map_or_else(String::new, |n| format!("; the nearest is `{n}`")),
        })
    }

    fn all_names(&self) -> Result<Vec<String>, StoreError> {
        let mut all = names_in(&self.dir.join(NAMES))?;
        all.retain(|n| !n.starts_with('.'));
        all.sort();
        Ok(all)
    }

    fn names_in_dir(&self) -> Result<Vec<String>, StoreError> {
        names_in(&self.dir)
    }

    fn unknown(&self, text: &str, help: String) -> StoreError {
        StoreError::Unknown {
            text: text.to_owned(),
            dir: self.dir.clone(),
            help,
        }
    }
}

/// Rejects invalid names.
fn valid(name: &str) -> Result<(), StoreError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let valid = !name.is_empty()
        && name.len() <= 64
        && name.chars().all(plain)
        && !name.starts_with('.')
        && back(name).is_none()
        && !Id::could_be(name);
    if valid {
        Ok(())
    } else {
        Err(StoreError::Name(name.to_owned()))
    }
}

/// Parses `last` and `last~N`, and returns how many runs to go back.
fn back(text: &str) -> Option<usize> {
    match text.strip_prefix("last")? {
        "" => Some(0),
        rest => rest.strip_prefix('~')?.parse().ok(),
    }
}

/// Returns the names of the entries of a folder; empty if the folder does not exist.
fn names_in(dir: &Path) -> Result<Vec<String>, StoreError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(StoreError::io(dir, e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| StoreError::io(dir, e))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}

/// Reads a run from any folder.
///
/// # Errors
/// Fails if the run does not exist or is incomplete.
pub fn open_dir(dir: &Path) -> Result<RunView, StoreError> {
    read::view(dir)
}

/// Returns whether a folder looks like a saved run.
#[must_use]
pub fn is_run_dir(dir: &Path) -> bool {
    dir.join(files::RUN).is_file()
}
