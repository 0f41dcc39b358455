//! What a model came from: a `config.json`, and the files next to it.

use super::config::of_language_model;
use super::read_json;
use crate::train::TrainError;
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Files next to a `config.json` that do not depend on weights: how to generate text, and the
/// tokenizer.
const KEPT: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
];
/// Endings of such files, whose names differ: models of SentencePiece and of tiktoken, templates.
const ENDINGS: [&str; 3] = ["model", "tiktoken", "jinja"];

/// The `config.json` that a model came from.
#[derive(Clone, Debug)]
pub struct Origin {
    /// Fields of the language model.
    pub(super) config: Value,
    /// Folder, if it is that of a published model.
    folder: Option<PathBuf>,
}

impl Origin {
    /// Reads the file of the folder that weights come from, or else the one that the scenario
    /// names; returns `None` without either. A file that has more than JSON has is none.
    ///
    /// # Errors
    /// If the folder's file cannot be read.
    pub fn of(
        weights: Option<&Path>,
        model_file: Option<&Path>,
    ) -> Result<Option<Self>, TrainError> {
        const NAME: &str = "config.json";
        let read = |path: &Path| Ok(of_language_model(read_json(path)?).0);
        let unfit = |e| TrainError::Init(Box::new(e));
        if let Some(folder) = weights {
            return Ok(Some(Self {
                config: read(&folder.join(NAME)).map_err(unfit)?,
                folder: Some(folder.to_owned()),
            }));
        }
        let Some(path) = model_file else {
            return Ok(None);
        };
        let is_published = path.file_name() == Some(OsStr::new(NAME));
        let folder = path.parent().filter(|_| is_published);
        Ok(read(path).ok().map(|config: Value| Self {
            config,
            folder: folder.map(Path::to_owned),
        }))
    }

    /// Copies the files that do not depend on weights to another folder. The code that a
    /// `config.json` names as its own is one of them.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(super) fn copy_files(&self, to: &Path) -> Result<(), TrainError> {
        let Some(from) = &self.folder else {
            return Ok(());
        };
        let same = |path: &Path| path.canonicalize().ok();
        if same(from) == same(to) {
            return Ok(());
        }
        let has_code = self.config.get("auto_map").is_some();
        // The working directory has an empty path.
        let listed = match from.as_os_str().is_empty() {
            true => Path::new("."),
            false => from,
        };
        for entry in std::fs::read_dir(listed).map_err(TrainError::io(from))? {
            let path = entry.map_err(TrainError::io(from))?.path();
            let (Some(name), ending) = (path.file_name(), path.extension()) else {
                continue;
            };
            let is_kept = KEPT.iter().any(|kept| name == *kept)
                || ending.is_some_and(|own| ENDINGS.iter().any(|end| own == *end))
                || has_code && ending.is_some_and(|own| own == "py");
            if is_kept && path.is_file() {
                std::fs::copy(&path, to.join(name)).map_err(TrainError::io(&path))?;
            }
        }
        Ok(())
    }
}
