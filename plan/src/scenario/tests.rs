//! Tests of the whole path from text to scenario.

/// A file of `tests/data/configs`.
macro_rules! config {
    ($name:literal) => {
        include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/data/configs/",
            $name,
            ".json"
        ))
    };
}

mod aliases;
mod bad;
mod class_sizes;
mod classes;
mod closest;
mod defaults;
mod documents;
mod expert_parallel;
mod fuzz;
mod huggingface;
mod ignored;
mod inputs;
mod layers;
mod lora;
mod moe;
mod param_groups;
mod public_models;
mod shipped;
mod sounds;
mod towers;

use std::fs;
use std::path::PathBuf;

/// The smallest complete scenario.
const MINIMAL: &str =
    "[model]\npreset = \"llama3-8b\"\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";

/// [`MINIMAL`] with overrides.
fn minimal(overrides: &[&str]) -> Result<super::Scenario, super::ScenarioError> {
    let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
    super::parse("minimal", MINIMAL, &overrides)
}

/// Loads a scenario whose preset is this `config.json`, in a folder of its own.
fn read_config(
    test: &str,
    config: &str,
    sets: &[&str],
) -> Result<super::Scenario, super::ScenarioError> {
    let text = "[model]\npreset = \"there/config.json\"\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";
    let f = Folder::new(test, &[("mine.toml", text), ("there/config.json", config)]);
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    super::load(&f.file("mine.toml"), &sets)
}

/// A folder of its own for one test, removed at the end.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new(test: &str, files: &[(&str, &str)]) -> Self {
        let folder = Self::path(test);
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            let file = folder.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        Self(folder)
    }

    fn path(test: &str) -> PathBuf {
        std::env::temp_dir().join(format!("shardlab-{}-{test}", std::process::id()))
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
