//! The nearest path, for an error.

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
    fn nearest_by_edits() {
        assert_eq!(distance(b"kitten", b"sitting"), 3);
        assert_eq!(
            nearest("layer.*", ["embedding", "layers.0", "norm"].into_iter()),
            Some("layers.0")
        );
    }
}
