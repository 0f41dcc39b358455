//! Globs over module paths, and the nearest path for an error.

/// Whether `glob` matches `path`: component by component, where `*` stands for any characters of one component.
pub(super) fn matches(glob: &str, path: &str) -> bool {
    let (mut g, mut p) = (glob.split('.'), path.split('.'));
    loop {
        match (g.next(), p.next()) {
            (None, None) => return true,
            (Some(a), Some(b)) if component(a.as_bytes(), b.as_bytes()) => {}
            _ => return false,
        }
    }
}

/// Greedy wildcard match with one backtrack point: linear in practice, never exponential.
fn component(glob: &[u8], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if g < glob.len() && glob[g] == b'*' {
            star = Some((g, t));
            g += 1;
        } else if g < glob.len() && glob[g] == text[t] {
            g += 1;
            t += 1;
        } else if let Some((sg, st)) = star {
            star = Some((sg, st + 1));
            g = sg + 1;
            t = st + 1;
        } else {
            return false;
        }
    }
    glob[g..].iter().all(|&c| c == b'*')
}

/// The candidate with the fewest single-character edits from `wanted`; the first of equals.
pub(super) fn nearest<'a>(
    wanted: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    candidates.min_by_key(|c| distance(wanted.as_bytes(), c.as_bytes()))
}

fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_is_one_component() {
        assert!(matches("layers.*", "layers.31"));
        assert!(matches("*", "embedding"));
        assert!(matches("layers.*.mlp", "layers.0.mlp"));
        assert!(matches("layers.1*", "layers.12"));
        assert!(!matches("layers.*", "layers"));
        assert!(!matches("layers.*", "layers.0.mlp"));
        assert!(!matches("layers.*.mlp", "layers.0.attention"));
        assert!(!matches("layers.1*", "layers.2"));
    }

    #[test]
    fn nearest_by_edits() {
        assert_eq!(distance(b"kitten", b"sitting"), 3);
        assert_eq!(
            nearest("layer.*", ["embedding", "layers.0", "norm"].into_iter()),
            Some("layers.0")
        );
    }
}
