//! Running median of a series.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Keeps the median of the values so far: each half in a heap with its inner end on top.
#[derive(Debug)]
pub(super) struct Median<T> {
    low: BinaryHeap<T>,
    high: BinaryHeap<Reverse<T>>,
}

impl<T: Ord> Default for Median<T> {
    fn default() -> Self {
        Self {
            low: BinaryHeap::new(),
            high: BinaryHeap::new(),
        }
    }
}

impl<T: Ord + Copy> Median<T> {
    /// Adds a value.
    pub(super) fn add(&mut self, value: T) {
        self.low.push(value);
        // The largest value of the low half moves to the high half, which must not become the
        // larger one.
        self.high.extend(self.low.pop().map(Reverse));
        if self.high.len() > self.low.len() {
            self.low.extend(self.high.pop().map(|Reverse(value)| value));
        }
    }

    /// Returns the median, or the lower of the two middle values; `None` if there are no values.
    pub(super) fn get(&self) -> Option<T> {
        self.low.peek().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_that_of_the_sorted_series(values in prop::collection::vec(0u8..20, 0..50)) {
            let mut median = Median::default();
            prop_assert_eq!(median.get(), None);
            for (i, value) in values.iter().enumerate() {
                median.add(*value);
                let mut sorted = values[..=i].to_vec();
                sorted.sort_unstable();
                prop_assert_eq!(median.get(), Some(sorted[i / 2]));
            }
        }
    }
}
