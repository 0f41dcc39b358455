//! Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

mod config;

use super::TrainError;
use super::data::encode;
use super::hf::read_json;
use super::layout::StateLayout;
use super::state::{StateIo, With};
use super::tensor_file::{self, Entry, TensorFile};
use shardlab_plan::Program;
use shardlab_plan::config::Lora;
use shardlab_plan::ir::{DType, Param, ParamId};
use std::collections::BTreeSet;
use std::path::Path;

/// Prefix of names in PEFT's files: that of a model within `PeftModel` and `LoraModel`.
const PREFIX: &str = "base_model.model.";

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

/// Returns the parameters of adapters, and of modules that are trained in full next to them, with
/// their names in PEFT's files.
fn names(program: &Program) -> Vec<(ParamId, String)> {
    let named = |(id, p): (u32, &Param)| {
        let hf = p.hf.as_ref().filter(|_| p.is_saved_with_adapters())?;
        let name = match p.magnitude_of() {
            Some(_) => hf.module.clone(),
            None => p.hf_name()?,
        };
        Some((ParamId(id), format!("{PREFIX}{name}")))
    };
    (0u32..).zip(&program.params).filter_map(named).collect()
}

/// Writes the adapters of a PEFT folder to all ranks.
///
/// # Errors
/// If the folder's configuration differs from the scenario's, or if tensors are missing, unused or
/// of another shape; errors of files and memory.
pub fn load(
    dir: &Path,
    program: &Program,
    lora: &Lora,
    layout: &StateLayout,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let path = dir.join(CONFIG);
    config::check(&path, &read_json(&path)?, program, lora)?;
    let mut file = TensorFile::open(&dir.join(TENSORS))?;
    let found = find(&file, program)?;
    for (id, entry) in found {
        layout.set_weights(io, id, &mut |elements| file.read(&entry, elements))?;
    }
    Ok(())
}

/// Gives the learned lengths of rows (DoRA) the norms of the rows that they belong to, as adapters
/// that add nothing start. All processes call it.
///
/// # Errors
/// If a buffer of a weight cannot be read or written.
pub(crate) fn start_magnitudes(
    program: &Program,
    layout: &StateLayout,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let params = || (0u32..).zip(&program.params);
    for (id, magnitude) in params() {
        let Some(of) = magnitude.magnitude_of() else {
            continue;
        };
        let Some((base, _)) = params().find(|(_, p)| p.name == of) else {
            continue;
        };
        let values = layout.weights_with(io, ParamId(base), With::All)?;
        let rows = magnitude.numel().max(1) as usize;
        let norm = |row: &[f32]| {
            row.iter()
                .map(|x| f64::from(*x).powi(2))
                .sum::<f64>()
                .sqrt() as f32
        };
        let norms: Vec<f32> = values.chunks(values.len() / rows).map(norm).collect();
        layout.set_weights(io, ParamId(id), &mut |elements| {
            Ok(norms[elements.start as usize..elements.end as usize].to_vec())
        })?;
    }
    Ok(())
}

/// Finds the tensor of every parameter; there may be no others.
fn find(file: &TensorFile, program: &Program) -> Result<Vec<(ParamId, Entry)>, TrainError> {
    let mut missing = Vec::new();
    let mut found = Vec::new();
    let mut used = BTreeSet::new();
    for (id, name) in names(program) {
        let shape = program.params[id.index()].shape.as_slice();
        match file.entries.get(&name) {
            Some(entry) if entry.shape != shape => {
                let what = format!(
                    "tensor `{name}` has shape {:?}, the adapter's is {shape:?}",
                    entry.shape
                );
                return Err(TrainError::format(file.path(), what));
            }
            Some(entry) => found.push((id, entry.clone())),
            None => missing.push(name.clone()),
        }
        used.insert(name);
    }
    if !missing.is_empty() {
        return Err(TrainError::Missing {
            path: file.path().to_owned(),
            names: missing,
        });
    }
    let others = file.entries.keys().filter(|n| !used.contains(*n));
    let others: Vec<&str> = others.map(String::as_str).collect();
    if !others.is_empty() {
        let what = format!(
            "has tensors for which lora.target_modules and lora.modules_to_save have no module: {}",
            others.join(", ")
        );
        return Err(TrainError::format(file.path(), what));
    }
    Ok(found)
}

/// Writes the adapters as a PEFT folder, in float32. All processes call it; process 0 writes.
///
/// # Errors
/// If a weight cannot be read, or a file cannot be written.
pub fn export(
    dir: &Path,
    program: &Program,
    lora: &Lora,
    layout: &StateLayout,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let names = names(program);
    if io.local().start != 0 {
        for (id, _) in names {
            layout.weights(io, id)?;
        }
        return Ok(());
    }
    std::fs::create_dir_all(dir).map_err(TrainError::io(dir))?;
    let path = dir.join(CONFIG);
    tensor_file::replace(&path, |out| {
        serde_json::to_writer_pretty(out, &config::of(program, lora))
            .map_err(|e| TrainError::format(&path, e.to_string()))
    })?;
    let shape = |id: &ParamId| program.params[id.index()].shape.to_vec();
    let tensors: Vec<(String, DType, Vec<u64>)> = names
        .iter()
        .map(|(id, name)| (name.clone(), DType::F32, shape(id)))
        .collect();
    let path = dir.join(TENSORS);
    tensor_file::replace(&path, |out| {
        out.write_all(&tensor_file::header(&tensors))
            .map_err(TrainError::io(&path))?;
        for (id, _) in &names {
            let values = layout.weights(io, *id)?;
            out.write_all(&encode(&values, DType::F32))
                .map_err(TrainError::io(&path))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests;
