//! Writes runs completely or not at all.

use super::entry::summary;
use super::error::StoreError;
use super::files::{GAPS, MEMORY, RUN, SPANS, SUMMARY};
use super::id::Id;
use super::{Store, UNFINISHED, tables};
use crate::environment;
use crate::view::RunView;
use serde::{Deserialize, Serialize};
use shardlab_plan::record::RunKind;
use std::fs::{self, File, TryLockError};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::Path;
use std::time::Duration;

/// File of the scenario's text.
const SCENARIO: &str = "scenario.toml";

/// Number of ids to try before the write fails. Two runs in the same second have the same random
/// digits once in 16 million times.
const TRIES: u32 = 16;
/// Age beyond which a folder without files counts as abandoned.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

/// Content of `run.json`.
#[derive(Serialize, Deserialize)]
pub(super) struct Head<V> {
    /// Sizes of the tables in bytes. A run whose tables have other sizes is incomplete.
    pub(super) spans_bytes: u64,
    /// See `spans_bytes`.
    pub(super) memory_bytes: u64,
    /// See `spans_bytes`.
    pub(super) gaps_bytes: u64,
    /// The view without the content of the tables.
    pub(super) view: V,
}

pub(super) fn writable(store: &Store) -> Result<(), StoreError> {
    let is_new = !store.dir.exists();
    create_dir(&store.dir)?;
    let probe = store.dir.join(format!("{UNFINISHED}{}", Id::now()));
    let probed = fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe));
    if is_new {
        let _ = fs::remove_dir(&store.dir);
    }
    probed.map_err(|e| StoreError::io(&probe, e))
}

/// Returns the run with facts about this machine added to its environment.
pub(super) fn complete(view: &RunView) -> RunView {
    let mut view = view.clone();
    let is_elsewhere = view.run.kind == RunKind::Import;
    for (key, value) in environment::facts() {
        let environment = &mut view.run.environment;
        if is_elsewhere && environment::MACHINE.contains(&key.as_str()) {
            // An imported run was measured on another machine, which its trace does not describe.
            if key == "host" {
                environment.entry("imported_on".to_owned()).or_insert(value);
            }
        } else {
            environment.entry(key).or_insert(value);
        }
    }
    view
}

/// Saves a [`complete`] run.
pub(super) fn save(store: &Store, view: &RunView) -> Result<Id, StoreError> {
    let is_new = !store.dir.exists();
    create_dir(&store.dir)?;
    save_in(store, view).inspect_err(|_| {
        if is_new {
            // Succeeds only if the folder is empty.
            let _ = fs::remove_dir(&store.dir);
        }
    })
}

fn save_in(store: &Store, view: &RunView) -> Result<Id, StoreError> {
    for _ in 0..TRIES {
        let id = Id::now();
        let unfinished = store.dir.join(format!("{UNFINISHED}{id}"));
        match fs::create_dir(&unfinished) {
            Ok(()) => {}
            // Another writer chose the same id.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(StoreError::io(&unfinished, e)),
        }
        let result = write(&unfinished, &id, view).and_then(|lock| {
            let to = store.path(&id);
            match fs::rename(&unfinished, &to) {
                Ok(()) => {
                    sync(&store.dir)?;
                    drop(lock);
                    Ok(Some(id))
                }
                Err(_) if to.exists() => Ok(None),
                Err(e) => Err(StoreError::io(&to, e)),
            }
        });
        match result {
            Ok(Some(id)) => return Ok(id),
            Ok(None) => _ = fs::remove_dir_all(&unfinished),
            Err(e) => {
                let _ = fs::remove_dir_all(&unfinished);
                return Err(e);
            }
        }
    }
    Err(StoreError::invalid(&store.dir, "no free name was found"))
}

/// Writes and flushes all files. The returned file is locked, which shows other processes that the
/// writer is alive.
fn write(dir: &Path, id: &Id, view: &RunView) -> Result<File, StoreError> {
    let path = dir.join(RUN);
    let failed = |e| StoreError::io(&path, e);
    let head_file = File::create_new(&path).map_err(failed)?;
    head_file.lock().map_err(failed)?;
    let spans_bytes = table(dir, SPANS, |to| tables::write_spans(view, to))?;
    let memory_bytes = table(dir, MEMORY, |to| tables::write_memory(view, to))?;
    let gaps_bytes = table(dir, GAPS, |to| tables::write_gaps(view, to))?;
    if !view.scenario.text.is_empty() {
        file(dir, SCENARIO, view.scenario.text.as_bytes())?;
    }
    let json = |value: serde_json::Result<Vec<u8>>| {
        value.map_err(|e| StoreError::invalid(dir, format!("JSON: {e}")))
    };
    let text = json(serde_json::to_vec_pretty(&summary(id, view)))?;
    file(dir, SUMMARY, &text)?;
    let head = Head {
        spans_bytes,
        memory_bytes,
        gaps_bytes,
        view: small(view),
    };
    let mut writer = BufWriter::new(&head_file);
    writer
        .write_all(&json(serde_json::to_vec(&head))?)
        .and_then(|()| writer.flush())
        .map_err(failed)?;
    drop(writer);
    head_file.sync_all().map_err(failed)?;
    sync(dir)?;
    Ok(head_file)
}

/// Returns the view without the content of the tables.
fn small(view: &RunView) -> RunView {
    let mut in_tables: Vec<_> = view.run.spans.iter().map(|s| s.instr).collect();
    in_tables.extend(view.run.memory.timeline.iter().map(|s| s.instr));
    in_tables.sort_unstable();
    let mut small = RunView {
        instrs: view
            .instrs
            .iter()
            .filter(|i| in_tables.binary_search(&i.id).is_err())
            .copied()
            .collect(),
        ..view.clone()
    };
    small.run.spans.clear();
    small.run.gaps.clear();
    small.run.memory.timeline.clear();
    small
}

fn table(
    dir: &Path,
    name: &str,
    fill: impl FnOnce(&mut BufWriter<&File>) -> Result<(), csv::Error>,
) -> Result<u64, StoreError> {
    let path = dir.join(name);
    let failed = |e| StoreError::io(&path, e);
    let file = File::create_new(&path).map_err(failed)?;
    let mut writer = BufWriter::with_capacity(1 << 18, &file);
    fill(&mut writer).map_err(|e| failed(e.into()))?;
    writer.flush().map_err(failed)?;
    drop(writer);
    file.sync_all().map_err(failed)?;
    file.metadata().map(|m| m.len()).map_err(failed)
}

fn file(dir: &Path, name: &str, content: &[u8]) -> Result<(), StoreError> {
    let path = dir.join(name);
    let mut file = File::create_new(&path).map_err(|e| StoreError::io(&path, e))?;
    file.write_all(content)
        .and_then(|()| file.sync_all())
        .map_err(|e| StoreError::io(&path, e))
}

/// Writes a small file atomically, replacing one with the same name.
pub(super) fn replace(dir: &Path, name: &str, content: &[u8]) -> Result<(), StoreError> {
    let unfinished = format!("{UNFINISHED}{}", Id::now());
    file(dir, &unfinished, content)?;
    rename(dir, &unfinished, name).inspect_err(|_| {
        let _ = fs::remove_file(dir.join(&unfinished));
    })
}

/// Renames a small file atomically, replacing one with the new name.
pub(super) fn rename(dir: &Path, from: &str, to: &str) -> Result<(), StoreError> {
    let to = dir.join(to);
    fs::rename(dir.join(from), &to).map_err(|e| StoreError::io(&to, e))?;
    sync(dir)
}

/// Removes a small file.
pub(super) fn remove(dir: &Path, name: &str) -> Result<(), StoreError> {
    let path = dir.join(name);
    fs::remove_file(&path).map_err(|e| StoreError::io(&path, e))?;
    sync(dir)
}

/// Creates a folder and its parents.
pub(super) fn create_dir(dir: &Path) -> Result<(), StoreError> {
    fs::create_dir_all(dir).map_err(|e| StoreError::io(dir, e))
}

/// Flushes a folder, so that the names in it survive a power failure.
fn sync(dir: &Path) -> Result<(), StoreError> {
    // Not every system allows opening a folder. In that case, flushing the files has to suffice.
    match File::open(dir) {
        Ok(file) => file.sync_all().map_err(|e| StoreError::io(dir, e)),
        Err(_) => Ok(()),
    }
}

/// Returns whether the writer of an unfinished run has stopped: the first file of the run is not
/// locked.
pub(super) fn abandoned(dir: &Path) -> bool {
    match File::open(dir.join(RUN)) {
        Ok(file) => match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => false,
        },
        Err(_) => fs::metadata(dir)
            .and_then(|m| m.modified())
            .ok()
            .and_then(|t| t.elapsed().ok())
            .is_some_and(|age| age > ABANDONED_AFTER),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn the_machine_of_an_imported_run_is_another_one() {
        let mut view = testing::view(100);
        view.run.environment.clear();
        view.run.kind = RunKind::Exec;
        let own = complete(&view).run.environment;
        view.run.kind = RunKind::Import;
        let imported = complete(&view).run.environment;
        assert_eq!(imported.get("imported_on"), own.get("host"));
        assert!(own.contains_key("os"));
        let machine = environment::MACHINE;
        assert!(machine.iter().all(|key| !imported.contains_key(*key)));
        assert_eq!(imported.get("shardlab"), own.get("shardlab"));
    }
}
