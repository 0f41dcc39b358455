//! Writes changed options back to the user's files, or to a new file for a framework.
//!
//! ```text
//! changes ─ rules ─▶ keys of the framework ─ edit ─▶ text ─ read again ─▶ what is expressed
//! ```
//!
//! Edited files are read again. Changes that they do not express are reported with the reason.

mod edit;
mod fresh;
mod python;
mod rules;

#[cfg(test)]
mod tests;

pub use fresh::{Form, fresh};
pub use python::python;

use crate::error::ConfigError;
use crate::job::Job;
use crate::reader::Reader;
use crate::table::Format;
use crate::{Options, derive, detect};
use edit::{Document, Syntax};
use shardlab_plan::Scenario;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file and its text with changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edited {
    /// Path as the caller gave it.
    pub path: PathBuf,
    /// Text before the changes.
    pub before: String,
    /// Text with the changes.
    pub after: String,
}

/// A change that no file expresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unexpressed {
    /// The change, in the syntax of `--set`.
    pub set: String,
    /// Why no file expresses it.
    pub why: String,
}

/// The files of a job after changes.
#[derive(Debug)]
pub struct Edits {
    /// Files that have changed.
    pub files: Vec<Edited>,
    /// Changes that no file expresses.
    pub lost: Vec<Unexpressed>,
}

/// Writes changes into the files of a job, in place. Everything else in the files stays the same,
/// including comments. `changes` are in the syntax of `--set`; `to` is the scenario with these
/// changes.
///
/// # Errors
/// Fails if the files cannot be read, with or without the changes.
pub fn edit(
    files: &[PathBuf],
    options: &Options,
    changes: &[String],
    to: &Scenario,
) -> Result<Edits, ConfigError> {
    let read = |documents: &[Document]| {
        let texts = documents.iter().map(|d| (d.path.clone(), d.text.clone()));
        read(files, options, texts.collect())
    };
    let mut documents = Vec::new();
    let (mut job, sources) = read(&[])?;
    let pairs = job.has_pairs();
    for (path, format) in sources {
        let text = detect::text(&path)?;
        documents.push(Document::new(path, text, format)?);
    }
    let before: Vec<String> = documents.iter().map(|d| d.text.clone()).collect();
    let mut lost = Vec::new();
    let mut lose = |sets: &[&String], why: &str| {
        lost.extend(sets.iter().map(|set| Unexpressed {
            set: (*set).clone(),
            why: why.to_owned(),
        }));
    };
    for sets in together(changes) {
        // The files say it already.
        if says(&mut job, &sets) {
            continue;
        }
        let mut next = documents.clone();
        let written = sets
            .iter()
            .try_for_each(|set| write(&mut next, set, (to, pairs)));
        let read = written.and_then(|()| read(&next).map_err(|e| e.to_string()));
        match read.map(|(mut job, _)| says(&mut job, &sets).then_some(job)) {
            Ok(Some(says)) => (documents, job) = (next, says),
            Ok(None) => lose(&sets, "another key of the configuration decides it"),
            Err(why) => lose(&sets, &why),
        }
    }
    let files = documents.into_iter().zip(before);
    let files = files.filter(|(d, before)| d.text != *before);
    Ok(Edits {
        files: files
            .map(|(document, before)| Edited {
                path: document.path,
                before,
                after: document.text,
            })
            .collect(),
        lost,
    })
}

/// Groups changes that are only consistent together: the micro-batch with the accumulation, and the
/// sizes of the mesh.
fn together(changes: &[String]) -> Vec<Vec<&String>> {
    const PAIRS: [&str; 2] = [
        "train.micro_batch= train.grad_accum=",
        "mesh.dp_shard= mesh.dp_replicate=",
    ];
    let pair = |set: &str| {
        let key = set.split_inclusive('=').next().unwrap_or(set);
        PAIRS.iter().position(|pair| pair.contains(key))
    };
    let mut groups: Vec<Vec<&String>> = Vec::new();
    for set in changes {
        let own = pair(set);
        match groups
            .iter_mut()
            .find(|g| own.is_some() && pair(g[0]) == own)
        {
            Some(group) => group.push(set),
            None => groups.push(vec![set]),
        }
    }
    groups
}

/// Returns whether a job has the values that these changes set.
fn says(job: &mut Job, sets: &[&String]) -> bool {
    let sets: Vec<String> = sets.iter().map(|set| (*set).clone()).collect();
    match (job.scenario(&[]), job.scenario(&sets)) {
        (Ok(own), Ok(changed)) => own == changed,
        _ => false,
    }
}

/// A file of a job and its format.
type Source = (PathBuf, &'static Format);

/// Reads files, using other texts for some of them, and returns the job and all files with their
/// formats.
fn read(
    files: &[PathBuf],
    options: &Options,
    texts: BTreeMap<PathBuf, String>,
) -> Result<(Job, Vec<Source>), ConfigError> {
    let mut reader = Reader {
        texts,
        ..Reader::default()
    };
    for file in files {
        reader.file(file, None)?;
    }
    derive::finish(&mut reader, options)?;
    let sources = reader.files.iter().cloned();
    let sources = sources.zip(reader.formats.iter().copied()).collect();
    Ok((Job::new(files, reader), sources))
}

/// Writes a change into the first file whose format has a key for it.
/// `pairs` means that each sample is a pair of sequences.
fn write(
    documents: &mut [Document],
    set: &str,
    (to, pairs): (&Scenario, bool),
) -> Result<(), String> {
    let (key, mut value) = set.split_once('=').ok_or("expected SECTION.KEY=VALUE")?;
    let half;
    if pairs && key == "train.micro_batch" {
        let sequences = value.parse::<u64>().ok();
        let samples = sequences.filter(|n| n.is_multiple_of(2)).map(|n| n / 2);
        half = samples.ok_or("samples are pairs of sequences")?.to_string();
        value = &half;
    }
    let mut why = "no counterpart".to_owned();
    for document in documents {
        let has = |path: &str| document.has(path);
        let Some(pairs) = rules::pairs(document.format, key, value, to, &has) else {
            continue;
        };
        let mut next = document.clone();
        match pairs
            .iter()
            .try_for_each(|(path, value)| next.set(path, value))
        {
            Ok(()) => {
                *document = next;
                return Ok(());
            }
            Err(e) => why = e,
        }
    }
    Err(why)
}

/// Writes changes into the text of a scenario file, in place.
///
/// # Errors
/// Fails if the text is not TOML or a value cannot be replaced.
pub fn edit_scenario(path: &Path, text: &str, changes: &[String]) -> Result<String, ConfigError> {
    let mut document = Document::scenario(path, text)?;
    for set in changes {
        let (key, value) = set.split_once('=').unwrap_or((set, ""));
        let set = document.set(key, value);
        set.map_err(|why| ConfigError::file(path, format!("{key}: {why}")))?;
    }
    debug_assert_eq!(document.syntax, Syntax::Toml, "scenarios are TOML");
    Ok(document.text)
}
