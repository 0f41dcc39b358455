//! Reads configuration files with the tables of their formats.

use crate::detect;
use crate::doubts;
use crate::draft::Draft;
use crate::error::{ConfigError, Place};
use crate::formats::{ACCELERATE, DEEPSPEED, FSDP, PEFT, SWIFT_FSDP};
use crate::interpolation;
use crate::row::{Doubt, Lack, Status, UNKNOWN, UNSET_VARIABLE};
use crate::shell::{CONDITION, SOURCE, source_note};
use crate::table::{Effect, Format, To, is_typo};
use crate::tree::{Name, Node, Value};
use shardlab_plan::scenario::nearest;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Maximum length of a chain of files that refer to one another.
const MAX_FILES: usize = 16;
const NOT_EVALUATED: &str = "cannot be evaluated without running the script: taken as false";
/// Why a job is not predicted if a variable names its file of options.
const UNSET_FILE: &str = "the file decides how the job is sharded, and the variable that names it is not set: write its path";
/// Number of parent folders to search for a file that a configuration names: such paths are often
/// relative to the root of a repository.
const ABOVE: usize = 6;

/// Reads files into a draft.
#[derive(Default)]
pub(crate) struct Reader {
    pub(crate) draft: Draft,
    /// Formats of the files, in the order in which they were read.
    pub(crate) formats: Vec<&'static Format>,
    /// Folder of the file that names the model.
    pub(crate) model_folder: PathBuf,
    /// Files in the order in which they were read.
    pub(crate) files: Vec<PathBuf>,
    /// Options that a command sets to null, which removes them from its files.
    pub(crate) removed: Vec<String>,
    /// Options of commands. They replace the same keys of the files that follow.
    pub(crate) options: Vec<CommandOption>,
    /// Texts that replace the contents of files.
    pub(crate) texts: BTreeMap<PathBuf, String>,
}

/// An option of a command.
pub(crate) struct CommandOption {
    /// Path of the key, as [`plain_path`] writes it.
    path: String,
    node: Node,
    row: usize,
    /// Whether the table of the command has the option. The table of a file can have it, too.
    known: bool,
}

/// The file that is being read.
struct File<'f> {
    shown: &'f str,
    folder: &'f Path,
    root: &'f Node,
    is_command: bool,
}

impl Reader {
    /// Reads a file and the files that it refers to.
    ///
    /// # Errors
    /// Fails if a file cannot be read, a key is misspelled, a value has the wrong type, or values
    /// contradict one another.
    pub(crate) fn file(
        &mut self,
        path: &Path,
        format: Option<&'static Format>,
    ) -> Result<(), ConfigError> {
        self.files.push(path.to_owned());
        if self.files.len() > MAX_FILES {
            return Err(ConfigError::file(
                path,
                "too many files refer to one another",
            ));
        }
        let text = match self.texts.get(path) {
            Some(text) => text.clone(),
            None => detect::text(path)?,
        };
        self.text(path, &text, format)
    }

    /// Reads a text as the contents of the file at `path`.
    pub(crate) fn text(
        &mut self,
        path: &Path,
        text: &str,
        format: Option<&'static Format>,
    ) -> Result<(), ConfigError> {
        let shown = path.display().to_string();
        // If another file refers to this one, the key decides the format.
        let (found, root) = detect::parse_as(&shown, text, format)?;
        let format = format.unwrap_or(found);
        self.formats.push(format);
        let folder = path.parent().unwrap_or(Path::new(""));
        let is_command = detect::is_script(&shown, text);
        let file = File {
            shown: &shown,
            folder,
            root: &root,
            is_command,
        };
        if !is_command {
            self.unknown_options(&file, format)?;
            return self.map(&file, format, &root, "", "", None);
        }
        // Options of a command replace those of the files that it names.
        let (mut files, options): (Vec<_>, Vec<_>) = root
            .entries()
            .iter()
            .cloned()
            .partition(|(name, _)| names_file(format, name));
        // The paths of other files can be options of the main file, too.
        files.sort_by_key(|(name, _)| is_main_file(format, name));
        let options = Node::new(root.at, Value::Map(options));
        self.map(&file, format, &options, "", "", None)?;
        self.draft.end_command();
        let nulls = root
            .entries()
            .iter()
            .filter(|(_, v)| v.value == Value::Null);
        self.removed = nulls.map(|(name, _)| name.text.clone()).collect();
        let files = Node::new(root.at, Value::Map(files));
        self.map(&file, format, &files, "", "", None)
    }

    /// Reads the entries of a map. `shown` is the path in the file, `path` the path in the format.
    fn map(
        &mut self,
        file: &File<'_>,
        format: &'static Format,
        map: &Node,
        shown: &str,
        path: &str,
        above: Option<To>,
    ) -> Result<(), ConfigError> {
        for (name, node) in map.entries() {
            let shown = join(shown, &name.text);
            let path = if format.flat {
                name.text.replace('_', "-")
            } else {
                join(path, &name.text)
            };
            let exact = format.key(&path);
            let to = exact.or(above);
            let inner = !node.entries().is_empty();
            match exact {
                Some(To::File(_) | To::Preset(..))
                    if inner
                        && self
                            .replacement(file, format, &shown, &path, node)
                            .is_some() =>
                {
                    self.leaf(file, format, name, node, &shown, &path, to)?;
                }
                Some(To::File(format) | To::Preset(_, format)) if inner => {
                    self.map(file, format, node, &shown, "", None)?;
                }
                // Notes of a file's author, as in `config/fsdp2.json` of ms-swift.
                _ if inner && to.is_none() && is_comment(name) => {
                    self.leaf(file, format, name, node, &shown, &path, to)?;
                }
                Some(To::With(_)) if inner && !format.flat => {
                    self.leaf(file, format, name, node, &shown, &path, to)?
                }
                // Sections of flat formats may have the name of a key, such as `optimizer`.
                Some(To::With(_) | To::Choice(_)) if inner => {
                    self.map(file, format, node, &shown, &path, above)?;
                }
                _ if inner => {
                    if to.is_none() {
                        section(file, format, name, &path)?;
                    }
                    self.map(file, format, node, &shown, &path, to)?;
                }
                _ => self.leaf(file, format, name, node, &shown, &path, to)?,
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "one place with its two paths")]
    fn leaf(
        &mut self,
        file: &File<'_>,
        format: &'static Format,
        name: &Name,
        node: &Node,
        shown: &str,
        path: &str,
        to: Option<To>,
    ) -> Result<(), ConfigError> {
        let place = Place {
            file: file.shown.to_owned(),
            at: name.at,
        };
        let row = self.draft.row(place, shown, node.to_string(), Status::Used);
        if let Some(by) = self.replacement(file, format, shown, path, node) {
            let by = &self.draft.rows[by];
            let why = format!("replaced by {} = {}", by.key, by.value);
            self.draft.none(row, Lack::Nothing, why);
            return Ok(());
        }
        if file.is_command && !is_unset_variable(node) && !matches!(to, Some(To::AnyFile)) {
            self.options.push(CommandOption {
                path: plain_path(format, shown, path),
                node: node.clone(),
                row,
                known: to.is_some(),
            });
        }
        if self.removed.iter().any(|name| name == shown) {
            self.draft
                .none(row, Lack::Nothing, "removed by the command");
            return Ok(());
        }
        let resolved = interpolation::resolve(file.root, shown, node);
        let node = resolved.as_ref();
        let Some(to) = to else {
            if name.text.starts_with('$') {
                self.draft.none(row, Lack::Accuracy, UNSET_VARIABLE);
                return Ok(());
            }
            if name.text == SOURCE
                && let Some(path) = node.text()
            {
                let (lack, why) = source_note(file.folder, path);
                self.draft.none(row, lack, why);
                return Ok(());
            }
            if file.is_command
                && name.text == CONDITION
                && let Some(condition) = node.text()
            {
                self.draft.none(row, Lack::Accuracy, NOT_EVALUATED);
                self.draft.rows[row].doubt = Some(Doubt {
                    key: "",
                    message: format!(
                        "`{condition}` cannot be evaluated without running the script, and the command depends on \
                         it: it is taken as false. If that is wrong, write the values in the script, or add --set \
                         KEY=VALUE"
                    ),
                });
                return Ok(());
            }
            if node.is_unset() {
                self.draft.none(row, Lack::Nothing, "not set");
                return Ok(());
            }
            return self.unknown(format, name, path, row, file.shown);
        };
        self.value(file, node, row, shown, to)
    }

    /// Returns the row of the option of a command that replaces a key of a file by another value.
    fn replacement(
        &self,
        file: &File<'_>,
        format: &Format,
        shown: &str,
        path: &str,
        node: &Node,
    ) -> Option<usize> {
        // These files have keys of their own: programs compare them with their arguments.
        let own = [&DEEPSPEED, &FSDP, &PEFT, &SWIFT_FSDP];
        if file.is_command || own.iter().any(|f| f.name == format.name) {
            return None;
        }
        let path = plain_path(format, shown, path);
        let option = self.options.iter().find(|o| o.path == path)?;
        (!option.node.same_as(node)).then_some(option.row)
    }

    /// Reads options that only the table of the command's file has, such as those of `axolotl
    /// train`.
    fn unknown_options(
        &mut self,
        file: &File<'_>,
        format: &'static Format,
    ) -> Result<(), ConfigError> {
        let mut found = Vec::new();
        for option in self.options.iter_mut().filter(|o| !o.known) {
            let path = if format.flat {
                option.path.replace('_', "-")
            } else {
                option.path.clone()
            };
            if let Some(to) = format.key(&path) {
                option.known = true;
                found.push((option.row, option.node.clone(), to));
            }
        }
        for (row, node, to) in found {
            let known = &mut self.draft.rows[row];
            (known.status, known.why) = (Status::Used, None);
            let (shown, place) = (known.key.clone(), known.place.clone());
            let place = place.map_or_else(|| file.shown.to_owned(), |p| p.file);
            let command = File {
                shown: &place,
                is_command: true,
                ..*file
            };
            self.value(&command, &node, row, &shown, to)?;
        }
        Ok(())
    }

    /// Applies the value of a known key.
    fn value(
        &mut self,
        file: &File<'_>,
        node: &Node,
        row: usize,
        shown: &str,
        to: To,
    ) -> Result<(), ConfigError> {
        let at =
            |message: String| ConfigError::at(file.shown, node.at, format!("{shown}: {message}"));
        if let To::Aside(why) = to {
            self.draft.none(row, Lack::Nothing, why);
            return Ok(());
        }
        let is_chosen = matches!(to, To::Choice(_)) && node.text().is_some();
        if node.is_unset() && !is_chosen {
            self.draft.none(row, Lack::Nothing, "not set");
            return Ok(());
        }
        let names_model =
            matches!(to, To::Model | To::MaybeModel) && node.text().is_some_and(ends_in_name);
        if is_unset_variable(node) && !names_model {
            match to {
                To::File(format) | To::Preset(_, format) => {
                    return self.follow(file, Some(format), node, row, shown);
                }
                To::AnyFile => return self.follow(file, None, node, row, shown),
                _ => {}
            }
            self.draft.none(row, Lack::Accuracy, UNSET_VARIABLE);
            self.draft.rows[row].doubt = doubts::unset_variable(shown, node, to);
            return Ok(());
        }
        if node.is_auto() && matches!(to, To::Integer(_) | To::Number(_) | To::Fact(_)) {
            self.draft
                .none(row, Lack::Nothing, "filled in from the training arguments");
            return Ok(());
        }
        let effect = match to {
            To::Integer(key) => Effect::Set(key, node.count().map_err(at)?.to_string()),
            To::Number(key) => Effect::Set(key, float(node.number().map_err(at)?)),
            To::Fact(fact) => Effect::Fact(fact, node.count().map_err(at)?),
            To::Model | To::MaybeModel => {
                let text = node
                    .text()
                    .ok_or_else(|| at(node.expected("the name of a model")))?
                    .to_owned();
                if self.draft.model.is_none() {
                    self.model_folder = file.folder.to_owned();
                }
                match to {
                    To::MaybeModel => Effect::MaybeModel(text),
                    _ => Effect::Model(text),
                }
            }
            To::File(format) => return self.follow(file, Some(format), node, row, shown),
            To::AnyFile => return self.follow(file, None, node, row, shown),
            To::Preset(preset, format) => match preset(node) {
                Some(effect) => effect,
                None => return self.follow(file, Some(format), node, row, shown),
            },
            To::With(convert) | To::Choice(convert) => convert(node).map_err(at)?,
            To::Aside(why) => Effect::Aside(why),
            To::Lost(_) | To::Decisive(_) if is_off(node) => Effect::Aside("off"),
            To::Lost(why) => Effect::Lost(why),
            To::Decisive(why) => Effect::Decisive(why),
        };
        self.draft.apply(row, effect)
    }

    /// Rejects a misspelled key, and adds a row for an unknown one.
    fn unknown(
        &mut self,
        format: &Format,
        name: &Name,
        path: &str,
        row: usize,
        file: &str,
    ) -> Result<(), ConfigError> {
        let word = format.name_of(path);
        let known = format.siblings(path);
        if is_comment(name) {
            self.draft.none(row, Lack::Nothing, "a comment");
            return Ok(());
        }
        let misspelled = known.iter().find(|k| is_typo(word, k));
        if let Some(meant) = misspelled.filter(|_| !format.open) {
            let message = format!(
                "`{}` is not a key of {}; did you mean `{meant}`?",
                name.text, format.name
            );
            return Err(ConfigError::at(file, name.at, message));
        }
        // Arguments of a command start with dashes, which the tables do not write.
        let word = word.trim_start_matches("--");
        // Programs may have the key themselves.
        if let Some(meant) = known.iter().find(|k| is_typo(word, k))
            && format.key(meant).is_some_and(doubts::decides)
        {
            let message = format!(
                "{} is not a key of {}; if `{meant}` was meant, its default is predicted: correct the name",
                name.text, format.name
            );
            self.draft.rows[row].doubt = Some(Doubt { key: "", message });
        }
        let near = nearest(word, known.iter().map(AsRef::as_ref))
            .map_or_else(String::new, |n| format!("; the nearest is `{n}`"));
        let why = format!("{UNKNOWN} {} that is known here{near}", format.name);
        self.draft.none(row, Lack::Accuracy, why);
        Ok(())
    }

    /// Reads the file that a key names.
    fn follow(
        &mut self,
        file: &File<'_>,
        format: Option<&'static Format>,
        node: &Node,
        row: usize,
        shown: &str,
    ) -> Result<(), ConfigError> {
        let at =
            |message: String| ConfigError::at(file.shown, node.at, format!("{shown}: {message}"));
        let Some(text) = node.text() else {
            return if node.entries().is_empty() {
                self.draft.none(row, Lack::Nothing, "not set");
                Ok(())
            } else {
                Err(at(node.expected("the path of a file")))
            };
        };
        let Some(path) = find(file.folder, text) else {
            if text.contains('$') {
                self.draft.none(row, Lack::Everything, UNSET_FILE);
                return Ok(());
            }
            let message = format!(
                "file `{text}` is not found, relative to this file or the working directory"
            );
            return Err(at(message));
        };
        if self.files.contains(&path) {
            return Err(at(format!("`{text}` refers back to itself")));
        }
        self.draft.rows[row].why = Some("read as well".to_owned());
        self.file(&path, format)
    }
}

/// Finds a file that another one names, relative to the folder of that one, one above it, or the
/// working directory.
fn find(folder: &Path, path: &str) -> Option<PathBuf> {
    let here = Path::new("");
    let folders = folder.ancestors().take(ABOVE);
    // A variable or command at the start of a path stands for one of these folders.
    let (first, path) = match path.split_once('/') {
        Some((first, rest)) if first.starts_with('$') => (first, rest),
        _ => ("", path),
    };
    let started = matches!(first, "$PWD" | "${PWD}").then_some(here);
    let mut all = started.into_iter().chain(folders).chain([here]);
    all.find_map(|folder| Some(folder.join(path)).filter(|path| path.is_file()))
}

/// Returns whether a key is a comment. Names of classes such as `_component_` are none.
fn is_comment(name: &Name) -> bool {
    name.text.starts_with('_') && !name.text.ends_with('_')
}

/// Rejects the misspelled name of a map.
fn section(file: &File<'_>, format: &Format, name: &Name, path: &str) -> Result<(), ConfigError> {
    if format.open || format.flat {
        return Ok(());
    }
    let above = path.rsplit_once('.').map_or("", |(above, _)| above);
    let known = format.sections(above);
    if known.iter().any(|section| *section == name.text) {
        return Ok(());
    }
    let Some(meant) = known.iter().find(|section| is_typo(&name.text, section)) else {
        return Ok(());
    };
    let message = format!(
        "`{}` is not a section of {}; did you mean `{meant}`?",
        name.text, format.name
    );
    Err(ConfigError::at(file.shown, name.at, message))
}

/// Returns whether an option of a command names a configuration file.
fn names_file(format: &Format, name: &Name) -> bool {
    let path = if format.flat {
        name.text.replace('_', "-")
    } else {
        name.text.clone()
    };
    matches!(
        format.key(&path),
        Some(To::File(_) | To::AnyFile | To::Preset(..))
    )
}

/// Returns whether an option of a command names its main configuration, whose keys the options
/// replace.
fn is_main_file(format: &Format, name: &Name) -> bool {
    matches!(format.key(&name.text), Some(To::AnyFile))
}

/// Returns the path of a key in the form in which options of commands and keys of files are
/// compared: without dashes, and for Accelerate, whose options have no sections, without sections.
fn plain_path(format: &Format, shown: &str, path: &str) -> String {
    let whole = if format.flat { path } else { shown };
    let whole = if format.name == ACCELERATE.name {
        whole.rsplit('.').next().unwrap_or(whole)
    } else {
        whole
    };
    whole.trim_start_matches('-').replace('-', "_")
}

/// Returns whether a value is a variable that the script does not set.
fn is_unset_variable(node: &Node) -> bool {
    node.text().is_some_and(|text| text.starts_with('$'))
}

/// Returns whether a path starts with a variable and ends in a name: `$HOME/models/Qwen3-8B`.
fn ends_in_name(path: &str) -> bool {
    path.rsplit_once('/')
        .is_some_and(|(_, name)| !name.is_empty() && !name.contains('$'))
}

fn is_off(node: &Node) -> bool {
    match &node.value {
        Value::Bool(b) => !b,
        Value::Integer(i) => *i == 0 || *i == 1,
        Value::Float(f) => *f == 0.0,
        Value::List(items) => items.is_empty(),
        Value::Map(entries) => entries.is_empty(),
        Value::Text(text) => matches!(
            text.to_ascii_lowercase().as_str(),
            "false" | "no" | "0" | "1"
        ),
        Value::Null => true,
    }
}

/// Writes a number as a TOML float.
pub(crate) fn float(number: f64) -> String {
    format!("{number:?}")
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}
