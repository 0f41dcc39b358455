//! Differences between two outlines.

use super::{HEADING, expand};
use similar::{ChangeTag, DiffOp, TextDiff};
use std::fmt::Write;

/// Number of context lines around a change.
const CONTEXT: usize = 2;

/// Returns a diff of two outlines: changed statements after `-` and `+`, each under the heading of
/// its place in the model, with some context. Equal changes are counted instead of repeated. At
/// most `limit` lines are returned, plus a last line with the number of omitted lines. The result
/// is empty if the outlines are equal.
#[must_use]
pub fn changes(old: &str, new: &str, limit: usize) -> String {
    let (old, new) = (expand(old), expand(new));
    let mut places: Vec<(String, usize)> = Vec::new();
    for (a, b) in pairs(&visits(&old), &visits(&new)) {
        for place in hunks(a, b) {
            match places.iter_mut().find(|(p, _)| *p == place) {
                Some((_, n)) => *n += 1,
                None => places.push((place, 1)),
            }
        }
    }
    let mut out = String::new();
    let (mut written, mut left) = (0, 0);
    for (place, times) in places {
        let lines = place.lines().count();
        if written > 0 && written + lines > limit {
            left += times;
            continue;
        }
        for line in place.lines().take(limit) {
            out.push_str(line);
            out.push('\n');
        }
        written += lines;
        match times {
            1 => {}
            2 => out.push_str("(1 more occurrence)\n"),
            n => {
                let _ = writeln!(out, "({} more occurrences)", n - 1);
            }
        }
    }
    match left {
        0 => {}
        1 => out.push_str("… and 1 more change\n"),
        n => {
            let _ = writeln!(out, "… and {n} more changes");
        }
    }
    out
}

/// Splits an expanded outline into parts that each start with a title or a heading.
fn visits(text: &str) -> Vec<&str> {
    let mut all = Vec::new();
    let (mut start, mut at) = (0, 0);
    for line in text.split_inclusive('\n') {
        if at > start && (line.starts_with(HEADING) || line.starts_with('[')) {
            all.push(&text[start..at]);
            start = at;
        }
        at += line.len();
    }
    if at > start {
        all.push(&text[start..at]);
    }
    all
}

fn title(visit: &str) -> &str {
    visit.lines().next().unwrap_or_default()
}

/// Returns pairs of differing parts. A part without a counterpart is paired with an empty text.
fn pairs<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(&'a str, &'a str)> {
    let mut all = Vec::new();
    let whole = TextDiff::from_slices(old, new);
    for op in whole.ops() {
        if matches!(op, DiffOp::Equal { .. }) {
            continue;
        }
        let (old, new) = (&old[op.old_range()], &new[op.new_range()]);
        let (a, b): (Vec<&str>, Vec<&str>) = (
            old.iter().map(|v| title(v)).collect(),
            new.iter().map(|v| title(v)).collect(),
        );
        for op in TextDiff::from_slices(&a, &b).ops() {
            let (old, new) = (&old[op.old_range()], &new[op.new_range()]);
            if matches!(op, DiffOp::Equal { .. }) {
                all.extend(old.iter().copied().zip(new.iter().copied()));
            } else {
                all.extend(old.iter().map(|v| (*v, "")));
                all.extend(new.iter().map(|v| ("", *v)));
            }
        }
    }
    all.retain(|(a, b)| a != b);
    all
}

/// Returns the changes between two parts, each under its heading.
fn hunks(old: &str, new: &str) -> Vec<String> {
    let title = title(if new.is_empty() { old } else { new });
    let diff = TextDiff::from_lines(old, new);
    let groups = diff.grouped_ops(CONTEXT);
    let hunk = |group: &Vec<DiffOp>| {
        let mut lines: Vec<(String, usize)> = Vec::new();
        for change in group.iter().flat_map(|op| diff.iter_changes(op)) {
            let sign = match change.tag() {
                ChangeTag::Delete => '-',
                ChangeTag::Insert => '+',
                ChangeTag::Equal => ' ',
            };
            let line = format!("{sign}{}", change.value().trim_end_matches('\n'));
            match lines.last_mut() {
                Some((last, n)) if *last == line => *n += 1,
                _ => lines.push((line, 1)),
            }
        }
        let mut out = String::new();
        if lines.first().is_none_or(|(l, _)| &l[1..] != title) {
            let _ = writeln!(out, " {title}");
        }
        for (line, n) in lines {
            match n {
                1 => out.push_str(&line),
                n => {
                    let _ = write!(out, "{line} ({n} times)");
                }
            }
            out.push('\n');
        }
        out
    };
    groups.iter().map(hunk).collect()
}
