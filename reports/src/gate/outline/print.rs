//! Prints outlines as text.

use super::HEADING;
use super::fold::{Id, Symbol, Symbols};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Maximum width of a line.
const WIDTH: usize = 120;

/// Prints the sections of an outline. Blocks come before their references.
pub(super) fn print(symbols: &Symbols, sections: &[(String, Vec<Id>)]) -> String {
    let mut names = Names::new();
    let mut out = String::new();
    for (_, list) in sections {
        define(symbols, list, &mut names, &mut out);
    }
    for (title, list) in sections {
        fill(&format!("[{title}]"), symbols, list, &names, &mut out);
    }
    out
}

/// Numbers of blocks in their order in the text.
type Names = BTreeMap<Id, usize>;

/// Writes the blocks that a list needs.
fn define(symbols: &Symbols, list: &[Id], names: &mut Names, out: &mut String) {
    for id in list {
        match symbols.get(*id) {
            Symbol::Repeat(_, body) => define(symbols, body, names, out),
            Symbol::Block(body) if !names.contains_key(id) => {
                define(symbols, body, names, out);
                let name = names.len() + 1;
                fill(&format!("[block {name}]"), symbols, body, names, out);
                names.insert(*id, name);
            }
            Symbol::Block(_) | Symbol::Line(_) => {}
        }
    }
}

/// Writes a title and a list of statements. Lines are broken between words; headings start a line.
/// Lines after the first are indented, more so within loops.
fn fill(title: &str, symbols: &Symbols, list: &[Id], names: &Names, out: &mut String) {
    let mut statements = Vec::new();
    spell(symbols, list, names, &mut statements);
    out.push_str(title);
    let (mut width, mut depth) = (title.len(), 0);
    for (i, statement) in statements.iter().enumerate() {
        let next = statements.get(i + 1);
        let end = match next {
            Some(next) if next.goes_on => ",",
            Some(_) => ";",
            None => "",
        };
        let words = format!("{}{end}", statement.text);
        for (k, word) in words.split(' ').enumerate() {
            let length = word.chars().count();
            let breaks = k == 0 && statement.heading && i > 0;
            if breaks || width + 1 + length > WIDTH {
                width = 1 + 2 * depth;
                let _ = write!(out, "\n{:width$}", "");
            } else {
                out.push(' ');
                width += 1;
            }
            out.push_str(word);
            width += length;
            depth += word.matches('{').count();
            depth = depth.saturating_sub(word.matches('}').count());
        }
    }
    out.push('\n');
}

/// A statement with its surrounding braces.
struct Statement {
    text: String,
    heading: bool,
    /// Whether it has the same label as the previous statement, and omits it.
    goes_on: bool,
}

/// Returns the label of a statement, which is its purpose: `copy-out` in
/// `copy-out: free temporary`.
pub(super) fn label(statement: &str) -> Option<&str> {
    let (label, _) = statement.split_once(": ")?;
    (!label.contains(' ')).then_some(label)
}

fn spell(symbols: &Symbols, list: &[Id], names: &Names, out: &mut Vec<Statement>) {
    let mut before = None;
    for id in list {
        let last = std::mem::take(&mut before);
        match symbols.get(*id) {
            Symbol::Line(text) => {
                before = label(text);
                let rest = before
                    .filter(|l| last == Some(*l))
                    .map(|l| &text[l.len() + 2..]);
                out.push(Statement {
                    text: rest.unwrap_or(text).to_owned(),
                    heading: text.starts_with(HEADING),
                    goes_on: rest.is_some(),
                });
            }
            Symbol::Repeat(times, body) => {
                let start = out.len();
                spell(symbols, body, names, out);
                if let Some(first) = out.get_mut(start) {
                    first.text.insert_str(0, &format!("{times}x{{"));
                }
                if let Some(last) = out.last_mut() {
                    last.text.push('}');
                }
            }
            Symbol::Block(_) => out.push(Statement {
                text: format!("run {}", names.get(id).copied().unwrap_or_default()),
                heading: false,
                goes_on: false,
            }),
        }
    }
}
