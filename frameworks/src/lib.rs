//! shardlab-frameworks reads the configurations of training frameworks as scenarios.
//!
//! ```text
//! file ─ detect ─▶ tree ─┐                           ┌─▶ rows      what became of each key
//!   formats (tables) ────┴─ reader ─▶ draft ─ derive ─┴─▶ scenario  as TOML
//!
//! file ◀─ emit ◀─ changed scenario keys
//! ```
//!
//! No key is dropped silently: each key of the files becomes a row that says whether it is used,
//! assumed or has no counterpart, and why. Nothing is downloaded.
//!
//! ```
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/frameworks/torchtitan/llama3-8b.toml");
//! let options = shardlab_frameworks::Options {
//!     gpus: Some("8xh100".parse()?),
//!     ..Default::default()
//! };
//! let job = shardlab_frameworks::read(&[path.into()], &options)?;
//! assert_eq!(job.framework, "torchtitan");
//! assert!(job.text().contains("micro_batch = 1"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adapters;
mod convert;
mod derive;
mod detect;
mod doubts;
mod draft;
pub mod emit;
mod error;
mod formats;
mod gpus;
mod interpolation;
mod job;
mod model;
mod reader;
mod row;
mod shell;
mod table;
mod toml_file;
mod tree;
mod yaml;

#[cfg(test)]
mod tests;

pub use error::{ConfigError, Place};
pub use gpus::Gpus;
pub use job::{Job, JobError};
pub use row::{Doubt, Lack, Row, Setting, Status};

use reader::Reader;
use std::path::PathBuf;

/// Information that the files do not contain.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// GPUs of the job.
    pub gpus: Option<Gpus>,
    /// Folder with the model's config.json, or the path of that file.
    pub model: Option<PathBuf>,
    /// Hugging Face Hub cache in which to look for downloaded models.
    pub cache: Option<PathBuf>,
}

/// Returns whether a text in TOML is a configuration of a framework that is refused by name.
#[must_use]
pub fn is_refused(text: &str) -> bool {
    let root = toml_file::parse("", text);
    root.is_ok_and(|root| detect::is_refused(&root))
}

/// Reads the configuration of a job from one file or from several that belong together, such as a
/// configuration of Accelerate and the arguments of the Trainer.
///
/// # Errors
/// Fails if a file cannot be read or its format is unknown, if a key is misspelled or has a value
/// of the wrong type, if sizes contradict one another, or if neither the files nor the options give
/// a value that is needed.
pub fn read(files: &[PathBuf], options: &Options) -> Result<Job, ConfigError> {
    let mut reader = Reader::default();
    for file in files {
        reader.file(file, None)?;
    }
    derive::finish(&mut reader, options)?;
    Ok(Job::new(files, reader))
}
