//! The words of a shell script.

use super::expansion::{Elements, Operation};
use shardlab_plan::scenario::Position;

/// Words up to a line's end, a semicolon or an operator between commands.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) words: Vec<Word>,
    pub(super) kind: Kind,
    pub(super) join: Join,
}

/// What a line is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    #[default]
    Command,
    /// Patterns of a branch of a `case`.
    Pattern,
    /// `;;`
    EndOfBranch,
}

/// How a line depends on the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Join {
    #[default]
    Always,
    /// `&&`
    And,
    /// `||`
    Or,
    /// `|`: it runs if the line before it runs.
    Pipe,
}

/// A word and its parts.
#[derive(Debug)]
pub(super) struct Word {
    pub(super) at: Position,
    pub(super) parts: Vec<Part>,
    /// The assignment, if the word is one.
    pub(super) assignment: Option<Assignment>,
}

/// `NAME=value` or `NAME+=(words)`.
#[derive(Debug)]
pub(super) struct Assignment {
    pub(super) name: String,
    pub(super) appends: bool,
    pub(super) value: Vec<Part>,
    pub(super) array: Option<Vec<Word>>,
}

/// A part of a word.
#[derive(Debug)]
pub(super) enum Part {
    Literal {
        text: String,
        quoted: bool,
    },
    Variable {
        name: String,
        elements: Elements,
        operation: Option<Operation>,
        quoted: bool,
    },
    /// The text inside `$((…))`.
    Arithmetic(String),
    /// A command in `$(…)` or backquotes.
    Command,
}

impl Part {
    /// Returns the part for `$NAME`.
    pub(super) fn variable(name: String, quoted: bool) -> Self {
        Self::Variable {
            name,
            elements: Elements::All,
            operation: None,
            quoted,
        }
    }
}

impl Word {
    /// Sets the position of a word and of all words in it.
    pub(super) fn move_to(&mut self, at: Position) {
        self.at = at;
        let array = self.assignment.as_mut().and_then(|a| a.array.as_mut());
        array
            .into_iter()
            .flatten()
            .for_each(|word| word.move_to(at));
    }

    /// Returns the text of a word if it has neither quotes nor variables.
    pub(super) fn literal(&self) -> Option<&str> {
        match self.parts.as_slice() {
            [
                Part::Literal {
                    text,
                    quoted: false,
                },
            ] => Some(text),
            _ => None,
        }
    }

    pub(super) fn is_quoted(&self) -> bool {
        self.parts.iter().any(|p| {
            matches!(
                p,
                Part::Literal { quoted: true, .. } | Part::Variable { quoted: true, .. }
            )
        })
    }
}

/// Ends a literal part and adds it to `parts`.
pub(super) fn push(parts: &mut Vec<Part>, text: &mut String) {
    if !text.is_empty() {
        let text = std::mem::take(text);
        parts.push(Part::Literal {
            text,
            quoted: false,
        });
    }
}

/// Returns the name in `NAME=` or `NAME+=`, and whether the assignment appends.
pub(super) fn assigned(text: &str) -> Option<(String, bool)> {
    let name = text.strip_suffix('=')?;
    let (name, appends) = match name.strip_suffix('+') {
        Some(name) => (name, true),
        None => (name, false),
    };
    is_target(name).then(|| (name.to_owned(), appends))
}

/// Returns whether a text is a name, or that of an element: `B[2]`.
fn is_target(text: &str) -> bool {
    let element = text.strip_suffix(']').and_then(|t| t.split_once('['));
    let (name, index) = element.unwrap_or((text, "0"));
    is_name(name) && !index.is_empty()
}

fn is_name(name: &str) -> bool {
    let is = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().all(is) && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

/// Splits an assignment off the parts of a word.
pub(super) fn assignment(parts: &mut Vec<Part>) -> Option<Assignment> {
    let Some(Part::Literal {
        text,
        quoted: false,
    }) = parts.first()
    else {
        return None;
    };
    let (name, value) = text.split_once('=')?;
    let (name, appends) = match name.strip_suffix('+') {
        Some(name) => (name, true),
        None => (name, false),
    };
    if !is_target(name) {
        return None;
    }
    let (name, value) = (name.to_owned(), value.to_owned());
    let mut rest: Vec<Part> = parts.drain(1..).collect();
    if !value.is_empty() {
        rest.insert(
            0,
            Part::Literal {
                text: value,
                quoted: false,
            },
        );
    }
    Some(Assignment {
        name,
        appends,
        value: rest,
        array: None,
    })
}
