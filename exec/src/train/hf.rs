//! Models in Hugging Face format: `config.json` and `safetensors`, with the names of
//! transformers.

mod config;
mod folder;
mod names;
mod origin;
mod written;

use super::TrainError;
use super::layout::StateLayout;
use super::state::StateIo;
use super::tensor_file::{self, Entry, TensorFile};
use crate::train::data::encode;
use folder::{Folder, Found};
use names::Stored;
pub use names::Tensor;
pub use origin::Origin;
use serde_json::Value;
use shardlab_plan::Program;
use shardlab_plan::config::Model;
use shardlab_plan::ir::{DType, Param, ParamId};
use std::ops::Range;
use std::path::Path;

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

/// Checks, before a run, that its model can be written in Hugging Face's format. `origin` is what
/// the model came from.
///
/// # Errors
/// [`TrainError::NoNames`] if its parameters have no published names, or if no `config.json`
/// describes it.
pub fn has_form(
    program: &Program,
    model: &Model,
    origin: Option<&Origin>,
) -> Result<(), TrainError> {
    written::of(model, origin)?;
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
    let params = (0u32..).map(ParamId).zip(&program.params);
    let own: Vec<(ParamId, Stored)> = params
        .zip(names)
        .filter(|((_, param), _)| !param.is_adapter())
        .map(|((id, _), stored)| (id, stored))
        .collect();
    let found = folder.find_all(own.iter().flat_map(|(_, stored)| &stored.tensors))?;
    folder.check_unused(&found, model.tie_embeddings)?;
    let mut found = found.into_iter();
    for (id, stored) in &own {
        let of_param = found.by_ref().take(stored.tensors.len());
        let sources = stored.tensors.iter().zip(of_param);
        let mut sources: Vec<Source<'_>> =
            sources.map(|(t, found)| Source::new(t, found)).collect();
        let param = &program.params[id.index()];
        layout.set_param(io, (*id, param), &mut |elements: Range<u64>| {
            read_elements(&mut sources, &mut folder, elements)
        })?;
    }
    Ok(())
}

/// Reads elements of a parameter, given the tensors that hold it in the order of its elements.
fn read_elements(
    sources: &mut [Source<'_>],
    folder: &mut Folder,
    elements: Range<u64>,
) -> Result<Vec<f32>, TrainError> {
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
}

/// A tensor of a file, and the elements of a parameter that it holds.
struct Source<'n> {
    tensor: &'n Tensor,
    file: usize,
    entry: Entry,
    /// All elements, if the file has them in another order.
    whole: Option<Vec<f32>>,
}

impl<'n> Source<'n> {
    fn new(tensor: &'n Tensor, found: Found) -> Self {
        Self {
            tensor,
            file: found.file,
            entry: found.entry,
            whole: None,
        }
    }

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

/// Writes the optimizer's weights as a Hugging Face folder, in float32, one tensor at a time. Of a
/// model that came from such a folder, it keeps what does not depend on weights: other fields of
/// `config.json`, the tokenizer, and how to generate text. All processes call it, and process 0
/// writes.
///
/// # Errors
/// If the family has no published names, a weight cannot be read, or a file cannot be written.
pub fn export(
    dir: &Path,
    program: &Program,
    (model, origin): (&Model, Option<&Origin>),
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
    let config = written::of(model, origin)?;
    if let Some(origin) = origin {
        origin.copy_files(dir)?;
    }
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
