//! Numbers the names of two runs in a common table, so that places in their programs can be
//! compared by number.

use crate::view::RunView;
use std::collections::BTreeMap;

/// Names of two runs. Equal names have equal numbers.
pub(super) struct Common<'a> {
    known: BTreeMap<&'a str, u32>,
    /// Names by number.
    pub(super) names: Vec<&'a str>,
}

impl<'a> Common<'a> {
    pub(super) fn new() -> Self {
        Self {
            known: BTreeMap::new(),
            names: Vec::new(),
        }
    }

    /// Returns the numbers of a list of names.
    pub(super) fn of(&mut self, all: &'a [String]) -> Vec<u32> {
        all.iter()
            .map(|name| {
                *self.known.entry(name).or_insert_with(|| {
                    self.names.push(name);
                    self.names.len() as u32 - 1
                })
            })
            .collect()
    }
}

/// Sums for two runs, by key.
#[derive(Default)]
pub(super) struct Sums<K>(pub(super) BTreeMap<K, [u64; 2]>);

impl<K: Ord> Sums<K> {
    pub(super) fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(super) fn add(&mut self, key: K, side: usize, amount: u64) {
        self.0.entry(key).or_default()[side] += amount;
    }

    /// Returns the sums, largest change first; equal changes are sorted by key.
    pub(super) fn by_change(self) -> Vec<(K, [u64; 2])> {
        let mut all: Vec<(K, [u64; 2])> = self.0.into_iter().collect();
        all.sort_by(|x, y| change(y.1).cmp(&change(x.1)).then_with(|| x.0.cmp(&y.0)));
        all
    }
}

/// Returns the size of a change.
pub(super) fn change(pair: [u64; 2]) -> u64 {
    pair[0].abs_diff(pair[1])
}

/// Returns the numbers of a run's unit names.
pub(super) fn unit_numbers<'a>(common: &mut Common<'a>, run: &'a RunView) -> Vec<u32> {
    common.of(&run.program.units)
}
