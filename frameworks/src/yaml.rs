//! Reads YAML, including JSON as a subset of YAML, into a tree.

use crate::error::ConfigError;
use crate::tree::{Name, Node, Value, plain};
use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Tag};
use shardlab_plan::scenario::Position;
use std::collections::HashMap;

/// Maximum number of values in a file, including those that aliases repeat.
const MAX_NODES: usize = 100_000;
/// Maximum nesting depth.
const MAX_DEPTH: usize = 64;
/// The key with which YAML merges another map.
const MERGE: &str = "<<";

/// A list or map whose end has not been read yet.
struct Open {
    at: Position,
    anchor: usize,
    kind: Kind,
}

enum Kind {
    List(Vec<Node>),
    Map {
        entries: Vec<(Name, Node)>,
        /// Entries of maps that are merged into this one; own entries override them.
        merged: Vec<(Name, Node)>,
        key: Option<Name>,
    },
}

/// Reads a document.
///
/// # Errors
/// Fails on a syntax error, a repeated name, a tag such as `!include`, a second document, or a file
/// that is too large or too deeply nested.
pub(crate) fn parse(file: &str, text: &str) -> Result<Node, ConfigError> {
    match document(file, text) {
        Err(fault) if fault.is_indentation => Ok(document(file, &deepened(text))?),
        result => Ok(result?),
    }
}

/// The reason why a text is rejected.
struct Fault {
    error: ConfigError,
    /// A line has less indentation than YAML requires.
    is_indentation: bool,
}

impl From<ConfigError> for Fault {
    fn from(error: ConfigError) -> Self {
        Self {
            error,
            is_indentation: false,
        }
    }
}

impl From<Fault> for ConfigError {
    fn from(fault: Fault) -> Self {
        fault.error
    }
}

/// Indents brackets at the start of a line like the end of the line before. YAML requires the end
/// of a list to be indented deeper than its key; PyYAML, which the frameworks use, does not.
fn deepened(text: &str) -> String {
    let mut depth = 0;
    let mut moved = String::with_capacity(text.len());
    for line in text.lines() {
        let words = line.trim_start();
        let own = line.len() - words.len();
        if words.starts_with([']', '}']) && own < depth {
            moved.push_str(&" ".repeat(depth - own));
        } else if !words.is_empty() {
            depth = own;
        }
        moved.push_str(line);
        moved.push('\n');
    }
    moved
}

/// Parses a document without changing its indentation.
fn document(file: &str, text: &str) -> Result<Node, Fault> {
    let mut reader = Reader {
        file,
        open: Vec::new(),
        anchors: HashMap::new(),
        nodes: 0,
        root: None,
    };
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|e| Fault {
            error: ConfigError::at(
                file,
                position(e.marker()),
                format!("not valid YAML: {}", e.info()),
            ),
            is_indentation: e.info() == "invalid indentation",
        })?;
        reader.event(event, position(&span.start))?;
    }
    let empty = || ConfigError::File {
        file: file.to_owned(),
        message: "the file is empty".to_owned(),
    };
    Ok(reader.root.ok_or_else(empty)?)
}

fn position(mark: &Marker) -> Position {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Position {
        line: number(mark.line().max(1)),
        column: number(mark.col() + 1),
    }
}

struct Reader<'f> {
    file: &'f str,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
    root: Option<Node>,
}

impl Reader<'_> {
    fn error(&self, at: Position, message: impl Into<String>) -> ConfigError {
        ConfigError::at(self.file, at, message)
    }

    fn event(&mut self, event: Event<'_>, at: Position) -> Result<(), ConfigError> {
        match event {
            Event::DocumentStart(_) if self.root.is_some() => {
                Err(self.error(at, "a second document starts here; expected one"))
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.tag(tag.as_deref(), at)?;
                if let Some(Open {
                    kind:
                        Kind::Map {
                            key: key @ None, ..
                        },
                    ..
                }) = self.open.last_mut()
                {
                    let text = text.into_owned();
                    *key = Some(Name { text, at });
                    return Ok(());
                }
                let text_tag = tag.as_deref().is_some_and(|t| t.suffix == "str");
                let value = if style == ScalarStyle::Plain && !text_tag {
                    plain(&text)
                } else {
                    Value::Text(text.into_owned())
                };
                self.value(Node::new(at, value), anchor)
            }
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    return Err(self.error(at, "this alias refers to the value that contains it"));
                };
                self.nodes += count(&node);
                self.value(node, 0)
            }
            Event::SequenceStart(anchor, tag) => {
                self.tag(tag.as_deref(), at)?;
                self.start(at, anchor, Kind::List(Vec::new()))
            }
            Event::MappingStart(anchor, tag) => {
                self.tag(tag.as_deref(), at)?;
                let kind = Kind::Map {
                    entries: Vec::new(),
                    merged: Vec::new(),
                    key: None,
                };
                self.start(at, anchor, kind)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(open) = self.open.pop() else {
                    return Err(self.error(at, "nothing ends here"));
                };
                let value = match open.kind {
                    Kind::List(items) => Value::List(items),
                    Kind::Map {
                        mut entries,
                        merged,
                        ..
                    } => {
                        for (name, node) in merged {
                            if !contains(&entries, &name) {
                                entries.push((name, node));
                            }
                        }
                        Value::Map(entries)
                    }
                };
                self.value(Node::new(open.at, value), open.anchor)
            }
            _ => Ok(()),
        }
    }

    /// Rejects tags that would need a custom constructor.
    fn tag(&self, tag: Option<&Tag>, at: Position) -> Result<(), ConfigError> {
        let Some(tag) = tag.filter(|t| !t.is_yaml_core_schema()) else {
            return Ok(());
        };
        let name = format!("{}{}", tag.handle, tag.suffix);
        let advice = if name.contains("include") {
            "insert the file's content instead"
        } else {
            "write the value itself instead"
        };
        Err(self.error(at, format!("the tag `{name}` is not followed: {advice}")))
    }

    fn start(&mut self, at: Position, anchor: usize, kind: Kind) -> Result<(), ConfigError> {
        if self.open.len() >= MAX_DEPTH {
            return Err(self.error(at, format!("nested more than {MAX_DEPTH} levels deep")));
        }
        self.open.push(Open { at, anchor, kind });
        Ok(())
    }

    fn value(&mut self, node: Node, anchor: usize) -> Result<(), ConfigError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(self.error(node.at, format!("more than {MAX_NODES} values")));
        }
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let file = self.file;
        match self.open.last_mut().map(|o| &mut o.kind) {
            None => self.root = Some(node),
            Some(Kind::List(items)) => items.push(node),
            Some(Kind::Map {
                entries,
                merged,
                key,
            }) => match key.take() {
                None => return Err(ConfigError::at(file, node.at, "expected a name")),
                Some(name) if name.text == MERGE => merge(file, merged, node)?,
                Some(name) if contains(entries, &name) => {
                    let same = |(n, v): &(Name, Node)| n.text == name.text && v.same_as(&node);
                    if !entries.iter().any(same) {
                        let message = format!("`{}` is given twice, with another value", name.text);
                        return Err(ConfigError::at(file, name.at, message));
                    }
                }
                Some(name) => entries.push((name, node)),
            },
        }
        Ok(())
    }
}

fn contains(entries: &[(Name, Node)], name: &Name) -> bool {
    entries.iter().any(|(n, _)| n.text == name.text)
}

/// Adds the entries of a merged map (`<<: *base`). Entries of earlier maps take precedence.
fn merge(file: &str, merged: &mut Vec<(Name, Node)>, node: Node) -> Result<(), ConfigError> {
    let maps = match node.value {
        Value::List(items) => items,
        _ => vec![node],
    };
    for map in maps {
        let Value::Map(entries) = map.value else {
            return Err(ConfigError::at(file, map.at, "`<<` expects a map"));
        };
        for (name, node) in entries {
            if !contains(merged, &name) {
                merged.push((name, node));
            }
        }
    }
    Ok(())
}

fn count(node: &Node) -> usize {
    match &node.value {
        Value::List(items) => 1 + items.iter().map(count).sum::<usize>(),
        Value::Map(entries) => 1 + entries.iter().map(|(_, n)| count(n)).sum::<usize>(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse("a.yaml", text).unwrap_err().to_string()
    }

    #[test]
    fn values_have_places() {
        let root = parse("a.yaml", "a: 1\nb:\n  c: [x, true]\n  d:\n").unwrap();
        let c = root.get("b.c").unwrap();
        assert_eq!(c.at, Position { line: 3, column: 6 });
        assert_eq!(c.to_string(), "[x, true]");
        assert!(root.get("b.d").unwrap().is_unset());
        assert_eq!(root.entries()[1].0.at, Position { line: 2, column: 1 });
    }

    #[test]
    fn json_is_read_with_places_too() {
        let root = parse(
            "a.json",
            "{\n\t\"a\": {\"b\": 5e8, \"c\": \"1\"},\n\t\"d\": null\n}",
        )
        .unwrap();
        let b = root.get("a.b").unwrap();
        assert_eq!((b.at.line, b.count()), (2, Ok(500_000_000)));
        assert_eq!(root.get("a.c").unwrap().text(), Some("1"));
        assert!(root.get("d").unwrap().is_unset());
    }

    #[test]
    fn brackets_may_end_a_list_where_pyyaml_lets_them() {
        let text = "a:\n  b: [\n      \"x\",\n      \"y\",\n  ]\n  c: 1\n";
        let node = parse("a.yaml", text).unwrap();
        let deeper = parse("a.yaml", &text.replace("\n  ]", "\n     ]")).unwrap();
        assert_eq!(format!("{:?}", node.value), format!("{:?}", deeper.value));
        let bad = parse("a.yaml", "a:\n    b: 1\n  c: 2\n").unwrap_err();
        assert!(bad.to_string().contains("a.yaml:3:"), "{bad}");
    }

    #[test]
    fn anchors_and_merges_are_resolved() {
        let root = parse(
            "a.yaml",
            "x: &x {a: 1, b: 2}\ny:\n  <<: *x\n  b: 3\nz: *x\n",
        )
        .unwrap();
        assert_eq!(root.get("y.a").unwrap().integer(), Ok(1));
        assert_eq!(root.get("y.b").unwrap().integer(), Ok(3));
        assert_eq!(root.get("z.b").unwrap().integer(), Ok(2));
    }

    #[test]
    fn bad_files_say_where() {
        assert_eq!(
            error("a: 1\nb: !include c.yaml\n"),
            "a.yaml:2:4: the tag `!include` is not followed: insert the file's content instead"
        );
        assert_eq!(
            error("a: 1\na: 2\n"),
            "a.yaml:2:1: `a` is given twice, with another value"
        );
        // PyYAML takes the last of several equal names; here, all values are the same.
        let root = parse("a.yaml", "a: [1, x]\nb: 2\na: [1, x]\n").unwrap();
        assert_eq!(root.entries().len(), 2);
        assert!(
            error("a: [1\nb: 2").starts_with("a.yaml:"),
            "{}",
            error("a: [1\nb: 2")
        );
        assert!(error("a: 1\n---\nb: 1\n").contains("second document"));
        assert_eq!(error(""), "a.yaml: the file is empty");
        assert!(error(&"[".repeat(99)).contains("levels deep"));
        let bomb = "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n\
                    c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\n\
                    e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e]\n";
        assert!(error(bomb).contains("values"), "{}", error(bomb));
    }
}
