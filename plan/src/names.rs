//! Finds the valid name nearest to a mistyped one.

/// Maximum length of names that are compared.
const MAX_LEN: usize = 64;

/// Returns the candidate nearest to `word`: by edit distance up to a third of its length, or else
/// one that contains it.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let word = word.to_lowercase();
    let length = word.chars().count();
    if length == 0 || length > MAX_LEN {
        return None;
    }
    let limit = (length / 3).max(1);
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let mut d = distance(&word, candidate);
        if d > limit
            && length >= 3
            && (candidate.contains(&word) || word.contains(candidate) && candidate.len() >= 3)
        {
            d = limit; // a part of the name: as good as the worst accepted typing error
        }
        if d <= limit && best.is_none_or(|(b, _)| d < b) {
            best = Some((d, candidate));
        }
    }
    best.map(|(_, c)| c)
}

/// Returns the number of edits (insert, remove, replace, swap neighbors) from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replace = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replace.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = above;
        above = row;
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_and_far() {
        let names = ["prefetch_forward", "prefetch_backward", "policy", "units"];
        assert_eq!(nearest("prefetch_foward", names), Some("prefetch_forward"));
        assert_eq!(nearest("polciy", names), Some("policy"));
        assert_eq!(nearest("unit", names), Some("units"));
        assert_eq!(
            nearest("H200", ["h100-80", "h200-nvlink"]),
            Some("h200-nvlink")
        );
        assert_eq!(nearest("zzz", names), None);
        assert_eq!(nearest("", names), None);
    }

    #[test]
    fn distances() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("ab", "ba"), 1);
        assert_eq!(distance("", "abc"), 3);
    }
}
