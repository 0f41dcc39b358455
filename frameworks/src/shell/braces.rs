//! Reads the contents of `${…}`: a name, an element, and an operation.

use super::expansion::{Elements, End, Matches, Operation};
use super::lex::Lexer;
use super::word::Part;
use crate::error::ConfigError;
use shardlab_plan::scenario::Position;

/// Returns the part for the contents of `${…}`.
///
/// # Errors
/// Fails if a quote or bracket within is not closed, or it is nested too deeply.
pub(super) fn braces(
    file: &str,
    inner: &str,
    at: Position,
    depth: usize,
    quoted: bool,
) -> Result<Part, ConfigError> {
    let parts = |text: &str| Lexer::parts(file, text, at, depth);
    let counted = inner.strip_prefix('#').filter(|rest| !rest.is_empty());
    let inner = counted.unwrap_or(inner);
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let end = inner.find(|c| !is_name(c)).unwrap_or(inner.len());
    let (name, rest) = inner.split_at(end);
    // Names of variables in variables, and operations on arguments, are not followed.
    if name.is_empty() {
        return Ok(Part::Command);
    }
    let (elements, rest) = match rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
        Some(("@" | "*", rest)) => (Elements::All, rest),
        Some((index, rest)) => (Elements::One(parts(index)?), rest),
        None => (Elements::All, rest),
    };
    let after = |signs: &[&str]| signs.iter().find_map(|sign| rest.strip_prefix(sign));
    let operation = if counted.is_some() {
        rest.is_empty().then_some(Operation::Length)
    } else if rest.is_empty() || after(&[":?", "?"]).is_some() {
        None
    } else if let Some(word) = after(&[":-", "-", ":=", "="]) {
        Some(Operation::Default {
            word: parts(word)?,
            assigns: rest.trim_start_matches(':').starts_with('='),
        })
    } else if let Some(word) = after(&[":+", "+"]) {
        Some(Operation::Alternative(parts(word)?))
    } else if let Some(pattern) = after(&["##", "#", "%%", "%"]) {
        Some(Operation::Trim {
            end: if rest.starts_with('#') {
                End::Front
            } else {
                End::Back
            },
            longest: rest.starts_with("##") || rest.starts_with("%%"),
            pattern: parts(pattern)?,
        })
    } else if let Some(text) = after(&["//", "/#", "/%", "/"]) {
        let (pattern, with) = split_pattern(text);
        Some(Operation::Replace {
            matches: match rest.chars().nth(1) {
                Some('/') => Matches::All,
                Some('#') => Matches::At(End::Front),
                Some('%') => Matches::At(End::Back),
                _ => Matches::First,
            },
            pattern: parts(pattern)?,
            with: parts(with)?,
        })
    } else if matches!(rest, "^" | "^^" | "," | ",,") {
        Some(Operation::Case {
            upper: rest.starts_with('^'),
            all: rest.len() == 2,
        })
    } else if let Some(range) = rest.strip_prefix(':') {
        let (offset, length) = match range.split_once(':') {
            Some((offset, length)) => (offset, Some(length.to_owned())),
            None => (range, None),
        };
        Some(Operation::Substring {
            offset: offset.to_owned(),
            length,
        })
    } else {
        return Ok(Part::Command);
    };
    if counted.is_some() && operation.is_none() {
        return Ok(Part::Command);
    }
    Ok(Part::Variable {
        name: name.to_owned(),
        elements,
        operation,
        quoted,
    })
}

/// Splits `pattern/text` at the first slash that is neither quoted nor within braces.
fn split_pattern(text: &str) -> (&str, &str) {
    let (mut depth, mut quote) = (0_usize, None);
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => {
                chars.next();
            }
            '\'' | '"' if quote == Some(c) => quote = None,
            '\'' | '"' if quote.is_none() => quote = Some(c),
            _ if quote.is_some() => {}
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            '/' if depth == 0 => return (&text[..at], &text[at + 1..]),
            _ => {}
        }
    }
    (text, "")
}
