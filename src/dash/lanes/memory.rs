//! The columns of the memory curve.

use super::bins::Window;
use shardlab_reports::view::MemoryCurve;
pub use shardlab_reports::view::{Family, Stack};

/// Content of a column: its largest sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Index of the sample.
    pub sample: usize,
    /// Allocated bytes.
    pub allocated: u64,
    /// Maximum of reserved bytes.
    pub reserved: u64,
}

/// Returns the columns of a window; `None` before the first sample.
#[must_use]
pub fn columns(curve: &MemoryCurve, window: Window, columns: u16) -> Vec<Option<Column>> {
    let mut out = Vec::with_capacity(usize::from(columns));
    let mut at = curve.samples.partition_point(|s| s.time < window.from);
    for column in 0..columns {
        let end = window.time(column + 1, columns);
        // Memory that was allocated before the column starts also counts.
        let mut best = at.checked_sub(1);
        let mut reserved = best.map_or(0, |b| curve.samples[b].reserved);
        while let Some(sample) = curve.samples.get(at).filter(|s| s.time < end) {
            if best.is_none_or(|b| sample.allocated > curve.samples[b].allocated) {
                best = Some(at);
            }
            reserved = reserved.max(sample.reserved);
            at += 1;
        }
        out.push(best.map(|sample| Column {
            sample,
            allocated: curve.samples[sample].allocated,
            reserved,
        }));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::testing::view;
    use shardlab_reports::view::Sample;

    #[test]
    fn stacks_sum_to_what_is_allocated() {
        for name in [
            "llama3-8b-4xh200",
            "llama-tiny",
            "small-megatron",
            "small-fsdp2",
        ] {
            let view = view(name, &[]);
            let curve = MemoryCurve::new(&view);
            assert_eq!(curve.stacks.len(), curve.samples.len(), "{name}");
            for (sample, stack) in curve.samples.iter().zip(&curve.stacks) {
                assert_eq!(stack.iter().sum::<u64>(), sample.allocated, "{name}");
            }
            let peak = curve.samples[curve.peak.unwrap()].allocated;
            assert_eq!(peak, view.run.memory.peak_allocated.0, "{name}");
        }
    }

    #[test]
    fn a_column_shows_its_largest_sample() {
        let sample = |time, allocated| Sample {
            time,
            allocated,
            reserved: 2 * allocated,
        };
        let curve = MemoryCurve {
            samples: vec![sample(5, 1), sample(11, 7), sample(12, 3), sample(35, 4)],
            ..MemoryCurve::default()
        };
        let shown = columns(&curve, Window { from: 0, to: 40 }, 4);
        let allocated: Vec<Option<u64>> = shown.iter().map(|c| c.map(|c| c.allocated)).collect();
        assert_eq!(allocated, [Some(1), Some(7), Some(3), Some(4)]);
        assert_eq!(shown[2].map(|c| c.reserved), Some(6));
        let before = columns(&curve, Window { from: 0, to: 4 }, 2);
        assert_eq!(before, [None, None]);
    }
}
