//! Models in Hugging Face format: `config.json` and `safetensors`, with the names of
//! transformers.

mod config;
mod names;

use super::TrainError;
use super::layout::StateLayout;
use super::state::StateIo;
use super::tensor_file::{self, Entry, TensorFile};
use crate::train::data::encode;
use names::Stored;
pub use names::Tensor;
use serde_json::Value;
use shardlab_plan::Program;
use shardlab_plan::config::Model;
use shardlab_plan::ir::{DType, Param, ParamId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Tensors of a folder: `model.safetensors`, or the files that `model.safetensors.index.json`
/// lists.
struct Folder {
    path: PathBuf,
    /// What the names of the model's tensors begin with, if there are others.
    prefix: &'static str,
    files: Vec<TensorFile>,
    /// By tensor: index of its file.
    of: BTreeMap<String, usize>,
}

impl Folder {
    fn open(dir: &Path, prefix: &'static str) -> Result<Self, TrainError> {
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
            prefix,
            files,
            of,
        })
    }

    /// Finds a tensor by name, also without the model's prefix (gpt2 was published without it).
    fn find(&self, name: &str) -> Option<(usize, String, Entry)> {
        let short = name.split_once('.').map_or(name, |(_, rest)| rest);
        let names = match self.prefix {
            "" => [name.to_owned(), short.to_owned()],
            prefix => [[prefix, name].concat(), name.to_owned()],
        };
        names.iter().find_map(|n| {
            let file = *self.of.get(n)?;
            Some((file, n.to_owned(), self.files[file].entries[n].clone()))
        })
    }
}

pub(super) fn read_json(path: &Path) -> Result<Value, TrainError> {
    let text = std::fs::read(path).map_err(TrainError::io(path))?;
    serde_json::from_slice(&text).map_err(|e| TrainError::format(path, e.to_string()))
}

/// Returns how all parameters of a program are stored.
fn names_of(program: &Program) -> Result<Vec<Stored>, TrainError> {
    names::of(program).ok_or_else(|| TrainError::NoNames {
        why: "some of its parameters have no published names".to_owned(),
    })
}

/// Checks, before a run, that its model can be written in Hugging Face's format.
///
/// # Errors
/// [`TrainError::NoNames`] if its parameters have no published names, or if no `config.json`
/// describes it.
pub fn has_form(program: &Program, model: &Model) -> Result<(), TrainError> {
    config::of(model)?;
    names_of(program).map(|_| ())
}

/// Writes the weights of a Hugging Face folder to all ranks. Of a folder with a Llama 4 and its
/// vision tower, it takes the language model. Adapters keep theirs: [`adapter`] reads them.
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
    let names = names_of(program)?;
    let path = dir.join("config.json");
    let (config, prefix) = config::of_language_model(read_json(&path)?);
    config::check(&path, &config, model, seq_len)?;
    let mut folder = Folder::open(dir, prefix)?;
    let mut missing = Vec::new();
    let mut found = Vec::new();
    let params = (0u32..).map(ParamId).zip(&program.params);
    let own: Vec<(ParamId, Stored)> = params
        .zip(names)
        .filter(|((_, param), _)| !param.is_adapter())
        .map(|((id, _), stored)| (id, stored))
        .collect();
    for tensor in own.iter().flat_map(|(_, stored)| &stored.tensors) {
        match folder.find(&tensor.name) {
            None => missing.push(tensor.name.clone()),
            Some((file, stored, entry)) => {
                if entry.shape != tensor.shape {
                    let what = format!(
                        "tensor `{stored}` has shape {:?}, the model's is {:?}",
                        entry.shape, tensor.shape
                    );
                    return Err(TrainError::format(folder.files[file].path(), what));
                }
                found.push((file, stored, entry));
            }
        }
    }
    if !missing.is_empty() {
        return Err(TrainError::Missing {
            path: folder.path,
            names: missing,
        });
    }
    let used: BTreeSet<&str> = found.iter().map(|(_, n, _)| n.as_str()).collect();
    let (biases, left): (Vec<&str>, Vec<&str>) = folder
        .of
        .keys()
        .map(String::as_str)
        .filter(|n| !used.contains(n) && n.starts_with(prefix))
        .filter(|n| !names::ignorable(n, model.tie_embeddings))
        .partition(|n| CORRECTION_BIASES.iter().any(|end| n.ends_with(end)));
    if !left.is_empty() {
        let what = format!(
            "has tensors that the model does not have: {}",
            left.join(", ")
        );
        return Err(TrainError::format(dir, what));
    }
    let biases: Vec<String> = biases.into_iter().map(str::to_owned).collect();
    for name in biases {
        let file = &mut folder.files[folder.of[&name]];
        let entry = file.entries[&name].clone();
        if file
            .read(&entry, 0..entry.numel())?
            .iter()
            .any(|x| *x != 0.0)
        {
            let what = match name.ends_with(CORRECTION_BIASES[0]) {
                true => "but the model has no bias of scores: set model.router_bias = true",
                false => "and `exec` has no routers with such a bias",
            };
            let what = format!("`{name}` is not 0, {what}");
            return Err(TrainError::format(file.path(), what));
        }
    }
    let mut found = found.into_iter();
    for (id, stored) in &own {
        let entries = found.by_ref().take(stored.tensors.len());
        let mut sources: Vec<_> = stored
            .tensors
            .iter()
            .zip(entries)
            .map(|(tensor, (file, _, entry))| Source {
                tensor,
                file,
                entry,
                whole: None,
            })
            .collect();
        let param = &program.params[id.index()];
        layout.set_param(io, (*id, param), &mut |elements: Range<u64>| {
            let mut out = Vec::with_capacity((elements.end - elements.start) as usize);
            let first = sources.partition_point(|s| s.tensor.elements.end <= elements.start);
            for source in &mut sources[first..] {
                let of = &source.tensor.elements;
                if of.start >= elements.end {
                    break;
                }
                let part = elements.start.max(of.start)..elements.end.min(of.end);
                let inside = part.start - of.start..part.end - of.start;
                out.extend(source.read(&mut folder.files[source.file], inside)?);
            }
            Ok(out)
        })?;
    }
    Ok(())
}

/// Buffers that balance the load of experts without a loss. A router adds one to its scores
/// (`model.router_bias`).
const CORRECTION_BIASES: [&str; 2] = [".e_score_correction_bias", ".expert_bias"];

/// A tensor of a file, and the elements of a parameter that it holds.
struct Source<'n> {
    tensor: &'n Tensor,
    file: usize,
    entry: Entry,
    /// All elements, if the file has them in another order.
    whole: Option<Vec<f32>>,
}

impl Source<'_> {
    /// Reads elements, counted from the tensor's first one in the parameter.
    fn read(
        &mut self,
        file: &mut TensorFile,
        elements: Range<u64>,
    ) -> Result<Vec<f32>, TrainError> {
        if self.tensor.order.is_none() {
            return file.read(&self.entry, elements);
        }
        // Rows of a transposed tensor are spread over the file, so one tensor is cached.
        if self.whole.is_none() {
            let stored = file.read(&self.entry, 0..self.entry.numel())?;
            self.whole = Some(self.tensor.restored(stored));
        }
        let all = self.whole.as_deref().unwrap_or_default();
        Ok(all[elements.start as usize..elements.end as usize].to_vec())
    }
}

/// Writes the optimizer's weights as a Hugging Face folder, in float32, one tensor at a time. All
/// processes call it; process 0 writes.
///
/// # Errors
/// If the family has no published names, a weight cannot be read, or a file cannot be written.
pub fn export(
    dir: &Path,
    program: &Program,
    model: &Model,
    layout: &StateLayout,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let names = names_of(program)?;
    if io.local().start != 0 {
        for p in 0..program.params.len() as u32 {
            layout.weights(io, ParamId(p))?;
        }
        return Ok(());
    }
    std::fs::create_dir_all(dir).map_err(TrainError::io(dir))?;
    let config = config::of(model)?;
    let path = dir.join("config.json");
    tensor_file::replace(&path, |out| {
        serde_json::to_writer_pretty(out, &config)
            .map_err(|e| TrainError::format(&path, e.to_string()))
    })?;
    let tensors: Vec<(String, DType, Vec<u64>)> = names
        .iter()
        .flat_map(|stored| &stored.tensors)
        .map(|t| (t.name.clone(), DType::F32, t.shape.clone()))
        .collect();
    let path = dir.join("model.safetensors");
    tensor_file::replace(&path, |out| {
        out.write_all(&tensor_file::header(&tensors))
            .map_err(TrainError::io(&path))?;
        for (p, stored) in (0u32..).zip(&names) {
            let all = layout.weights(io, ParamId(p))?;
            for tensor in &stored.tensors {
                let bytes = encode(&tensor.published(&all), DType::F32);
                out.write_all(&bytes).map_err(TrainError::io(&path))?;
            }
        }
        Ok(())
    })
}

/// Returns the published tensors that hold each parameter, in the program's order; the parameter
/// itself, under its own name, for families without published names.
#[must_use]
pub fn tensors(program: &Program) -> Vec<Vec<Tensor>> {
    let mesh = &program.meta.mesh;
    match names::of(program) {
        Some(all) => all.into_iter().map(|stored| stored.tensors).collect(),
        None => {
            let whole = |p: &Param| vec![Tensor::whole(p.name.clone(), &p.full_shape(mesh))];
            program.params.iter().map(whole).collect()
        }
    }
}

/// Returns the published name of every parameter, in the program's order, with `*` for the numbers
/// of experts; `None` for families without names.
#[must_use]
pub fn published_names(program: &Program) -> Option<Vec<String>> {
    Some(names::of(program)?.into_iter().map(|n| n.name).collect())
}

#[cfg(test)]
mod tests;
