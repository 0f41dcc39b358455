//! Baselines: one text file per scenario, made for reading and diffing.

pub(crate) mod options;
mod write;

use super::facts::Facts;
use super::limits::Place;
use serde::Deserialize;
use shardlab_plan::scenario::{Position, nearest};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Version of the written file format. It increases when the meaning of a field changes. An outline
/// of the plan in format 1 can be compared only by the version that wrote it; all other content of
/// such files is read.
pub const BASELINE_FORMAT: u32 = 2;
/// Oldest format that can be read.
const OLDEST_FORMAT: u32 = 1;

/// Maximum size of a file that is read, bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Why there is no baseline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// The baseline does not exist.
    #[error(
        "{}: there is no baseline of `{scenario}`{}; `shardlab gate --bless` writes one",
        path.display(),
        near.as_ref().map_or_else(String::new, |n| format!(", did you mean `{n}`?"))
    )]
    Missing {
        /// The most similar name that has a baseline.
        near: Option<String>,
        /// Path that was searched.
        path: PathBuf,
        /// Scenario.
        scenario: String,
    },
    /// The file cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// The file is not a baseline.
    #[error("{}{}: {message}", path.display(), at.map_or_else(String::new, |at| format!(":{}:{}", at.line, at.column)))]
    Format {
        /// Path.
        path: PathBuf,
        /// Line and column, starting at 1, if the error has a place.
        at: Option<Position>,
        /// Reason.
        message: String,
    },
}

impl BaselineError {
    /// Returns the place of the error in the baseline's file, if it has one.
    #[must_use]
    pub fn place(&self) -> Option<Place> {
        let Self::Format {
            path, at: Some(at), ..
        } = self
        else {
            return None;
        };
        Some(Place {
            file: path.display().to_string(),
            line: at.line,
            column: at.column,
        })
    }
}

/// Why a text is not a baseline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// Line and column, starting at 1, if the error has a place.
    pub at: Option<Position>,
    /// Message, on one line.
    pub message: String,
}

impl Fault {
    fn new(text: &str, error: &toml::de::Error) -> Self {
        let at = error.span().map(|span| Position::of(text, span.start));
        let words: Vec<&str> = error.message().split_whitespace().collect();
        Self {
            at,
            message: format!("is not a baseline: {}", words.join(" ")),
        }
    }
}

/// A baseline and the file it was read from.
#[derive(Clone, Debug, PartialEq)]
pub struct Baseline {
    /// Facts at the time of writing.
    pub facts: Facts,
    /// File name for annotations; empty if the baseline was not read from a file.
    pub file: String,
    /// Version of the file's format.
    format: u32,
    /// Text of the file.
    text: String,
}

/// Fields of files of every format.
#[derive(Deserialize)]
struct Head {
    format: u32,
}

impl Baseline {
    /// Creates a baseline without a file.
    #[must_use]
    pub fn of(facts: Facts) -> Self {
        Self {
            text: write::text(&facts),
            facts,
            file: String::new(),
            format: BASELINE_FORMAT,
        }
    }

    /// Returns the text of a baseline file with these facts.
    #[must_use]
    pub fn text(facts: &Facts) -> String {
        write::text(facts)
    }

    /// Reads a baseline. `scenario` is the scenario that the caller needs the baseline for.
    ///
    /// # Errors
    /// Fails if the file does not exist or is not a baseline of a known format.
    pub fn read(path: &Path, scenario: &str) -> Result<Self, BaselineError> {
        let io = |error| BaselineError::Io {
            path: path.to_owned(),
            error,
        };
        let size = match std::fs::metadata(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(BaselineError::Missing {
                    near: near(path, scenario),
                    path: path.to_owned(),
                    scenario: scenario.to_owned(),
                });
            }
            other => other.map_err(io)?.len(),
        };
        let fault = |Fault { at, message }| BaselineError::Format {
            path: path.to_owned(),
            at,
            message,
        };
        if size > MAX_BYTES {
            let message = format!("is longer than {MAX_BYTES} bytes");
            return Err(fault(Fault { at: None, message }));
        }
        let text = std::fs::read_to_string(path).map_err(io)?;
        Self::parse(text, &path.display().to_string()).map_err(fault)
    }

    /// Parses a text; `file` is its name in annotations.
    ///
    /// # Errors
    /// Fails if it is not a baseline of a known format.
    pub fn parse(text: String, file: &str) -> Result<Self, Fault> {
        let Head { format } = toml::from_str(&text).map_err(|e| Fault::new(&text, &e))?;
        if !(OLDEST_FORMAT..=BASELINE_FORMAT).contains(&format) {
            return Err(Fault {
                at: None,
                message: format!(
                    "has format {format}, this version reads formats {OLDEST_FORMAT} to {BASELINE_FORMAT}; \
                     `shardlab gate --bless` writes it again"
                ),
            });
        }
        // The format is not a fact. An empty line in its place keeps the positions of the following
        // lines.
        let at = text.lines().position(|line| is_key(line, "format"));
        let facts = text.split('\n').enumerate();
        let facts = facts.map(|(i, line)| if Some(i) == at { "" } else { line });
        let facts = facts.collect::<Vec<_>>().join("\n");
        let facts: Facts = toml::from_str(&facts).map_err(|e| Fault::new(&facts, &e))?;
        Ok(Self {
            facts,
            file: file.to_owned(),
            format,
            text,
        })
    }

    /// Returns the plan's outline, if this version can compare it with its own outlines.
    #[must_use]
    pub fn outline(&self) -> Option<&str> {
        (self.format == BASELINE_FORMAT).then_some(self.facts.program.outline.as_str())
    }

    /// Returns the line of an option, for example `train.lr`.
    #[must_use]
    pub(crate) fn option_place(&self, option: &str) -> Option<Place> {
        let (section, key) = option.split_once('.')?;
        let mut place = self.place("options", section)?;
        let from = place.line as usize - 1;
        let entry = format!("{:?}", format!("{key}{}", options::IS));
        let entry = entry.trim_end_matches('"');
        let lines = self.text.lines().skip(from);
        let last = lines.clone().position(|l| l.ends_with(']'))?;
        let mut lines = lines.take(last + 1).enumerate();
        match lines.find(|(_, l)| l.contains(entry)) {
            Some((n, _)) => place.line += n as u32,
            // A file of format 1.
            None => return self.place("options", &format!("{option:?}")),
        }
        Some(place)
    }

    /// Returns the line of a key of a section (`""` is the head), for example `memory` and
    /// `allocated`.
    #[must_use]
    pub fn place(&self, section: &str, key: &str) -> Option<Place> {
        if self.file.is_empty() {
            return None;
        }
        let mut now = "";
        for (i, line) in self.text.lines().enumerate() {
            if let Some(title) = line.strip_prefix('[') {
                now = title
                    .trim_start_matches('[')
                    .split(']')
                    .next()
                    .unwrap_or("");
            }
            let found = line
                .split_once('=')
                .is_some_and(|(k, _)| k.trim() == key && now == section);
            if found {
                return Some(Place {
                    file: self.file.clone(),
                    line: u32::try_from(i + 1).unwrap_or(u32::MAX),
                    column: 1,
                });
            }
        }
        Some(Place::start(self.file.clone()))
    }
}

/// Returns the most similar name in the folder of a missing path.
fn near(path: &Path, scenario: &str) -> Option<String> {
    let entries = std::fs::read_dir(path.parent()?).ok()?;
    let names: Vec<String> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "toml"))
        .filter_map(|p| Some(p.file_stem()?.to_str()?.to_owned()))
        .collect();
    nearest(scenario, names.iter().map(String::as_str)).map(str::to_owned)
}

/// Returns whether a text is meant as a baseline, valid or not: its head contains a format, which
/// scenarios do not have.
#[must_use]
pub fn is_baseline(text: &str) -> bool {
    head(text, "format").is_some()
}

/// Returns the line of a key in the head of a text.
fn head<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut head = text.lines().take_while(|line| !line.starts_with('['));
    head.find(|line| is_key(line, key))
}

/// Returns whether a line sets this key.
fn is_key(line: &str, key: &str) -> bool {
    line.split_once('=').is_some_and(|(k, _)| k.trim() == key)
}

/// Folders in which baselines are searched by default, in this order.
pub const FOLDERS: [&str; 2] = ["tests/baselines", "baselines"];

/// Returns the first existing folder of [`FOLDERS`].
#[must_use]
pub fn folder() -> Option<PathBuf> {
    FOLDERS.iter().map(PathBuf::from).find(|p| p.is_dir())
}

/// Returns the path of a scenario's baseline: `at` itself if it ends in `.toml` and is not a
/// folder, otherwise `NAME.toml` in that folder.
#[must_use]
pub fn path_of(at: &Path, scenario: &str) -> PathBuf {
    if at.extension().is_some_and(|e| e == "toml") && !at.is_dir() {
        at.to_owned()
    } else {
        at.join(format!("{scenario}.toml"))
    }
}

/// Result of blessing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blessed {
    /// There was no baseline before.
    Created,
    /// The content has changed.
    Updated,
    /// The content is the same.
    Unchanged,
}

/// Checks that a scenario's baseline may replace an existing file at a path. The file must be an
/// older baseline of the scenario, valid or not.
///
/// # Errors
/// Fails if the file is anything else.
pub fn replaceable(path: &Path, scenario: &str) -> Result<(), BaselineError> {
    let fault = |message: String| {
        Err(BaselineError::Format {
            path: path.to_owned(),
            at: None,
            message: format!("{message}; it is not overwritten"),
        })
    };
    let text = match std::fs::read(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(|error| BaselineError::Io {
            path: path.to_owned(),
            error,
        })?,
    };
    let text = String::from_utf8_lossy(&text);
    if !is_baseline(&text) {
        return fault("is not a baseline".to_owned());
    }
    let line = head(&text, "scenario").and_then(|line| line.parse::<toml::Table>().ok());
    match line.as_ref().and_then(|t| t.get("scenario")?.as_str()) {
        Some(other) if other != scenario => {
            fault(format!("is the baseline of `{other}`, not of `{scenario}`"))
        }
        _ => Ok(()),
    }
}

/// Writes a baseline, completely or not at all.
///
/// # Errors
/// Fails if it cannot be written, or if the path is not [`replaceable`].
pub fn bless(path: &Path, facts: &Facts) -> Result<Blessed, BaselineError> {
    let io = |error| BaselineError::Io {
        path: path.to_owned(),
        error,
    };
    replaceable(path, &facts.scenario)?;
    let text = Baseline::text(facts);
    let before = std::fs::read_to_string(path).ok();
    if before.as_deref() == Some(text.as_str()) {
        return Ok(Blessed::Unchanged);
    }
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(io)?;
    }
    replace(path, |file| file.write_all(text.as_bytes())).map_err(io)?;
    Ok(if before.is_some() {
        Blessed::Updated
    } else {
        Blessed::Created
    })
}

/// Writes a file next to a path and moves it there when it is complete. An existing file is kept
/// until then, and a partial file is removed.
fn replace(
    path: &Path,
    write: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let part = path.with_extension(format!("toml.{}", std::process::id()));
    let written = File::create(&part)
        .and_then(|mut file| {
            write(&mut file)?;
            // A full disk may be reported only at this point.
            file.sync_all()
        })
        .and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written
}

#[cfg(test)]
mod tests;
