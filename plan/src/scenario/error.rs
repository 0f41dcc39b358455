//! Errors about a scenario, with their position.

use super::source::Source;
use std::fmt;
use std::ops::Range;

/// A place in a scenario's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
}

impl Position {
    /// Returns the position of a byte. A byte beyond the text, or within a character, counts as the
    /// nearest character before.
    #[must_use]
    pub fn of(text: &str, byte: usize) -> Self {
        let before = &text[..boundary(text, byte)];
        let line = before.rsplit('\n').next().unwrap_or_default();
        let count = |n: usize| u32::try_from(n + 1).unwrap_or(u32::MAX);
        Self {
            line: count(before.matches('\n').count()),
            column: count(line.chars().count()),
        }
    }
}

/// The last byte up to this one at which a character begins, or the text's end.
fn boundary(text: &str, byte: usize) -> usize {
    let mut at = byte.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// What is wrong with a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScenarioErrorKind {
    /// A file cannot be read, is too long, or extends itself.
    File,
    /// The text is no TOML, or not of this format.
    Syntax,
    /// There is no such section or key.
    Unknown,
    /// A value has the wrong type or is out of range.
    Value,
    /// A key that has to be given is missing.
    Missing,
    /// Values exclude each other.
    Conflict,
    /// A key has no effect.
    NoEffect,
    /// A name or glob in a list matches nothing in the model.
    NoMatch,
}

/// Why a scenario is refused.
///
/// `Display` prints `file:line:column: message`, the line with a caret under the fault, and a
/// `help:` line where there is something to suggest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScenarioError(Box<Detail>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Detail {
    kind: ScenarioErrorKind,
    file: String,
    position: Option<Position>,
    message: String,
    expected: Option<String>,
    help: Option<String>,
    excerpt: Option<Excerpt>,
}

/// One line of the source, cut to a printable width.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Excerpt {
    text: String,
    caret: usize,
    width: usize,
}

/// Characters of a source line that an excerpt shows.
const EXCERPT_WIDTH: usize = 96;

impl ScenarioError {
    /// About a range of bytes of a source.
    pub(crate) fn at(source: &Source, span: Range<usize>, message: impl Into<String>) -> Self {
        let (position, excerpt) = locate(&source.text, span);
        Self(Box::new(Detail {
            kind: ScenarioErrorKind::Syntax,
            file: source.name.to_string(),
            position: Some(position),
            message: message.into(),
            expected: None,
            help: None,
            excerpt: Some(excerpt),
        }))
    }

    /// About a file as a whole.
    pub(crate) fn file_only(file: impl Into<String>, message: impl Into<String>) -> Self {
        Self(Box::new(Detail {
            kind: ScenarioErrorKind::File,
            file: file.into(),
            position: None,
            message: message.into(),
            expected: None,
            help: None,
            excerpt: None,
        }))
    }

    pub(crate) fn of(mut self, kind: ScenarioErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with_help(mut self, help: impl Into<String>) -> Self {
        self.0.help = Some(help.into());
        self
    }

    pub(crate) fn with_near(self, near: Option<&str>) -> Self {
        match near {
            Some(n) => self.with_help(format!("did you mean `{n}`?")),
            None => self,
        }
    }

    pub(crate) fn with_expected(mut self, expected: impl Into<String>) -> Self {
        self.0.expected = Some(expected.into());
        self
    }

    /// Names what set the value in place of a file, such as a variable of the environment.
    #[must_use]
    pub fn set_by(mut self, name: impl Into<String>) -> Self {
        self.0.file = name.into();
        self.0.position = None;
        self.0.excerpt = None;
        self
    }

    /// Returns the kind of fault, for callers that distinguish faults.
    #[must_use]
    pub fn kind(&self) -> ScenarioErrorKind {
        self.0.kind
    }

    /// Returns the file as the user named it, or the override (`--set fsdp.policy=x`).
    #[must_use]
    pub fn file(&self) -> &str {
        &self.0.file
    }

    /// Returns line and column; `None` if the error is about the file as a whole.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        self.0.position
    }

    /// Returns what is wrong, in one sentence.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns what would have been accepted in this place.
    #[must_use]
    pub fn expected(&self) -> Option<&str> {
        self.0.expected.as_deref()
    }

    /// Returns what to do: the nearest valid name, or the other option to change.
    #[must_use]
    pub fn help(&self) -> Option<&str> {
        self.0.help.as_deref()
    }
}

/// Shows the excerpt in separate lines; `{:#}` is one line without it.
impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &*self.0;
        write!(f, "{}:", d.file)?;
        if let Some(p) = d.position {
            write!(f, "{}:{}:", p.line, p.column)?;
        }
        write!(f, " {}", d.message)?;
        if let (Some(e), Some(p), false) = (&d.excerpt, d.position, f.alternate()) {
            let gutter = p.line.to_string().len();
            write!(f, "\n  {} | {}", p.line, e.text)?;
            write!(
                f,
                "\n  {:gutter$} | {:caret$}{}",
                "",
                "",
                "^".repeat(e.width),
                caret = e.caret
            )?;
        }
        if let Some(h) = &d.help {
            let gap = if f.alternate() { " " } else { "\n  " };
            write!(f, "{gap}help: {h}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ScenarioError {}

/// Line, column and excerpt of a byte range; ranges beyond the text are cut to it.
fn locate(text: &str, span: Range<usize>) -> (Position, Excerpt) {
    let start = boundary(text, span.start);
    let line_start = text[..start].rfind('\n').map_or(0, |i| i + 1);
    let line_end = text[start..].find('\n').map_or(text.len(), |i| start + i);
    let column = text[line_start..start].chars().count();

    // A window around the fault when the line is long.
    let first = column.saturating_sub(EXCERPT_WIDTH * 3 / 4);
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    let body = text[line_start..line_end].trim_end_matches('\r');
    let mut shown: String = body
        .chars()
        .skip(first)
        .take(EXCERPT_WIDTH)
        .map(printable)
        .collect();
    if body.chars().count() > first + EXCERPT_WIDTH {
        shown.push('…');
    }
    let prefix = if first > 0 { "…" } else { "" };
    let caret = column - first + prefix.chars().count();
    let end = span.end.clamp(start, line_end);
    let faulty = text.get(start..end).map_or(1, |s| s.chars().count());
    let width = faulty.clamp(1, EXCERPT_WIDTH / 4 + 16);
    (
        Position::of(text, start),
        Excerpt {
            text: format!("{prefix}{shown}").trim_end().to_owned(),
            caret,
            width,
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source {
            name: "x.toml".into(),
            text: text.into(),
            folder: None,
        }
    }

    #[test]
    fn columns_count_characters_and_carets_span_the_fault() {
        let e = ScenarioError::at(&source("a = 1\n\"é\" = wrong\n"), 13..18, "bad")
            .with_near(Some("right"));
        assert_eq!(e.position(), Some(Position { line: 2, column: 7 }));
        assert_eq!(
            e.to_string(),
            "x.toml:2:7: bad\n  2 | \"é\" = wrong\n    |       ^^^^^\n  help: did you mean `right`?"
        );
    }

    #[test]
    fn long_lines_are_cut_around_the_fault() {
        let text = format!("{}X{}", "a".repeat(1000), "b".repeat(1000));
        let shown = ScenarioError::at(&source(&text), 1000..1001, "bad").to_string();
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[1].chars().count() < 120);
        let caret = lines[2].chars().position(|c| c == '^');
        assert_eq!(caret.map(|i| lines[1].chars().nth(i)), Some(Some('X')));
    }

    #[test]
    fn a_span_beyond_the_text_is_cut() {
        let e = ScenarioError::at(&source("é"), 1..99, "bad");
        assert_eq!(e.position(), Some(Position { line: 1, column: 1 }));
    }
}
