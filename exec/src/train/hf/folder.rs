//! The tensors of a folder in Hugging Face's format.

use super::names::{self, Tensor};
use super::read_json;
use crate::train::TrainError;
use crate::train::tensor_file::{Entry, TensorFile};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Buffers that balance the load of experts without a loss. A router adds one to its scores
/// (`model.router_bias`).
const CORRECTION_BIASES: [&str; 2] = [".e_score_correction_bias", ".expert_bias"];

/// Tensors of a folder: `model.safetensors`, or the files that `model.safetensors.index.json`
/// lists.
pub(super) struct Folder {
    path: PathBuf,
    /// What the names of the model's tensors begin with, if there are others.
    prefix: &'static str,
    pub(super) files: Vec<TensorFile>,
    /// By tensor: index of its file.
    of: BTreeMap<String, usize>,
}

/// A tensor in a folder.
pub(super) struct Found {
    /// Index of its file.
    pub(super) file: usize,
    /// Name in the file.
    name: String,
    pub(super) entry: Entry,
}

impl Folder {
    /// Opens the files of a folder. `prefix` begins the names of the model's tensors if the folder
    /// has others.
    ///
    /// # Errors
    /// If a file cannot be read or is not in its format.
    pub(super) fn open(dir: &Path, prefix: &'static str) -> Result<Self, TrainError> {
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

    /// Finds the tensors of parameters, in their order.
    ///
    /// # Errors
    /// If tensors are missing (all of them are named), or one has another shape.
    pub(super) fn find_all<'t>(
        &self,
        tensors: impl Iterator<Item = &'t Tensor>,
    ) -> Result<Vec<Found>, TrainError> {
        let (mut missing, mut all) = (Vec::new(), Vec::new());
        for tensor in tensors {
            let Some(found) = self.find(&tensor.name) else {
                missing.push(tensor.name.clone());
                continue;
            };
            if found.entry.shape != tensor.shape {
                let what = format!(
                    "tensor `{}` has shape {:?}, the model's is {:?}",
                    found.name, found.entry.shape, tensor.shape
                );
                return Err(TrainError::format(self.files[found.file].path(), what));
            }
            all.push(found);
        }
        if missing.is_empty() {
            return Ok(all);
        }
        let found: BTreeSet<&str> = all.iter().map(|f: &Found| f.name.as_str()).collect();
        let others = self.others(&found).filter(|n| !names::ignorable(n, true));
        let others: Vec<&str> = others.map(String::as_str).collect();
        if !others.is_empty() {
            let what = format!(
                "has no {}, but {}: `exec` does not read files that stack or merge projections in this way",
                some(&missing),
                some(&others)
            );
            return Err(TrainError::format(&self.path, what));
        }
        Err(TrainError::Missing {
            path: self.path.clone(),
            names: missing,
        })
    }

    /// Returns the names of tensors of the model that are not among these.
    fn others<'s>(&'s self, used: &'s BTreeSet<&str>) -> impl Iterator<Item = &'s String> {
        let own = |n: &&String| !used.contains(n.as_str()) && n.starts_with(self.prefix);
        self.of.keys().filter(own)
    }

    /// Checks that the model uses all tensors. Buffers that no computation reads may be left.
    ///
    /// # Errors
    /// If tensors are not used (all of them are named), or a correction bias of experts that the
    /// model lacks is not 0; errors of files.
    pub(super) fn check_unused(
        &mut self,
        found: &[Found],
        tie_embeddings: bool,
    ) -> Result<(), TrainError> {
        let used: BTreeSet<&str> = found.iter().map(|f| f.name.as_str()).collect();
        let left = self
            .others(&used)
            .filter(|n| !names::ignorable(n, tie_embeddings));
        let (biases, left): (Vec<String>, Vec<String>) = left
            .cloned()
            .partition(|n| CORRECTION_BIASES.iter().any(|end| n.ends_with(end)));
        if !left.is_empty() {
            let what = format!(
                "has tensors that the model does not have: {}",
                left.join(", ")
            );
            return Err(TrainError::format(&self.path, what));
        }
        biases.iter().try_for_each(|name| self.check_zero(name))
    }

    /// Checks that a correction bias is 0, which is the same as none.
    fn check_zero(&mut self, name: &str) -> Result<(), TrainError> {
        let file = &mut self.files[self.of[name]];
        let entry = file.entries[name].clone();
        let numbers = file.read(&entry, 0..entry.numel())?;
        if numbers.iter().all(|x| *x == 0.0) {
            return Ok(());
        }
        let what = match name.ends_with(CORRECTION_BIASES[0]) {
            true => "but the model has no bias of scores: set model.router_bias = true",
            false => "and `exec` has no routers with such a bias",
        };
        let what = format!("`{name}` is not 0, {what}");
        Err(TrainError::format(file.path(), what))
    }

    /// Finds a tensor by name, also without the model's prefix (gpt2 was published without it).
    fn find(&self, name: &str) -> Option<Found> {
        let short = name.split_once('.').map_or(name, |(_, rest)| rest);
        let names = match self.prefix {
            "" => [name.to_owned(), short.to_owned()],
            prefix => [[prefix, name].concat(), name.to_owned()],
        };
        names.iter().find_map(|n| {
            let file = *self.of.get(n)?;
            Some(Found {
                file,
                name: n.to_owned(),
                entry: self.files[file].entries[n].clone(),
            })
        })
    }
}

/// Returns the first of many names, and how many more there are.
fn some<T: std::borrow::Borrow<str>>(names: &[T]) -> String {
    const MAX_NAMES: usize = 3;
    let first = names[..names.len().min(MAX_NAMES)].join(", ");
    match names.len().saturating_sub(MAX_NAMES) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}
