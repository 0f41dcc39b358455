//! Loading of checkpoints into any program of the same model.

use super::held;
use super::index::{FORMAT, Index, Piece, Progress};
use crate::base::blockwise;
use crate::train::TrainError;
use crate::train::data::encode;
use crate::train::layout::{Kind, Span, StateLayout};
use crate::train::state::StateIo;
use crate::train::tensor_file::TensorFile;
use shardlab_plan::Program;
use shardlab_plan::ir::{BufferId, DType, ParamId};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A checkpoint whose checksums have been verified.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: Index,
    files: BTreeMap<String, TensorFile>,
    /// By parameter and kind: pieces, ascending.
    pieces: BTreeMap<(usize, Kind), Vec<Piece>>,
}

impl Checkpoint {
    /// Opens a checkpoint and verifies all of its files.
    ///
    /// # Errors
    /// If files are missing, truncated or modified; the error names them.
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        Self::read(path, true)
    }

    /// Opens a checkpoint that another process has verified.
    ///
    /// # Errors
    /// If files are missing or cannot be read.
    pub(crate) fn open_verified(path: &Path) -> Result<Self, TrainError> {
        Self::read(path, false)
    }

    fn read(path: &Path, verify: bool) -> Result<Self, TrainError> {
        let index_path = path.join("index.json");
        let text = std::fs::read(&index_path).map_err(TrainError::io(&index_path))?;
        let sum_path = path.join("index.blake3");
        let sum = std::fs::read_to_string(&sum_path).map_err(TrainError::io(&sum_path))?;
        if blake3::hash(&text).to_hex().as_str() != sum.trim() {
            return Err(TrainError::format(&index_path, "corrupt: wrong checksum"));
        }
        let index: Index = serde_json::from_slice(&text)
            .map_err(|e| TrainError::format(&index_path, e.to_string()))?;
        if index.format != FORMAT {
            let what = format!(
                "unknown format {}; this version reads {FORMAT}",
                index.format
            );
            return Err(TrainError::format(&index_path, what));
        }
        let mut files = BTreeMap::new();
        for (name, file) in &index.files {
            let at = path.join(name);
            let (bytes, sum) = if verify {
                checksum(&at)?
            } else {
                let size = std::fs::metadata(&at).map_err(TrainError::io(&at))?.len();
                (size, file.blake3.clone())
            };
            if bytes != file.bytes {
                let what = format!("corrupt: {bytes} bytes of {}", file.bytes);
                return Err(TrainError::format(&at, what));
            }
            if sum != file.blake3 {
                return Err(TrainError::format(&at, "corrupt: wrong checksum"));
            }
            files.insert(name.clone(), TensorFile::open(&at)?);
        }
        let mut pieces: BTreeMap<(usize, Kind), Vec<Piece>> = BTreeMap::new();
        for piece in &index.pieces {
            let Some(kind) = Kind::ALL.into_iter().find(|k| piece.is(*k)) else {
                let what = format!("unknown state `{}`", piece.kind);
                return Err(TrainError::format(&index_path, what));
            };
            pieces
                .entry((piece.param, kind))
                .or_default()
                .push(piece.clone());
        }
        for list in pieces.values_mut() {
            list.sort_by_key(|p| p.start);
        }
        Ok(Self {
            path: path.to_owned(),
            index,
            files,
            pieces,
        })
    }

    /// Returns the progress of the run.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.index.progress
    }

    /// Returns the index.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Writes weights and moments into the memory of ranks, before their first step. If there are
    /// adapters, it writes only theirs.
    ///
    /// # Errors
    /// If weights or moments are missing or have another shape (all of them are named), and errors
    /// of files and memory.
    pub fn load(
        &mut self,
        program: &Program,
        layout: &StateLayout,
        io: &mut dyn StateIo,
    ) -> Result<(), TrainError> {
        let of = self.indices(program)?;
        let held = held(program);
        self.require(program, layout, &of, &held)?;
        for (p, from) in of.iter().enumerate().filter(|(p, _)| held[*p]) {
            let param = ParamId(p as u32);
            layout.set_weights(io, param, &mut |elements| {
                self.elements(*from, Kind::Master, elements)
            })?;
        }
        if self.index.progress.step == 0 {
            return Ok(());
        }
        let local = io.local();
        let ranks = (0u32..).zip(&layout.ranks);
        for (rank, state) in ranks.filter(|(r, _)| local.contains(r)) {
            for kind in [Kind::First, Kind::Second] {
                let mut by_buffer: BTreeMap<BufferId, Vec<&Span>> = BTreeMap::new();
                for span in state.of(kind) {
                    by_buffer.entry(span.buffer).or_default().push(span);
                }
                for (buffer, spans) in by_buffer {
                    let buffer = (buffer, spans[0].scales);
                    let numel = program.buffers[buffer.0.index()].bytes.0 / spans[0].dtype.size();
                    let mut values = vec![0.0; numel as usize];
                    for span in spans {
                        let found =
                            self.elements(of[span.param.index()], kind, span.elements.clone())?;
                        let at = (span.offset / span.dtype.size()) as usize;
                        values[at..at + found.len()].copy_from_slice(&found);
                    }
                    let dtype = program.buffers[buffer.0.index()].dtype;
                    preset(io, rank, buffer, dtype, &values, kind)?;
                }
            }
        }
        Ok(())
    }

    /// Returns all elements of a state, in float32; `None` if the checkpoint does not hold them
    /// all.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn whole(&mut self, param: usize, kind: Kind) -> Result<Option<Vec<f32>>, TrainError> {
        let numel: u64 = self.index.params[param].shape.iter().product();
        if !self.holds(param, kind, &(0..numel)) {
            return Ok(None);
        }
        self.elements(param, kind, 0..numel).map(Some)
    }

    /// Returns the index of every parameter of the program in this checkpoint.
    ///
    /// # Errors
    /// If the parameters of the two have other names or shapes.
    pub fn indices(&self, program: &Program) -> Result<Vec<usize>, TrainError> {
        let known: BTreeMap<&str, usize> = self
            .index
            .params
            .iter()
            .enumerate()
            .map(|(i, p)| (p.name.as_str(), i))
            .collect();
        let mut missing = Vec::new();
        let mut of = Vec::new();
        for param in &program.params {
            let shape = param.full_shape(&program.meta.mesh);
            match known.get(param.name.as_str()) {
                None => missing.push(param.name.clone()),
                Some(&i) if self.index.params[i].shape != shape.as_slice() => {
                    let what = format!(
                        "`{}` has shape {:?}, the model's is {:?}",
                        param.name, self.index.params[i].shape, shape
                    );
                    return Err(TrainError::format(&self.path, what));
                }
                Some(&i) => of.push(i),
            }
        }
        if !missing.is_empty() {
            return Err(TrainError::Missing {
                path: self.path.clone(),
                names: missing,
            });
        }
        let used: BTreeSet<usize> = of.iter().copied().collect();
        let left: Vec<&str> = (0..self.index.params.len())
            .filter(|i| !used.contains(i))
            .map(|i| self.index.params[i].name.as_str())
            .collect();
        if !left.is_empty() {
            let what = format!(
                "has parameters that the model does not have: {}",
                left.join(", ")
            );
            return Err(TrainError::format(&self.path, what));
        }
        Ok(of)
    }

    /// Checks that every element that the program needs exists.
    fn require(
        &self,
        program: &Program,
        layout: &StateLayout,
        of: &[usize],
        held: &[bool],
    ) -> Result<(), TrainError> {
        let mut missing = BTreeSet::new();
        for kind in Kind::ALL {
            if kind != Kind::Master && self.index.progress.step == 0 {
                continue;
            }
            for (_, span) in layout.primaries(kind) {
                let p = span.param.index();
                if held[p] && !self.holds(of[p], kind, &span.elements) {
                    missing.insert(format!("{} of {}", kind.name(), program.params[p].name));
                }
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(TrainError::Missing {
            path: self.path.clone(),
            names: missing.into_iter().collect(),
        })
    }

    fn pieces(&self, param: usize, kind: Kind) -> &[Piece] {
        self.pieces.get(&(param, kind)).map_or(&[], Vec::as_slice)
    }

    fn holds(&self, param: usize, kind: Kind, elements: &Range<u64>) -> bool {
        let mut at = elements.start;
        for piece in self.pieces(param, kind) {
            if piece.start <= at {
                at = at.max(piece.start + piece.numel);
            }
        }
        at >= elements.end
    }

    /// Assembles elements of a state from the pieces that contain them.
    fn elements(
        &mut self,
        param: usize,
        kind: Kind,
        elements: Range<u64>,
    ) -> Result<Vec<f32>, TrainError> {
        let mut out = vec![0.0; (elements.end - elements.start) as usize];
        let list = self
            .pieces
            .get(&(param, kind))
            .map_or(&[][..], Vec::as_slice);
        for piece in list {
            let from = piece.start.max(elements.start);
            let to = (piece.start + piece.numel).min(elements.end);
            if from >= to {
                continue;
            }
            let file = self.files.get_mut(&piece.file);
            let found = file.and_then(|f| {
                let entry = f.entries.get(&piece.tensor)?.clone();
                (entry.numel() == piece.numel).then_some((f, entry))
            });
            let Some((file, entry)) = found else {
                let what = format!(
                    "the index lists `{}`, but its file does not have it",
                    piece.tensor
                );
                return Err(TrainError::format(&self.path, what));
            };
            let values = file.read(&entry, from - piece.start..to - piece.start)?;
            let at = (from - elements.start) as usize;
            out[at..at + values.len()].copy_from_slice(&values);
        }
        Ok(out)
    }
}

/// Sets the contents of a state, and of its scales if it is in 8 bits.
fn preset(
    io: &mut dyn StateIo,
    rank: u32,
    (buffer, scales): (BufferId, Option<BufferId>),
    dtype: DType,
    values: &[f32],
    kind: Kind,
) -> Result<(), TrainError> {
    let Some(scales) = scales else {
        return io.preset(rank, buffer, encode(values, dtype));
    };
    let map = blockwise::codebook(kind == Kind::First);
    let mut codes = vec![0; values.len()];
    let blocks = values
        .chunks(blockwise::BLOCK)
        .zip(codes.chunks_mut(blockwise::BLOCK));
    let found: Vec<f32> = blocks
        .map(|(values, codes)| blockwise::restore(values, map, codes))
        .collect();
    io.preset(rank, buffer, codes)?;
    io.preset(rank, scales, encode(&found, DType::F32))
}

/// Returns the size and the BLAKE3 digest of a file.
fn checksum(path: &Path) -> Result<(u64, String), TrainError> {
    let mut file = std::fs::File::open(path).map_err(TrainError::io(path))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let n = file.read(&mut buffer).map_err(TrainError::io(path))?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        bytes += n as u64;
    }
    Ok((bytes, hasher.finalize().to_hex().to_string()))
}
