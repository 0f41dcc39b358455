//! Models in Hugging Face format: `config.json` and `safetensors`, with the names of llama and
//! gpt2.

mod config;
mod names;

use super::TrainError;
use super::layout::StateLayout;
use super::state::StateIo;
use super::tensor_file::{self, Entry, TensorFile};
use crate::train::data::encode;
use names::Name;
use serde_json::Value;
use shardlab_plan::Program;
use shardlab_plan::config::Model;
use shardlab_plan::ir::{DType, ParamId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Tensors of a folder: `model.safetensors`, or the files that `model.safetensors.index.json`
/// lists.
struct Folder {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// By tensor: index of its file.
    of: BTreeMap<String, usize>,
}

impl Folder {
    fn open(dir: &Path) -> Result<Self, TrainError> {
        let index = dir.join("model.safetensors.index.json");
        let names: BTreeSet<String> = if index.exists() {
            let value = read_json(&index)?;
            value
                .get("weight_map")
                .and_then(Value::as_object)
                .map(|m| {
                    m.values()
                        .filter_map(Value::as_str)
                        .map(str::to_owned)
                        .collect()
                })
                .ok_or_else(|| TrainError::format(&index, "no `weight_map`"))?
        } else {
            BTreeSet::from(["model.safetensors".to_owned()])
        };
        let files = names
            .iter()
            .map(|n| TensorFile::open(&dir.join(n)))
            .collect::<Result<Vec<_>, _>>()?;
        let of = files
            .iter()
            .enumerate()
            .flat_map(|(i, f)| f.entries.keys().map(move |n| (n.clone(), i)))
            .collect();
        Ok(Self {
            path: dir.to_owned(),
            files,
            of,
        })
    }

    /// Finds a tensor by name, also without the model's prefix (gpt2 was published without it).
    fn find(&self, name: &str) -> Option<(usize, String, Entry)> {
        let short = name.split_once('.').map_or(name, |(_, rest)| rest);
        [name, short].into_iter().find_map(|n| {
            let file = *self.of.get(n)?;
            Some((file, n.to_owned(), self.files[file].entries[n].clone()))
        })
    }
}

pub(super) fn read_json(path: &Path) -> Result<Value, TrainError> {
    let text = std::fs::read(path).map_err(TrainError::io(path))?;
    serde_json::from_slice(&text).map_err(|e| TrainError::format(path, e.to_string()))
}

/// Writes the weights of a Hugging Face folder to all ranks. Adapters keep theirs: [`adapter`]
/// reads them.
///
/// [`adapter`]: super::adapter
///
/// # Errors
/// If `config.json` describes another model, or if tensors are missing, unused or of another shape
/// (all of them are named); errors of files and memory.
pub fn load(
    dir: &Path,
    program: &Program,
    model: &Model,
    seq_len: u64,
    layout: &StateLayout,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let names = names::of(program).ok_or(TrainError::NoNames)?;
    let path = dir.join("config.json");
    config::check(&path, &read_json(&path)?, model, seq_len)?;
    let mut folder = Folder::open(dir)?;
    let mut missing = Vec::new();
    let mut found = Vec::new();
    let params = (0u32..).map(ParamId).zip(&program.params);
    let mut own: Vec<(ParamId, Name)> = Vec::new();
    for (name, (id, param)) in names.into_iter().zip(params) {
        if param.is_adapter() {
            continue;
        }
        match folder.find(&name.name) {
            None => missing.push(name.name.clone()),
            Some((file, stored, entry)) => {
                let shape = name.stored_shape(&param.shape);
                if entry.shape != shape {
                    let what = format!(
                        "tensor `{stored}` has shape {:?}, the model's is {shape:?}",
                        entry.shape
                    );
                    return Err(TrainError::format(folder.files[file].path(), what));
                }
                found.push((file, stored, entry));
            }
        }
        own.push((id, name));
    }
    if !missing.is_empty() {
        return Err(TrainError::Missing {
            path: folder.path,
            names: missing,
        });
    }
    let used: BTreeSet<&str> = found.iter().map(|(_, n, _)| n.as_str()).collect();
    let left: Vec<&str> = folder
        .of
        .keys()
        .map(String::as_str)
        .filter(|n| !used.contains(n) && !names::ignorable(n, model.tie_embeddings))
        .collect();
    if !left.is_empty() {
        let what = format!(
            "has tensors that the model does not have: {}",
            left.join(", ")
        );
        return Err(TrainError::format(dir, what));
    }
    for ((id, name), (file, _, entry)) in own.into_iter().zip(found) {
        let file = &mut folder.files[file];
        let shape = &program.params[id.index()].shape;
        let mut whole = None;
        layout.set_weights(io, id, &mut |elements: Range<u64>| {
            if !name.transposed {
                return file.read(&entry, elements);
            }
            // Rows of a transposed tensor are spread over the file, so one tensor is cached.
            if whole.is_none() {
                let stored = file.read(&entry, 0..entry.numel())?;
                whole = Some(transpose(&stored, shape[1] as usize, shape[0] as usize));
            }
            let all = whole.as_deref().unwrap_or_default();
            Ok(all[elements.start as usize..elements.end as usize].to_vec())
        })?;
    }
    Ok(())
}

/// Transposes a row-major `rows x cols` matrix.
fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for r in 0..rows {
        for c in 0..cols {
            out[c * rows + r] = x[r * cols + c];
        }
    }
    out
}

/// Writes the optimizer's weights as a Hugging Face folder, in float32, one tensor at a time. All
/// processes call it; process 0 writes.
///
/// # Errors
/// For families without published names, and errors of files and memory.
pub fn export(
    dir: &Path,
    program: &Program,
    model: &Model,
    layout: &StateLayout,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let names = names::of(program).ok_or(TrainError::NoNames)?;
    if io.local().start != 0 {
        for p in 0..program.params.len() as u32 {
            layout.weights(io, ParamId(p))?;
        }
        return Ok(());
    }
    std::fs::create_dir_all(dir).map_err(TrainError::io(dir))?;
    let config = config::of(model).ok_or(TrainError::NoNames)?;
    let path = dir.join("config.json");
    tensor_file::replace(&path, |out| {
        serde_json::to_writer_pretty(out, &config)
            .map_err(|e| TrainError::format(&path, e.to_string()))
    })?;
    let tensors: Vec<(String, DType, Vec<u64>)> = names
        .iter()
        .zip(&program.params)
        .map(|(n, p)| (n.name.clone(), DType::F32, n.stored_shape(&p.shape)))
        .collect();
    let path = dir.join("model.safetensors");
    tensor_file::replace(&path, |out| {
        out.write_all(&tensor_file::header(&tensors))
            .map_err(TrainError::io(&path))?;
        for (p, (Name { transposed, .. }, param)) in (0u32..).zip(names.iter().zip(&program.params))
        {
            let mut values = layout.weights(io, ParamId(p))?;
            if *transposed {
                values = transpose(&values, param.shape[0] as usize, param.shape[1] as usize);
            }
            out.write_all(&encode(&values, DType::F32))
                .map_err(TrainError::io(&path))?;
        }
        Ok(())
    })
}

/// Returns the published name of every parameter, in the program's order; `None` for families
/// without names.
#[must_use]
pub fn published_names(program: &Program) -> Option<Vec<String>> {
    Some(names::of(program)?.into_iter().map(|n| n.name).collect())
}

#[cfg(test)]
mod tests;
