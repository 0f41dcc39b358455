//! Repetitions in a list of lines.

use std::collections::HashMap;

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

/// Folds adjacent repetitions, those that save most first, and those of folded parts again.
pub(super) fn fold(lines: Vec<String>) -> Vec<Node> {
    counted(lines).0
}

/// The same, and how many passes over the list that took.
pub(super) fn counted(lines: Vec<String>) -> (Vec<Node>, usize) {
    let mut names: Vec<Node> = Vec::new();
    let mut ids: HashMap<String, u32> = HashMap::new();
    let mut tokens: Vec<u32> = Vec::with_capacity(lines.len());
    for line in lines {
        let id = *ids.entry(line.clone()).or_insert_with(|| {
            names.push(Node::Line(line));
            (names.len() - 1) as u32
        });
        tokens.push(id);
    }
    // The same repetition elsewhere gets the same name, so that it can fold in turn.
    let mut repeats: HashMap<(usize, Vec<u32>), u32> = HashMap::new();
    let mut passes = 1;
    while let Some((length, saved)) = best(&tokens, names.len()) {
        passes += 1;
        let mut folded = Vec::with_capacity(tokens.len());
        let mut end = 0;
        for (start, times) in runs(&tokens, length) {
            if start < end || length * (times - 1) != saved {
                continue;
            }
            folded.extend(&tokens[end..start]);
            let body = tokens[start..start + length].to_vec();
            let nodes = fold_ids(&body, &names);
            folded.push(*repeats.entry((times, body)).or_insert_with(|| {
                names.push(Node::Repeat(times, nodes));
                (names.len() - 1) as u32
            }));
            end = start + length * times;
        }
        folded.extend(&tokens[end..]);
        tokens = folded;
    }
    (fold_ids(&tokens, &names), passes)
}

fn fold_ids(tokens: &[u32], names: &[Node]) -> Vec<Node> {
    tokens.iter().map(|t| names[*t as usize].clone()).collect()
}

/// The shortest length of the repetitions that save most lines, and how many each saves. Tokens are below `names`.
fn best(tokens: &[u32], names: usize) -> Option<(usize, usize)> {
    const NONE: usize = usize::MAX;
    let longest = (tokens.len() / 2).min(LONGEST);
    // Where each name was seen last, and for each token where its name was before: only equal tokens are looked at.
    let mut last = vec![NONE; names];
    let mut before = vec![NONE; tokens.len()];
    // By length: the latest run of tokens that come again so much later.
    let mut again = vec![0..0; longest + 1];
    let mut best: Option<(usize, usize)> = None;
    for (i, token) in tokens.iter().enumerate() {
        before[i] = std::mem::replace(&mut last[*token as usize], i);
        let mut j = before[i];
        while j != NONE && i - j <= longest {
            let length = i - j;
            let run = &mut again[length];
            if run.end != j {
                run.start = j;
            }
            run.end = j + 1;
            let saved = run.len() / length * length;
            let more = |(l, s)| saved > s || saved == s && length < l;
            if saved >= LEAST_SAVED && best.is_none_or(more) {
                best = Some((length, saved));
            }
            j = before[j];
        }
    }
    best
}

/// The repetitions of a length, in order of their starts: start and times. They may overlap.
fn runs(tokens: &[u32], length: usize) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    let mut i = 0;
    while i + length < tokens.len() {
        let start = i;
        while i + length < tokens.len() && tokens[i] == tokens[i + length] {
            i += 1;
        }
        if i - start >= length {
            all.push((start, (i - start) / length + 1));
        }
        i += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers that are alike in part: the parts are folded together, however many layers there are.
    #[test]
    fn depth_takes_no_more_passes() {
        let passes = |layers: usize| {
            let layer = |i: usize| {
                let layer = format!("layer {i}");
                [
                    &layer, "gather", "gather", "gather", "mm", "add", "mm", "add",
                ]
                .map(str::to_owned)
            };
            let (nodes, passes) = counted((0..layers).flat_map(layer).collect());
            assert_eq!(nodes.len(), 3 * layers);
            passes
        };
        assert_eq!(passes(2), 3);
        assert_eq!(passes(500), 3);
    }
}
