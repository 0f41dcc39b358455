//! Offsets between the clocks of ranks.
//!
//! Ranks on several hosts have clocks of their own. A collective that exchanges data between all
//! its ranks ends at nearly the same time on each of them: no rank can end it before the last one
//! has joined. The median over many collectives of the difference between two ranks' ends is
//! therefore the offset of their clocks.

use super::pairs::{CollectiveSpan, counted};
use crate::attribute::Work;

/// Minimum number of collectives that determine an offset. The ends of single collectives differ
/// by up to 80 us in traces of two GPUs of one host, the medians by 5 us.
const MATCHES: usize = 5;
/// Minimum offset that is reported, nanoseconds: the delay of a rank that counts as a wait for it.
const REPORTED: i64 = 20_000;

/// The clock of a rank relative to the clock of the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The clock is ahead by these nanoseconds, according to this number of collectives.
    Ahead(i64, usize),
    /// Only these collectives are in both traces, which are too few.
    Unknown(usize),
}

impl Clock {
    /// Returns what has to be subtracted from the rank's times, nanoseconds.
    pub(crate) const fn offset(self) -> i64 {
        match self {
            Self::Ahead(ns, _) => ns,
            Self::Unknown(_) => 0,
        }
    }

    /// Returns a note for the reader; `None` if there is nothing to say.
    pub(crate) fn note(self, rank: u32, first: u32) -> Option<String> {
        match self {
            Self::Ahead(ns, n) if ns.abs() >= REPORTED => {
                let way = if ns > 0 { "ahead of" } else { "behind" };
                Some(format!(
                    "rank {rank}: its clock is {:.2} ms {way} rank {first}'s, corrected by the ends of {n} collectives",
                    ns.abs() as f64 / 1e6
                ))
            }
            // Ranks without a common group share no collectives, and nothing compares them.
            Self::Ahead(..) | Self::Unknown(0) => None,
            Self::Unknown(n) => Some(format!(
                "rank {rank}: its clock may differ from rank {first}'s: only {n} of their collectives match, and {MATCHES} are needed to correct it"
            )),
        }
    }
}

/// Returns the clock of each rank other than the first one.
#[must_use]
pub(crate) fn clocks(ranks: &[&[CollectiveSpan]]) -> Vec<Clock> {
    let Some((first, others)) = ranks.split_first() else {
        return Vec::new();
    };
    let of = |rank: &&[CollectiveSpan]| {
        let pairs = counted(first, rank).into_iter();
        let both = pairs.map(|(own, other)| (&first[own], &rank[other]));
        // In others, such as broadcasts, a rank may end before another one joins.
        let both = both.filter(|(own, _)| {
            matches!(
                own.key.0,
                Work::AllGather | Work::ReduceScatter | Work::AllReduce
            )
        });
        let both = both.map(|(own, other)| other.span.1 - own.span.1);
        let mut apart: Vec<i64> = both.collect();
        apart.sort_unstable();
        if apart.len() < MATCHES {
            Clock::Unknown(apart.len())
        } else {
            Clock::Ahead(apart[(apart.len() - 1) / 2], apart.len())
        }
    };
    others.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::pure_times;
    use super::*;
    use proptest::prelude::*;

    fn rank(times: &[(i64, i64)]) -> Vec<CollectiveSpan> {
        let all = times.iter().enumerate();
        all.map(|(i, &span)| CollectiveSpan {
            device: i as u32,
            step: 0,
            key: (Work::AllGather, "0".into(), 8),
            span,
        })
        .collect()
    }

    fn shift(rank: &mut [CollectiveSpan], by: i64) {
        for c in rank {
            c.span = (c.span.0 + by, c.span.1 + by);
        }
    }

    #[test]
    fn the_median_of_ends_is_the_offset() {
        let first = rank(&[(0, 10), (20, 30), (40, 50), (60, 70), (80, 90)]);
        // One of them ends much later, one is only on this rank.
        let mut other = rank(&[(5, 10), (22, 31), (41, 99), (60, 69), (70, 90), (95, 99)]);
        other[5].key.2 = 16;
        shift(&mut other, 3_000_000);
        let [clock] = clocks(&[&first, &other])[..] else {
            panic!("one clock");
        };
        assert_eq!(clock, Clock::Ahead(3_000_000, 5));
        assert_eq!(
            clock.note(1, 0).unwrap(),
            "rank 1: its clock is 3.00 ms ahead of rank 0's, corrected by the ends of 5 collectives"
        );
        let few = clocks(&[&first[..4], &other[..4]])[0];
        assert_eq!((few, few.offset()), (Clock::Unknown(4), 0));
        assert!(few.note(1, 0).unwrap().contains("only 4"));
        assert_eq!(Clock::Unknown(0).note(1, 0), None);
        assert_eq!(Clock::Ahead(-5_200, 50).note(1, 0), None);
    }

    #[test]
    fn ranks_that_do_not_exchange_data_with_each_other_show_no_offset() {
        let mut first = rank(&[(0, 10), (20, 30), (40, 50), (60, 70), (80, 90)]);
        let mut other = first.clone();
        for c in first.iter_mut().chain(&mut other) {
            c.key.0 = Work::OtherCollective;
        }
        assert_eq!(clocks(&[&first, &other]), [Clock::Unknown(0)]);
        let mut elsewhere = rank(&[(0, 10), (20, 30), (40, 50), (60, 70), (80, 90)]);
        for c in &mut elsewhere {
            c.key.1 = "1".into();
        }
        let first = rank(&[(0, 10), (20, 30), (40, 50), (60, 70), (80, 90)]);
        assert_eq!(clocks(&[&first, &elsewhere]), [Clock::Unknown(0)]);
    }

    proptest! {
        #[test]
        fn no_offset_of_a_clock_changes_who_waits_for_whom(
            all in prop::collection::vec((0..1000_i64, 0..1000_i64, 1..50_i64, -9..9_i64), 5..40),
            by in -10_000_000_000..10_000_000_000_i64,
        ) {
            // Each starts at its own time on each rank, and ends when the last one has joined it.
            let mut now = 0;
            let mut spans = (Vec::new(), Vec::new());
            for (a, b, length, noise) in all {
                let end = now + a.max(b) + length;
                spans.0.push((now + a, end));
                spans.1.push((now + b, end + noise));
                now = end + 20;
            }
            let (first, mut other) = (rank(&spans.0), rank(&spans.1));
            let times = |other: &[CollectiveSpan]| {
                let mut other = other.to_vec();
                let offset = clocks(&[&first, &other])[0].offset();
                shift(&mut other, -offset);
                pure_times(&[&first, &other])
            };
            let before = times(&other);
            // The clocks agree up to the noise.
            let unchanged = pure_times(&[&first, &other]);
            for (corrected, plain) in before.late.iter().zip(&unchanged.late) {
                prop_assert!((corrected - plain).abs() <= 9 * first.len() as i64);
            }
            shift(&mut other, by);
            prop_assert_eq!(times(&other), before);
        }
    }
}
