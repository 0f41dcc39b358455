//! Runs saved in a folder.
//!
//! ```text
//! runs/20261120-143455678-3f2a9c/    one folder a run, never changed once it has its name
//!     summary.json    the JSON contract of a run, with id, date, options: all that a list needs
//!     run.json        the rest of its view, and which tables belong to it
//!     scenario.toml   the scenario as it was read
//!     spans.csv  memory.csv  gaps.csv
//! runs/.unfinished-…  a run being written, or one whose writer was killed
//! runs/.removed-…     a run being removed
//! runs/.names/NAME    holds the id that NAME stands for
//! ```
//!
//! A run is written under a temporary name, flushed to the disk and renamed: what has an id is
//! whole. Writers do not meet: ids are unique, and of two writers of one id the later one takes
//! another. Whatever is not whole is left out of lists and reported with the reason.

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
pub use id::{Id, day};
pub use known::{Known, Saved};

use crate::view::RunView;
use shardlab_plan::scenario::nearest;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Folder of runs where none is named.
pub const DEFAULT_DIR: &str = "runs";
/// Prefix of runs being written.
const UNFINISHED: &str = ".unfinished-";
/// Prefix of runs being removed.
const REMOVED: &str = ".removed-";
/// Folder of names.
const NAMES: &str = ".names";

/// A folder of runs. It is created by the first run that is saved in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    dir: PathBuf,
}

/// What is in a store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// Whole runs, oldest first.
    pub runs: Vec<Entry>,
    /// What is there but no whole run.
    pub skipped: Vec<Skipped>,
}

/// Something in a store that is not a complete run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Where.
    pub path: PathBuf,
    /// Why it is left out.
    pub reason: String,
    /// Whether it is left over from a writer or remover that is gone, so that removing it loses
    /// nothing.
    pub litter: bool,
}

impl Store {
    /// The store in a folder, which need not be there yet.
    #[must_use]
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Its folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Checks, before a long computation, that runs can be saved: a folder is made and removed
    /// again.
    ///
    /// # Errors
    /// [`StoreError::Io`] when they cannot.
    pub fn writable(&self) -> Result<(), StoreError> {
        write::writable(self)
    }

    /// Saves a run, with what is known about this machine added to its environment.
    ///
    /// # Errors
    /// When it cannot be written; then nothing of it is listed.
    pub fn save(&self, view: &RunView) -> Result<Id, StoreError> {
        write::save(self, &write::complete(view))
    }

    /// Reads a run.
    ///
    /// # Errors
    /// When it is not there or not whole.
    pub fn open(&self, id: &Id) -> Result<RunView, StoreError> {
        open_dir(&self.path(id))
    }

    /// What a list shows of one run.
    ///
    /// # Errors
    /// When it is not there or not whole.
    pub fn entry(&self, id: &Id) -> Result<Entry, StoreError> {
        Entry::read(&self.path(id))
    }

    /// Folder of a run.
    #[must_use]
    pub fn path(&self, id: &Id) -> PathBuf {
        self.dir.join(id.as_str())
    }

    /// All runs. A folder that is not there is an empty store.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn list(&self) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        for name in self.names_in_dir()? {
            let path = self.dir.join(&name);
            if name.starts_with(UNFINISHED) {
                let litter = write::abandoned(&path);
                listing.skipped.push(Skipped {
                    reason: if litter {
                        "its writer stopped before it was whole".into()
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

    /// Ids of all runs, oldest first, whole or not, without reading them.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn ids(&self) -> Result<Vec<Id>, StoreError> {
        let mut ids: Vec<Id> = self
            .names_in_dir()?
            .iter()
            .filter_map(|n| Id::parse(n))
            .collect();
        ids.sort();
        Ok(ids)
    }

    /// The run that a text means: an id, an unambiguous beginning of one or of its last part,
    /// `last`, `last~N`, or a name given with [`Store::name`].
    ///
    /// # Errors
    /// When there is no such run, or more than one; the nearest valid name is part of the message.
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

    /// Refuses what cannot be the name of a run.
    ///
    /// # Errors
    /// When it could be taken for an id or a path.
    pub fn check_name(name: &str) -> Result<(), StoreError> {
        valid(name)
    }

    /// Gives a run a name, in place of the run that had it before.
    ///
    /// # Errors
    /// When the name could be taken for an id or a path, or cannot be written.
    pub fn name(&self, name: &str, id: &Id) -> Result<(), StoreError> {
        valid(name)?;
        let dir = self.dir.join(NAMES);
        write::create_dir(&dir)?;
        write::replace(&dir, name, format!("{id}\n").as_bytes())
    }

    /// Gives the run that has the name `from` the name `to` instead, in one step: others find it by
    /// the one or by the other. A run that had `to` before has it no more.
    ///
    /// # Errors
    /// When there is no such name, when the new one could be taken for an id or a path, or when it
    /// cannot be written.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StoreError> {
        valid(to)?;
        self.has_name(from)?;
        write::rename(&self.dir.join(NAMES), from, to)
    }

    /// Takes a name away. The run that had it stays, and may be pruned from now on.
    ///
    /// # Errors
    /// When there is no such name, or it cannot be removed.
    pub fn unname(&self, name: &str) -> Result<(), StoreError> {
        self.has_name(name)?;
        write::remove(&self.dir.join(NAMES), name)
    }

    /// The names and what they stand for, by name.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn names(&self) -> Result<Vec<(String, Id)>, StoreError> {
        let mut all = Vec::new();
        for name in self.all_names()? {
            if let Some(id) = self.named(&name)? {
                all.push((name, id));
            }
        }
        Ok(all)
    }

    /// Removes a run. Others that read it meanwhile find it gone, never half.
    ///
    /// # Errors
    /// When it is not there or cannot be removed.
    pub fn remove(&self, id: &Id) -> Result<(), StoreError> {
        let trash = self.dir.join(format!("{REMOVED}{id}"));
        let path = self.path(id);
        fs::rename(&path, &trash).map_err(|e| StoreError::io(&path, e))?;
        fs::remove_dir_all(&trash).map_err(|e| StoreError::io(&trash, e))
    }

    /// Removes what a stopped writer or remover left.
    ///
    /// # Errors
    /// When it is no litter or cannot be removed.
    pub fn remove_litter(&self, skipped: &Skipped) -> Result<(), StoreError> {
        let own = skipped.path.parent() == Some(self.dir.as_path());
        if !own || !skipped.litter {
            return Err(StoreError::invalid(
                &skipped.path,
                "it is not left over from a stopped writer",
            ));
        }
        match fs::remove_dir_all(&skipped.path) {
            // Someone else was quicker.
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

    /// Refuses a name that no run has; one that stands for nothing sensible is a name too.
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

/// Refuses what cannot be a name.
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

/// `last` and `last~N`: how many runs back.
fn back(text: &str) -> Option<usize> {
    match text.strip_prefix("last")? {
        "" => Some(0),
        rest => rest.strip_prefix('~')?.parse().ok(),
    }
}

/// Names of what is in a folder; nothing where it is not there.
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

/// Reads the run in a folder, wherever it is.
///
/// # Errors
/// When it is not there or not whole.
pub fn open_dir(dir: &Path) -> Result<RunView, StoreError> {
    read::view(dir)
}

/// Whether a folder looks like a stored run.
#[must_use]
pub fn is_run_dir(dir: &Path) -> bool {
    dir.join(files::RUN).is_file()
}
