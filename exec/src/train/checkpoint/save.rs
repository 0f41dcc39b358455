//! Saving of checkpoints: a snapshot between two steps, written by a background thread while
//! training continues.
//!
//! Several processes write one checkpoint: each writes the files of its ranks, and process 0
//! creates the folder and the index, and renames the folder when it is complete.

use super::index::{
    FORMAT, Index, IndexFile, IndexParam, Piece, PieceType, Progress, file_of, tensor_of,
};
use super::{Store, held, name_of, sync_dir};
use crate::base::blockwise;
use crate::process::ProcessGroup;
use crate::train::data::{encode, floats};
use crate::train::layout::{Kind, Span, StateLayout};
use crate::train::state::StateIo;
use crate::train::{TrainError, tensor_file};
use shardlab_plan::Program;
use shardlab_plan::ir::{DType, STATE_BLOCK};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Pieces of a rank with their element types and bytes.
type Contents = Vec<(Piece, PieceType, Vec<u8>)>;

/// State of this process's ranks at one step, in host memory.
#[derive(Clone, Debug)]
pub struct Snapshot {
    index: Index,
    /// By rank of this process: its number, and its state in the order of the index.
    ranks: Vec<(u32, Contents)>,
}

impl Snapshot {
    /// Makes a snapshot of whole states in float32, as if one rank held all of them. `values`
    /// returns the elements of a parameter's state; `None` if it has none.
    ///
    /// # Errors
    /// If `values` fails.
    pub fn whole(
        program: &Program,
        progress: Progress,
        mut values: impl FnMut(usize, Kind) -> Result<Option<Vec<f32>>, TrainError>,
    ) -> Result<Self, TrainError> {
        let mut contents = Contents::new();
        for param in 0..program.params.len() {
            for kind in Kind::ALL {
                let Some(values) = values(param, kind)? else {
                    continue;
                };
                let elements = 0..values.len() as u64;
                let piece = piece(program, param, kind, elements, (0, 1));
                contents.push((piece, DType::F32, encode(&values, DType::F32)));
            }
        }
        let pieces = contents.iter().map(|c| c.0.clone()).collect();
        Ok(Self {
            index: index(program, 1, progress, pieces),
            ranks: vec![(0, contents)],
        })
    }

    /// Copies the state from the ranks' memory. `state` is false before the first step, when no
    /// moments exist.
    ///
    /// # Errors
    /// If a buffer of the state cannot be read.
    pub fn take(
        program: &Program,
        layout: &StateLayout,
        io: &mut dyn StateIo,
        progress: Progress,
    ) -> Result<Self, TrainError> {
        let world = program.meta.mesh.world();
        let local = io.local();
        let mut ranks: Vec<(u32, Contents)> = local.clone().map(|r| (r, Vec::new())).collect();
        let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); world as usize];
        let with_moments = progress.step > 0;
        let held = held(program);
        let kinds = Kind::ALL
            .iter()
            .filter(|k| **k == Kind::Master || with_moments);
        for &kind in kinds {
            for (rank, span) in layout.primaries(kind) {
                let param = span.param.index();
                if !held[param] {
                    continue;
                }
                let piece = piece(program, param, kind, span.elements.clone(), (rank, world));
                if local.contains(&rank) {
                    let (dtype, bytes) = read_state(io, rank, span, kind)?;
                    let place = (rank - local.start) as usize;
                    ranks[place].1.push((piece.clone(), dtype, bytes));
                }
                pieces[rank as usize].push(piece);
            }
        }
        Ok(Self {
            index: index(program, world, progress, pieces.concat()),
            ranks,
        })
    }

    /// Writes the checkpoint together with the other processes and makes it durable; then removes
    /// the oldest ones. Checkpoints after `after`, the last step that this training continues,
    /// belong to another training and are renamed.
    ///
    /// # Errors
    /// If a file cannot be written, by this process or another one. The folder is then unchanged.
    pub fn write(self, store: &Store, after: u64, peers: &ProcessGroup) -> Result<(), TrainError> {
        let name = name_of(self.index.progress.step);
        let temporary = store.dir.join(format!(".tmp-{name}"));
        let leads = peers.process() == 0;
        let done = self.write_parts(store, &temporary, after, peers);
        if done.is_err() && leads {
            // The first error is reported; leftovers are removed when the folder is opened again.
            let _ = std::fs::remove_dir_all(&temporary);
        }
        done?;
        if leads { store.prune() } else { Ok(()) }
    }

    /// Runs a part on every process before the next one starts; an error of one process is an error
    /// of all.
    fn write_parts(
        mut self,
        store: &Store,
        temporary: &Path,
        after: u64,
        peers: &ProcessGroup,
    ) -> Result<(), TrainError> {
        let leads = peers.process() == 0;
        let made = if leads { make(temporary) } else { Ok(()) };
        exchange_result(peers, temporary, made.map(|()| Vec::new()))?;
        let files = self.write_files(temporary);
        for files in exchange_result(peers, temporary, files)? {
            self.index.files.extend(files);
        }
        let placed = if leads {
            self.write_index(temporary).and_then(|()| {
                store.put_aside(after)?;
                let place = store.path(self.index.progress.step);
                std::fs::rename(temporary, &place).map_err(TrainError::io(&place))?;
                sync_dir(&store.dir)
            })
        } else {
            Ok(())
        };
        exchange_result(peers, temporary, placed.map(|()| Vec::new()))?;
        Ok(())
    }

    /// Writes the files of this process's ranks.
    fn write_files(&self, dir: &Path) -> Result<Vec<(String, IndexFile)>, TrainError> {
        let mut files = Vec::new();
        for (rank, pieces) in &self.ranks {
            let name = file_of(*rank, self.index.world_size);
            let tensors: Vec<_> = pieces
                .iter()
                .map(|(p, dtype, _)| (p.tensor.clone(), *dtype, vec![p.numel]))
                .collect();
            let header = tensor_file::header(&tensors);
            let parts =
                std::iter::once(header.as_slice()).chain(pieces.iter().map(|p| p.2.as_slice()));
            let file = write_synced(&dir.join(&name), parts)?;
            files.push((name, file));
        }
        Ok(files)
    }

    fn write_index(&self, dir: &Path) -> Result<(), TrainError> {
        let text = serde_json::to_vec(&self.index)
            .map_err(|e| TrainError::format(dir, format!("index: {e}")))?;
        let sum = write_synced(&dir.join("index.json"), [text.as_slice()])?.blake3;
        write_synced(&dir.join("index.blake3"), [sum.as_bytes()])?;
        sync_dir(dir)
    }
}

/// Returns the piece with these elements of a parameter's state, in the file of one of `world`
/// ranks.
fn piece(
    program: &Program,
    param: usize,
    kind: Kind,
    elements: Range<u64>,
    (rank, world): (u32, u32),
) -> Piece {
    Piece {
        param,
        kind: kind.name().to_owned(),
        start: elements.start,
        numel: elements.end - elements.start,
        tensor: tensor_of(&program.params[param].name, kind, elements.start),
        file: file_of(rank, world),
    }
}

/// Returns the index of pieces of `world` ranks, before their files are known.
fn index(program: &Program, world: u32, progress: Progress, pieces: Vec<Piece>) -> Index {
    let params = program.params.iter().map(|p| IndexParam {
        name: p.name.clone(),
        shape: p.full_shape(&program.meta.mesh).to_vec(),
    });
    Index {
        format: FORMAT,
        scenario: program.meta.scenario.clone(),
        program_digest: program.digest(),
        world_size: world,
        progress,
        params: params.collect(),
        files: BTreeMap::new(),
        pieces,
    }
}

/// Reads elements of a state. Those of 8-bit states are saved in float32, which any sharding
/// can load.
fn read_state(
    io: &mut dyn StateIo,
    rank: u32,
    span: &Span,
    kind: Kind,
) -> Result<(PieceType, Vec<u8>), TrainError> {
    let bytes = io.read(rank, span.buffer, span.offset, span.bytes())?;
    let Some(scales) = span.scales else {
        return Ok((span.dtype, bytes));
    };
    let map = blockwise::codebook(kind == Kind::First);
    let (start, end) = (span.offset, span.offset + span.bytes());
    let blocks = start / STATE_BLOCK..end.div_ceil(STATE_BLOCK);
    let at = (blocks.start * 4, (blocks.end - blocks.start) * 4);
    let scales = floats(&io.read(rank, scales, at.0, at.1)?, DType::F32);
    let mut values = vec![0.0; bytes.len()];
    for (block, scale) in blocks.zip(scales) {
        let first = (block * STATE_BLOCK).max(start) - start;
        let last = ((block + 1) * STATE_BLOCK).min(end) - start;
        let range = first as usize..last as usize;
        blockwise::dequantize(&bytes[range.clone()], scale, map, &mut values[range]);
    }
    Ok((DType::F32, encode(&values, DType::F32)))
}

/// Creates an empty folder.
fn make(dir: &Path) -> Result<(), TrainError> {
    if dir.exists() {
        std::fs::remove_dir_all(dir).map_err(TrainError::io(dir))?;
    }
    std::fs::create_dir(dir).map_err(TrainError::io(dir))
}

type Files = Vec<(String, IndexFile)>;

/// Exchanges the result of a part with the other processes.
fn exchange_result(
    peers: &ProcessGroup,
    dir: &Path,
    mine: Result<Files, TrainError>,
) -> Result<Vec<Files>, TrainError> {
    if peers.processes() == 1 {
        return Ok(vec![mine?]);
    }
    let sent: Result<&Files, String> = mine.as_ref().map_err(ToString::to_string);
    let text =
        serde_json::to_vec(&sent).map_err(|e| TrainError::format(dir, format!("index: {e}")))?;
    let all = peers.all_gather_untimed("checkpoint", text)?;
    mine?;
    let mut parts = Vec::new();
    for (process, text) in all.iter().enumerate() {
        let received: Result<Files, String> =
            serde_json::from_slice(text).unwrap_or_else(|e| Err(e.to_string()));
        parts.push(received.map_err(|e| TrainError::format(dir, format!("rank {process}: {e}")))?);
    }
    Ok(parts)
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
    /// Step of the previous checkpoint, or the first step of this training.
    after: u64,
    peers: Arc<ProcessGroup>,
    running: Option<JoinHandle<Result<(), TrainError>>>,
}

impl Saver {
    /// Creates a saver for a training from a given step, together with the processes of a group.
    #[must_use]
    pub fn new(store: Store, from: u64, peers: Arc<ProcessGroup>) -> Self {
        Self {
            store,
            after: from,
            peers,
            running: None,
        }
    }

    /// Begins to write a snapshot, once the previous one is complete.
    ///
    /// # Errors
    /// If the previous save failed, or if no thread can be started.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<(), TrainError> {
        self.finish()?;
        let (store, peers) = (self.store.clone(), Arc::clone(&self.peers));
        let after = std::mem::replace(&mut self.after, snapshot.index.progress.step);
        let spawned = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || snapshot.write(&store, after, &peers));
        self.running = Some(spawned.map_err(TrainError::io(&self.store.dir))?);
        Ok(())
    }

    /// Waits for the current save.
    ///
    /// # Errors
    /// If the save failed.
    pub fn finish(&mut self) -> Result<(), TrainError> {
        match self.running.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(TrainError::format(
                &PathBuf::from(&self.store.dir),
                "the thread that saves checkpoints panicked",
            )),
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // An error here follows one that has been reported.
        let _ = self.finish();
    }
}
