//! Outlines without folds, and what differs between two.

use super::diff;
use std::collections::BTreeMap;

/// An outline with every repetition and block written out, as lines; for a diff that shows what changed and no more.
/// Texts that are no outline come back as they are, as far as they go.
#[must_use]
pub fn expand(outline: &str) -> String {
    let lines: Vec<&str> = outline.lines().collect();
    let mut blocks: BTreeMap<&str, String> = BTreeMap::new();
    let mut out = String::new();
    let mut i = 0;
    while i < lines.len() {
        let title = lines[i];
        let end = lines[i + 1..]
            .iter()
            .position(|l| l.starts_with('['))
            .map_or(lines.len(), |n| i + 1 + n);
        let mut body = String::new();
        unfold(&lines[i + 1..end], 0, &blocks, &mut body);
        match title
            .strip_prefix("[block ")
            .and_then(|t| t.strip_suffix(']'))
        {
            Some(name) => {
                blocks.insert(name, body);
            }
            None => {
                out.push_str(title);
                out.push('\n');
                out.push_str(&body);
            }
        }
        i = end;
    }
    out
}

/// Longest expansion: a faulty file must not fill the memory.
const MOST_BYTES: usize = 64 << 20;

fn unfold(lines: &[&str], depth: usize, blocks: &BTreeMap<&str, String>, out: &mut String) {
    let indent = |l: &str| l.len() - l.trim_start_matches(' ').len();
    let mut i = 0;
    while i < lines.len() {
        let text = lines[i].trim_start_matches(' ');
        i += 1;
        let times = text
            .strip_suffix(" times:")
            .and_then(|n| n.parse::<u32>().ok());
        if let Some(times) = times {
            let body = lines[i..]
                .iter()
                .take_while(|l| indent(l) >= 2 * (depth + 1))
                .count();
            let mut once = String::new();
            unfold(&lines[i..i + body], depth + 1, blocks, &mut once);
            if !once.is_empty() {
                let room = MOST_BYTES.saturating_sub(out.len()) / once.len();
                out.push_str(&once.repeat(room.min(times as usize)));
            }
            i += body;
        } else if let Some(block) = text.strip_prefix("run ").and_then(|n| blocks.get(n)) {
            out.push_str(block);
        } else {
            out.push_str(text);
            out.push('\n');
        }
    }
}

/// What turns one outline into another: the diff of the expanded texts, equal places counted instead of repeated, at most
/// `limit` lines. Empty when the outlines say the same.
#[must_use]
pub fn changes(old: &str, new: &str, limit: usize) -> String {
    let diff = diff(&expand(old), &expand(new));
    let mut places: Vec<(&str, usize)> = Vec::new();
    for place in diff.split("…\n").filter(|p| !p.is_empty()) {
        match places.iter_mut().find(|(p, _)| *p == place) {
            Some((_, n)) => *n += 1,
            None => places.push((place, 1)),
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
        if !out.is_empty() {
            out.push_str("…\n");
        }
        for line in place.lines().take(limit) {
            out.push_str(line);
            out.push('\n');
        }
        written += lines;
        if times > 1 {
            out.push_str(&format!("(the same in {} more places)\n", times - 1));
        }
    }
    if left > 0 {
        out.push_str(&format!("… and {left} more places\n"));
    }
    out
}
