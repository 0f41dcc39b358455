//! The width of text output, and line breaking.

use comfy_table::Table;
use std::sync::OnceLock;

/// Width of output that does not go to a terminal, and maximum width of sentences, in columns.
pub(super) const WIDTH: usize = 100;

/// Minimum width that output is laid out for, in columns.
const MIN_COLUMNS: usize = 40;

/// Indent of a command's continuation lines.
const CONTINUED: &str = "    ";

/// Units that stay on the same line as their number.
const UNITS: [&str; 9] = ["B", "KiB", "MiB", "GiB", "ns", "us", "ms", "s", "%"];

/// Returns the width that the user requests: `COLUMNS`, or else that of the terminal, if there is
/// one.
pub(super) fn asked() -> Option<usize> {
    static ASKED: OnceLock<Option<usize>> = OnceLock::new();
    *ASKED.get_or_init(|| {
        let variable = std::env::var("COLUMNS").ok();
        let terminal = || Table::new().width().map(usize::from);
        variable
            .as_deref()
            .and_then(sensible)
            .or_else(|| terminal().filter(|w| *w > 0))
            .map(|w| w.max(MIN_COLUMNS))
    })
}

/// Parses a value of `COLUMNS`; `None` if it cannot be the width of a terminal.
fn sensible(columns: &str) -> Option<usize> {
    let number = columns.trim().parse().ok()?;
    (1..=10_000).contains(&number).then_some(number)
}

/// Returns the maximum width of tables.
pub(super) fn width() -> usize {
    asked().unwrap_or(WIDTH)
}

/// Returns the maximum width of sentences, which is limited because long lines are hard to read.
pub(super) fn sentence() -> usize {
    width().min(WIDTH)
}

/// Returns the width of a text on a terminal, without escape sequences for colours.
fn shown(text: &str) -> usize {
    let mut pieces = text.split("\x1b[");
    let first = pieces.next().map_or(0, |p| p.chars().count());
    let rest = pieces.map(|p| p.split_once('m').map_or(0, |(_, p)| p.chars().count()));
    first + rest.sum::<usize>()
}

/// Breaks a text into lines of at most `width` characters, between words but not between a number
/// and its unit. Runs of spaces within a line are kept. A word that is longer than a line gets a
/// separate line.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let bare = word.trim_end_matches([',', ';', '.', ')', ':']);
        match words.last_mut() {
            Some(number)
                if UNITS.contains(&bare) && number.ends_with(|c: char| c.is_ascii_digit()) =>
            {
                number.push(' ');
                number.push_str(word);
            }
            _ => words.push(word.to_owned()),
        }
    }
    fill(words, width, "")
}

/// Fills lines of at most `width` characters with words. Every line except the last ends with
/// `end`.
fn fill(words: impl IntoIterator<Item = String>, width: usize, end: &str) -> Vec<String> {
    let room = width.saturating_sub(end.len());
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if shown(line) + 1 + shown(&word) <= room || line.trim().is_empty() => {
                line.push(' ');
                line.push_str(&word);
            }
            // A run of spaces is not carried over to the next line.
            Some(_) if word.is_empty() => {}
            Some(line) => {
                line.truncate(line.trim_end().len());
                line.push_str(end);
                lines.push(word);
            }
            None => lines.push(word),
        }
    }
    lines
}

/// Breaks a line that is longer than `width`, if given, between words. Further lines start with
/// `indent`.
pub(super) fn hanging(line: &str, indent: &str, width: Option<usize>) -> Vec<String> {
    let Some(width) = width.filter(|w| shown(line) > *w) else {
        return vec![line.to_owned()];
    };
    let mut lines = wrap(line, width).into_iter();
    let first = lines.next().unwrap_or_default();
    let rest = line[first.len()..].trim_start();
    let further = wrap(rest, width.saturating_sub(indent.len()));
    let further = further.into_iter().map(|l| format!("{indent}{l}"));
    std::iter::once(first).chain(further).collect()
}

/// Lays out the text below the options of `--help`.
///
/// Lines of a paragraph are joined and wrapped to the terminal. Lines that start with spaces stay
/// separate: ` KEY text` continues below its text, and a command (` shardlab …`) continues after a
/// backslash, so that it can be pasted.
pub(super) fn help(text: &str) -> String {
    laid_out(text, sentence())
}

fn laid_out(text: &str, width: usize) -> String {
    let lines = logical(text);
    let lines = lines.iter().flat_map(|line| entry(line, width));
    lines.collect::<Vec<_>>().join("\n")
}

/// Joins the lines of paragraphs, and those of commands that a backslash continues.
fn logical(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        match lines.last_mut() {
            Some(last) if last.ends_with(" \\") => {
                last.truncate(last.len() - 2);
                last.push(' ');
                last.push_str(line.trim_start());
            }
            Some(last) if continues(last, line) => {
                last.push(' ');
                last.push_str(line.trim_start());
            }
            _ => lines.push(line.to_owned()),
        }
    }
    lines
}

/// Returns whether a line belongs to the same paragraph as the previous line.
fn continues(before: &str, line: &str) -> bool {
    let indent = |l: &str| l.len() - l.trim_start().len();
    let (blanks, outer) = (indent(line), indent(before));
    if before.is_empty() || line.is_empty() || before.ends_with(':') {
        return false;
    }
    match key(before) {
        // The line continues the text of a key.
        Some(hang) => blanks == hang,
        None => blanks == 0 && outer == 0,
    }
}

/// Returns the column at which the text of ` KEY text` starts.
fn key(line: &str) -> Option<usize> {
    let rest = line.trim_start();
    let blanks = line.len() - rest.len();
    let end = rest.find("  ").filter(|_| blanks > 0)?;
    Some(blanks + end + rest[end..].len() - rest[end..].trim_start().len())
}

/// Breaks one entry of a help text into lines.
fn entry(line: &str, width: usize) -> Vec<String> {
    let rest = line.trim_start();
    let indent = &line[..line.len() - rest.len()];
    if !indent.is_empty() && rest.starts_with("shardlab ") {
        if line.chars().count() <= width {
            return vec![line.to_owned()];
        }
        let room = width.saturating_sub(indent.len() + CONTINUED.len());
        let lines = fill(arguments(rest), room, " \\").into_iter().enumerate();
        let further = |i| if i > 0 { CONTINUED } else { "" };
        return lines
            .map(|(i, l)| format!("{indent}{}{l}", further(i)))
            .collect();
    }
    let hang = key(line).unwrap_or(indent.len());
    let (before, text) = line.split_at(hang);
    let hang = before.chars().count();
    let lines = wrap(text, width.saturating_sub(hang))
        .into_iter()
        .enumerate();
    let lines = lines.map(|(i, l)| match i {
        0 => format!("{before}{l}").trim_end().to_owned(),
        _ => format!("{:hang$}{l}", ""),
    });
    lines.collect()
}

/// Splits a command between arguments, where a line may be broken. An option stays with its value,
/// and quoted text stays together.
fn arguments(command: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut quoted = false;
    for word in command.split(' ') {
        let value_of_option =
            |p: &String| p.starts_with("--") && !p.contains([' ', '=']) && !word.starts_with("--");
        match parts.last_mut() {
            Some(last) if quoted || value_of_option(last) => {
                last.push(' ');
                last.push_str(word);
            }
            _ => parts.push(word.to_owned()),
        }
        if word.matches('\'').count() % 2 == 1 {
            quoted = !quoted;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_but_not_before_a_unit() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(
            wrap("peak 12.5 GiB, more", 10),
            ["peak", "12.5 GiB,", "more"]
        );
        assert_eq!(wrap("a b   c", 20), ["a b   c"]);
        assert_eq!(wrap("one   two", 4), ["one", "two"]);
        assert_eq!(wrap("a_word_of_its_own b", 4), ["a_word_of_its_own", "b"]);
        assert_eq!(wrap("", 20), [""]);
    }

    #[test]
    fn colours_take_no_room() {
        assert_eq!(shown("\x1b[32mfits\x1b[0m well"), 9);
        assert_eq!(wrap("it \x1b[32mfits\x1b[0m", 7).len(), 1);
    }

    #[test]
    fn only_a_width_is_taken_from_the_environment() {
        assert_eq!(sensible("80"), Some(80));
        for not in ["", "0", "-3", "wide", "100000"] {
            assert_eq!(sensible(not), None, "{not}");
        }
    }

    #[test]
    fn paragraphs_keys_and_commands_are_laid_out() {
        let text = "\
One paragraph of several words.

  0   done, all of it
  10  failed
  # A comment on the command
  shardlab compare a b --set x=1 --json
  shardlab sim 'a b' c";
        let expected = "\
One paragraph of
several words.

  0   done, all of
      it
  10  failed
  # A comment on the
  command
  shardlab \\
      compare a b \\
      --set x=1 \\
      --json
  shardlab sim \\
      'a b' c";
        assert_eq!(laid_out(text, 20), expected);
        // Nothing changes if there is enough room.
        assert_eq!(laid_out(text, 100), text);
    }

    #[test]
    fn lines_of_a_paragraph_are_joined() {
        let text = "\
Some words
and more.

Title:
  1  one
     and two
  2  three
  shardlab sim \\
      toy-cnn --json";
        let joined = "Some words and more.\n\nTitle:\n  1  one and two\n  2  three\n  shardlab sim toy-cnn --json";
        assert_eq!(laid_out(text, 80), joined);
    }

    /// Laying out a text twice changes nothing.
    #[test]
    fn laying_out_twice_changes_nothing() {
        let text =
            "Words and more words, of which none is long.\n  key  and its meaning in some words";
        for width in 16..60 {
            let once = laid_out(text, width);
            assert!(once.lines().all(|l| l.chars().count() <= width), "{once}");
        }
    }
}
