//! Replaces and adds values in a text at the positions that its tree records.

use crate::error::ConfigError;
use crate::table::Format;
use crate::tree::{Node, Value, plain};
use crate::{detect, toml_file};
use shardlab_plan::scenario::Position;
use std::path::{Path, PathBuf};

/// Arguments of a trainer; new arguments are added next to one of them.
const NEAR: [&str; 6] = [
    "micro-batch-size",
    "num-layers",
    "hidden-size",
    "seq-length",
    "per_device_train_batch_size",
    "model_name_or_path",
];

/// Syntax of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syntax {
    Yaml,
    Json,
    Toml,
    Shell,
}

/// A file that is being changed.
#[derive(Clone)]
pub(super) struct Document {
    pub(super) path: PathBuf,
    pub(super) text: String,
    /// Format of the framework; not used for scenario files.
    pub(super) format: &'static Format,
    pub(super) syntax: Syntax,
    is_scenario: bool,
    root: Node,
}

impl Document {
    pub(super) fn new(
        path: PathBuf,
        text: String,
        format: &'static Format,
    ) -> Result<Self, ConfigError> {
        let shown = path.display().to_string();
        let (_, root) = detect::parse_as(&shown, &text, Some(format))?;
        let ends = |ending: &str| path.extension().is_some_and(|e| e == ending);
        let is_script = detect::is_script(&shown, &text);
        let syntax = if ends("toml") {
            Syntax::Toml
        } else if is_script {
            Syntax::Shell
        } else if text.trim_start().starts_with('{') {
            Syntax::Json
        } else {
            Syntax::Yaml
        };
        Ok(Self {
            path,
            text,
            format,
            syntax,
            is_scenario: false,
            root,
        })
    }

    pub(super) fn scenario(path: &Path, text: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            path: path.to_owned(),
            root: toml_file::parse(&path.display().to_string(), text)?,
            text: text.to_owned(),
            format: &crate::formats::TORCHTITAN,
            syntax: Syntax::Toml,
            is_scenario: true,
        })
    }

    /// Returns whether the file has a value at a path, under any of the names of its key.
    pub(super) fn has(&self, path: &str) -> bool {
        self.find(path).is_some()
    }

    /// Sets the value at a path: replaces it, or adds the key.
    pub(super) fn set(&mut self, path: &str, value: &str) -> Result<(), String> {
        let value = self.written(value);
        let mut next = self.text.clone();
        match self.find(path) {
            Some((name, node)) if self.syntax == Syntax::Shell => {
                self.set_argument(&mut next, name, &node, path, &value)?;
            }
            Some((_, node)) => {
                let start = offset(&self.text, node.at);
                let end = self.end(start, &node)?;
                next.replace_range(start..end, &value);
            }
            None => self.add(&mut next, path, &value)?,
        }
        let shown = self.path.display().to_string();
        let parsed = if self.is_scenario {
            toml_file::parse(&shown, &next)
        } else {
            detect::parse_as(&shown, &next, Some(self.format)).map(|(_, root)| root)
        };
        self.root = parsed.map_err(|e| e.to_string())?;
        self.text = next;
        Ok(())
    }

    /// Finds the entry at a path. Returns the position of its name, and the value.
    fn find(&self, path: &str) -> Option<(Position, Node)> {
        let mut found = None;
        self.visit(&self.root, "", &mut |own, at, node| {
            if found.is_none() && self.is_same(own, path) {
                found = Some((at, node.clone()));
            }
        });
        found
    }

    fn visit(&self, map: &Node, above: &str, see: &mut dyn FnMut(&str, Position, &Node)) {
        for (name, node) in map.entries() {
            let path = match above {
                "" => name.text.clone(),
                above => format!("{above}.{}", name.text),
            };
            see(&path, name.at, node);
            self.visit(node, &path, see);
        }
    }

    /// Returns whether two paths name the same key.
    fn is_same(&self, own: &str, path: &str) -> bool {
        if self.is_scenario {
            return own == path;
        }
        if self.format.flat {
            let last = own.rsplit('.').next().unwrap_or(own);
            return last.trim_start_matches('-').replace('_', "-") == path;
        }
        own == path || self.format.is_same_key(own, path)
    }

    /// Writes a value in the syntax of the file.
    fn written(&self, value: &str) -> String {
        match self.syntax {
            Syntax::Yaml | Syntax::Shell => value.to_owned(),
            // Words that YAML reads as booleans are strings in TOML and JSON.
            Syntax::Toml | Syntax::Json => literal(value),
        }
    }

    /// Returns the end of a value that starts at a byte offset.
    fn end(&self, start: usize, node: &Node) -> Result<usize, String> {
        let rest = &self.text[start..];
        let first = rest.chars().next().ok_or("the value is not in the file")?;
        let nested = matches!(node.value, Value::List(_) | Value::Map(_));
        let length = match first {
            '"' | '\'' => quoted_end(rest, first),
            '[' | '{' => bracket_end(rest),
            _ if nested => return Err("a list over several lines is not replaced".to_owned()),
            _ => Some(self.plain_end(rest)),
        };
        length
            .map(|n| start + n)
            .ok_or_else(|| "the value does not end".to_owned())
    }

    fn plain_end(&self, rest: &str) -> usize {
        let line = rest.lines().next().unwrap_or_default();
        let cut = |at: Option<usize>| at.unwrap_or(line.len());
        let end = match self.syntax {
            Syntax::Yaml => {
                let comment = cut(line.find(" #"));
                // In a flow map, a value can end before the comment.
                comment.min(cut(line
                    .find([',', '}', ']'])
                    .filter(|_| line.contains('}'))))
            }
            Syntax::Json => cut(line.find([',', '}', ']'])),
            Syntax::Toml => cut(line.find('#')),
            Syntax::Shell => cut(line.find(|c: char| c.is_whitespace() || "\\)\"'".contains(c))),
        };
        line[..end].trim_end().len()
    }

    /// Replaces an argument of a command: `--name VALUE`, `--name=VALUE`, or a flag.
    fn set_argument(
        &self,
        next: &mut String,
        name: Position,
        node: &Node,
        path: &str,
        value: &str,
    ) -> Result<(), String> {
        let start = offset(&self.text, name);
        let is_flag = matches!(node.value, Value::Bool(_));
        match (is_flag, value) {
            (true, "true") => Ok(()),
            (true, "false") => {
                let flag = format!("--{path}");
                if !self.text[start..].starts_with(&flag) {
                    return Err("the flag comes from a variable".to_owned());
                }
                let end = start + flag.len();
                let blank = self.text[end..].starts_with(' ');
                next.replace_range(start..end + usize::from(blank), "");
                Ok(())
            }
            _ => {
                let mut at = offset(&self.text, node.at);
                let word = self.text[at..].split_whitespace().next();
                let assigns = |word: &str| {
                    let rest = word.trim_start_matches('+').strip_prefix(path);
                    rest.is_some_and(|rest| rest.starts_with('='))
                };
                if word.is_some_and(|w| w.starts_with("--") || assigns(w)) {
                    let inline = self.text[at..]
                        .find('=')
                        .ok_or("the value is not in the file")?;
                    at += inline + 1;
                }
                let end = self.end(at, node)?;
                let old = self.text[at..end].trim_matches(['"', '\'']);
                if plain(old) != node.value {
                    return Err("the value comes from a variable".to_owned());
                }
                next.replace_range(at..end, value);
                Ok(())
            }
        }
    }

    /// Adds a key that the file does not have.
    fn add(&self, next: &mut String, path: &str, value: &str) -> Result<(), String> {
        let (folder, name) = path.rsplit_once('.').unwrap_or(("", path));
        match self.syntax {
            Syntax::Shell if !folder.is_empty() => self.add_nested(next, path, value),
            Syntax::Shell => {
                // The new argument must follow one of the trainer, not one of the launcher.
                let near = NEAR.iter().find_map(|path| self.find(path));
                let (near, _) = near.ok_or("there is no known argument to add it after")?;
                let at = offset(&self.text, near);
                if !self.text[at..].starts_with("--") {
                    return Err("the arguments come from a variable".to_owned());
                }
                let argument = match value {
                    "true" => format!("--{name} "),
                    "false" => return Ok(()),
                    value => format!("--{name} {value} "),
                };
                next.insert_str(at, &argument);
                Ok(())
            }
            Syntax::Toml => {
                let header = format!("[{folder}]");
                let mut at = 0;
                for line in self.text.split_inclusive('\n') {
                    at += line.len();
                    if line.split('#').next().unwrap_or_default().trim() == header {
                        let gap = if line.ends_with('\n') { "" } else { "\n" };
                        next.insert_str(at, &format!("{gap}{name} = {value}\n"));
                        return Ok(());
                    }
                }
                let gap = if self.text.ends_with('\n') { "" } else { "\n" };
                next.push_str(&format!("{gap}\n{header}\n{name} = {value}\n"));
                Ok(())
            }
            Syntax::Yaml | Syntax::Json => self.add_entry(next, folder, name, value),
        }
    }

    /// Adds an option with a path next to another one, in the same form: `a.b=value`, as Hydra
    /// reads it, or `--a.b value`.
    fn add_nested(&self, next: &mut String, path: &str, value: &str) -> Result<(), String> {
        let mut found = None;
        self.visit(&self.root, "", &mut |own, at, node| {
            let at = offset(&self.text, at);
            let rest = &self.text[at..];
            let starts = |start: String| rest.starts_with(&start);
            if found.is_some() || !own.contains('.') || !node.entries().is_empty() {
                return;
            }
            if starts(format!("{own}=")) {
                found = Some((at, format!("{path}={value} ")));
            } else if starts(format!("--{own} ")) {
                found = Some((at, format!("--{path} {value} ")));
            }
        });
        let (at, option) = found.ok_or("the command has no option with a path, such as train.lr=1e-4, in front of which it could be added")?;
        next.insert_str(at, &option);
        Ok(())
    }

    fn add_entry(
        &self,
        next: &mut String,
        folder: &str,
        name: &str,
        value: &str,
    ) -> Result<(), String> {
        let entry = match self.syntax {
            Syntax::Json => format!("\"{name}\": {value}"),
            // The value is a map in block style.
            _ if value.starts_with('\n') => format!("{name}:{value}"),
            _ => format!("{name}: {value}"),
        };
        let parent = match folder {
            "" => Some(self.root.clone()),
            folder => self.find(folder).map(|(_, node)| node),
        };
        let Some(parent) = parent else {
            let inner = match self.syntax {
                Syntax::Json => format!("{{{entry}}}"),
                _ => format!("\n  {entry}"),
            };
            return self.add_entry(next, "", folder, &inner);
        };
        let Some((first, _)) = parent.entries().first() else {
            return Err(format!("`{folder}` is not a map with entries"));
        };
        let at = offset(&self.text, first.at);
        let before = self.text[..at].trim_end();
        let in_flow = before.ends_with(['{', ',']);
        if !in_flow && folder.is_empty() {
            let gap = if self.text.ends_with('\n') { "" } else { "\n" };
            next.push_str(&format!("{gap}{entry}\n"));
            return Ok(());
        }
        let line = self.text[..at].rfind('\n').map_or(0, |i| i + 1);
        let indent = &self.text[line..at];
        let alone = indent.trim().is_empty() && line > 0;
        let gap = match (in_flow, alone) {
            (true, true) => format!(",\n{indent}"),
            (true, false) => ", ".to_owned(),
            (false, _) => format!("\n{indent}"),
        };
        next.insert_str(at, &format!("{entry}{gap}"));
        Ok(())
    }
}

/// Writes a value in the syntax that TOML and JSON share: numbers, booleans, lists and tables
/// unchanged, anything else as a string.
pub(super) fn literal(value: &str) -> String {
    let as_it_is = value.starts_with(['[', '{', '"'])
        || matches!(value, "true" | "false")
        || matches!(plain(value), Value::Integer(_) | Value::Float(_));
    if as_it_is {
        value.to_owned()
    } else {
        crate::table::quoted(value)
    }
}

/// Returns the byte offset of a position.
fn offset(text: &str, at: Position) -> usize {
    let mut start = 0;
    for _ in 1..at.line {
        start += text[start..].find('\n').map_or(0, |i| i + 1);
    }
    let column = at.column.saturating_sub(1) as usize;
    let line = &text[start..];
    start
        + line
            .char_indices()
            .nth(column)
            .map_or(line.len(), |(i, _)| i)
}

/// Returns the length of a quoted string.
fn quoted_end(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    text.char_indices().skip(1).find_map(|(i, c)| {
        if escaped {
            escaped = false;
        } else if c == '\\' && quote == '"' {
            escaped = true;
        } else if c == quote {
            return Some(i + 1);
        }
        None
    })
}

/// Returns the length of a list or map in brackets.
fn bracket_end(text: &str) -> Option<usize> {
    let (mut depth, mut at) = (0, 0);
    while let Some(c) = text[at..].chars().next() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            '"' | '\'' => at += quoted_end(&text[at..], c)? - 1,
            _ => {}
        }
        at += if matches!(c, '"' | '\'') {
            1
        } else {
            c.len_utf8()
        };
        if depth == 0 {
            return Some(at);
        }
    }
    None
}
