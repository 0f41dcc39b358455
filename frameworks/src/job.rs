//! A job that has been read, with its rows and its scenario.

use crate::draft::Draft;
use crate::error::Place;
use crate::reader::Reader;
use crate::row::{Doubt, Lack, Row, Status, UNSET_VARIABLE};
use crate::table::Fact;
use shardlab_plan::Scenario;
use shardlab_plan::scenario::{self, Position, SECTIONS, ScenarioError, ScenarioErrorKind};
use std::fmt::{self, Write};
use std::path::PathBuf;

/// Note for a name in a list of layers that the model does not have. PEFT skips such names if at
/// least one other name matches.
/// Layers outside the blocks that PEFT adapts and scenarios do not.
const ENDS: [&str; 2] = ["lm_head", "embed_tokens"];
/// Why their adapters are not predicted.
const NOT_ADAPTED: &str = "PEFT adapts this layer, too, with rank × (hidden size + vocabulary) parameters more, which are not predicted";
const NO_SUCH_LAYER: &str = "skipped, as PEFT does where the model has no such layer";
/// Scenario key of the layers that get no adapters.
const EXCLUDED: &str = "lora.exclude_modules";
/// Scenario key of the modules that are frozen.
const FROZEN: &str = "fsdp.frozen";
/// End of the message about a pattern of modules that the model does not have.
const NO_MODULE: &str = "matches no module";
/// Note for a module that the model does not have, which thus needs no freezing.
const NOT_FROZEN: &str = "the model has no such module";
/// Note for a list of excluded layers with a name that the model does not have.
/// Key of the parts of blocks that are recomputed, and why it is left out if there are none.
const RECOMPUTED: &str = "train.recompute_modules";
const NOT_RECOMPUTED: &str = "skipped: the model has no such module";
/// The same for blocks.
const RECOMPUTED_BLOCKS: &str = "train.recompute_layers";
const MATCHES_NO_BLOCK: &str = "matches no block";
const NO_BLOCK: &str = "the model has no such block";
const NOTHING_RECOMPUTED: &str = "the model has none of these modules";
const NOTHING_EXCLUDED: &str = "the model has no such layer";
/// Column where comments start.
const COMMENT: usize = 40;

/// A job as its configuration describes it.
#[derive(Debug)]
pub struct Job {
    /// Name of the first file without its extension.
    pub name: String,
    /// Framework of the first file.
    pub framework: &'static str,
    draft: Draft,
}

/// An invalid scenario, with the key of the configuration that causes the error.
#[derive(Debug)]
pub struct JobError {
    /// Place of the key in the configuration, if it has one.
    pub place: Option<Place>,
    /// Key of the configuration and its value.
    pub key: Option<String>,
    /// Keys whose values are variables that the files do not set, each with its place. One of them
    /// may hold the missing value.
    pub variables: Vec<String>,
    /// The error in the scenario.
    pub error: ScenarioError,
    /// Whether the scenario derived from the configuration lacks a key.
    is_incomplete: bool,
}

impl Job {
    pub(crate) fn new(files: &[PathBuf], reader: Reader) -> Self {
        let name = files.first().and_then(|f| f.file_stem());
        Self {
            name: name.map_or_else(|| "job".to_owned(), |n| n.to_string_lossy().into_owned()),
            framework: reader.formats.first().map_or("a model", |f| f.name),
            draft: reader.draft,
        }
    }

    /// Returns whether every sample is a pair of sequences.
    pub(crate) fn has_pairs(&self) -> bool {
        self.draft.fact(Fact::Pairs).is_some()
    }

    /// Returns the status of each key, in the order of the files.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.draft.rows
    }

    /// Returns the keys without a counterpart that make a prediction impossible.
    pub fn decisive(&self) -> impl Iterator<Item = &Row> {
        let rows = self.rows().iter();
        rows.filter(|r| r.status.lack() == Lack::Everything)
    }

    /// Returns the keys that may change the answer although the prediction does not follow them,
    /// for a prediction with overrides.
    pub fn doubts<'a>(
        &'a self,
        overrides: &'a [String],
    ) -> impl Iterator<Item = (&'a Row, &'a Doubt)> {
        let given = |key: &str| {
            let mut keys = overrides.iter().filter_map(|o| o.split_once('='));
            !key.is_empty() && keys.any(|(name, _)| name.trim() == key)
        };
        let doubts = self
            .rows()
            .iter()
            .filter_map(|r| Some((r, r.doubt.as_ref()?)));
        doubts.filter(move |(_, doubt)| !given(doubt.key))
    }

    /// Returns the scenario as TOML, with a comment on each line that names the source of its
    /// value.
    #[must_use]
    pub fn text(&self) -> String {
        self.written().0
    }

    /// Returns the text, and the row that belongs to each of its lines.
    fn written(&self) -> (String, Vec<Option<usize>>) {
        let mut text = format!(
            "# From {} by `shardlab fit`. A comment says where a value is from.\n",
            self.framework
        );
        let mut lines = vec![None];
        for section in SECTIONS {
            let mut settings: Vec<(usize, &str, &str)> = Vec::new();
            for (i, row) in self.rows().iter().enumerate() {
                for setting in &row.settings {
                    let (of, key) = setting.key.split_once('.').unwrap_or(("", setting.key));
                    if of == section && settings.iter().all(|(_, k, _)| *k != key) {
                        settings.push((i, key, &setting.value));
                    }
                }
            }
            if settings.is_empty() {
                continue;
            }
            // Writing to a string cannot fail.
            let _ = write!(text, "\n[{section}]\n");
            lines.extend([None, None]);
            for (i, key, value) in settings {
                let pair = format!("{key} = {value}");
                let _ = writeln!(text, "{pair:<COMMENT$} # {}", self.origin(i));
                lines.push(Some(i));
            }
        }
        (text, lines)
    }

    /// Describes the source of a value: `job.yaml:3:1 micro_batch_size`, or why it is assumed.
    fn origin(&self, row: usize) -> String {
        let row = &self.rows()[row];
        let from = match &row.place {
            Some(place) => format!("{place} {}", row.key),
            None => String::new(),
        };
        let why = match (&row.why, row.status) {
            (Some(why), Status::Assumed) => format!("assumed: {why}"),
            (Some(why), _) if row.place.is_none() => why.clone(),
            _ => String::new(),
        };
        let gap = if from.is_empty() || why.is_empty() {
            ""
        } else {
            "; "
        };
        format!("{from}{gap}{why}").replace(['\n', '\r'], " ")
    }

    /// Returns the scenario with overrides. Keys that have no effect in it are dropped from it,
    /// with a note in their rows.
    ///
    /// # Errors
    /// Fails if the keys are not valid together; the error names the key of the configuration that
    /// causes it.
    pub fn scenario(&mut self, overrides: &[String]) -> Result<Scenario, JobError> {
        loop {
            let (text, lines) = self.written();
            let error = match scenario::parse(&self.name, &text, overrides) {
                Ok(scenario) => return Ok(scenario),
                Err(error) => error,
            };
            let line = error.position().map(|p| p.line as usize);
            let from_text = error.file() == self.name;
            let row = line.filter(|_| from_text).and_then(|l| *lines.get(l - 1)?);
            let key = line.and_then(|l| key_at(&text, l));
            match (error.kind(), row, key) {
                (ScenarioErrorKind::NoEffect, Some(_), Some(key)) => {
                    let why = format!("no effect here: {}", error.message());
                    self.draft.unset(&key, Lack::Nothing, &why);
                }
                (_, Some(_), Some(key))
                    if key == FROZEN
                        && error.message().ends_with(NO_MODULE)
                        && let Some(name) = quoted_at(&text, error.position()) =>
                {
                    if !self.draft.drop_item(&key, name, NOT_FROZEN) {
                        self.draft.unset(&key, Lack::Nothing, NOT_FROZEN);
                    }
                }
                (ScenarioErrorKind::NoMatch, Some(_), Some(key))
                    if key == RECOMPUTED
                        && let Some(name) = quoted_at(&text, error.position()) =>
                {
                    if self.draft.drop_item(&key, name, NOT_RECOMPUTED) {
                        continue;
                    }
                    for key in [RECOMPUTED, "train.recompute"] {
                        self.draft.unset(key, Lack::Nothing, NOTHING_RECOMPUTED);
                    }
                }
                (_, Some(_), Some(key))
                    if key == RECOMPUTED_BLOCKS
                        && error.message().ends_with(MATCHES_NO_BLOCK)
                        && let Some(name) = quoted_at(&text, error.position()) =>
                {
                    if self.draft.drop_item(&key, name, NO_BLOCK) {
                        continue;
                    }
                    for key in [RECOMPUTED_BLOCKS, "train.recompute"] {
                        self.draft.unset(key, Lack::Nothing, NO_BLOCK);
                    }
                }
                (ScenarioErrorKind::NoMatch, Some(row), Some(key))
                    if let Some(name) = quoted_at(&text, error.position())
                        && ENDS.contains(&name)
                        && self.draft.drop_item(&key, name, NOT_ADAPTED) =>
                {
                    let row = &mut self.draft.rows[row];
                    let message = format!("{}: {name}: {NOT_ADAPTED}", row.key);
                    row.doubt = Some(Doubt { key: "", message });
                }
                (ScenarioErrorKind::NoMatch, Some(_), Some(key))
                    if let Some(name) = quoted_at(&text, error.position())
                        && self.draft.drop_item(&key, name, NO_SUCH_LAYER) => {}
                (ScenarioErrorKind::NoMatch, Some(_), Some(key)) if key == EXCLUDED => {
                    self.draft.unset(&key, Lack::Nothing, NOTHING_EXCLUDED);
                }
                (_, row, _) => {
                    let row = row.map(|i| &self.rows()[i]);
                    let variables = if from_text && row.is_none() {
                        self.variables()
                    } else {
                        Vec::new()
                    };
                    return Err(JobError {
                        place: row.and_then(|r| r.place.clone()),
                        key: row.map(|r| format!("{} = {}", r.key, r.value)),
                        variables,
                        is_incomplete: from_text && error.kind() == ScenarioErrorKind::Missing,
                        error,
                    });
                }
            }
        }
    }
}

impl Job {
    /// Returns the keys whose values are variables that the files do not set.
    fn variables(&self) -> Vec<String> {
        let unset = |row: &&Row| row.why.as_deref() == Some(UNSET_VARIABLE);
        let shown = |row: &Row| {
            let place = row.place.as_ref();
            let place = place.map_or_else(String::new, |p| format!("{p}: "));
            format!("{place}{} = {}", row.key, row.value)
        };
        self.rows().iter().filter(unset).map(shown).collect()
    }
}

/// Returns the scenario key on a line of a text that [`Job`] wrote.
fn key_at(text: &str, line: usize) -> Option<String> {
    let before: Vec<&str> = text.lines().take(line).collect();
    let (key, _) = before.last()?.split_once(" = ")?;
    let section = before
        .iter()
        .rev()
        .find_map(|l| l.strip_prefix('[')?.strip_suffix(']'))?;
    Some(format!("{section}.{key}"))
}

/// Returns the text inside the quotation marks at a position.
fn quoted_at(text: &str, position: Option<Position>) -> Option<&str> {
    let at = position?;
    let line = text.lines().nth(at.line.checked_sub(1)? as usize)?;
    let rest = line.get(at.column.checked_sub(1)? as usize..)?;
    rest.strip_prefix('"')?.split('"').next()
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        if let Some(key) = &self.key {
            write!(f, "{key}: ")?;
        }
        let error = &self.error;
        if self.key.is_none() && self.variables.is_empty() {
            if self.is_incomplete {
                let message = error.message();
                return write!(
                    f,
                    "{message}; the configuration does not say it: add --set KEY=VALUE, or --model FOLDER for a model"
                );
            }
            return write!(f, "{error}");
        }
        write!(f, "{}", error.message())?;
        if !self.variables.is_empty() {
            write!(
                f,
                "; the files do not set these variables, and --set gives what they stand for:"
            )?;
            for variable in &self.variables {
                write!(f, "\n  {variable}")?;
            }
            return Ok(());
        }
        if let Some(help) = error.help() {
            write!(f, " ({help})")?;
        }
        Ok(())
    }
}

impl std::error::Error for JobError {}
