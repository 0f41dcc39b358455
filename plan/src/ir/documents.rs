//! Packed sequences: several documents, one after another.

use serde::Serialize;
use std::ops::Range;

/// Maximum number of lengths in a pattern of documents.
pub const MAX_DOCUMENTS: usize = 16;

/// Lengths of the documents of a sequence, in order. They repeat until the sequence is full, and
/// the last document is truncated there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Documents {
    /// The lengths, then zeros.
    lengths: [u32; MAX_DOCUMENTS],
}

impl Documents {
    /// A sequence is one document.
    pub const NONE: Self = Self::of(&[]);

    /// Creates a pattern of a few lengths.
    pub(crate) const fn of(given: &[u32]) -> Self {
        let mut lengths = [0; MAX_DOCUMENTS];
        let mut i = 0;
        while i < given.len() {
            lengths[i] = given[i];
            i += 1;
        }
        Self { lengths }
    }

    /// Creates a pattern; `None` if there are more than [`MAX_DOCUMENTS`] lengths, or if one is 0
    /// or does not fit in 32 bits.
    #[must_use]
    pub fn new(given: &[u64]) -> Option<Self> {
        let mut lengths = [0; MAX_DOCUMENTS];
        for (length, &n) in lengths.iter_mut().zip(given) {
            *length = u32::try_from(n).ok().filter(|&n| n > 0)?;
        }
        (given.len() <= MAX_DOCUMENTS).then_some(Self { lengths })
    }

    /// Returns the lengths of one repetition. There are none if a sequence is a single document.
    pub fn lengths(&self) -> impl Iterator<Item = u64> {
        let known = self.lengths.iter().take_while(|&&n| n > 0);
        known.map(|&n| u64::from(n))
    }

    /// Returns whether a sequence is one document.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.lengths[0] == 0
    }

    /// Returns the documents of sequences with `seq` positions: [`Documents::NONE`] if the first
    /// one fills them.
    #[must_use]
    pub(crate) fn in_sequence(self, seq: u64) -> Self {
        match u64::from(self.lengths[0]) >= seq {
            true => Self::NONE,
            false => self,
        }
    }

    /// Returns the parts of documents that are cut after every `every` of their positions; `None`
    /// if no pattern of [`MAX_DOCUMENTS`] lengths describes them.
    #[must_use]
    pub fn cut(self, every: u64) -> Option<Self> {
        if self.is_none() {
            return Self::new(&[every]);
        }
        let parts = |length: u64| {
            let starts = (0..length).step_by(usize::try_from(every).unwrap_or(usize::MAX));
            starts.map(move |start| every.min(length - start))
        };
        let all: Vec<u64> = self.lengths().flat_map(parts).collect();
        let repeats = |&n: &usize| {
            let again = all.iter().zip(&all[n..]).all(|(a, b)| a == b);
            again && all.len().is_multiple_of(n)
        };
        let period = (1..=MAX_DOCUMENTS.min(all.len())).find(repeats)?;
        Self::new(&all[..period])
    }

    /// Returns the positions of each document in a sequence of `seq` positions.
    pub fn spans(self, seq: u64) -> impl Iterator<Item = Range<u64>> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let document = (start < seq).then(|| self.span(start, seq))?;
            start = document.end;
            Some(document)
        })
    }

    /// Returns the positions of the document that contains `position`, in a sequence of `seq`
    /// positions.
    #[must_use]
    pub fn span(&self, position: u64, seq: u64) -> Range<u64> {
        let period: u64 = self.lengths().sum();
        if period == 0 {
            return 0..seq;
        }
        let mut start = position / period * period;
        for length in self.lengths() {
            if position < start + length {
                return start..(start + length).min(seq);
            }
            start += length;
        }
        unreachable!("a position is in the period that starts before it")
    }

    /// Returns the length of the longest document in a sequence of `seq` positions.
    #[must_use]
    pub fn longest(self, seq: u64) -> u64 {
        let lengths = self.spans(seq).map(|d| d.end - d.start);
        lengths.max().unwrap_or(seq)
    }
}

/// Writes the lengths.
impl Serialize for Documents {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.lengths().collect::<Vec<_>>().serialize(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_repeat_until_the_sequence_is_full() {
        let spans = |lengths: &[u64], seq| {
            let documents = Documents::new(lengths).unwrap();
            let ends = documents.spans(seq).map(|d| (d.start, d.end));
            ends.collect::<Vec<_>>()
        };
        assert_eq!(spans(&[3, 2], 9), [(0, 3), (3, 5), (5, 8), (8, 9)]);
        assert_eq!(spans(&[4], 8), [(0, 4), (4, 8)]);
        assert_eq!(spans(&[], 8), [(0, 8)]);
        assert_eq!(spans(&[9, 1], 8), [(0, 8)]);
    }

    #[test]
    fn the_document_of_a_position() {
        let documents = Documents::new(&[3, 2]).unwrap();
        for span in documents.spans(24) {
            for position in span.clone() {
                assert_eq!(documents.span(position, 24), span);
            }
        }
        assert_eq!(documents.longest(24), 3);
        assert_eq!(Documents::new(&[4, 9]).unwrap().longest(6), 4);
        assert_eq!(Documents::NONE.longest(6), 6);
    }

    #[test]
    fn parts_of_documents_start_with_them() {
        let cut = |lengths: &[u64], every| {
            let documents = Documents::new(lengths).unwrap();
            Some(documents.cut(every)?.lengths().collect::<Vec<_>>())
        };
        assert_eq!(cut(&[], 4), Some(vec![4]));
        assert_eq!(cut(&[3, 2], 4), Some(vec![3, 2]));
        assert_eq!(cut(&[10, 4, 5], 4), Some(vec![4, 4, 2, 4, 4, 1]));
        assert_eq!(cut(&[64], 4), Some(vec![4]));
        assert_eq!(cut(&[68, 64], 4), Some(vec![4]));
        assert_eq!(cut(&[65], 4), None);
        let whole = Documents::new(&[10, 4, 5]).unwrap();
        let both = whole.cut(4).unwrap();
        let part = |i| {
            let document = whole.span(i, 61);
            (document.start, (i - document.start) / 4)
        };
        for (i, j) in (0..61).flat_map(|i| (0..61).map(move |j| (i, j))) {
            let same = both.span(i, 61) == both.span(j, 61);
            assert_eq!(same, part(i) == part(j), "{i} {j}");
        }
    }

    #[test]
    fn what_is_no_pattern() {
        assert_eq!(Documents::new(&[0]), None);
        assert_eq!(Documents::new(&[1; 17]), None);
        assert_eq!(Documents::new(&[1 << 32]), None);
        assert_eq!(Documents::new(&[]), Some(Documents::NONE));
        let three = Documents::new(&[3]).unwrap();
        assert_eq!(three.in_sequence(3), Documents::NONE);
        assert_eq!(three.in_sequence(4), three);
    }
}
