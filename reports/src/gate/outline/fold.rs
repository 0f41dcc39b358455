//! Repetitions in a list of lines.

use std::collections::BTreeMap;

/// A line, or a repeated part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// A line.
    Line(String),
    /// How often, and what.
    Repeat(usize, Vec<Node>),
}

/// Shortest part that is worth folding: lines saved must exceed the line that says how often.
const LEAST_SAVED: usize = 2;
/// Longest part that is looked for.
const LONGEST: usize = 4096;

/// Folds adjacent repetitions, the one that saves most first, and those of folded parts again.
pub(super) fn fold(lines: Vec<String>) -> Vec<Node> {
    let mut names: Vec<Node> = Vec::new();
    let mut ids: BTreeMap<String, u32> = BTreeMap::new();
    let mut tokens: Vec<u32> = Vec::with_capacity(lines.len());
    for line in lines {
        let id = *ids.entry(line.clone()).or_insert_with(|| {
            names.push(Node::Line(line));
            (names.len() - 1) as u32
        });
        tokens.push(id);
    }
    while let Some((start, length, times)) = best(&tokens) {
        let body: Vec<Node> = fold_ids(&tokens[start..start + length], &names);
        let id = names.len() as u32;
        names.push(Node::Repeat(times, body));
        tokens.splice(start..start + length * times, [id]);
        // The same repetition elsewhere gets the same name, so that it can fold in turn.
        let mut i = 0;
        while i < tokens.len() {
            let same = (0..names.len() - 1)
                .find(|o| names[*o] == names[tokens[i] as usize] && (*o as u32) < tokens[i]);
            if let Some(o) = same {
                tokens[i] = o as u32;
            }
            i += 1;
        }
    }
    fold_ids(&tokens, &names)
}

fn fold_ids(tokens: &[u32], names: &[Node]) -> Vec<Node> {
    tokens.iter().map(|t| names[*t as usize].clone()).collect()
}

/// The repetition that saves most lines: start, length, times.
fn best(tokens: &[u32]) -> Option<(usize, usize, usize)> {
    let n = tokens.len();
    let mut best: Option<(usize, (usize, usize, usize))> = None;
    for length in 1..=(n / 2).min(LONGEST) {
        let mut i = 0;
        // Runs of positions that equal the one `length` later are repetitions.
        while i + length < n {
            if tokens[i] != tokens[i + length] {
                i += 1;
                continue;
            }
            let start = i;
            while i + length < n && tokens[i] == tokens[i + length] {
                i += 1;
            }
            let times = (i - start) / length + 1;
            let saved = length * (times - 1);
            if times > 1 && saved >= LEAST_SAVED && best.is_none_or(|(s, _)| saved > s) {
                best = Some((saved, (start, length, times)));
            }
        }
    }
    best.map(|(_, found)| found)
}
