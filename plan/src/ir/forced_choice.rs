//! Choices of a router that depend on the number of a row instead of its scores.

use crate::divisors::gcd;
use crate::random::SplitMix64;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// What chooses `k` different columns for each row. Choices depend neither on scores nor on the
/// device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ForcedChoice {
    /// Columns are drawn.
    Drawn(DrawnColumns),
    /// Row `r` takes the columns `r * k`, …, `r * k + k - 1`, modulo the number of columns.
    RoundRobin,
}

/// Returns the columns of a row in round-robin order: `k` of `columns`.
pub fn round_robin(row: u64, k: u64, columns: u64) -> impl Iterator<Item = u64> {
    let first = (row % columns) * k;
    (first..first + k).map(move |n| n % columns)
}

/// The rows of a group are a multiple of this number. Thread blocks on GPUs have this many rows, so
/// they never have rows of two groups.
const ROWS: u64 = 4;

/// Draws `k` different columns for each row, such that every column gets its share of the rows.
///
/// This is systematic sampling in random order (Hartley and Rao, "Sampling with unequal
/// probabilities and without replacement", 1962). The columns are placed one after another, in an
/// order drawn per group of rows, each with the length of its share. A row takes the columns at its
/// start and at whole units after it. These are exactly `k` different columns, because shares add
/// up to `k` units and none is longer than one unit. The starts of a group's rows are equally
/// spaced, so a group takes each column as often as its share says, rounded up or down. All
/// arithmetic is in integers, so every device makes the same choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct DrawnColumns {
    /// Share of each column in a row. The shares add up to `k` units.
    pub shares: &'static [u32],
    /// Length for which a row has one point.
    pub unit: u32,
    /// Number of rows that share an order.
    pub group: u32,
    /// Number of adjacent rows that take equally popular columns equally often: the smallest number
    /// for which that is possible. It divides `group`.
    pub period: u32,
    /// Seed of orders and starts.
    pub seed: u64,
}

impl DrawnColumns {
    /// Creates choices of `k` columns with these relative popularities. A column is chosen at most
    /// once per row, so popularity beyond that is divided among the other columns.
    ///
    /// # Panics
    /// Panics if there are fewer than `k` columns.
    #[must_use]
    pub fn new(popularity: &[f64], k: u64, seed: u64) -> Self {
        let columns = popularity.len() as u64;
        assert!((1..=columns).contains(&k), "{k} of {columns} columns");
        let period = columns / gcd(columns, k);
        let group = period / gcd(period, ROWS) * ROWS;
        // Shares of equally popular columns are multiples of the distance between two starts, and
        // points and ends fit in 32 bits.
        let bits = (u64::from(u32::MAX) / (group * (k + 1))).ilog2();
        let unit = group << bits;
        let shares = shares(popularity, k, unit);
        Self {
            shares: interned(shares),
            unit: unit as u32,
            group: group as u32,
            period: period as u32,
            seed,
        }
    }

    /// Returns the distance between two starts.
    #[must_use]
    pub const fn step(&self) -> u32 {
        self.unit / self.group
    }

    /// Returns the positions of the columns for a group of rows, on the rank with this index among
    /// those with separate rows.
    #[must_use]
    pub fn columns(&self, rank: u32, group: u64) -> ForcedColumns {
        let own = SplitMix64(self.seed ^ u64::from(rank)).draw();
        let own = SplitMix64(own ^ group).draw();
        let mut random = (0..).map(|n| SplitMix64(own.wrapping_add(n)).draw());
        let start = random.next().map_or(0, |r| r >> 32) as u32 % self.step();
        let mut order: Vec<(u32, usize)> = random
            .map(|r| (r >> 32) as u32)
            .zip(0..self.shares.len())
            .collect();
        order.sort_unstable();
        let mut before = vec![0; self.shares.len()];
        let mut end = 0;
        for (_, column) in order {
            before[column] = end;
            end += self.shares[column];
        }
        ForcedColumns {
            of: *self,
            before,
            start,
        }
    }
}

/// Columns for a group of rows, in their order.
#[derive(Clone, Debug)]
pub struct ForcedColumns {
    of: DrawnColumns,
    /// Where each column starts.
    before: Vec<u32>,
    /// The smallest start of a row.
    start: u32,
}

impl ForcedColumns {
    /// Returns the columns of a row of the group, in ascending order.
    pub fn of_row(&self, row: u32) -> impl Iterator<Item = usize> {
        let DrawnColumns {
            unit,
            group,
            period,
            ..
        } = self.of;
        // The starts of adjacent rows have the same spacing as those of a period.
        let place = row % period * (group / period) + row / period;
        let start = self.start + place * self.of.step();
        // Points below an end.
        let points = move |end: u32| (end + (unit - 1 - start)) / unit;
        let ends = self.before.iter().zip(self.of.shares).enumerate();
        ends.filter(move |(_, (before, share))| points(**before) < points(**before + **share))
            .map(|(column, _)| column)
    }
}

/// Returns shares that add up to `k` units, none of which is longer than one unit.
fn shares(popularity: &[f64], k: u64, unit: u64) -> Vec<u32> {
    let mut whole = vec![false; popularity.len()];
    let mut of = vec![0.0; popularity.len()];
    // Each round finds a column that every row takes, or none.
    loop {
        let left = k - whole.iter().filter(|w| **w).count() as u64;
        let others = || (0..popularity.len()).filter(|i| !whole[*i]);
        let all: f64 = others().map(|i| popularity[i]).sum();
        let number = others().count() as f64;
        for i in others() {
            let part = match all > 0.0 {
                true => popularity[i] / all,
                false => 1.0 / number,
            };
            of[i] = left as f64 * part;
        }
        let more: Vec<usize> = others().filter(|&i| of[i] > 1.0 - 1e-9).collect();
        if more.is_empty() {
            return rounded(&of, &whole, left * unit, unit);
        }
        more.into_iter().for_each(|i| whole[i] = true);
    }
}

/// Returns one unit for each whole column, and the shares `of` the others. The ends are rounded so
/// that the shares add up to `all`.
fn rounded(of: &[f64], whole: &[bool], all: u64, unit: u64) -> Vec<u32> {
    let last = whole.iter().rposition(|w| !w);
    let (mut sum, mut before) = (0.0, 0);
    let each = of.iter().zip(whole).enumerate();
    each.map(|(i, (share, whole))| {
        if *whole {
            return unit as u32;
        }
        sum += share;
        let end = match Some(i) == last {
            true => all,
            false => ((sum * unit as f64).round() as u64).min(all),
        };
        let length = end - before;
        before = end;
        length as u32
    })
    .collect()
}

/// Returns a copy that is never freed. Plans of the same scenario share the copy.
fn interned(shares: Vec<u32>) -> &'static [u32] {
    static KNOWN: Mutex<BTreeSet<&'static [u32]>> = Mutex::new(BTreeSet::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(old) = known.get(&shares[..]) {
        return old;
    }
    let new: &'static [u32] = shares.leak();
    known.insert(new);
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of columns and choices in mixtures of experts: small ones, Mixtral, Qwen, DeepSeek,
    /// odd ones.
    const SIZES: [(usize, u64); 9] = [
        (2, 1),
        (8, 2),
        (8, 8),
        (60, 4),
        (64, 6),
        (128, 8),
        (160, 6),
        (256, 8),
        (13, 5),
    ];

    /// Popularities that decrease by a constant factor.
    fn falling(columns: usize, ratio: f64) -> Vec<f64> {
        (0..columns).map(|i| ratio.powi(i as i32)).collect()
    }

    /// Choices for the first `rows` rows of a rank.
    fn rows(of: &DrawnColumns, rank: u32, rows: u32) -> Vec<Vec<usize>> {
        let group = |row: u32| of.columns(rank, u64::from(row / of.group));
        (0..rows)
            .map(|row| group(row).of_row(row % of.group).collect())
            .collect()
    }

    fn counts(chosen: &[Vec<usize>], columns: usize) -> Vec<u32> {
        let mut counts = vec![0; columns];
        chosen.iter().flatten().for_each(|c| counts[*c] += 1);
        counts
    }

    #[test]
    fn a_row_has_different_columns_in_ascending_order() {
        for (columns, k) in SIZES {
            for popularity in [falling(columns, 1.0), falling(columns, 0.9)] {
                let of = DrawnColumns::new(&popularity, k, 7);
                let sum: u64 = of.shares.iter().map(|s| u64::from(*s)).sum();
                assert_eq!(sum, k * u64::from(of.unit), "{columns} {k}");
                assert!(of.shares.iter().all(|s| *s <= of.unit));
                assert_eq!(of.group % of.period, 0);
                for chosen in rows(&of, 1, 200) {
                    assert_eq!(chosen.len() as u64, k, "{columns} {k}");
                    assert!(chosen.windows(2).all(|w| w[0] < w[1]));
                    assert!(chosen.iter().all(|c| *c < columns));
                }
            }
        }
    }

    /// Walks along the columns of a group and compares the columns at the points of a row.
    #[test]
    fn columns_lie_at_the_points_of_a_row() {
        let of = DrawnColumns::new(&falling(12, 0.8), 3, 5);
        let own = of.columns(2, 4);
        let mut order: Vec<usize> = (0..12).collect();
        order.sort_by_key(|c| own.before[*c]);
        let mut starts = BTreeSet::new();
        for row in 0..of.group {
            let place = (row % of.period) * (of.group / of.period) + row / of.period;
            let start = own.start + place * (of.unit / of.group);
            starts.insert(place);
            let mut found: Vec<usize> = (0..3)
                .map(|n| {
                    let mut left = start + n * of.unit;
                    let at = order.iter().find(|c| {
                        let share = of.shares[**c];
                        let here = left < share;
                        left = left.saturating_sub(share);
                        here
                    });
                    *at.unwrap()
                })
                .collect();
            found.sort_unstable();
            assert_eq!(own.of_row(row).collect::<Vec<_>>(), found, "{row}");
        }
        assert_eq!(starts, (0..of.group).collect());
    }

    #[test]
    fn equally_popular_columns_are_chosen_equally_often() {
        for (columns, k) in SIZES {
            let of = DrawnColumns::new(&vec![3.0; columns], k, 1);
            // How often a period takes each column: once, if `k` divides the number of columns.
            let most_apart = k as u32 * of.period / columns as u32;
            for n in [1, 5, of.period, of.group, 3 * of.group + of.period, 333] {
                let counts = counts(&rows(&of, 0, n), columns);
                let [least, most] = [counts.iter().min(), counts.iter().max()];
                let differ = most.unwrap() - least.unwrap();
                let part = u32::from(n % of.period != 0);
                assert!(differ <= part * most_apart, "{columns} {k} {n}: {counts:?}");
            }
        }
    }

    #[test]
    fn a_group_takes_each_column_as_often_as_its_share_says() {
        for (columns, k) in SIZES {
            let of = DrawnColumns::new(&falling(columns, 0.93), k, 3);
            let n = 40 * of.group;
            let chosen = rows(&of, 0, n);
            for group in chosen.chunks(of.group as usize) {
                for (count, share) in counts(group, columns).into_iter().zip(of.shares) {
                    let wanted = f64::from(*share) / f64::from(of.step());
                    let differ = (f64::from(count) - wanted).abs();
                    assert!(differ < 1.0, "{columns} {k}: {count} instead of {wanted}");
                }
            }
            // Rounding errors of groups are independent: five standard deviations of 40 of them.
            for (count, share) in counts(&chosen, columns).into_iter().zip(of.shares) {
                let wanted = f64::from(*share) / f64::from(of.unit) * f64::from(n);
                let differ = (f64::from(count) - wanted).abs();
                assert!(differ < 5.0 * (40.0f64 / 4.0).sqrt(), "{columns} {k}");
            }
        }
    }

    #[test]
    fn what_no_row_can_take_goes_to_others() {
        let parts = |popularity: &[f64], k| {
            let of = DrawnColumns::new(popularity, k, 0);
            let part = |s: &u32| f64::from(*s) / f64::from(of.unit);
            of.shares.iter().map(part).collect::<Vec<_>>()
        };
        let close = |a: &[f64], b: &[f64]| {
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6), "{a:?}");
        };
        close(&parts(&[1.0, 2.0, 1.0], 1), &[0.25, 0.5, 0.25]);
        // 8 of 10 for two choices is more than one per row.
        close(&parts(&[1.0, 8.0, 1.0], 2), &[0.5, 1.0, 0.5]);
        // With the rest, the second column is also chosen by each row.
        close(&parts(&[50.0, 9.0, 1.0, 1.0], 3), &[1.0, 1.0, 0.5, 0.5]);
        close(&parts(&[7.0, 0.0, 0.0], 2), &[1.0, 0.5, 0.5]);
        close(&parts(&[0.0; 4], 2), &[0.5; 4]);
        close(&parts(&[1.0, 5.0], 2), &[1.0, 1.0]);
    }

    /// Columns are chosen together as often as if each row drew its own: of 128 experts, a row with
    /// eight has one of the 16 of a rank with probability 1 - C(112, 8) / C(128, 8).
    #[test]
    fn columns_of_a_row_are_independent_but_for_their_number() {
        let of = DrawnColumns::new(&[1.0; 128], 8, 9);
        let chosen = rows(&of, 0, 8192);
        let missed: f64 = (0..8)
            .map(|i| f64::from(112 - i) / f64::from(128 - i))
            .product();
        for rank in 0..8 {
            let has = |row: &&Vec<usize>| row.iter().any(|c| c / 16 == rank);
            let share = chosen.iter().filter(has).count() as f64 / 8192.0;
            assert!((share - (1.0 - missed)).abs() < 0.03, "{rank}: {share}");
        }
    }

    /// Routers of torchtitan and NeMo Automodel take `arange(tokens * k).view(tokens, k) % columns`
    /// for benchmarks.
    #[test]
    fn rows_take_columns_in_round_robin_order() {
        let rows = |k, columns| -> Vec<Vec<u64>> {
            (0..4)
                .map(|row| round_robin(row, k, columns).collect())
                .collect()
        };
        assert_eq!(rows(2, 6), [[0, 1], [2, 3], [4, 5], [0, 1]]);
        assert_eq!(rows(3, 5), [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]);
    }

    #[test]
    fn ranks_and_seeds_choose_differently() {
        let of = |seed, rank| rows(&DrawnColumns::new(&[1.0; 64], 6, seed), rank, 64);
        assert_eq!(of(1, 0), of(1, 0));
        assert_ne!(of(1, 0), of(1, 1));
        assert_ne!(of(1, 0), of(2, 0));
        let [a, b] = [0, 1].map(|seed| DrawnColumns::new(&[1.0; 64], 6, seed));
        assert!(std::ptr::eq(a.shares, b.shares));
    }
}
