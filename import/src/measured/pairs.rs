//! Finds the collectives of two ranks that are the same one.
//!
//! The n-th collective of one kind, group and size in a step is the same on both ranks, unless a
//! trace lacks events: the profiler drops some, or starts later on one rank. The counts then
//! differ, and the times decide, since a collective ends at nearly the same time on all its ranks.

use crate::attribute::Work;
use std::collections::{BTreeMap, HashSet};

/// Ends of one collective on two ranks whose clocks agree differ by less than this, nanoseconds.
const APART: i64 = 100_000;
/// Maximum number of combinations that are compared by time.
const COMBINATIONS: usize = 10_000_000;

/// A collective of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveSpan {
    /// Device event, an index into [`Trace::device`](crate::kineto::Trace::device).
    pub device: u32,
    /// Step, an index into the rank's steps.
    pub step: u32,
    /// Kind, group and size.
    pub key: (Work, String, u64),
    /// Start and end on the common clock of all ranks, nanoseconds.
    pub span: (i64, i64),
}

/// What equal collectives share: step, kind, group and size.
type Alike<'a> = (u32, &'a (Work, String, u64));

/// Collectives of two ranks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Pairs {
    /// Those that both have: indices into the lists of the two ranks.
    pub(super) both: Vec<(usize, usize)>,
    /// Those of the first rank that the trace of the second one lacks, although it has others of
    /// the same group.
    pub(super) lost: Vec<usize>,
    /// Number of those of the second rank that the trace of the first one lacks.
    pub(super) lost_by_first: usize,
}

/// Returns the indices of a rank's collectives by what equal ones share, in the order of time.
fn alike(rank: &[CollectiveSpan]) -> BTreeMap<Alike<'_>, Vec<usize>> {
    let mut all: BTreeMap<Alike<'_>, Vec<usize>> = BTreeMap::new();
    for (i, c) in rank.iter().enumerate() {
        all.entry((c.step, &c.key)).or_default().push(i);
    }
    all
}

/// Returns the groups of a rank. Without a name of its group, a collective can be any rank's.
fn groups(rank: &[CollectiveSpan]) -> HashSet<&str> {
    let named = rank.iter().map(|c| c.key.1.as_str());
    named.filter(|g| !g.is_empty()).collect()
}

/// Returns the number of a rank's collectives by step, kind and group.
fn counts(rank: &[CollectiveSpan]) -> BTreeMap<(u32, Work, &str), usize> {
    let mut all = BTreeMap::new();
    for c in rank {
        *all.entry((c.step, c.key.0, c.key.1.as_str())).or_default() += 1;
    }
    all
}

/// Returns the pairs that do not depend on clocks: those of which both ranks have equally many.
pub(super) fn counted(first: &[CollectiveSpan], other: &[CollectiveSpan]) -> Vec<(usize, usize)> {
    let others = alike(other);
    let mut pairs = Vec::new();
    for (key, own) in alike(first) {
        if let Some(theirs) = others.get(&key).filter(|t| t.len() == own.len()) {
            pairs.extend(own.into_iter().zip(theirs.iter().copied()));
        }
    }
    pairs
}

/// Returns the pairs of two ranks whose clocks agree.
pub(super) fn pairs(first: &[CollectiveSpan], other: &[CollectiveSpan]) -> Pairs {
    let (own, theirs) = (alike(first), alike(other));
    let (own_groups, their_groups) = (groups(first), groups(other));
    let (own_counts, their_counts) = (counts(first), counts(other));
    // Ranks exchange different sizes in an all-to-all, so that equal counts mean that none is lost.
    let lacks = |(step, (work, group, _)): &Alike<'_>| {
        let key = (*step, *work, group.as_str());
        own_counts.get(&key) != their_counts.get(&key)
            && own_groups.contains(group.as_str())
            && their_groups.contains(group.as_str())
    };
    let mut found = Pairs::default();
    let none = Vec::new();
    for (key, own) in &own {
        let theirs = theirs.get(key).unwrap_or(&none);
        let both = match own.len() == theirs.len() {
            true => own.iter().copied().zip(theirs.iter().copied()).collect(),
            false => by_time((first, own), (other, theirs)),
        };
        if lacks(key) {
            let matched: HashSet<usize> = both.iter().map(|p| p.0).collect();
            found
                .lost
                .extend(own.iter().filter(|i| !matched.contains(i)));
            found.lost_by_first += theirs.len() - both.len();
        }
        found.both.extend(both);
    }
    for (key, theirs) in &theirs {
        if !own.contains_key(key) && lacks(key) {
            found.lost_by_first += theirs.len();
        }
    }
    found
}

/// Selects as many of the longer list as the shorter one has, so that the sum of the differences of
/// ends is least. Returns the pairs that overlap in time.
fn by_time(
    (first, own): (&[CollectiveSpan], &[usize]),
    (other, theirs): (&[CollectiveSpan], &[usize]),
) -> Vec<(usize, usize)> {
    if own.len() > theirs.len() {
        let swapped = by_time((other, theirs), (first, own));
        return swapped.into_iter().map(|(a, b)| (b, a)).collect();
    }
    let skips = theirs.len() - own.len();
    if own.len().saturating_mul(skips + 1) > COMBINATIONS {
        return Vec::new();
    }
    let apart = |i: usize, k: usize| {
        let (a, b) = (&first[own[i]], &other[theirs[i + k]]);
        u128::from(a.span.1.abs_diff(b.span.1))
    };
    // Least sums for the first collectives, by the number of those that were skipped; and whether
    // the last pair follows a skip.
    let mut least = vec![0; skips + 1];
    let mut skipped: Vec<Vec<bool>> = Vec::with_capacity(own.len());
    for i in 0..own.len() {
        let mut row = vec![false; skips + 1];
        let mut best = u128::MAX;
        for k in 0..=skips {
            let with = least[k] + apart(i, k);
            row[k] = best < with;
            best = best.min(with);
            least[k] = best;
        }
        skipped.push(row);
    }
    let mut k = skips;
    let mut pairs = Vec::new();
    for i in (0..own.len()).rev() {
        while skipped[i][k] {
            k -= 1;
        }
        pairs.push((own[i], theirs[i + k]));
    }
    pairs.reverse();
    pairs.retain(|&(a, b)| {
        let (a, b) = (first[a].span, other[b].span);
        a.0.max(b.0) - a.1.min(b.1) < APART
    });
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns collectives that end at these milliseconds and last 1 ms.
    fn rank(ends: &[i64]) -> Vec<CollectiveSpan> {
        let all = ends.iter().enumerate();
        all.map(|(i, end)| CollectiveSpan {
            device: i as u32,
            step: 0,
            key: (Work::AllGather, "0 [0, 1]".into(), 8),
            span: ((end - 1) * 1_000_000, end * 1_000_000),
        })
        .collect()
    }

    #[test]
    fn a_lost_collective_does_not_shift_the_others() {
        let first = rank(&[10, 20, 30, 40]);
        let second = rank(&[10, 30, 40]);
        assert_eq!(
            pairs(&first, &second),
            Pairs {
                both: vec![(0, 0), (2, 1), (3, 2)],
                lost: vec![1],
                lost_by_first: 0
            }
        );
        let reverse = pairs(&second, &first);
        assert_eq!(reverse.both, [(0, 0), (1, 2), (2, 3)]);
        assert_eq!((reverse.lost.len(), reverse.lost_by_first), (0, 1));
        assert_eq!(counted(&first, &second), []);
        assert_eq!(counted(&first, &first).len(), 4);
        // Each trace lacks one. Calls that do not overlap are not paired.
        let found = pairs(&rank(&[10, 20, 30]), &rank(&[20, 40]));
        assert_eq!((found.both, found.lost), (vec![(1, 0)], vec![0, 2]));
    }

    #[test]
    fn ranks_outside_of_a_group_lose_nothing() {
        let first = rank(&[10, 20]);
        let mut second = rank(&[10]);
        second[0].key.1 = "1 [1, 2]".into();
        assert_eq!(pairs(&first, &second), Pairs::default());
        // Sizes of an all-to-all differ.
        let mut second = rank(&[10, 20]);
        second[1].key.2 = 9;
        let found = pairs(&first, &second);
        assert_eq!((found.both, found.lost), (vec![(0, 0)], vec![]));
    }

    proptest! {
        #[test]
        fn any_lost_collectives_are_found(kept in prop::collection::vec(any::<bool>(), 1..40)) {
            let ends: Vec<i64> = (1..=kept.len() as i64).map(|i| 5 * i).collect();
            let rest: Vec<i64> = ends.iter().zip(&kept).filter(|(_, k)| **k).map(|(e, _)| *e).collect();
            let found = pairs(&rank(&ends), &rank(&rest));
            let expected: Vec<usize> = (0..kept.len()).filter(|i| kept[*i]).collect();
            let paired: Vec<usize> = found.both.iter().map(|p| p.0).collect();
            prop_assert_eq!(paired, expected);
        }
    }
}
