//! Finds the divergence that the others follow from.
//!
//! If a rank stops, the ranks of its groups wait for it, and do not issue the collectives of their
//! other groups. Ranks there wait in turn. The cause is where this chain ends: at a rank that does
//! not wait itself. Clocks of hosts differ, so only times of one rank are compared.

use super::Entry;
use super::report::Divergence;
use std::collections::{BTreeMap, BTreeSet};

/// A rank's entry of a divergence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Issued {
    /// Number of entries that the rank recorded before.
    pub(super) id: u64,
    /// Time of issue by the clock of the rank's host, nanoseconds.
    pub(super) at: i64,
    /// Whether it has not completed.
    pub(super) waits: bool,
    /// Whether its kernel runs, so that no earlier work of the rank delays it.
    pub(super) is_started: bool,
}

impl Issued {
    /// Returns what an entry says, with the state of the entry that has one.
    pub(super) fn new(entry: &Entry, state: &Entry) -> Self {
        Self {
            id: entry.id,
            at: entry.created,
            waits: !state.is_completed(),
            is_started: state.state == "started",
        }
    }
}

/// A divergence with what its ranks have issued.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) divergence: Divergence,
    /// Ranks that did not issue what the others wait in.
    pub(super) awaited: BTreeSet<u32>,
    /// The entries of the ranks that issued one.
    pub(super) issued: BTreeMap<u32, Issued>,
}

impl Found {
    /// Returns the time of its first entry.
    fn at(&self) -> i64 {
        self.issued.values().map(|i| i.at).min().unwrap_or(i64::MAX)
    }

    /// Returns whether the other one can be its cause.
    fn follows(&self, other: &Self) -> bool {
        if self.awaited.is_empty() {
            let delayed = self.issued.iter().filter(|(_, own)| !own.is_started);
            let mut before = delayed.filter_map(|(r, own)| Some((own, other.issued.get(r)?)));
            return before.any(|(own, other)| other.waits && other.at < own.at);
        }
        let mut entries = self.awaited.iter().filter_map(|r| other.issued.get(r));
        entries.any(|entry| entry.waits)
    }

    /// Returns whether it has no cause of its own: all ranks issued it, but none runs it.
    fn is_unexplained(&self) -> bool {
        matches!(self.divergence, Divergence::Incomplete { .. })
            && !self.issued.values().any(|i| i.is_started)
    }

    /// Returns whether this one is known to be the earlier one: a rank issued its entry first, or
    /// both await a rank, and the others issued fewer entries before. Ranks of such groups run the
    /// same program.
    fn precedes(&self, other: &Self) -> bool {
        let both = self.issued.iter();
        let mut both = both.filter_map(|(r, own)| Some((own.at, other.issued.get(r)?.at)));
        if let Some((own, other)) = both.next() {
            return own < other;
        }
        let first = |found: &Self| found.issued.values().map(|i| i.id).min();
        !self.awaited.is_disjoint(&other.awaited) && first(self) < first(other)
    }
}

/// Sorts divergences: the cause first, then by time.
pub(super) fn sorted(mut all: Vec<Found>) -> Vec<Divergence> {
    all.sort_by_key(Found::at);
    if let Some(cause) = cause(&all) {
        all[..=cause].rotate_right(1);
    }
    all.into_iter().map(|f| f.divergence).collect()
}

/// Returns the position of the cause. Divergences that follow from each other, as when two ranks
/// wait for each other, are one cause.
fn cause(all: &[Found]) -> Option<usize> {
    let follows: Vec<Vec<usize>> = all
        .iter()
        .map(|own| {
            let others = all.iter().enumerate();
            let causes = others.filter(|(_, o)| !std::ptr::eq(own, *o) && own.follows(o));
            causes.map(|(i, _)| i).collect()
        })
        .collect();
    let reached: Vec<BTreeSet<usize>> = (0..all.len()).map(|i| reach(i, &follows)).collect();
    let is_last = |i: &usize| reached[*i].iter().all(|j| reached[*j].contains(i));
    let last: Vec<usize> = (0..all.len()).filter(is_last).collect();
    let earlier = |i: usize| {
        let others = last.iter().filter(|j| **j != i);
        others.filter(|j| all[**j].precedes(&all[i])).count()
    };
    last.iter()
        .copied()
        .min_by_key(|&i| (all[i].is_unexplained(), earlier(i), i))
}

/// Returns what a divergence follows from, directly or not.
fn reach(from: usize, follows: &[Vec<usize>]) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut open = follows[from].clone();
    while let Some(next) = open.pop() {
        if reached.insert(next) {
            open.extend(&follows[next]);
        }
    }
    reached
}
