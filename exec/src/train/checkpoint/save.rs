//! Saving: a snapshot between two steps, written to disk by a thread of its own while training goes on.

use super::index::{
    FORMAT, Index, IndexFile, IndexParam, Piece, PieceType, Progress, file_of, tensor_of,
};
use super::{Store, name_of, sync_dir};
use crate::train::layout::{Kind, StateLayout};
use crate::train::state::StateIo;
use crate::train::{TrainError, safe};
use shardlab_plan::Program;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// State of all ranks at one moment, in host memory.
#[derive(Clone, Debug)]
pub struct Snapshot {
    index: Index,
    /// By rank: type and bytes of the pieces, in the index's order.
    ranks: Vec<Vec<(Piece, PieceType, Vec<u8>)>>,
}

impl Snapshot {
    /// Copies the state out of the ranks' memory. `state` is false before the first step, when no moments exist.
    ///
    /// # Errors
    /// What the memory reports.
    pub fn take(
        program: &Program,
        layout: &StateLayout,
        io: &mut dyn StateIo,
        progress: Progress,
    ) -> Result<Self, TrainError> {
        let world = program.meta.world;
        let mut ranks: Vec<Vec<(Piece, PieceType, Vec<u8>)>> = vec![Vec::new(); world as usize];
        let with_moments = progress.step > 0;
        let kinds = Kind::ALL
            .iter()
            .filter(|k| **k == Kind::Master || with_moments);
        for &kind in kinds {
            for (rank, span) in layout.primaries(kind) {
                let bytes = io.read(rank, span.buffer, span.offset, span.bytes())?;
                let param = span.param.index();
                let piece = Piece {
                    param,
                    kind: kind.name().to_owned(),
                    start: span.elements.start,
                    numel: span.numel(),
                    tensor: tensor_of(&program.params[param].name, kind, span.elements.start),
                    file: file_of(rank, world),
                };
                ranks[rank as usize].push((piece, span.dtype, bytes));
            }
        }
        let params = program
            .params
            .iter()
            .map(|p| IndexParam {
                name: p.name.clone(),
                shape: p.shape.to_vec(),
            })
            .collect();
        let index = Index {
            format: FORMAT,
            scenario: program.meta.scenario.clone(),
            program_digest: program.digest(),
            world_size: world,
            progress,
            params,
            files: BTreeMap::new(),
            pieces: ranks.iter().flatten().map(|(p, _, _)| p.clone()).collect(),
        };
        Ok(Self { index, ranks })
    }

    /// Writes the checkpoint and makes it durable; then drops the oldest ones.
    ///
    /// # Errors
    /// What the file system reports. The folder then holds what it held before.
    pub fn write(mut self, store: &Store) -> Result<(), TrainError> {
        let name = name_of(self.index.progress.step);
        let temporary = store.dir.join(format!(".tmp-{name}"));
        let done = self.write_files(&temporary).and_then(|()| {
            place(
                &temporary,
                &store.dir.join(&name),
                &store.dir.join(format!(".old-{name}")),
            )?;
            sync_dir(&store.dir)
        });
        if done.is_err() {
            // The first error is the one to report; a leftover is removed when the folder is opened again.
            let _ = std::fs::remove_dir_all(&temporary);
        }
        done?;
        store.prune()
    }

    fn write_files(&mut self, dir: &Path) -> Result<(), TrainError> {
        if dir.exists() {
            std::fs::remove_dir_all(dir).map_err(TrainError::io(dir))?;
        }
        std::fs::create_dir(dir).map_err(TrainError::io(dir))?;
        let world = self.index.world_size;
        for (rank, pieces) in (0u32..).zip(&self.ranks) {
            let name = file_of(rank, world);
            let tensors: Vec<_> = pieces
                .iter()
                .map(|(p, dtype, _)| (p.tensor.clone(), *dtype, vec![p.numel]))
                .collect();
            let header = safe::header(&tensors);
            let parts =
                std::iter::once(header.as_slice()).chain(pieces.iter().map(|p| p.2.as_slice()));
            let file = write_synced(&dir.join(&name), parts)?;
            self.index.files.insert(name, file);
        }
        let text = serde_json::to_vec(&self.index)
            .map_err(|e| TrainError::format(dir, format!("index: {e}")))?;
        let sum = write_synced(&dir.join("index.json"), [text.as_slice()])?.blake3;
        write_synced(&dir.join("index.blake3"), [sum.as_bytes()])?;
        sync_dir(dir)
    }
}

/// Gives a finished folder its name, in place of an older one of that name.
fn place(temporary: &Path, place: &Path, old: &Path) -> Result<(), TrainError> {
    if place.exists() {
        std::fs::rename(place, old).map_err(TrainError::io(place))?;
    }
    std::fs::rename(temporary, place).map_err(TrainError::io(place))?;
    if old.exists() {
        std::fs::remove_dir_all(old).map_err(TrainError::io(old))?;
    }
    Ok(())
}

fn write_synced<'a>(
    path: &Path,
    parts: impl IntoIterator<Item = &'a [u8]>,
) -> Result<IndexFile, TrainError> {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = 0;
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        for part in parts {
            hasher.update(part);
            bytes += part.len() as u64;
            out.write_all(part)?;
        }
        out.flush()?;
        out.get_ref().sync_all()
    };
    write().map_err(TrainError::io(path))?;
    Ok(IndexFile {
        bytes,
        blake3: hasher.finalize().to_hex().to_string(),
    })
}

/// Saves in the background, one checkpoint at a time.
#[derive(Debug)]
pub struct Saver {
    store: Store,
    running: Option<JoinHandle<Result<(), TrainError>>>,
}

impl Saver {
    /// Saves into this folder.
    #[must_use]
    pub fn new(store: Store) -> Self {
        Self {
            store,
            running: None,
        }
    }

    /// Begins to write a snapshot, once the one before is done.
    ///
    /// # Errors
    /// Those of the save before.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<(), TrainError> {
        self.finish()?;
        let store = self.store.clone();
        let spawned = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || snapshot.write(&store));
        self.running = Some(spawned.map_err(TrainError::io(&self.store.dir))?);
        Ok(())
    }

    /// Waits for the save at hand.
    ///
    /// # Errors
    /// Its errors.
    pub fn finish(&mut self) -> Result<(), TrainError> {
        match self.running.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(TrainError::format(
                &PathBuf::from(&self.store.dir),
                "the thread that saves panicked",
            )),
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // An error here follows one that is already reported.
        let _ = self.finish();
    }
}
