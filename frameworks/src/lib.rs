//! shardlab-frameworks reads the configurations of training frameworks as scenarios.
//!
//! ```text
//! file ─ detect ─▶ tree ─┐                           ┌─▶ rows      what became of each key
//!   formats (tables) ────┴─ reader ─▶ draft ─ derive ─┴─▶ scenario  as TOML
//!
//! file ◀─ emit ◀─ changed scenario keys
//! ```
//!
//! Nothing is dropped silently: every key of the files is a row that says whether it is used,
//! assumed or without counterpart, and why. No file is downloaded.
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
pub use row::{Lack, Row, Setting, Status};

use reader::Reader;
use std::path::PathBuf;

/// What the files do not say.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// GPUs of the job.
    pub gpus: Option<Gpus>,
    /// Folder of the model with its config.json, or that file.
    pub model: Option<PathBuf>,
    /// Cache of the Hugging Face hub, in which downloaded models are looked for.
    pub cache: Option<PathBuf>,
}

/// Reads the configuration of a job: one file, or several that belong together, such as the
/// configuration of Accelerate and the arguments of the Trainer.
///
/// # Errors
/// A file that cannot be read, or whose format is not known; a misspelled key, a value of the wrong
/// type, sizes that contradict one another; what neither the files nor the options say.
pub fn read(files: &[PathBuf], options: &Options) -> Result<Job, ConfigError> {
    let mut reader = Reader::default();
    for file in files {
        reader.file(file, None)?;
    }
    derive::finish(&mut reader, options)?;
    Ok(Job::new(files, reader))
}
