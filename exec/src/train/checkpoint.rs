//! Checkpoints: one folder a step, with a `safetensors` file a rank and an index of what lies where.
//!
//! Every element of every state is stored once, by the lowest rank that holds it, under its place in the whole parameter:
//! a program of any mesh, strategy, policy or precision can load it. A folder is written under a temporary name, synced and
//! renamed, so that whatever has the name `step-N` is complete; checksums tell damage that came later.

mod index;
mod load;
mod save;

pub use index::{Index, Piece, Progress};
pub use load::Checkpoint;
pub use save::{Saver, Snapshot};

use super::TrainError;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Name of a finished checkpoint.
fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// Step of a finished checkpoint's name.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    keep: usize,
}

impl Store {
    /// Opens (and makes) a folder in which the newest `keep` checkpoints stay. Leftovers of a save that did not finish are
    /// removed.
    ///
    /// # Errors
    /// When the folder cannot be made, read or tidied.
    pub fn open(dir: &Path, keep: usize) -> Result<Self, TrainError> {
        std::fs::create_dir_all(dir).map_err(TrainError::io(dir))?;
        let store = Self {
            dir: dir.to_owned(),
            keep: keep.max(1),
        };
        for (path, name) in store.entries()? {
            if name.starts_with(".tmp-") {
                std::fs::remove_dir_all(&path).map_err(TrainError::io(&path))?;
            }
        }
        Ok(store)
    }

    /// The folder that another process has opened.
    #[must_use]
    pub fn attach(dir: &Path, keep: usize) -> Self {
        Self {
            dir: dir.to_owned(),
            keep: keep.max(1),
        }
    }

    fn entries(&self) -> Result<Vec<(PathBuf, String)>, TrainError> {
        let list = std::fs::read_dir(&self.dir).map_err(TrainError::io(&self.dir))?;
        let mut out = Vec::new();
        for entry in list {
            let entry = entry.map_err(TrainError::io(&self.dir))?;
            out.push((
                entry.path(),
                entry.file_name().to_string_lossy().into_owned(),
            ));
        }
        out.sort();
        Ok(out)
    }

    /// Steps of the finished checkpoints, ascending.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, TrainError> {
        let mut steps: Vec<u64> = self
            .entries()?
            .iter()
            .filter_map(|(_, n)| step_of(n))
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Folder of a step's checkpoint.
    #[must_use]
    pub fn path(&self, step: u64) -> PathBuf {
        self.dir.join(name_of(step))
    }

    /// Steps of the checkpoints that training from a step on does not build upon.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn beyond(&self, step: u64) -> Result<Vec<u64>, TrainError> {
        let mut steps = self.steps()?;
        steps.retain(|s| *s > step);
        Ok(steps)
    }

    /// Gives the checkpoints beyond a step names under which they are neither resumed from nor removed.
    fn put_aside(&self, step: u64) -> Result<(), TrainError> {
        let steps = self.beyond(step)?;
        for step in &steps {
            let path = self.path(*step);
            let mut names = (1..).map(|n| self.dir.join(format!("{}.aside-{n}", name_of(*step))));
            let aside = names.find(|p| !p.exists()).unwrap_or_default();
            std::fs::rename(&path, aside).map_err(TrainError::io(&path))?;
        }
        // Before a new one gets its name: no kill leaves them above it.
        if steps.is_empty() {
            Ok(())
        } else {
            sync_dir(&self.dir)
        }
    }

    /// Removes all but the newest checkpoints.
    fn prune(&self) -> Result<(), TrainError> {
        let steps = self.steps()?;
        for step in &steps[..steps.len().saturating_sub(self.keep)] {
            let path = self.path(*step);
            std::fs::remove_dir_all(&path).map_err(TrainError::io(&path))?;
        }
        Ok(())
    }
}

/// Makes names in a folder durable.
fn sync_dir(dir: &Path) -> Result<(), TrainError> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(TrainError::io(dir))
}

#[cfg(test)]
mod tests;
