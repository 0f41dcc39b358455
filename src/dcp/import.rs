//! Reads a folder.

use super::metadata::{Metadata, Tensor};
use super::{DcpError, archive};
use shardlab_exec::process::World;
use shardlab_exec::train::checkpoint::{Progress, Snapshot, Store};
use shardlab_exec::train::{Kind, TrainError, hf};
use shardlab_plan::{Program, Scenario};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// What was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Number of optimizer steps; 0 if the folder has no optimizer states.
    pub step: u64,
    /// The new checkpoint.
    pub path: PathBuf,
    /// Names in the folder that the model does not use.
    pub unused: Vec<String>,
}

/// Writes the weights and optimizer states of a folder as a checkpoint into `to`, a folder of
/// checkpoints.
///
/// # Errors
/// Fails if tensors of the model are missing or have another shape (the error names all of them),
/// if files are damaged or contain code, or if `to` has a checkpoint of that step or a later one.
pub fn import(
    folder: &Path,
    scenario: &Scenario,
    program: &Program,
    to: &Path,
) -> Result<Imported, DcpError> {
    let metadata = Metadata::read(folder)?;
    let params = hf::tensors(program);
    let names: Vec<&str> = params.iter().flatten().map(|t| t.name.as_str()).collect();
    let shapes: Vec<&[u64]> = params.iter().flatten().map(|t| &t.shape[..]).collect();
    let weights = prefix(&metadata, &names, "").ok_or_else(|| {
        let first = names.first().copied().unwrap_or_default();
        DcpError::format(
            folder,
            format!("has no weights of this model, such as `{first}`"),
        )
    })?;
    let trained: Vec<&str> = params
        .iter()
        .zip(&program.params)
        .filter(|(_, p)| p.requires_grad && !p.router_bias)
        .flat_map(|(tensors, _)| tensors.iter().map(|t| t.name.as_str()))
        .collect();
    let states = prefix(&metadata, &trained, &format!(".{}", Kind::First.name()));
    check(folder, &metadata, &weights, &names, &shapes)?;
    let mut reader = Reader {
        folder,
        metadata: &metadata,
        files: BTreeMap::new(),
    };
    let step = match (&states, trained.first()) {
        (Some(prefix), Some(name)) => reader.step(&format!("{prefix}{name}.step"))?,
        _ => 0,
    };
    let store = Store::open(to, usize::MAX)?;
    if store.steps()?.last().is_some_and(|last| *last >= step) {
        let what = format!("has a checkpoint of step {step} or later; name another folder");
        return Err(DcpError::format(to, what));
    }
    let batch = scenario.train.micro_batch
        * u64::from(scenario.train.grad_accum)
        * u64::from(scenario.mesh.data_ranks());
    let progress = Progress {
        step,
        samples: step * batch,
        data: "a PyTorch checkpoint".to_owned(),
        losses: vec![None; step as usize],
        grad_norms: vec![None; step as usize],
        ..Progress::default()
    };
    // The closure's errors are those of training, so the first error of this module is stored here.
    let failed = RefCell::new(None);
    let snapshot = Snapshot::whole(program, progress, |param, kind| {
        let name = |tensor: &hf::Tensor| match (kind, &states) {
            (Kind::Master, _) => Some(format!("{weights}{}", tensor.name)),
            (_, Some(prefix)) if program.params[param].requires_grad => {
                Some(format!("{prefix}{}.{}", tensor.name, kind.name()))
            }
            _ => None,
        };
        let mut all = Vec::new();
        for tensor in &params[param] {
            let Some(name) = name(tensor).filter(|n| metadata.tensors.contains_key(n)) else {
                return Ok(None);
            };
            match reader.tensor(&name) {
                Ok(values) => all.extend(tensor.restored(values)),
                Err(e) => {
                    let error = TrainError::Format {
                        path: folder.to_owned(),
                        what: e.to_string(),
                    };
                    *failed.borrow_mut() = Some(e);
                    return Err(error);
                }
            }
        }
        Ok(Some(all))
    });
    let snapshot = snapshot.map_err(|e| failed.take().unwrap_or_else(|| e.into()))?;
    let peers = World::single_process(program);
    snapshot.write(&store, step, peers.process_group())?;
    let used = |name: &&String| {
        let name = name.as_str();
        let bare = name.strip_prefix(weights.as_str());
        let state = states.as_ref().and_then(|p| name.strip_prefix(p.as_str()));
        let of = state
            .and_then(|s| s.rsplit_once('.'))
            .map(|(param, _)| param);
        // The table of embeddings has a second name.
        let tied = scenario.model.tie_embeddings && bare == Some("lm_head.weight");
        tied || bare.is_some_and(|n| names.contains(&n)) || of.is_some_and(|n| names.contains(&n))
    };
    let unused = metadata.tensors.keys().filter(|n| !used(n)).cloned();
    Ok(Imported {
        step,
        path: store.path(step),
        unused: unused.collect(),
    })
}

/// Returns the prefix of a folder's tensor names, which consist of a prefix, the name of a
/// parameter and `end`. It is `model.`, empty, or any other prefix of the program that wrote the
/// folder. If there are several, returns the one with the most parameters.
fn prefix(metadata: &Metadata, names: &[&str], end: &str) -> Option<String> {
    let first = format!("{}{end}", names.first()?);
    let candidates = metadata.tensors.keys().filter_map(|key| {
        let prefix = key.strip_suffix(first.as_str())?;
        (prefix.is_empty() || prefix.ends_with('.')).then_some(prefix)
    });
    let found = |prefix: &&str| {
        let has = |name: &&&str| {
            metadata
                .tensors
                .contains_key(&format!("{prefix}{name}{end}"))
        };
        names.iter().filter(has).count()
    };
    candidates.max_by_key(found).map(str::to_owned)
}

/// Rejects weights that are missing, incomplete or of another shape.
fn check(
    folder: &Path,
    metadata: &Metadata,
    prefix: &str,
    names: &[&str],
    shapes: &[&[u64]],
) -> Result<(), DcpError> {
    let mut missing = Vec::new();
    for (name, shape) in names.iter().zip(shapes) {
        let key = format!("{prefix}{name}");
        match metadata.tensors.get(&key) {
            None => missing.push(key),
            Some(tensor) if tensor.size != *shape => {
                let what = format!(
                    "`{key}` has shape {:?}, the model's is {shape:?}",
                    tensor.size
                );
                return Err(DcpError::format(folder, what));
            }
            Some(_) => {}
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let what = format!("missing {}", missing.join(", "));
    Err(DcpError::format(folder, what))
}

struct Reader<'a> {
    folder: &'a Path,
    metadata: &'a Metadata,
    files: BTreeMap<String, File>,
}

impl Reader<'_> {
    /// Reads the step count of an optimizer.
    fn step(&mut self, name: &str) -> Result<u64, DcpError> {
        let values = self.tensor(name)?;
        match values[..] {
            [step] if step >= 0.0 && step.fract() == 0.0 => Ok(step as u64),
            _ => Err(DcpError::format(
                self.folder,
                format!("`{name}` is not a number of steps"),
            )),
        }
    }

    /// Reads a whole tensor.
    fn tensor(&mut self, name: &str) -> Result<Vec<f32>, DcpError> {
        let fail = |what: String| DcpError::format(self.folder, format!("`{name}`: {what}"));
        let tensor = self.metadata.tensors.get(name);
        let tensor = tensor.ok_or_else(|| fail("missing".to_owned()))?;
        let numel: u64 = tensor.size.iter().product();
        let held = tensor.chunks.iter();
        let held: u64 = held.map(|c| c.sizes.iter().product::<u64>()).sum();
        if held != numel {
            return Err(fail(format!("{held} of {numel} elements are there")));
        }
        let mut out = vec![0.0; numel as usize];
        for chunk in &tensor.chunks {
            let path = self.folder.join(&chunk.place.file);
            if !self.files.contains_key(&chunk.place.file) {
                let file = File::open(&path).map_err(DcpError::io(&path))?;
                self.files.insert(chunk.place.file.clone(), file);
            }
            let Some(file) = self.files.get_mut(&chunk.place.file) else {
                continue;
            };
            let [at, length] = chunk.place.at;
            let end = file.metadata().map_err(DcpError::io(&path))?.len();
            if at.saturating_add(length) > end {
                let what = format!("truncated: `{name}` ends at byte {} of {end}", at + length);
                return Err(DcpError::format(&path, what));
            }
            let mut bytes = vec![0; length as usize];
            file.seek(SeekFrom::Start(at))
                .and_then(|_| file.read_exact(&mut bytes))
                .map_err(DcpError::io(&path))?;
            let (shape, values) = archive::read(&bytes)
                .map_err(|e| DcpError::format(&path, format!("`{name}`: {e}")))?;
            if shape != chunk.sizes {
                let what = format!(
                    "`{name}` has a part of shape {shape:?}, not {:?}",
                    chunk.sizes
                );
                return Err(DcpError::format(&path, what));
            }
            place(tensor, &chunk.offsets, &chunk.sizes, &values, &mut out);
        }
        Ok(out)
    }
}

/// Copies a box of elements to its place in a row-major tensor.
fn place(tensor: &Tensor, offsets: &[u64], sizes: &[u64], values: &[f32], out: &mut [f32]) {
    let Some((&width, outer)) = sizes.split_last() else {
        out.copy_from_slice(values);
        return;
    };
    let mut index = vec![0; outer.len()];
    for run in values.chunks_exact((width as usize).max(1)) {
        // The innermost dimension starts where the box does.
        let inner = index.iter().copied().chain([0]);
        let dimensions = tensor.size.iter().zip(offsets).zip(inner);
        let at = dimensions.fold(0, |at, ((size, offset), i)| at * size + offset + i);
        out[at as usize..at as usize + run.len()].copy_from_slice(run);
        for d in (0..index.len()).rev() {
            index[d] += 1;
            if index[d] < sizes[d] {
                break;
            }
            index[d] = 0;
        }
    }
}
