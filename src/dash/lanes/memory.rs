//! Memory over the recorded step, and its composition.

use super::bins::Window;
use shardlab_plan::ir::Role;
use shardlab_reports::RunView;

/// Groups of roles that the curve stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Sharded (resident) weights.
    Weights,
    /// Optimizer state.
    Optimizer,
    /// Resident gradients.
    Gradients,
    /// Gathered weights and their buffers.
    Gathered,
    /// Gradients waiting for a reduction.
    Reduction,
    /// Activations and logits.
    Activations,
    /// Everything else.
    Other,
}

impl Family {
    /// All families, from the bottom of the stack to the top.
    pub const ALL: [Self; 7] = [
        Self::Weights,
        Self::Optimizer,
        Self::Gradients,
        Self::Gathered,
        Self::Reduction,
        Self::Activations,
        Self::Other,
    ];

    /// Returns the family of a role.
    #[must_use]
    pub const fn of(role: Role) -> Self {
        match role {
            Role::ModelWeight | Role::MainWeight => Self::Weights,
            Role::OptimizerState => Self::Optimizer,
            Role::MainGrad => Self::Gradients,
            Role::FullWeight | Role::GatherBuffer | Role::GatherInput => Self::Gathered,
            Role::FullGrad | Role::ReduceInput | Role::ReduceOutput => Self::Reduction,
            Role::Activation | Role::Logits | Role::Temporary => Self::Activations,
            Role::Workspace | Role::Input => Self::Other,
        }
    }

    /// Returns the name in legends.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Gathered => "gathered",
            Self::Reduction => "reduction",
            Self::Activations => "activations",
            Self::Other => "other",
        }
    }
}

/// Bytes per family, in the order of [`Family::ALL`].
pub type Stack = [u64; Family::ALL.len()];

/// Memory from one point in time to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Picoseconds since the start of the step.
    pub time: u64,
    /// Allocated bytes.
    pub allocated: u64,
    /// Reserved bytes.
    pub reserved: u64,
}

/// Memory over the recorded step.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    /// Samples, sorted by time.
    pub samples: Vec<Sample>,
    /// Composition of each sample; empty if unknown.
    pub stacks: Vec<Stack>,
    /// Index of the sample with the most allocated bytes.
    pub peak: Option<usize>,
}

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

impl Curve {
    /// Returns the curve of a run.
    ///
    /// The host is ahead of the device: much of a step is allocated before the device starts it.
    /// Such samples are shown one step later, at the place of the next step's samples, because
    /// steady steps are alike. At the start of the step, all of these allocations have been made.
    #[must_use]
    pub fn new(view: &RunView) -> Self {
        let from = view.run.recorded_from.0;
        let length = view.recorded().0.max(1);
        let timeline = &view.run.memory.timeline;
        let began = timeline.partition_point(|s| s.time.0 < from);
        let within_step = |time: u64| match time.checked_sub(from) {
            Some(after) => after,
            None => (length - (from - time) % length) % length,
        };
        let mut order: Vec<(u64, usize)> = timeline
            .iter()
            .enumerate()
            .map(|(i, s)| (within_step(s.time.0), i))
            .collect();
        order.extend(began.checked_sub(1).map(|last| (0, last)));
        order.sort_by_key(|&(time, _)| time);
        let samples: Vec<Sample> = order
            .iter()
            .map(|&(time, i)| Sample {
                time,
                allocated: timeline[i].allocated.0,
                reserved: timeline[i].reserved.0,
            })
            .collect();
        // The first of equal samples.
        let peak = (0..samples.len())
            .rev()
            .max_by_key(|&i| samples[i].allocated);
        let stacks = stacks(view);
        Self {
            // One per sample, or none.
            stacks: order
                .iter()
                .filter_map(|o| stacks.get(o.1).copied())
                .collect(),
            peak,
            samples,
        }
    }

    /// Returns the columns of a window; `None` before the first sample.
    #[must_use]
    pub fn columns(&self, window: Window, columns: u16) -> Vec<Option<Column>> {
        let mut out = Vec::with_capacity(usize::from(columns));
        let mut at = self.samples.partition_point(|s| s.time < window.from);
        for column in 0..columns {
            let end = window.time(column + 1, columns);
            // Memory allocated before the column starts counts too.
            let mut best = at.checked_sub(1);
            let mut reserved = best.map_or(0, |b| self.samples[b].reserved);
            while let Some(sample) = self.samples.get(at).filter(|s| s.time < end) {
                if best.is_none_or(|b| sample.allocated > self.samples[b].allocated) {
                    best = Some(at);
                }
                reserved = reserved.max(sample.reserved);
                at += 1;
            }
            out.push(best.map(|sample| Column {
                sample,
                allocated: self.samples[sample].allocated,
                reserved,
            }));
        }
        out
    }
}

/// Returns the composition of every sample, starting from the peak. Each neighbouring sample
/// differs by one buffer, whose role is known.
fn stacks(view: &RunView) -> Vec<Stack> {
    let memory = &view.run.memory;
    let timeline = &memory.timeline;
    let known = timeline
        .iter()
        .position(|s| s.instr == memory.at.instr && s.allocated == memory.peak_allocated);
    let Some(known) = known else {
        return Vec::new();
    };
    let mut stack = Stack::default();
    for (role, bytes) in &memory.by_role {
        stack[Family::of(*role) as usize] += bytes.0;
    }
    if stack.iter().sum::<u64>() != memory.peak_allocated.0 {
        return Vec::new();
    }
    let mut all = vec![Stack::default(); timeline.len()];
    all[known] = stack;
    let family = |i: usize| {
        let role = view.instr(timeline[i].instr).and_then(|x| x.role);
        role.map_or(Family::Other, Family::of) as usize
    };
    for i in known + 1..timeline.len() {
        let mut next = all[i - 1];
        let slot = &mut next[family(i)];
        *slot = (*slot + timeline[i].allocated.0).saturating_sub(timeline[i - 1].allocated.0);
        all[i] = next;
    }
    for i in (0..known).rev() {
        let mut before = all[i + 1];
        let slot = &mut before[family(i + 1)];
        *slot = (*slot + timeline[i].allocated.0).saturating_sub(timeline[i + 1].allocated.0);
        all[i] = before;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dash::testing::view;
    use shardlab_plan::record::MemorySample;
    use shardlab_plan::units::{Bytes, Picos};

    #[test]
    fn stacks_sum_to_what_is_allocated() {
        for name in [
            "llama3-8b-4xh200",
            "llama-tiny",
            "small-megatron",
            "small-fsdp2",
        ] {
            let view = view(name, &[]);
            let curve = Curve::new(&view);
            assert_eq!(curve.stacks.len(), curve.samples.len(), "{name}");
            for (sample, stack) in curve.samples.iter().zip(&curve.stacks) {
                assert_eq!(stack.iter().sum::<u64>(), sample.allocated, "{name}");
            }
            let peak = curve.samples[curve.peak.unwrap()].allocated;
            assert_eq!(peak, view.run.memory.peak_allocated.0, "{name}");
        }
    }

    /// The host is a step ahead. Allocations before the step are shown at the place of the next
    /// step's, and no sample of another time is shown at the start.
    #[test]
    fn what_comes_before_the_step_stands_a_step_later() {
        let mut view = RunView::clone(&view("llama-tiny", &[]));
        view.run.recorded_from = Picos(1000);
        view.run.recorded_to = Picos(1100);
        let template = view.run.memory.timeline[0];
        let sample = |(time, allocated)| MemorySample {
            time: Picos(time),
            allocated: Bytes(allocated),
            ..template
        };
        let timeline = [(930, 5), (960, 9), (980, 3), (1010, 4), (1020, 6)];
        view.run.memory.timeline = timeline.map(sample).to_vec();
        let curve = Curve::new(&view);
        let shown: Vec<(u64, u64)> = curve
            .samples
            .iter()
            .map(|s| (s.time, s.allocated))
            .collect();
        assert_eq!(shown, [(0, 3), (10, 4), (20, 6), (30, 5), (60, 9), (80, 3)]);
        assert_eq!(curve.peak, Some(4));
        let columns = curve.columns(Window { from: 0, to: 100 }, 10);
        let allocated: Vec<u64> = columns.iter().flatten().map(|c| c.allocated).collect();
        assert_eq!(allocated, [3, 4, 6, 6, 5, 5, 9, 9, 9, 3]);
    }

    #[test]
    fn a_column_shows_its_largest_sample() {
        let sample = |time, allocated| Sample {
            time,
            allocated,
            reserved: 2 * allocated,
        };
        let curve = Curve {
            samples: vec![sample(5, 1), sample(11, 7), sample(12, 3), sample(35, 4)],
            ..Curve::default()
        };
        let shown = curve.columns(Window { from: 0, to: 40 }, 4);
        let allocated: Vec<Option<u64>> = shown.iter().map(|c| c.map(|c| c.allocated)).collect();
        assert_eq!(allocated, [Some(1), Some(7), Some(3), Some(4)]);
        assert_eq!(shown[2].map(|c| c.reserved), Some(6));
        let before = curve.columns(Window { from: 0, to: 4 }, 2);
        assert_eq!(before, [None, None]);
    }
}
