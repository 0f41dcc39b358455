//! Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

use super::TrainError;
use super::data::encode;
use super::hf::read_json;
use super::layout::StateLayout;
use super::state::{StateIo, With};
use super::tensor_file::{self, Entry, TensorFile};
use serde_json::{Value, json};
use shardlab_plan::Program;
use shardlab_plan::config::Lora;
use shardlab_plan::ir::{DType, HfForm, Param, ParamId};
use std::collections::{BTreeMap, BTreeSet};
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
    check(&path, &read_json(&path)?, lora)?;
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
/// Errors of the memory.
pub fn start_magnitudes(
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

/// Compares a configuration with the scenario's: what PEFT would compute must be what a run
/// computes. The names of tensors show which modules have adapters or are trained in full.
fn check(path: &Path, config: &Value, lora: &Lora) -> Result<(), TrainError> {
    let mut differences = Vec::new();
    let mut same = |key: &str, ours: Value, default: Value| {
        let theirs = config.get(key).filter(|v| !v.is_null()).unwrap_or(&default);
        let equal = match (theirs.as_f64(), ours.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => *theirs == ours,
        };
        if !equal {
            differences.push(format!("`{key}` is {theirs}, not {ours}"));
        }
    };
    same("peft_type", "LORA".into(), Value::Null);
    same("r", lora.r.into(), 8.into());
    same("lora_alpha", lora.alpha.into(), 8.into());
    same("use_rslora", lora.use_rslora.into(), false.into());
    same("use_dora", lora.use_dora.into(), false.into());
    same("lora_bias", false.into(), false.into());
    same("bias", "none".into(), "none".into());
    for key in ["rank_pattern", "alpha_pattern"] {
        same(key, json!({}), json!({}));
    }
    for key in ["trainable_token_indices", "target_parameters"] {
        same(key, Value::Null, Value::Null);
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(TrainError::OtherModel {
        path: path.to_owned(),
        differences,
    })
}

/// Returns PEFT's configuration of a program's adapters.
fn config(program: &Program, lora: &Lora) -> Value {
    let hf = |p: &'_ Param| p.hf.as_ref().map(|hf| hf.module.clone());
    let adapters = program.params.iter().filter(|p| p.is_adapter());
    let targets: BTreeSet<String> = adapters
        .filter_map(|p| Some(hf(p)?.strip_suffix(".lora_A")?.to_owned()))
        .collect();
    // A name's last component stands for all layers that it ends, so all have to have adapters.
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let mut all: BTreeMap<String, bool> = BTreeMap::new();
    for p in program.params.iter().filter(|p| !p.is_adapter()) {
        if let Some(path) = hf(p) {
            *all.entry(last(&path)).or_insert(true) &= targets.contains(&path);
        }
    }
    let short = |path: &String| {
        let end = last(path);
        if all.get(&end) == Some(&true) {
            end
        } else {
            path.clone()
        }
    };
    let names: BTreeSet<String> = targets.iter().map(short).collect();
    let saved: BTreeSet<String> = program
        .params
        .iter()
        .filter(|p| p.requires_grad && !p.is_adapter())
        .filter_map(hf)
        .collect();
    let saved = (!saved.is_empty()).then_some(saved);
    let shared = |p: &Param| p.requires_grad && !p.is_adapter() && p.modules.len() > 1;
    let transposed = |p: &Param| {
        let form = p.hf.as_ref().map(|hf| hf.form);
        form == Some(HfForm::Transposed)
    };
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": names,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "modules_to_save": saved,
        "ensure_weight_tying": program.params.iter().any(shared),
        "fan_in_fan_out": program.params.iter().any(transposed),
        "init_lora_weights": true,
        "inference_mode": true,
    })
}

/// Writes the adapters as a PEFT folder, in float32. All processes call it; process 0 writes.
///
/// # Errors
/// Errors of files and memory.
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
        serde_json::to_writer_pretty(out, &config(program, lora))
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
