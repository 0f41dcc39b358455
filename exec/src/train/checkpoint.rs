//! Checkpoints: one folder per step, with a `safetensors` file per rank and an index of their
//! contents.
//!
//! Every element of every state is stored once, by the lowest rank that has it, with its position
//! in the whole parameter, so programs of any mesh, strategy, policy or precision can load it. A
//! folder is written under a temporary name, synced and renamed, so every folder named `step-N` is
//! complete; checksums detect later damage.

mod index;
mod load;
mod save;

pub use index::{Index, Piece, Progress};
pub use load::Checkpoint;
pub use save::{Saver, Snapshot};

use super::TrainError;
use shardlab_plan::Program;
use shardlab_plan::ir::Param;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Returns whether checkpoints hold each parameter: all, or those that files of adapters have if
/// there are any adapters.
fn held(program: &Program) -> Vec<bool> {
    let adapters = program.params.iter().any(Param::is_adapter);
    let params = program.params.iter();
    params
        .map(|p| !adapters || p.is_saved_with_adapters())
        .collect()
}

/// Returns the name of a finished checkpoint.
fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// Parses the step from the name of a finished checkpoint.
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
    /// Opens (or creates) a folder that keeps the newest `keep` checkpoints. Removes leftovers of
    /// unfinished saves.
    ///
    /// # Errors
    /// If the folder cannot be created, read or cleaned up.
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

    /// Returns a folder that another process has opened.
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

    /// Returns the steps of the finished checkpoints, ascending.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, TrainError> {
        let mut steps: Vec<u64> = self
            .entries()?
            .iter()
            .filter_map(|(_, n)| step_of(n))
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns the folder of a step's checkpoint.
    #[must_use]
    pub fn path(&self, step: u64) -> PathBuf {
        self.dir.join(name_of(step))
    }

    /// Returns the steps of checkpoints that a training from a given step does not continue.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn beyond(&self, step: u64) -> Result<Vec<u64>, TrainError> {
        let mut steps = self.steps()?;
        steps.retain(|s| *s > step);
        Ok(steps)
    }

    /// Renames the checkpoints after a step, so that they are neither resumed from nor removed.
    fn put_aside(&self, step: u64) -> Result<(), TrainError> {
        let steps = self.beyond(step)?;
        for step in &steps {
            let path = self.path(*step);
            let mut names = (1..).map(|n| self.dir.join(format!("{}.aside-{n}", name_of(*step))));
            let aside = names.find(|p| !p.exists()).unwrap_or_default();
            std::fs::rename(&path, aside).map_err(TrainError::io(&path))?;
        }
        // Precedes the rename of a new checkpoint, so that no crash leaves the old ones after it.
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

/// Makes the names in a folder durable.
fn sync_dir(dir: &Path) -> Result<(), TrainError> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(TrainError::io(dir))
}

#[cfg(test)]
mod tests;
