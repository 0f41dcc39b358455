//! The merged document: files along `extends`, overrides and sweep points, key by key, each value
//! with its position.

use super::check;
use super::error::{Position, ScenarioError, ScenarioErrorKind};
use super::keys::{KEYS, Key, SECTIONS};
use super::model_files::ModelFiles;
use super::source::Source;
use super::spellings;
use super::value::{Datum, Entry, Origin, Value, convert_table};
use crate::names::nearest;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::de::DeTable;

/// Maximum size of a file in bytes.
pub(crate) const MAX_TEXT_BYTES: usize = 1 << 20;

/// Maximum number of points of a sweep.
pub(crate) const MAX_POINTS: usize = 100_000;

/// How strong a value is: the preset is weakest, then files in the order of inheritance, then
/// overrides, then the axes of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Layer {
    Preset,
    Given(u32),
    Axis,
}

/// A key's value in force.
#[derive(Clone, Debug)]
struct Given {
    value: Value,
    layer: Layer,
}

/// One axis of `[sweep]`.
#[derive(Clone, Debug)]
pub(crate) struct AxisValues {
    /// Keys that it sets together.
    pub keys: Vec<Key>,
    /// Its values: of each one value for every key.
    pub values: Vec<Vec<Value>>,
    /// Given by `--axis`, which no other `--axis` may replace.
    is_option: bool,
}

/// Everything that a scenario's texts say.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    sources: Vec<Source>,
    pub(super) model_files: ModelFiles,
    given: Vec<Option<Given>>,
    sections: [Option<Origin>; SECTIONS.len()],
    layers: u32,
    main: u32,
    /// Axes of `[sweep]`, in order of appearance.
    pub axes: Vec<AxisValues>,
    /// Name of the scenario.
    pub name: String,
    /// Leading comment of the file.
    pub about: String,
    /// What a model file says that no key expresses.
    pub notes: Vec<String>,
}

/// What of a preset other values depend on.
#[derive(Debug, Default)]
pub(crate) struct Shape {
    pub(crate) family: Option<String>,
    /// Model width, elements.
    pub(crate) hidden: Option<u64>,
    /// Width of the feed-forward layer, elements.
    pub(crate) ffn: Option<u64>,
}

impl Document {
    pub(crate) fn new(name: String) -> Self {
        Self {
            sources: Vec::new(),
            model_files: ModelFiles::default(),
            given: vec![None; KEYS.len()],
            sections: [None; SECTIONS.len()],
            layers: 0,
            main: 0,
            axes: Vec::new(),
            name,
            about: String::new(),
            notes: Vec::new(),
        }
    }

    /// Value in force.
    pub(crate) fn value(&self, key: Key) -> Option<&Value> {
        self.given[key as usize].as_ref().map(|g| &g.value)
    }

    /// Layer of the value in force.
    pub(crate) fn layer(&self, key: Key) -> Option<Layer> {
        self.given[key as usize].as_ref().map(|g| g.layer)
    }

    /// Returns the document without its value of a key.
    pub(crate) fn without(&self, key: Key) -> Self {
        let mut other = self.clone();
        other.given[key as usize] = None;
        other
    }

    /// Whether the user (not the preset) gives the key.
    pub(crate) fn says(&self, key: Key) -> bool {
        self.layer(key).is_some_and(|l| l > Layer::Preset)
    }

    /// Where each key that the user gives was written, by path (`gate.loss`): the file or override,
    /// and the position.
    pub(crate) fn places(&self) -> BTreeMap<String, (String, Position)> {
        let keys = KEYS.iter().zip(&self.given);
        keys.filter_map(|(info, given)| {
            let given = given.as_ref().filter(|g| g.layer > Layer::Preset)?;
            let at = self.error(given.value.origin, "");
            let path = format!("{}.{}", info.section, info.key);
            Some((path, (at.file().to_owned(), at.position()?)))
        })
        .collect()
    }

    /// An error at a place.
    pub(crate) fn error(&self, at: Origin, message: impl Into<String>) -> ScenarioError {
        match self.sources.get(at.source as usize) {
            Some(source) => ScenarioError::at(source, at.span(), message),
            None => ScenarioError::file_only(self.name.clone(), message),
        }
    }

    /// An error about a combination of keys, at the one that was set last; at the section when none
    /// was.
    pub(crate) fn conflict(&self, keys: &[Key], message: impl Into<String>) -> ScenarioError {
        let mut best: Option<(Layer, Origin)> = None;
        for given in keys.iter().filter_map(|k| self.given[*k as usize].as_ref()) {
            if best.is_none_or(|(layer, _)| given.layer > layer) {
                best = Some((given.layer, given.value.origin));
            }
        }
        match best {
            Some((_, origin)) => self.error(origin, message),
            None => self.missing(keys[0], message),
        }
        .of(ScenarioErrorKind::Conflict)
    }

    /// Returns an error about a key that no text gives.
    pub(crate) fn missing(&self, key: Key, message: impl Into<String>) -> ScenarioError {
        let section = SECTIONS.iter().position(|s| *s == key.info().section);
        let header = section.and_then(|i| self.sections[i]);
        self.error(
            header.unwrap_or_else(|| Origin::new(self.main, 0..0)),
            message,
        )
        .of(ScenarioErrorKind::Missing)
    }

    pub(crate) fn add_source(&mut self, source: Source) -> u32 {
        self.sources.push(source);
        (self.sources.len() - 1) as u32
    }

    /// The layer above all before.
    pub(crate) fn next_layer(&mut self) -> Layer {
        self.layers += 1;
        Layer::Given(self.layers)
    }

    /// Takes in a file's tables.
    pub(crate) fn absorb_file(
        &mut self,
        source: Source,
        table: &DeTable<'_>,
    ) -> Result<(), ScenarioError> {
        self.about = about(&source.text);
        let index = self.add_source(source);
        self.main = index;
        let layer = self.next_layer();
        for entry in convert_table(table, index, 0) {
            match entry.key.as_str() {
                "extends" => {}
                "sweep" => self.absorb_sweep(&entry, false)?,
                _ => self.absorb_section(entry, layer)?,
            }
        }
        Ok(())
    }

    /// Takes from a preset the keys that no text gives. Returns those that other keys depend on.
    pub(crate) fn absorb_preset(
        &mut self,
        source: Source,
        table: &DeTable<'_>,
    ) -> Result<Shape, ScenarioError> {
        let index = self.add_source(source);
        let mut shape = Shape::default();
        for entry in convert_table(table, index, 0) {
            if entry.key == "model" {
                let fields = entry.value.table().unwrap_or_default();
                let field = |key: &str| fields.iter().find(|f| f.key == key).map(|f| &f.value);
                shape = Shape {
                    family: field("family").and_then(Value::str).map(str::to_owned),
                    hidden: field("hidden").and_then(Value::integer),
                    ffn: field("ffn").and_then(Value::integer),
                };
            }
            self.absorb_section(entry, Layer::Preset)?;
        }
        Ok(shape)
    }

    fn absorb_section(&mut self, entry: Entry, layer: Layer) -> Result<(), ScenarioError> {
        let Some(index) = SECTIONS.iter().position(|s| *s == entry.key) else {
            return Err(self.unknown_section(&entry));
        };
        let section = SECTIONS[index];
        if layer > Layer::Preset {
            self.sections[index] = Some(entry.key_origin);
        }
        let Datum::Table(fields) = entry.value.datum else {
            let message = format!("`{section}` is a section, not {}", entry.value.describe());
            return Err(self
                .error(entry.value.origin, message)
                .with_help(format!("write [{section}] and its keys below")));
        };
        let mut seen: Vec<(Key, String)> = Vec::new();
        for field in fields {
            let key = self.key(section, &field.key, field.key_origin)?;
            if let Some((_, other)) = seen.iter().find(|(k, _)| *k == key) {
                let message = format!("`{}` and `{other}` are the same key", field.key);
                let error = self.error(field.key_origin, message);
                return Err(error.with_help(format!("keep one of them: `{}`", key.info().key)));
            }
            self.set(key, field.value, layer)?;
            seen.push((key, field.key));
        }
        Ok(())
    }

    /// Gives a key a value, after checking its form.
    pub(crate) fn set(
        &mut self,
        key: Key,
        value: Value,
        layer: Layer,
    ) -> Result<(), ScenarioError> {
        let value = self.checked(key, value)?;
        let slot = &mut self.given[key as usize];
        if layer > Layer::Preset || slot.is_none() {
            *slot = Some(Given { value, layer });
        }
        Ok(())
    }

    /// Replaces the value of a key that is given, at its place, by the value that it stands for.
    pub(crate) fn resolve(&mut self, key: Key, datum: Datum) {
        if let Some(given) = &mut self.given[key as usize] {
            given.value.datum = datum;
        }
    }

    /// Returns a key's value in the spelling of this format.
    ///
    /// # Errors
    /// When it has the wrong form.
    fn checked(&self, key: Key, value: Value) -> Result<Value, ScenarioError> {
        let mut value = spellings::resolved(key.info().accepts, value);
        if key == Key::Preset && check::form(self, key, &value).is_err() {
            value.datum = self.config_in(&value).map_or(value.datum, Datum::Str);
        }
        check::form(self, key, &value).map_err(|e| e.of(ScenarioErrorKind::Value))?;
        Ok(value)
    }

    /// Returns the path of the `config.json` in a folder that a value names.
    fn config_in(&self, folder: &Value) -> Option<String> {
        let file = Path::new(folder.str()?).join("config.json");
        let is_there = self.found(folder).join("config.json").is_file();
        is_there.then(|| file.display().to_string())
    }

    /// The key of this name, or an error that suggests one.
    pub(crate) fn key(&self, section: &str, name: &str, at: Origin) -> Result<Key, ScenarioError> {
        if let Some(key) = Key::find(section, name) {
            return Ok(key);
        }
        let error = self
            .error(at, format!("unknown key `{name}` in [{section}]"))
            .of(ScenarioErrorKind::Unknown);
        if let Some(what) = not_modeled(section, name) {
            return Err(error.with_help(format!("{what} is not modeled")));
        }
        if let Some(home) = Key::named(name) {
            return Err(error.with_help(format!("`{name}` belongs in [{}]", home.info().section)));
        }
        let siblings: Vec<&str> = Key::of_section(section).map(|k| k.info().key).collect();
        if let Some(near) = nearest(name, siblings.iter().copied()) {
            return Err(error.with_near(Some(near)));
        }
        if let Some(near) = nearest(name, KEYS.iter().map(|k| k.key)).and_then(Key::named) {
            return Err(error.with_help(format!(
                "did you mean `{}` in [{}]?",
                near.info().key,
                near.info().section
            )));
        }
        Err(error.with_help(format!("keys of [{section}]: {}", siblings.join(", "))))
    }

    fn unknown_section(&self, entry: &Entry) -> ScenarioError {
        let name = &entry.key;
        let what = if entry.value.table().is_some() {
            format!("unknown section [{name}]")
        } else {
            format!("unknown key `{name}`")
        };
        let error = self
            .error(entry.key_origin, what)
            .of(ScenarioErrorKind::Unknown);
        if let Some(home) = Key::named(name) {
            return error.with_help(format!("`{name}` belongs in [{}]", home.info().section));
        }
        let sections = SECTIONS.iter().copied().chain(["sweep", "extends"]);
        match nearest(name, sections) {
            Some(near) => error.with_near(Some(near)),
            None => error.with_help(format!(
                "sections: {}, sweep; and extends = \"FILE\"",
                SECTIONS.join(", ")
            )),
        }
    }

    /// Takes in `[sweep]`: keys are paths (`fsdp.policy`, dotted or quoted), values lists.
    /// `is_option` where that is an option of the command line.
    pub(crate) fn absorb_sweep(
        &mut self,
        sweep: &Entry,
        is_option: bool,
    ) -> Result<(), ScenarioError> {
        let Some(fields) = sweep.value.table() else {
            let message = format!("`sweep` is a section, not {}", sweep.value.describe());
            return Err(self.error(sweep.value.origin, message));
        };
        for field in fields {
            self.absorb_axis(&field.key, field, is_option)?;
        }
        let points = self
            .axes
            .iter()
            .try_fold(1usize, |n, a| n.checked_mul(a.values.len()));
        if points.is_none_or(|n| n > MAX_POINTS) {
            return Err(self.error(
                sweep.key_origin,
                format!("the sweep has more than {MAX_POINTS} points"),
            ));
        }
        Ok(())
    }

    fn absorb_axis(
        &mut self,
        path: &str,
        field: &Entry,
        is_option: bool,
    ) -> Result<(), ScenarioError> {
        if SECTIONS.contains(&path)
            && let Some(inner) = field.value.table()
        {
            return inner
                .iter()
                .try_for_each(|f| self.absorb_axis(&format!("{path}.{}", f.key), f, is_option));
        }
        let keys = self.axis_keys(path, field.key_origin)?;
        let axis = AxisValues {
            values: self.axis_values(path, &keys, &field.value)?,
            keys,
            is_option,
        };
        self.add_axis(path, axis, field.key_origin)
    }

    /// The keys of an axis: `section.key`, or several joined by commas.
    fn axis_keys(&self, path: &str, at: Origin) -> Result<Vec<Key>, ScenarioError> {
        let mut keys = Vec::new();
        let mut read = 0;
        for part in path.split(',').map(str::trim) {
            let at = self.part(at, part, &mut read);
            let key = self.axis_key(part, at)?;
            if keys.contains(&key) {
                let message = format!("axis `{path}` names `{part}` twice");
                return Err(self.error(at, message));
            }
            keys.push(key);
        }
        Ok(keys)
    }

    fn axis_key(&self, path: &str, at: Origin) -> Result<Key, ScenarioError> {
        let Some((section, name)) = path.split_once('.') else {
            let error = self.error(at, format!("`{path}` is not a key path"));
            return Err(match Key::named(path) {
                Some(key) => error.with_help(format!("did you mean `{}`?", key.path())),
                None => error.with_help(
                    "write section.key = [values], for example fsdp.prefetch_forward = [0, 1, 2]",
                ),
            });
        };
        let (section, name) = (section.trim(), name.trim());
        if !SECTIONS.contains(&section) {
            let error = self.error(at, format!("unknown section [{section}] in axis `{path}`"));
            return Err(error.with_near(nearest(section, SECTIONS)));
        }
        self.key(section, name, at)
    }

    /// The values of an axis, one for each of its keys.
    fn axis_values(
        &self,
        path: &str,
        keys: &[Key],
        value: &Value,
    ) -> Result<Vec<Vec<Value>>, ScenarioError> {
        let expected = || match keys {
            [key] => format!("a list of {}", key.info().expected()),
            several => format!("a list of lists of {} values", several.len()),
        };
        let points = match &value.datum {
            Datum::Array(points) if !points.is_empty() => points,
            datum => {
                let message = match datum {
                    Datum::Array(_) => format!("axis `{path}` has no values"),
                    _ => format!(
                        "axis `{path}` must be a list of values, not {}",
                        value.describe()
                    ),
                };
                let error = self.error(value.origin, message);
                return Err(error.with_expected(expected()));
            }
        };
        let mut values = Vec::with_capacity(points.len());
        for point in points {
            let parts = match (keys, point.array()) {
                ([_], _) => std::slice::from_ref(point),
                (_, Some(parts)) if parts.len() == keys.len() => parts,
                (_, other) => {
                    let message = format!(
                        "a value of axis `{path}` must be a list of {}, one for each key, not {}",
                        keys.len(),
                        other
                            .map_or_else(|| point.describe(), |l| format!("a list of {}", l.len()))
                    );
                    let error = self.error(point.origin, message);
                    return Err(error.with_expected(expected()));
                }
            };
            let parts = keys.iter().zip(parts.iter().cloned());
            let parts = parts.map(|(key, part)| self.checked(*key, part));
            values.push(parts.collect::<Result<Vec<_>, _>>()?);
        }
        Ok(values)
    }

    /// Takes in an axis, which replaces those whose keys it gives all.
    fn add_axis(&mut self, path: &str, axis: AxisValues, at: Origin) -> Result<(), ScenarioError> {
        let gives = |k: &Key| axis.keys.contains(k);
        let (mut first, mut replaced) = (None, Vec::new());
        for (i, other) in self.axes.iter().enumerate() {
            let Some(shared) = other.keys.iter().find(|k| gives(k)) else {
                continue;
            };
            let written = other.values.first().and_then(|v| v.first());
            let source = written.map(|v| v.origin.source);
            if axis.is_option && other.is_option {
                let key = shared.path();
                let names = [source.unwrap_or(at.source), at.source];
                let [first, second] = names.map(|s| self.source_name(s));
                let message = format!("two axes set `{key}`: {first} and {second}");
                let help = "give all values of a key in one axis";
                return Err(self.error(at, message).with_help(help));
            }
            if source == Some(at.source) {
                let message = format!("two axes of one sweep set `{}`", shared.path());
                let help = "a key can be in one axis only, alone or with others";
                return Err(self.error(at, message).with_help(help));
            }
            if let Some(left) = other.keys.iter().find(|k| !gives(k)) {
                let message = format!(
                    "axis `{path}` sets `{}`, but another axis sets it together with `{}`",
                    shared.path(),
                    left.path()
                );
                let help = "an axis replaces another only if it sets all of its keys";
                return Err(self.error(at, message).with_help(help));
            }
            match first {
                None => first = Some(i),
                Some(_) => replaced.push(i),
            }
        }
        for i in replaced.into_iter().rev() {
            self.axes.remove(i);
        }
        match first {
            Some(i) => self.axes[i] = axis,
            None => self.axes.push(axis),
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> &str {
        self.sources.get(source as usize).map_or("", |s| &s.name)
    }

    /// Where a part of what was written at a place is, searched from `read` on, which is moved
    /// behind it; the whole where it is not written as such.
    fn part(&self, whole: Origin, part: &str, read: &mut usize) -> Origin {
        let source = self.sources.get(whole.source as usize);
        let text = source.and_then(|s| s.text.get(whole.span()));
        let rest = text.and_then(|t| t.get(*read..));
        match rest.and_then(|r| r.find(part)) {
            Some(found) if !part.is_empty() => {
                let begin = *read + found;
                *read = begin + part.len();
                let at = whole.span().start;
                Origin::new(whole.source, at + begin..at + *read)
            }
            _ => whole,
        }
    }

    /// The folder that a path written at a place is relative to, where that is not the working
    /// directory.
    pub(crate) fn folder(&self, at: Origin) -> Option<&Path> {
        self.sources.get(at.source as usize)?.folder.as_deref()
    }

    /// A path as the working directory has it: one in a file is relative to that file, as `extends`
    /// is.
    pub(crate) fn found(&self, path: &Value) -> PathBuf {
        let name = path.str().unwrap_or_default();
        self.folder(path.origin)
            .map_or_else(|| name.into(), |folder| folder.join(name))
    }

    /// The text of a key's value in its source, with quotes.
    pub(crate) fn written(&self, key: Key) -> Option<&str> {
        let origin = self.value(key)?.origin;
        let source = self.sources.get(origin.source as usize)?;
        source.text.get(origin.span())
    }

    /// The text of a value as written; strings without quotes.
    pub(crate) fn text_of(&self, value: &Value) -> String {
        match &value.datum {
            Datum::Str(s) => s.clone(),
            _ => {
                let text = self
                    .sources
                    .get(value.origin.source as usize)
                    .and_then(|s| s.text.get(value.origin.span()));
                text.unwrap_or_default()
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
            }
        }
    }
}

/// Comment lines before anything else, without their `#`.
fn about(text: &str) -> String {
    let lines = text
        .trim_start_matches('\u{feff}')
        .lines()
        .map(str::trim)
        .skip_while(|l| l.is_empty());
    let comments = lines
        .map_while(|l| l.strip_prefix('#'))
        .map(|l| l.trim_start_matches('#').trim());
    comments.collect::<Vec<_>>().join("\n").trim().to_owned()
}

/// Returns the kind of parallelism that a key of other frameworks asks for, if it is not modeled.
fn not_modeled(section: &str, name: &str) -> Option<&'static str> {
    match (section, name) {
        ("mesh", "pp" | "pipeline_parallel_degree" | "pipeline_model_parallel_size") => {
            Some("pipeline parallelism")
        }
        ("mesh", "cp" | "context_parallel_degree" | "context_parallel_size") => {
            Some("context parallelism")
        }
        ("mesh", "sp" | "sequence_parallel") => Some("sequence parallelism"),
        _ => None,
    }
}
