//! Maps lanes to columns of the screen.
//!
//! A single pass visits the visible spans. The timeline keeps the result until the window or the
//! width changes, so the cost of drawing depends on the number of columns, not of spans.

use super::{Gap, Lane};
use shardlab_plan::record::Cause;
use shardlab_reports::view::Work;

/// Content of one column of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bin {
    /// Share of the column's time (0 to 1) in which anything ran.
    pub cover: f32,
    /// The kind of work that ran longest.
    pub work: Option<Work>,
    /// The span that ran longest.
    pub span: u32,
    /// Share of that span.
    longest: f32,
    /// Whether something ran at the column's left edge.
    pub left: bool,
    /// Whether something ran at its right edge.
    pub right: bool,
    /// Whether something on the critical path ran.
    pub critical: bool,
}

/// A part of the step, in picoseconds; never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Start.
    pub from: u64,
    /// End.
    pub to: u64,
}

impl Window {
    /// Returns the length, picoseconds.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.to.saturating_sub(self.from).max(1)
    }

    /// Returns the column of a time, out of `columns`. Times outside the window map to positions
    /// beyond the edges.
    #[must_use]
    pub fn column(&self, time: u64, columns: u16) -> f64 {
        (time as f64 - self.from as f64) / self.length() as f64 * f64::from(columns)
    }

    /// Returns the time at the left edge of a column.
    #[must_use]
    pub fn time(&self, column: u16, columns: u16) -> u64 {
        let share = f64::from(column) / f64::from(columns.max(1));
        self.from + (share * self.length() as f64) as u64
    }
}

/// Returns the columns of a lane.
#[must_use]
pub fn bins(lane: &Lane, critical: &[bool], window: Window, columns: u16) -> Vec<Bin> {
    let mut bins = vec![Bin::default(); usize::from(columns)];
    // Time of each kind of work in the current column. Spans come in order, so only one column is
    // needed at a time.
    let mut kinds = [0f32; Work::ALL.len()];
    let mut at = usize::MAX;
    for item in lane.within(window.from, window.to) {
        let start = window.column(item.start.max(window.from), columns);
        let end = window.column(item.end.min(window.to), columns);
        let kind = Work::ALL.iter().position(|w| *w == item.work).unwrap_or(0);
        let on_path = critical.get(item.span as usize).copied().unwrap_or(false);
        let last = (end.ceil() as usize).min(bins.len());
        for column in (start as usize)..last.max(start as usize + 1).min(bins.len()) {
            if column != at {
                at = column;
                kinds = [0.0; Work::ALL.len()];
            }
            let (left, right) = (column as f64, column as f64 + 1.0);
            let share = (end.min(right) - start.max(left)).max(0.0) as f32;
            let bin = &mut bins[column];
            kinds[kind] += share;
            bin.cover = (bin.cover + share).min(1.0);
            if bin.work.is_none() || share > bin.longest {
                bin.longest = share;
                bin.span = item.span;
            }
            let best = bin.work.map_or(0.0, |w| {
                kinds[Work::ALL.iter().position(|x| *x == w).unwrap_or(0)]
            });
            if bin.work.is_none() || kinds[kind] > best {
                bin.work = Some(item.work);
            }
            const EDGE: f64 = 1e-6;
            bin.left |= start <= left + EDGE;
            bin.right |= end >= right - EDGE;
            bin.critical |= on_path;
        }
    }
    bins
}

/// Returns, for each column, the cause with the most exposed time and its share.
#[must_use]
pub(crate) fn gap_bins(gaps: &[Gap], window: Window, columns: u16) -> Vec<Option<(Cause, f32)>> {
    let mut bins: Vec<Option<(Cause, f32)>> = vec![None; usize::from(columns)];
    let first = gaps.partition_point(|g| g.end <= window.from);
    for gap in gaps[first..].iter().take_while(|g| g.start < window.to) {
        let start = window.column(gap.start.max(window.from), columns);
        let end = window.column(gap.end.min(window.to), columns);
        let last = (end.ceil() as usize).min(bins.len());
        for (column, bin) in bins.iter_mut().enumerate().take(last).skip(start as usize) {
            let (left, right) = (column as f64, column as f64 + 1.0);
            let share = (end.min(right) - start.max(left)).max(0.0) as f32;
            *bin = match *bin {
                Some((cause, other)) if cause == gap.cause => Some((cause, other + share)),
                Some(other) if other.1 >= share => Some(other),
                _ => Some((gap.cause, share)),
            };
        }
    }
    bins
}

#[cfg(test)]
mod tests {
    use super::super::Item;
    use super::*;
    use shardlab_plan::ir::StreamId;

    fn lane(items: &[(u64, u64, Work)]) -> Lane {
        Lane {
            stream: StreamId(0),
            name: "compute".into(),
            items: items
                .iter()
                .enumerate()
                .map(|(i, &(start, end, work))| Item {
                    start,
                    end,
                    span: i as u32,
                    work,
                })
                .collect(),
        }
    }

    #[test]
    fn columns_hold_shares_kinds_and_edges() {
        let lane = lane(&[
            (0, 15, Work::Gemm),
            (15, 18, Work::Copy),
            (35, 40, Work::Attention),
        ]);
        let all = bins(&lane, &[true, false, false], Window { from: 0, to: 40 }, 4);
        let covers: Vec<f32> = all.iter().map(|b| b.cover).collect();
        assert_eq!(covers, [1.0, 0.8, 0.0, 0.5]);
        assert_eq!(
            all.iter().map(|b| b.work).collect::<Vec<_>>(),
            [
                Some(Work::Gemm),
                Some(Work::Gemm),
                None,
                Some(Work::Attention)
            ]
        );
        assert!(all[0].critical && all[1].critical && !all[3].critical);
        assert!(all[1].left && !all[1].right && !all[3].left && all[3].right);
    }

    /// The sum over all columns is the visible busy time, at every zoom level.
    #[test]
    fn no_time_is_lost_or_doubled() {
        let items: Vec<(u64, u64, Work)> = (0..500u64)
            .map(|i| {
                (
                    i * 20,
                    i * 20 + 1 + (i * 7) % 19,
                    Work::ALL[(i % 9) as usize],
                )
            })
            .collect();
        let lane = lane(&items);
        for (from, to, columns) in [
            (0, 10_000, 80u16),
            (0, 10_000, 7),
            (1234, 1300, 140),
            (33, 34, 10),
        ] {
            let window = Window { from, to };
            let all = bins(&lane, &[], window, columns);
            let shown: f64 = all.iter().map(|b| f64::from(b.cover)).sum::<f64>()
                * (to - from) as f64
                / f64::from(columns);
            let busy: u64 = items
                .iter()
                .map(|i| i.1.min(to).saturating_sub(i.0.max(from)))
                .sum();
            assert!(
                (shown - busy as f64).abs() < 1e-3 * busy as f64 + 1e-6,
                "{window:?}: {shown} {busy}"
            );
        }
    }

    #[test]
    fn gaps_show_the_cause_that_takes_most() {
        let gap = |start, end, cause| Gap {
            start,
            end,
            cause,
            awaited: Vec::new(),
        };
        let gaps = [
            gap(0, 4, Cause::Host),
            gap(5, 11, Cause::Wire),
            gap(30, 31, Cause::Tail),
        ];
        let all = gap_bins(&gaps, Window { from: 0, to: 40 }, 4);
        let causes: Vec<Option<Cause>> = all.iter().map(|b| b.map(|(c, _)| c)).collect();
        assert_eq!(
            causes,
            [
                Some(Cause::Wire),
                Some(Cause::Wire),
                None,
                Some(Cause::Tail)
            ]
        );
    }
}
