//! Sets of times as sorted, disjoint intervals.

/// Sorts and merges intervals.
#[must_use]
pub fn union(list: &mut [(u64, u64)]) -> Vec<(u64, u64)> {
    list.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(list.len());
    for &(start, end) in list.iter() {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}

/// Returns the total length.
#[must_use]
pub fn length(set: &[(u64, u64)]) -> u64 {
    set.iter().map(|i| i.1 - i.0).sum()
}

/// Returns the total length of the intersection of two sets.
#[must_use]
pub fn overlap(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (mut i, mut j, mut total) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        let (start, end) = (a[i].0.max(b[j].0), a[i].1.min(b[j].1));
        total += end.saturating_sub(start);
        if a[i].1 < b[j].1 {
            i += 1;
        } else {
            j += 1;
        }
    }
    total
}

/// Returns whether an interval shares time with a set.
#[must_use]
pub fn touches(set: &[(u64, u64)], (start, end): (u64, u64)) -> bool {
    let i = set.partition_point(|s| s.1 <= start);
    set.get(i).is_some_and(|s| s.0 < end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_operations() {
        let a = union(&mut [(5, 9), (0, 3), (2, 4), (9, 10)]);
        assert_eq!(a, [(0, 4), (5, 10)]);
        assert_eq!(length(&a), 9);
        assert_eq!(overlap(&a, &[(3, 6), (8, 20)]), 1 + 1 + 2);
        assert!(touches(&a, (3, 4)) && touches(&a, (4, 6)));
        assert!(!touches(&a, (4, 5)) && !touches(&a, (10, 12)));
    }
}
