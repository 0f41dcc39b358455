//! Reading files: `extends` chains, shipped scenarios, overrides from the command line.

use super::error::ScenarioError;
use super::keys::{Key, SECTIONS};
use super::merge::{Document, MAX_TEXT_BYTES};
use super::presets::PRESETS;
use super::shipped;
use super::source::Source;
use super::value::{Datum, Entry, Origin, Value, convert, syntax_error};
use crate::names::nearest;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use toml::de::{DeTable, DeValue};

/// Where a text came from, which decides what `extends` and the paths in it are relative to.
enum Place {
    Disk(PathBuf),
    Stdin,
    Shipped(&'static str),
    Text,
}

/// The argument that means the scenario on standard input.
const STDIN: &str = "-";
/// What errors call standard input.
const STDIN_NAME: &str = "<stdin>";
/// The name of a scenario from standard input.
const STDIN_STEM: &str = "stdin";

/// Returns whether a path means standard input.
#[must_use]
pub fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == STDIN
}

/// The text on standard input. It can be read only once, and is asked for again by every pass over
/// the scenario.
fn stdin() -> Result<&'static str, String> {
    static TEXT: OnceLock<Result<String, String>> = OnceLock::new();
    let text = TEXT.get_or_init(|| read_text(std::io::stdin().lock(), MAX_TEXT_BYTES));
    text.as_deref().map_err(Clone::clone)
}

/// Returns the text of a scenario: of a file, a shipped one, or standard input. `None` if it cannot
/// be read.
#[must_use]
pub fn text(path: &Path) -> Option<String> {
    open(path).ok().map(|(_, source)| source.text.to_string())
}

impl Place {
    /// Equal for the same file under two names.
    fn identity(&self) -> String {
        match self {
            Self::Disk(path) => path
                .canonicalize()
                .unwrap_or_else(|_| path.clone())
                .display()
                .to_string(),
            Self::Stdin => STDIN_NAME.to_owned(),
            Self::Shipped(name) => format!("shipped:{name}"),
            Self::Text => String::new(),
        }
    }
}

/// The document of a file (or of a shipped scenario, when `path` is a bare name and not a file)
/// with overrides.
pub(crate) fn document(path: &Path, overrides: &[String]) -> Result<Document, ScenarioError> {
    let (place, source) = open(path)?;
    let name = match &place {
        Place::Shipped(name) => (*name).to_owned(),
        Place::Stdin => STDIN_STEM.to_owned(),
        _ => stem(path),
    };
    finish(name, place, source, overrides)
}

/// The name of the scenario in a file.
fn stem(path: &Path) -> String {
    path.file_stem()
        .map_or_else(String::new, |s| s.to_string_lossy().into_owned())
}

/// The document of a text as if a file held it, which it does not hold yet.
pub(crate) fn document_to_be(path: &Path, text: &str) -> Result<Document, ScenarioError> {
    let source = source_on_disk(path, text);
    finish(stem(path), Place::Disk(path.to_owned()), source, &[])
}

/// The document of a text. `extends` is an error: there is nothing it could be relative to.
pub(crate) fn document_of_text(
    name: &str,
    text: &str,
    overrides: &[String],
) -> Result<Document, ScenarioError> {
    let stem = Path::new(name)
        .file_stem()
        .map_or_else(|| name.to_owned(), |s| s.to_string_lossy().into_owned());
    let stem = if name.ends_with(".toml") {
        stem
    } else {
        name.to_owned()
    };
    finish(
        stem,
        Place::Text,
        Source {
            name: name.into(),
            text: text.into(),
            folder: None,
        },
        overrides,
    )
}

fn finish(
    name: String,
    place: Place,
    source: Source,
    overrides: &[String],
) -> Result<Document, ScenarioError> {
    let mut document = Document::new(name);
    absorb(&mut document, &place, source, &mut Vec::new())?;
    for text in overrides {
        override_with(&mut document, text)?;
    }
    Ok(document)
}

fn open(path: &Path) -> Result<(Place, Source), ScenarioError> {
    if is_stdin(path) {
        let text = stdin().map_err(|reason| ScenarioError::file_only(STDIN_NAME, reason))?;
        let source = Source {
            name: STDIN_NAME.into(),
            text: text.into(),
            folder: None,
        };
        return Ok((Place::Stdin, source));
    }
    let shown = path.display().to_string();
    if !path.exists()
        && path.components().count() == 1
        && let Some((name, text)) = shipped::find_shipped(&shown)
    {
        return Ok((Place::Shipped(name), shipped_source(name, text)));
    }
    match read(path) {
        Ok(text) => Ok((Place::Disk(path.to_owned()), source_on_disk(path, &text))),
        Err(_)
            if !path.exists() && path.components().count() == 1 && path.extension().is_none() =>
        {
            Err(unknown_name(&shown))
        }
        Err(reason) => {
            let error = ScenarioError::file_only(shown, reason);
            let names = shipped::shipped().iter().map(|(n, _)| *n);
            Err(match nearest(&stem(path), names) {
                Some(near) if !path.exists() => {
                    error.with_help(format!("a shipped scenario has a similar name: {near}"))
                }
                _ => error,
            })
        }
    }
}

/// Reports a name that is neither that of a file nor that of a shipped scenario.
fn unknown_name(name: &str) -> ScenarioError {
    let is_preset = name != "none" && PRESETS.contains(&name);
    let near = nearest(name, shipped::shipped().iter().map(|(n, _)| *n));
    let similar = near.map(|near| format!("a shipped scenario has a similar name: {near}"));
    let help = match (is_preset, similar) {
        (true, similar) => {
            let other = similar.map_or_else(String::new, |s| format!("; {s}"));
            format!(
                "{name} is a model: write preset = \"{name}\" into [model] of a scenario{other}"
            )
        }
        (false, Some(similar)) => similar,
        (false, None) => "`shardlab scenarios` lists the shipped ones".to_owned(),
    };
    ScenarioError::file_only(
        name.to_owned(),
        "no such file or shipped scenario".to_owned(),
    )
    .with_help(help)
}

fn source_on_disk(path: &Path, text: &str) -> Source {
    Source {
        name: path.display().to_string().into(),
        text: text.into(),
        // Empty for a file in the working directory.
        folder: path.parent().map(Arc::from),
    }
}

fn shipped_source(name: &str, text: &'static str) -> Source {
    Source {
        name: format!("scenarios/{name}.toml").into(),
        text: text.into(),
        folder: None,
    }
}

pub(crate) fn read(path: &Path) -> Result<String, String> {
    read_text(file(path)?, MAX_TEXT_BYTES)
}

/// Reads a model's `config.json`, which may list thousands of layers that are not quantized.
pub(crate) fn read_model(path: &Path) -> Result<String, String> {
    const MAX_BYTES: usize = 16 << 20;
    let text = read_text(file(path)?, MAX_BYTES)?;
    match text.len() > MAX_BYTES {
        true => Err(format!("is longer than {MAX_BYTES} bytes")),
        false => Ok(text),
    }
}

fn file(path: &Path) -> Result<std::fs::File, String> {
    std::fs::File::open(path).map_err(|e| format!("cannot be opened: {e}"))
}

/// Reads one byte more than the longest text, which shows that a text is longer.
fn read_text(from: impl Read, longest: usize) -> Result<String, String> {
    // Most files fit, so two calls read them.
    let mut bytes = Vec::with_capacity(8 << 10);
    from.take(longest as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| format!("cannot be read: {e}"))?;
    String::from_utf8(bytes)
        .map_err(|e| format!("is not valid UTF-8 (byte {})", e.utf8_error().valid_up_to()))
}

/// Adds a text to the document, after the files that it extends.
fn absorb(
    document: &mut Document,
    place: &Place,
    source: Source,
    chain: &mut Vec<(String, String)>,
) -> Result<(), ScenarioError> {
    if source.text.len() > MAX_TEXT_BYTES {
        return Err(ScenarioError::file_only(
            source.name.to_string(),
            format!("is longer than {MAX_TEXT_BYTES} bytes"),
        ));
    }
    chain.push((place.identity(), source.name.to_string()));
    let text = source.text.clone();
    let parsed = DeTable::parse(&text).map_err(|e| {
        let error = syntax_error(&source, &e, 0);
        match is_of_framework(&source.name, &text) {
            true => error.with_help(format!(
                "a scenario is TOML; predict this file with `shardlab fit {} --gpus 8xh100`, or name a model's config.json as `preset` in [model]",
                source.name
            )),
            false => error,
        }
    })?;
    let table = parsed.get_ref();
    if let Some(base) = table.get("extends") {
        let fail = |message: String| ScenarioError::at(&source, base.span(), message);
        let Some(base_name) = base.get_ref().as_str() else {
            return Err(fail(format!(
                "`extends` must be a file name, not a value of type {}",
                base.get_ref().type_str()
            )));
        };
        let (base_place, base_source) = resolve(place, base_name).map_err(|(reason, near)| {
            let error = fail(reason);
            match near {
                Some(n) => error.with_help(format!("did you mean `{n}.toml`?")),
                None => error,
            }
        })?;
        let identity = base_place.identity();
        if chain.iter().any(|(seen, _)| *seen == identity) {
            let names: Vec<&str> = chain.iter().map(|(_, n)| n.as_str()).collect();
            return Err(fail(format!(
                "`extends` forms a cycle: {} -> {}",
                names.join(" -> "),
                base_source.name
            )));
        }
        if chain.len() >= 32 {
            return Err(fail("`extends` is more than 32 files deep".into()));
        }
        absorb(document, &base_place, base_source, chain)?;
    }
    document.absorb_file(source, table)
}

/// The text that `extends = name` means, or why there is none and a name near to it.
fn resolve(place: &Place, name: &str) -> Result<(Place, Source), (String, Option<&'static str>)> {
    let near = || {
        let stem = name.strip_suffix(".toml").unwrap_or(name);
        nearest(stem, shipped::shipped().iter().map(|(n, _)| *n))
    };
    match place {
        Place::Text => Err((
            "`extends` works only in files: this text has no folder to search".into(),
            None,
        )),
        Place::Shipped(_) => match shipped::find_shipped(name) {
            Some((n, text)) => Ok((Place::Shipped(n), shipped_source(n, text))),
            None => Err((format!("there is no shipped scenario `{name}`"), near())),
        },
        Place::Disk(_) | Place::Stdin => {
            let path: &Path = match place {
                Place::Disk(path) => path,
                // Relative to the working directory.
                _ => Path::new(""),
            };
            let folder = path.parent().unwrap_or(Path::new(""));
            let base = folder.join(name);
            // A file that is still to be written is in its own way already.
            if base != path
                && !base.exists()
                && let Some((n, text)) = shipped::find_shipped(name)
            {
                return Ok((Place::Shipped(n), shipped_source(n, text)));
            }
            match read(&base) {
                Ok(text) => {
                    let source = source_on_disk(&base, &text);
                    Ok((Place::Disk(base), source))
                }
                Err(reason) => {
                    let shown = base.display();
                    Err((format!("the extended file {shown} {reason}"), near()))
                }
            }
        }
    }
}

/// `section.key=VALUE`, from `--set`.
fn override_with(document: &mut Document, text: &str) -> Result<(), ScenarioError> {
    let mut written = written("--set", text)?;
    if let Some(axis) = written.path.strip_prefix("sweep.").map(str::to_owned) {
        written.at.start = written.at.end - axis.len();
        written.path = axis;
        return absorb_axis(document, written, false);
    }
    let setting = setting(document, written)?;
    let layer = document.next_layer();
    let key = document.key(&setting.section, &setting.key, setting.at)?;
    document.set(key, setting.value, layer)
}

/// `section.key=[v1, v2]`, from `--axis`; keys joined by commas are set together.
pub(crate) fn axis_from(document: &mut Document, text: &str) -> Result<(), ScenarioError> {
    absorb_axis(document, written("--axis", text)?, true)
}

fn absorb_axis(
    document: &mut Document,
    written: Written,
    is_option: bool,
) -> Result<(), ScenarioError> {
    let (value, at) = written.value(document)?;
    let entry = Entry {
        key: written.path,
        key_origin: at,
        value,
    };
    let table = Value {
        origin: at,
        datum: Datum::Table(vec![entry]),
    };
    let sweep = Entry {
        key: "sweep".into(),
        key_origin: at,
        value: table,
    };
    document.absorb_sweep(&sweep, is_option)
}

/// `PATH=VALUE` as given to an option.
struct Written {
    source: Source,
    path: String,
    /// Bytes of the path.
    at: Range<usize>,
    /// Bytes of the value.
    value: Range<usize>,
}

impl Written {
    /// An error about the path.
    fn error(&self, message: impl Into<String>) -> ScenarioError {
        ScenarioError::at(&self.source, self.at.clone(), message)
    }

    /// The value, and the place of the path. What is no TOML is a string.
    fn value(&self, document: &mut Document) -> Result<(Value, Origin), ScenarioError> {
        let index = document.add_source(self.source.clone());
        let (text, shift) = (&self.source.text[self.value.clone()], self.value.start);
        let value = match DeValue::parse(text) {
            Ok(v) => convert(v.get_ref(), v.span(), index, shift),
            Err(e) if text.starts_with(['[', '{', '"', '\'']) => {
                return Err(syntax_error(&self.source, &e, shift));
            }
            Err(_) => Value {
                origin: Origin::new(index, self.value.clone()),
                datum: Datum::Str(text.to_owned()),
            },
        };
        Ok((value, Origin::new(index, self.at.clone())))
    }
}

/// Most characters of an option's text in the place of an error.
const SHOWN: usize = 60;

/// A text with its middle left out where it is long.
fn shortened(text: &str) -> String {
    let count = text.chars().count();
    if count <= SHOWN {
        return text.to_owned();
    }
    let (head, tail) = (SHOWN * 2 / 3, SHOWN / 3);
    let start: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(count - tail).collect();
    format!("{start}…{end}")
}

fn written(option: &str, text: &str) -> Result<Written, ScenarioError> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(ScenarioError::file_only(
            option,
            format!("is longer than {MAX_TEXT_BYTES} bytes"),
        ));
    }
    let source = Source {
        name: format!("{option} {}", shortened(text)).into(),
        text: text.into(),
        folder: None,
    };
    let Some((path, value)) = text.split_once('=') else {
        return Err(ScenarioError::at(
            &source,
            0..text.len(),
            "expected section.key=VALUE",
        ));
    };
    let shift = text.len() - value.trim_start().len();
    Ok(Written {
        at: path.len() - path.trim_start().len()..path.trim_end().len().max(1),
        path: path.trim().to_owned(),
        value: shift..shift + value.trim().len(),
        source,
    })
}

struct Setting {
    section: String,
    key: String,
    value: Value,
    at: Origin,
}

/// The key of `section.key=VALUE`, and its value; further path components make an inline table.
fn setting(document: &mut Document, written: Written) -> Result<Setting, ScenarioError> {
    let path = written.path.as_str();
    let parts: Vec<&str> = path.split('.').map(str::trim).collect();
    let ([section, key, rest @ ..], false) = (&parts[..], parts.iter().any(|p| p.is_empty()))
    else {
        let error = written.error(format!("`{path}` is not a key path"));
        return Err(match Key::named(path) {
            Some(key) => error.with_help(format!("did you mean `{}`?", key.path())),
            None if path == "extends" => error.with_help("`extends` can only be written in a file"),
            None => error.with_help("write section.key=VALUE, for example fsdp.prefetch_forward=0"),
        });
    };
    if !SECTIONS.contains(section) {
        let error = written.error(format!("unknown section [{section}]"));
        return Err(match Key::named(section) {
            Some(key) => error.with_help(format!("did you mean `{}`?", key.path())),
            None => error.with_near(nearest(section, SECTIONS)),
        });
    }
    if rest.len() > 8 {
        return Err(written.error(format!("`{path}` is not a key path")));
    }
    let (mut value, at) = written.value(document)?;
    for part in rest.iter().rev() {
        let entry = Entry {
            key: (*part).to_owned(),
            key_origin: at,
            value,
        };
        value = Value {
            origin: at,
            datum: Datum::Table(vec![entry]),
        };
    }
    Ok(Setting {
        section: (*section).to_owned(),
        key: (*key).to_owned(),
        value,
        at,
    })
}
/// Returns whether a file that is no TOML is probably a model's `config.json` or a framework's
/// configuration.
fn is_of_framework(name: &str, text: &str) -> bool {
    let path = Path::new(name);
    let by_name = ["json", "yaml", "yml"]
        .iter()
        .any(|e| path.extension().is_some_and(|x| x.eq_ignore_ascii_case(e)));
    by_name || text.trim_start().starts_with('{')
}
