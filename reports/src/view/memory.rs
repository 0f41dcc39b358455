//! Memory over the recorded step on the time axis of the device, and its composition.

use super::RunView;
use shardlab_plan::ir::{InstrId, Role};

/// Groups of roles that charts stack.
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
    /// Everything else.
    Other,
    /// Activations and their gradients.
    Activations,
    /// Logits and tensors of their shape.
    Logits,
}

impl Family {
    /// Number of families.
    pub const COUNT: usize = 8;

    /// All families, from the bottom of the stack to the top. Persistent memory comes first, so
    /// that the most variable families do not move the others.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Weights,
        Self::Optimizer,
        Self::Gradients,
        Self::Gathered,
        Self::Reduction,
        Self::Other,
        Self::Activations,
        Self::Logits,
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
            Role::Activation | Role::Temporary => Self::Activations,
            Role::Logits => Self::Logits,
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
            Self::Other => "other",
            Self::Activations => "activations",
            Self::Logits => "logits",
        }
    }
}

/// Bytes per family, in the order of [`Family::ALL`].
pub type Stack = [u64; Family::COUNT];

/// The memory from one point in time to the next.
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
pub struct MemoryCurve {
    /// Samples, sorted by time.
    pub samples: Vec<Sample>,
    /// Composition of each sample; empty if unknown.
    pub stacks: Vec<Stack>,
    /// Index of the sample with the most allocated bytes.
    pub peak: Option<usize>,
}

impl MemoryCurve {
    /// Returns the curve of a run.
    ///
    /// The allocator works in host time, and the host runs ahead of the device. Each sample is
    /// placed where the device reaches it: at the start of the next kernel that the host issued to
    /// the compute stream. The curve is therefore aligned with the streams, while its order and
    /// values are those of the allocator. The level at the start of the step equals the level at
    /// its end, because all steady steps are the same.
    #[must_use]
    pub fn new(view: &RunView) -> Self {
        let timeline = &view.run.memory.timeline;
        let times = device_times(view).unwrap_or_else(|| host_times(view));
        // The level at the start of the step, unless there is a sample at the start.
        let level = times.iter().zip(0..).max_by_key(|o| *o.0);
        let level = level.filter(|_| times.iter().all(|&t| t > 0));
        let mut order: Vec<(u64, usize)> = level.map(|(_, i)| (0, i)).into_iter().collect();
        order.extend(times.iter().copied().zip(0..));
        order.sort_by_key(|&(time, _)| time);
        let samples: Vec<Sample> = order
            .iter()
            .map(|&(time, i)| Sample {
                time,
                allocated: timeline[i].allocated.0,
                reserved: timeline[i].reserved.0,
            })
            .collect();
        // Of equal samples, the first is the peak.
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
}

/// Returns the time when the device reaches each sample, in picoseconds since the start of the
/// step. Returns `None` if the ids of the samples do not show the order of issue, as in imported
/// traces.
fn device_times(view: &RunView) -> Option<Vec<u64>> {
    let from = view.run.recorded_from.0;
    let compute = view.run.spans.iter().filter(|s| s.stream.index() == 0);
    let mut kernels: Vec<(InstrId, u64)> = compute
        .map(|s| (s.instr, s.start.0.saturating_sub(from)))
        .collect();
    kernels.sort_unstable();
    let timeline = &view.run.memory.timeline;
    if timeline.first()?.instr > kernels.last()?.0 {
        return None;
    }
    let end = view.recorded().0;
    // Kernels of a stream start in the order of issue, and the curve never moves back in time.
    let mut next = 0;
    let times = timeline.iter().map(|sample| {
        while kernels.get(next).is_some_and(|k| k.0 < sample.instr) {
            next += 1;
        }
        kernels.get(next).map_or(end, |k| k.1)
    });
    Some(times.collect())
}

/// Returns the host's times, picoseconds since the start of the step. Allocations before the step
/// are shown one step later, where the next step makes them.
fn host_times(view: &RunView) -> Vec<u64> {
    let from = view.run.recorded_from.0;
    let length = view.recorded().0.max(1);
    let within_step = |time: u64| match time.checked_sub(from) {
        Some(after) => after,
        None => (length - (from - time) % length) % length,
    };
    let timeline = view.run.memory.timeline.iter();
    timeline.map(|s| within_step(s.time.0)).collect()
}

/// Returns the composition of every sample, starting from the peak. Neighbouring samples differ by
/// one buffer, whose role is known.
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
    use crate::testing;
    use shardlab_plan::record::MemorySample;
    use shardlab_plan::units::{Bytes, Picos};

    #[test]
    fn families_are_listed_in_the_order_of_their_numbers() {
        for (i, family) in Family::ALL.into_iter().enumerate() {
            assert_eq!(family as usize, i);
        }
    }

    /// A sample is placed at the next kernel of the compute stream, whatever its host time is.
    #[test]
    fn samples_line_up_with_the_kernels_issued_after_them() {
        let mut view = testing::view(400);
        // The host issues everything at the same time.
        for sample in &mut view.run.memory.timeline {
            sample.time = Picos(1);
        }
        let curve = MemoryCurve::new(&view);
        let compute: Vec<_> = view
            .run
            .spans
            .iter()
            .filter(|s| s.stream.index() == 0)
            .collect();
        let timeline = &view.run.memory.timeline;
        assert_eq!(curve.samples.len(), timeline.len() + 1);
        for (sample, shown) in timeline.iter().zip(&curve.samples[1..]) {
            let next = compute.iter().find(|s| s.instr > sample.instr);
            let expected = next.map_or(view.recorded().0, |s| s.start.0);
            assert_eq!(shown.time, expected, "{sample:?}");
            assert_eq!(shown.allocated, sample.allocated.0);
        }
        assert_eq!(curve.samples[0].time, 0);
    }

    /// Without an order of issue, allocations before the step are shown where the next step makes
    /// them, and no sample of another time is shown at the start.
    #[test]
    fn what_comes_before_the_step_stands_a_step_later() {
        let mut view = testing::view(8);
        view.run.recorded_from = Picos(1000);
        view.run.recorded_to = Picos(1100);
        let sample = |(time, allocated)| MemorySample {
            instr: InstrId(u32::MAX),
            time: Picos(time),
            allocated: Bytes(allocated),
            reserved: Bytes(allocated),
        };
        let timeline = [(930, 5), (960, 9), (980, 3), (1010, 4), (1020, 6)];
        view.run.memory.timeline = timeline.map(sample).to_vec();
        let curve = MemoryCurve::new(&view);
        let shown: Vec<(u64, u64)> = curve
            .samples
            .iter()
            .map(|s| (s.time, s.allocated))
            .collect();
        assert_eq!(shown, [(0, 3), (10, 4), (20, 6), (30, 5), (60, 9), (80, 3)]);
        assert_eq!(curve.peak, Some(4));
    }
}
